"""The interface behind which the ways of searching stand, and how one of them is asked.

A solver takes a ``Problem`` and returns a ``Result``: what it found, what it proved. ``OPTIMAL`` is
said only of what was proved. Solvers register under a name; ``auto`` takes the first of
``PREFERENCE`` that is registered, and the result says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal, NamedTuple, Protocol

from .capability import PLAIN, Capability
from .cluster import Cluster
from .cost import BUCKET_BYTES
from .errors import InfeasibleError, InputError
from .goal import Goal
from .layout import lattice
from .options import Decisions
from .pins import spelled_out
from .plan import Plan
from .profile import ModelProfile
from .schedule import ScheduleName

ResultStatus = Literal["optimal", "feasible", "heuristic", "infeasible"]
Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is over (0 to 1)."""

PREFERENCE = ("integer", "multipliers", "heuristic")
"""The order in which ``auto`` looks for a solver: the first that is there and that is able."""
INTEGER_PAIRS = 20_000
"""Pairs of states along all edges up to which an integer program is taken to be quick."""
AUTO_S = 20.0
"""Seconds that ``auto`` gives the integer program where no limit was asked for."""


@dataclass(frozen=True)
class Problem:
    """What to plan. ``capability`` bounds the search; ``executor`` is what can be run, where the
    search is allowed more (then the plan is hypothetical). Without ``placement`` one is chosen.
    Among plans whose objective is within ``near`` of the best (a share) the simpler is taken."""

    profile: ModelProfile
    cluster: Cluster
    goal: Goal
    capability: Capability = PLAIN
    executor: Capability | None = None
    placement: tuple[int, ...] | None = None
    schedule: ScheduleName = "barrier"
    bucket_bytes: int = BUCKET_BYTES
    near: float = 0.01
    progress: Progress | None = field(default=None, compare=False)

    @property
    def slice_bytes(self) -> tuple[int, ...]:
        """The sizes of slices or buckets that may be chosen from."""
        chosen = self.goal.slice_bytes if self.schedule == "priority" else ()
        return tuple(dict.fromkeys(chosen)) or (self.bucket_bytes,)

    def report(self, what: str, share: float) -> None:
        """Tells the caller how far the search is."""
        if self.progress is not None:
            self.progress(what, share)


class Relaxation(NamedTuple):
    """A change of the goal that makes a problem feasible, checked by solving it again."""

    what: Literal[
        "memory_limit_bytes", "batch", "micro_batches", "amplification_limit", "time_limit_s"
    ]
    value: float
    sentence: str


class Enlargement(NamedTuple):
    """A cluster with more nodes of the same kind on which a plan keeps all limits, checked by
    planning for it, and for one node fewer in vain."""

    ranks: int
    nodes: int
    sentence: str


LIMITS = {
    "amplification_limit": "the limit on device-seconds (amplification_limit)",
    "unit_amplification_limit": "the limit on a unit's device-seconds (unit_amplification_limit)",
    "time_limit_s": "the limit on a step's time (time_limit_s)",
}
"""What sentences call the limits of a goal that are not memory's."""


class Infeasibility(NamedTuple):
    """Why no plan fits: the tightest rank and unit of the plan that comes closest, the bytes that
    it needs there and that are available, and the smallest changes found that help: of the goal
    (``relaxations``), of the cluster (``enlargement``). ``limit`` is what cannot be kept: a field
    of the goal, memory's unless said otherwise."""

    rank: int
    unit: str
    needed_bytes: int
    available_bytes: int
    relaxations: tuple[Relaxation, ...] = ()
    limit: str = "memory_limit_bytes"
    enlargement: Enlargement | None = None

    @property
    def sentence(self) -> str:
        """All of it for a person."""
        larger = [self.enlargement.sentence] if self.enlargement else []
        help_ = "; or ".join([*(r.sentence for r in self.relaxations), *larger])
        if self.limit == "pins":
            return f"the pins leave unit {self.unit!r} nothing that it can be: lift one of them"
        if self.limit != "memory_limit_bytes":
            what = LIMITS.get(self.limit, self.limit)
            return f"no plan keeps {what}: " + (help_ or "allow more, or lift another limit")
        return (
            f"no plan found fits in memory: the closest needs {_mib(self.needed_bytes)} on rank "
            f"{self.rank} (at unit {self.unit!r}) and {_mib(self.available_bytes)} are available: "
            + (help_ or "use devices with more memory, more of them, or a smaller model")
        )


class Result(NamedTuple):
    """What a solver found: ``objective_s`` is the value of ``plan`` by the formulas that solvers
    work with (seconds of a step, or device-seconds), ``bound_s`` what no plan can beat (None where
    nothing was proved), ``gap`` = 1 - bound / objective. What the step is predicted to take stands
    in the plan: there it is simulated as it is run."""

    solver: str
    status: ResultStatus
    objective_s: float | None
    bound_s: float | None
    gap: float | None
    plan: Plan | None
    decisions: Decisions | None
    seconds: float
    infeasible: Infeasibility | None = None
    reason: str = ""

    def checked(self) -> Plan:
        """The plan; raises ``InfeasibleError`` where there is none."""
        if self.plan is None:
            assert self.infeasible is not None
            raise InfeasibleError(self.infeasible.sentence)
        return self.plan


class Solver(Protocol):
    """A way of searching. ``name`` is what users call it."""

    @property
    def name(self) -> str:
        """What it is registered as."""

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """Searches, for no longer than ``time_limit_s`` where one is given."""


_solvers: dict[str, Callable[[], Solver]] = {}


def register(name: str, make: Callable[[], Solver]) -> None:
    """Makes a solver known under a name."""
    _solvers[name] = make


def solvers() -> tuple[str, ...]:
    """The names of the solvers that there are."""
    _load()
    return tuple(_solvers)


def solve(problem: Problem, solver: str = "auto", time_limit_s: float | None = None) -> Result:
    """Plans. ``solver`` is a registered name or ``auto``; see ``Result.checked`` for the plan."""
    _load()
    name, reason = solver, "asked for"
    if solver == "auto":
        name, reason = _auto(problem)
        if name == "integer" and time_limit_s is None:
            time_limit_s = AUTO_S
    if name not in _solvers:
        raise InputError(f"there is no solver {solver!r}: choose from {['auto', *_solvers]}")
    _check(problem)
    result = _solvers[name]().solve(problem, time_limit_s)
    result = result._replace(reason="; ".join(r for r in (reason, result.reason) if r))
    if not problem.capability.branches:
        return result
    from .branches import side_by_side  # it imports this module

    return side_by_side(problem, result)


def settled(problem: Problem) -> Problem:
    """The problem with patterns in its pins spelled out; see ``pins.spelled_out``."""
    world = problem.cluster.world_size
    goal = spelled_out(problem.goal, problem.profile, problem.capability, world)
    return replace(problem, goal=goal)


def _auto(problem: Problem) -> tuple[str, str]:
    """The solver to take, and why."""
    pairs = state_pairs(problem)
    able = [n for n in PREFERENCE if n in _solvers and (n != "integer" or pairs <= INTEGER_PAIRS)]
    size = f"{pairs:,} pairs of states along edges"
    if able[0] == "integer":
        return able[0], f"auto took integer: it proves its answer, and {size} are few"
    return able[0], f"auto took {able[0]}: {size} are too many for the integer program"


def state_pairs(problem: Problem) -> int:
    """About how many pairs of layouts and styles the integer program would have."""
    bursts = problem.capability.idle_positions
    world, complete = problem.cluster.world_size, problem.goal.all_layouts
    layouts = list(lattice(world, complete=complete, bursts=bursts))
    states = {
        unit.name: 1
        if unit.fixed
        else sum(1 for y in layouts if y.degree == 1)
        + len(unit.splits) * sum(1 for y in layouts if y.degree > 1)
        for unit in problem.profile.units
    }
    return sum(states[e.source] * states[e.target] for e in problem.profile.edges)


def _check(problem: Problem) -> None:
    goal, world = problem.goal, problem.cluster.world_size
    if all(m > 1 and goal.batch < world * m for m in goal.micro_batches):
        most = max(goal.batch // world, 1)
        raise InputError(
            f"a batch of {goal.batch} on {world} ranks cannot be cut into any of "
            f"{list(goal.micro_batches)} micro-batches: allow at most {most}"
        )
    names = [unit.name for unit in problem.profile.units]
    for pin in goal.pins:
        if pin.unit not in names:
            near = get_close_matches(pin.unit, names, 3) or names[:3]
            raise InputError(f"a pin names unit {pin.unit!r}, which is not there: try {near}")
    if problem.placement is not None and sorted(problem.placement) != list(range(world)):
        raise InputError(
            f"placement {list(problem.placement)} is not an order of ranks 0 to {world - 1}"
        )


def _load() -> None:
    """Registers the solvers that come with the planner (late: they import this module)."""
    from . import heuristic
    from .exact import solve as integer
    from .scale import multipliers

    register("heuristic", heuristic.Heuristic)
    register("integer", integer.Integer)
    register("multipliers", multipliers.Multipliers)


def _mib(count: int) -> str:
    return f"{count:,} bytes ({count / 2**20:,.1f} MiB)"
