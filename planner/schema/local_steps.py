"""LocalSteps: hosts that train by themselves and average what they have learnt now and then."""

# DiLoCo (Douillard et al., arXiv 2311.08105) and Streaming DiLoCo (Douillard et al., arXiv
# 2501.18512). The outer optimizer is SGD with Nesterov momentum, by default with DiLoCo's values.

from .record import Count, Index, Positive, Record, Share

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
MIXING = 0.5
"""The share of the agreed copy where hosts have gone on meanwhile: as much as of what they have
themselves. Streaming DiLoCo's mixing factor alpha is 1 - mixing."""
MOST_INNER_STEPS = 500
"""The longest round that was published to train about as well (DiLoCo)."""


class LocalSteps(Record, frozen=True, kw_only=True):
    """How ``hosts`` train apart. Positions are divided into so many equal runs, one for each host.

    ``inner_steps`` are the optimizer's steps of a round. ``fragments`` names the first unit of each
    fragment, a run of units that is exchanged once in a round, each at a step of its own. What a
    fragment's exchange brings is applied ``delay`` steps after it has left.

    Hosts agree on a copy of each parameter. A fragment's exchange averages over hosts by how much
    they have moved away from it, and SGD of learning rate ``outer_lr`` with Nesterov momentum
    ``outer_momentum`` takes this average for the gradient of the agreed copy. A host goes on from
    ``mixing`` times the new copy and 1 - ``mixing`` times what it has itself by then.
    """

    hosts: Count
    inner_steps: Count
    fragments: tuple[Index, ...] = (0,)
    delay: Index = 0
    outer_lr: Positive = OUTER_LR
    outer_momentum: Share = OUTER_MOMENTUM
    mixing: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # What the user asks for is checked in words of the options by the goal.
        if self.hosts < 2:
            raise ValueError(f"local steps of {self.hosts} host leave nothing to average")
        if self.fragments[:1] != (0,) or sorted(set(self.fragments)) != list(self.fragments):
            raise ValueError("fragments must begin with unit 0 and name later units in order")
        if len(self.fragments) > self.inner_steps:
            raise ValueError(
                f"{len(self.fragments)} fragments cannot each have a step of their own among "
                f"{self.inner_steps} inner steps"
            )
        if self.delay >= self.inner_steps:
            raise ValueError(
                f"a delay of {self.delay} steps lasts beyond the round of {self.inner_steps}"
            )
        if self.outer_momentum == 1:
            raise ValueError("an outer momentum of 1 would never forget: give less")
        if not self.mixing:
            raise ValueError("a mixing of 0 would never take over what hosts agree on")

    def check(self, world_size: int, units: int) -> None:
        """Raises ``ValueError`` where a plan of so many ranks and units cannot have them."""
        if world_size % self.hosts:
            raise ValueError(f"{world_size} ranks are not {self.hosts} hosts of equal size")
        # Plans made by hand may have no units: the first fragment then has all there is.
        if self.fragments[-1] >= max(units, 1):
            raise ValueError(f"a fragment begins with unit {self.fragments[-1]} of {units}")

    def ranks_per_host(self, world_size: int) -> int:
        """How many ranks train as one host."""
        return world_size // self.hosts

    def fragment_of(self, unit: int) -> int:
        """The number of the fragment that a unit is in."""
        return sum(first <= unit for first in self.fragments) - 1

    # -- the round ---------------------------------------------------------------------------------

    @property
    def steps_to_begin(self) -> int:
        """After how many of the optimizer's steps an average of every fragment has been applied."""
        return self.inner_steps + self.delay

    def turn(self, fragment: int) -> int:
        """After which of a round's steps (1 to ``inner_steps``) the fragment leaves."""
        # Spread evenly, the last at the round's end; rounded up, so that no two share a step.
        return -(-(fragment + 1) * self.inner_steps // len(self.fragments))

    def leaving(self, step: int) -> int | None:
        """The fragment that leaves after the optimizer's ``step`` (the first is 1); None without
        one."""
        within = (step - 1) % self.inner_steps + 1
        turns = {self.turn(fragment): fragment for fragment in range(len(self.fragments))}
        return turns.get(within)

    def arriving(self, step: int) -> int | None:
        """The fragment whose exchange is applied after the optimizer's ``step``."""
        return self.leaving(step - self.delay) if step > self.delay else None
