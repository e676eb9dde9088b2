"""Plan: the only thing that passes from planner to executor."""

from collections.abc import Iterable
from typing import Literal, Protocol, get_args

import msgspec

from .cluster import check_ranks
from .errors import InputError
from .goal import Goal
from .layout import Layout, Style
from .local_batches import local_batches
from .local_steps import LocalSteps
from .precision import Precision
from .profile import LossyExchange, UnitKind, check_batch_dims
from .record import Bytes, Count, Document, Index, Record, Seconds

MemoryPolicy = Literal["keep", "recompute", "offload"]
ExchangePolicy = Literal["dense", "sharded", "fully_sharded", LossyExchange]
SHARDING: tuple[ExchangePolicy, ...] = ("sharded", "fully_sharded")
"""Each rank updates its part of a parameter; the second keeps nothing but that between uses."""
LOSSY: tuple[ExchangePolicy, ...] = get_args(LossyExchange)
"""A part of the gradient waits for a later step."""
WireFormat = Literal["exact", "bf16"]
"""As what gradients that are sent whole travel: in their own type, or rounded to bfloat16."""
FeedbackPolicy = Literal["residual", "in_place", "mirror", "host_mirror"]
"""Where top-k keeps what it has not sent. See ``memory.gradient_buffers``."""
# Those in which a gradient is taken in as soon as it is computed, so that its memory is free.
AT_ONCE: tuple[FeedbackPolicy, ...] = ("in_place", "mirror", "host_mirror")
# Those that hold back updates, not gradients. The parts of an update, applied one by one, add up to
# the whole only where it is linear in the gradient: SGD's.
MIRRORS: tuple[FeedbackPolicy, ...] = ("mirror", "host_mirror")
Status = Literal["optimal", "feasible", "heuristic", "manual"]
ScheduleName = Literal["barrier", "priority"]
"""How gradients travel: in buckets, first in, first out, all waited for (``barrier``); in slices,
those first that forward needs first (``priority``). See ``simulate.schedule``."""


class Exchanged(Protocol):
    """What a unit's plan, or an option for it, says of its gradients."""

    @property
    def layout(self) -> Layout: ...
    @property
    def exchange(self) -> ExchangePolicy: ...
    @property
    def wire(self) -> WireFormat: ...


def leave_after_backward(units: Iterable[Exchanged], ranks: int) -> bool:
    """Whether gradients leave when all of backward is over where collectives are queued on a
    device's streams: where some unit leaves ranks idle and some exchange is not one all-reduce. See
    [Note: One order on a device's streams] in executor/gradients/priority.py."""
    every = list(units)
    others = any(unit.exchange != "dense" or unit.wire != "exact" for unit in every)
    return others and _leave_idle(every, ranks)


def _leave_idle(units: Iterable[Exchanged], ranks: int) -> bool:
    return any(unit.layout.size < ranks for unit in units)


class UnitPlan(Record, frozen=True, kw_only=True):
    """The decision for one unit, and what it is predicted to cost on its busiest rank.

    Seconds are of one micro-batch; ``exchange_s`` is of one step. ``blocking_s`` is what the unit
    waits for: redistribution at its input and the collectives inside it, both ways.
    ``batched_inputs`` and ``batch_dims`` as in ``UnitProfile``: what is redistributed at entry.
    ``peers_per_host``, where it is above 1, are those on one host among the ranks that exchange its
    gradients: they add these up first, and hosts exchange the sums.
    ``segment``, where it is not empty, names modules called one after another that contain this
    unit and its neighbours with the same ``segment``: these are recomputed together, from the
    segment's input.
    """

    name: str
    kind: UnitKind
    modules: tuple[str, ...]
    batched_inputs: tuple[Index, ...] = ()
    batch_dims: tuple[Index, ...] | None = None
    layout: Layout
    style: Style = "none"
    memory: MemoryPolicy = "keep"
    segment: tuple[str, ...] = ()
    early_release: bool = False
    exchange: ExchangePolicy = "dense"
    exchange_ratio: float = 1.0
    wire: WireFormat = "exact"
    peers_per_host: Count = 1
    feedback: FeedbackPolicy = "residual"
    parameter_bytes: Bytes = 0
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    blocking_s: Seconds = 0.0
    exchange_s: Seconds = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_batch_dims(self.name, self.batched_inputs, self.batch_dims)
        if self.layout.groups % self.peers_per_host:
            raise ValueError(
                f"unit {self.name!r} has {self.layout.groups} peers, which do not divide into "
                f"{self.peers_per_host} on each host"
            )

    @property
    def lossy(self) -> bool:
        """Whether part of its gradient waits for a later step."""
        return self.exchange in LOSSY

    @property
    def rounded(self) -> bool:
        """Whether its gradients are rounded to travel."""
        return self.wire != "exact"

    def batch_dim(self, number: int = 0) -> int:
        """The dimension of samples in its batched input ``number``; that of the first is also
        that of a divided unit's output."""
        return self.batch_dims[number] if self.batch_dims else 0


Phase = Literal["forward", "backward", "update"]

CLASS_NAMES = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "residuals": "residuals",
    "gradients": "weight gradients",
    "feature_maps": "feature maps",
    "map_gradients": "feature map gradients",
    "buffers": "buffers in flight",
    "workspace": "workspace",
}
"""The classes of memory, and what people call them."""


class Moment(Record, frozen=True, kw_only=True):
    """Bytes alive at one point of a step, by class, while ``unit`` is at work."""

    unit: str
    phase: Phase
    weights: Bytes
    optimizer: Bytes
    residuals: Bytes
    gradients: Bytes
    feature_maps: Bytes
    map_gradients: Bytes
    buffers: Bytes
    workspace: Bytes

    @property
    def total(self) -> int:
        """All bytes alive."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, int]:
        """Bytes by class, in the order of ``CLASS_NAMES``."""
        return {name: getattr(self, name) for name in CLASS_NAMES}

    @property
    def largest(self) -> str:
        """The class that takes most, in words."""
        found = self.by_class()
        return CLASS_NAMES[max(found, key=lambda name: found[name])]


class Prediction(Record, frozen=True, kw_only=True):
    """What a step is predicted to take and to hold, on the busiest rank.

    ``step_s`` = ``compute_s`` (forward, backward and update, with the slowing by communication) +
    ``blocking_s`` (redistribution and collectives inside units) + ``exposed_s`` (gradient exchange
    that nothing hides). ``peak_bytes`` by position. ``wire_bytes`` is what the busiest rank sends.
    ``fullest`` is the moment at which the fullest rank holds most.

    ``waiting_s`` is how much longer the slowest rank computes than a median one, where that is
    known: others wait for it, in ``blocking_s`` or ``exposed_s``. ``host_s`` is the part of
    ``compute_s`` in which a GPU waits for its host to issue work, ``copies_s`` that in which copies
    to the host's memory and back are waited for. The measured step lies between
    ``low_s`` and ``high_s`` nine times in ten (none: not said). ``reserved_bytes`` is what torch's
    allocator reserves of a GPU for them at least, by position (none on CPUs); ``pinned_bytes`` what
    each position takes of its host's pinned memory at most (none: nothing).
    """

    step_s: Seconds
    compute_s: Seconds
    blocking_s: Seconds
    exposed_s: Seconds
    update_s: Seconds
    exchange_s: Seconds
    wire_bytes: Bytes
    peak_bytes: tuple[Bytes, ...]
    gpu_seconds: Seconds
    samples_per_s: float
    fullest: Moment | None = None
    waiting_s: Seconds = 0.0
    host_s: Seconds = 0.0
    copies_s: Seconds = 0.0
    low_s: Seconds | None = None
    high_s: Seconds | None = None
    reserved_bytes: tuple[Bytes, ...] = ()
    pinned_bytes: tuple[Bytes, ...] = ()


class Provenance(Record, frozen=True, kw_only=True):
    """Where a plan came from: the solver, what it proved, and from which measurements."""

    solver: str
    status: Status
    bound_s: Seconds | None = None
    gap: float | None = None
    solve_s: Seconds = 0.0
    profile: str
    cluster: str
    software: tuple[tuple[str, str], ...] = ()


class Plan(Document, frozen=True, kw_only=True, tag="Plan"):
    """How to train one model on one cluster.

    ``placement[p]`` is the rank at position ``p``. ``message_bytes`` is the most gradient that one
    message carries (a bucket, or a slice by priority), ``schedule`` in which order they go.
    ``target`` rebuilds the model (a workload's name, ``file.py:factory``), ``model`` is the
    fingerprint of its structure, ``precision`` is how it is to compute (none: as it was built).
    ``baseline`` is plain data parallelism on the same cluster with the same micro-batches, by the
    plan's schedule or as DDP does by default, whichever is quicker; ``baseline_fits`` says whether
    that would fit in memory. With ``local_steps`` each host trains by itself and hosts average what
    they have learnt now and then: gradients are exchanged inside hosts only, and the prediction's
    step is the mean over a round. ``reserve_bytes`` is what was taken off a device's memory (the
    most of one), where that is the limit. ``local_batch_sizes`` are the samples of each position
    where devices are unequal; else none are listed, and shares are even.
    """

    schema_version: int = 2
    target: str
    model: str
    precision: Precision | None = None
    world_size: Count
    goal: Goal
    micro_batches: Count = 1
    message_bytes: Count = 25 * 2**20
    schedule: ScheduleName = "barrier"
    placement: tuple[Index, ...]
    local_batch_sizes: tuple[Index, ...] = ()
    units: tuple[UnitPlan, ...]
    local_steps: LocalSteps | None = None
    prediction: Prediction
    baseline: Prediction
    baseline_fits: bool = True
    reserve_bytes: Bytes = 0
    hypothetical: tuple[str, ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        super().__post_init__()
        # What no plan may be. Whether an executor can run it is its ``Capability``'s to say.
        check_ranks(self.world_size)
        if sorted(self.placement) != list(range(self.world_size)):
            order = ", ".join(map(str, self.placement))
            raise ValueError(
                f"placement {order} is not an order of ranks 0 to {self.world_size - 1}"
            )
        for unit in self.units:
            if unit.layout.first + unit.layout.size > self.world_size:
                raise ValueError(
                    f"unit {unit.name!r} has layout {unit.layout}, which needs more than "
                    f"{self.world_size} ranks"
                )
        # The executor and every report find a unit's decision by its name.
        names = [u.name for u in self.units]
        if len(set(names)) != len(names):
            raise ValueError("a unit is listed twice")
        if self.local_steps is not None:
            self.local_steps.check(self.world_size, len(self.units))
        self._check_local_batches()

    def _check_local_batches(self) -> None:
        sizes = self.local_batch_sizes
        if not sizes:
            return
        shown = ", ".join(map(str, sizes))
        if len(sizes) != self.world_size or sum(sizes) != self.goal.batch:
            raise ValueError(
                f"local_batch_sizes {shown} are not the {self.goal.batch} samples of a batch over "
                f"{self.world_size} ranks"
            )
        if self.local_steps is not None:
            raise ValueError(
                f"local_batch_sizes {shown} and local steps do not go together: hosts that train "
                "apart weigh alike in what they average, so they have equal shares"
            )

    def unit(self, name: str) -> UnitPlan:
        """The decision for the unit of that name."""
        return next(u for u in self.units if u.name == name)

    def local_batch_size(self, rank: int, batch: int | None = None) -> int:
        """The samples that ``rank`` is to be fed in a step, in all micro-batches: of the goal's
        batch, or of one of another size (a data set's last one)."""
        if not 0 <= rank < self.world_size:
            raise InputError(
                f"the plan has no rank {rank}: name one from 0 to {self.world_size - 1}"
            )
        whole = self.goal.batch if batch is None else batch
        return self.local_batches(whole)[self.placement.index(rank)]

    def local_batches(self, batch: int) -> tuple[int, ...]:
        """The samples of each position in a batch of another size, shared out in the same
        proportion (even where the plan lists no sizes): the first positions get one more where it
        does not divide."""
        return local_batches(batch, self.world_size, self.local_batch_sizes)

    @property
    def inside_host(self) -> "Plan":
        """What the ranks of one host train by, numbered by their positions there: the plan itself
        where hosts do not train apart. What it predicts stays that of the whole, but for memory."""
        local = self.local_steps
        if local is None:
            return self
        each = local.ranks_per_host(self.world_size)

        def inside(unit: UnitPlan) -> UnitPlan:
            groups = max(unit.layout.groups // local.hosts, 1)
            layout = msgspec.structs.replace(unit.layout, groups=groups)
            return msgspec.structs.replace(unit, layout=layout)

        seen = self.prediction
        prediction = msgspec.structs.replace(
            seen, peak_bytes=seen.peak_bytes[:each], pinned_bytes=seen.pinned_bytes[:each]
        )
        return msgspec.structs.replace(
            self,
            world_size=each,
            goal=msgspec.structs.replace(self.goal, batch=-(-self.goal.batch // local.hosts)),
            placement=tuple(range(each)),
            units=tuple(map(inside, self.units)),
            local_steps=None,
            prediction=prediction,
        )

    @property
    def leaves_idle(self) -> bool:
        """Whether some unit takes a part of the ranks only."""
        return _leave_idle(self.units, self.world_size)

    @property
    def slowed_s(self) -> float:
        """The longest that a step may take, with the background job that the goal allows."""
        # Predictions are of the step without it: how much of the limit it uses is not known.
        return self.prediction.step_s * self.goal.slowdown

    @property
    def speedup(self) -> float:
        """Predicted step of plain data parallelism over this plan's."""
        # A step of nothing (a profile of zero curves) is as fast either way.
        return self.baseline.step_s / self.prediction.step_s if self.prediction.step_s else 1.0
