"""What shares a cluster: foreground jobs under their plans, and background jobs of one device.

A foreground is told by one step, as each kind of device sees it: when it computes, when it
communicates. That step is the one of the simulation by which a plan is predicted
(``simulate_decisions``): it has the times of the busiest device, of which the others do what
concerns their units and their share of the samples.

A background is another training that needs one device and no network. It has the largest batch that
serves it best among those measured, as far as it fits in the memory that foregrounds leave.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ..cost.compute import backward_s, forward_s
from ..cost.cost import CostModel
from ..cost.device_kinds import slowed
from ..cost.ownership import PositionClass, position_classes
from ..schema.cluster import Cluster, Device, Node
from ..schema.errors import InputError
from ..schema.goal import Goal
from ..schema.options import Decisions, Option
from ..schema.plan import ScheduleName
from ..schema.profile import ModelProfile
from ..schema.record import Positive, Record, Seconds, Share
from ..simulate.events import Span
from ..simulate.rank_classes import simulate_decisions
from ..simulate.schedule import COMPUTE, step_of
from ..solve.evaluate import evaluate, rank_memory

# Steps that are simulated under priority; the last but one is told, so that what it sends late is
# seen to arrive.
STEADY = 5
# Of batches whose rates differ by less the smallest is taken: it leaves more memory.
NEAR = 0.01

# -- a step as devices see it ----------------------------------------------------------------------


class Busy(NamedTuple):
    """From ``start_s`` to ``end_s`` of the step the devices work on ``unit`` (its index)."""

    start_s: float
    end_s: float
    unit: int
    phase: str


class DeviceTimeline(NamedTuple):
    """The step of the devices at ``positions``: ``computing`` in order, never two at once;
    ``communicating`` in order of their starts, also while it computes."""

    positions: tuple[int, ...]
    computing: tuple[Busy, ...]
    communicating: tuple[Busy, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which such a device computes."""
        return sum(busy.end_s - busy.start_s for busy in self.computing)


class StepTimelines(NamedTuple):
    """A step of ``step_s`` by kinds of devices; ``peak_bytes`` on the fullest."""

    step_s: float
    kinds: tuple[DeviceTimeline, ...]
    units: tuple[str, ...]
    peak_bytes: int = 0

    @property
    def devices(self) -> int:
        return sum(len(kind.positions) for kind in self.kinds)


def timelines(model: CostModel, decisions: Decisions, schedule: ScheduleName) -> StepTimelines:
    """The step of those decisions in the steady state."""
    step = step_of(model, decisions, model.chain(decisions), schedule)
    steps = 1 if schedule == "barrier" else STEADY
    found = simulate_decisions(model, decisions, step, steps)
    until_s = found.step_s  # the barrier's one step begins at zero
    # By priority a step's messages arrive while the next one computes. The last step has no next
    # one, so the step before it is taken, which ends where the last one begins.
    if schedule == "priority":
        until_s = max((s.end_s for s in found.spans if s.phase != "exchange"), default=0.0)
        until_s -= found.step_s
    spans = list(_within(found.spans, until_s - found.step_s, until_s))
    # Devices that take the same part in every unit see the same step and are told once.
    classes = position_classes(model.counts, [o.layout for o in decisions])
    return StepTimelines(
        found.step_s,
        tuple(_timeline(model, decisions, each, spans) for each in classes),
        tuple(unit.name for unit in model.profile.units),
        max(each.peak_bytes for each in rank_memory(model, decisions)),
    )


def _within(spans: Iterable[Span], start_s: float, end_s: float) -> Iterable[Span]:
    """The parts of spans inside one step, counted from its start."""
    for span in spans:
        low, high = max(span.start_s, start_s), min(span.end_s, end_s)
        if high > low:
            yield span._replace(start_s=low - start_s, end_s=high - start_s)


def _timeline(
    model: CostModel, decisions: Decisions, kind: PositionClass, spans: Sequence[Span]
) -> DeviceTimeline:
    computing, communicating = [], []
    for span in spans:
        if span.resource != COMPUTE:
            if _communicates(model, decisions, kind, span):
                communicating.append(Busy(span.start_s, span.end_s, span.unit, span.phase))
            continue
        part = _part(model, span.unit, decisions[span.unit], kind, span.phase)
        if part > 0:
            end_s = span.start_s + part * (span.end_s - span.start_s)
            computing.append(Busy(span.start_s, end_s, span.unit, span.phase))
    return DeviceTimeline(kind.positions, tuple(_apart(computing)), tuple(sorted(communicating)))


def _apart(computing: Iterable[Busy]) -> Iterable[Busy]:
    last_s = 0.0
    # A device does one thing at a time: what overlaps here does so by rounding.
    for busy in sorted(computing):
        start_s = max(busy.start_s, last_s)
        if busy.end_s > start_s:
            yield busy._replace(start_s=start_s)
            last_s = busy.end_s


def _communicates(model: CostModel, decisions: Decisions, kind: PositionClass, span: Span) -> bool:
    """Whether devices of that kind take part: those of the unit, and of a redistribution also
    those from which its input comes."""
    if kind.samples[decisions[span.unit].layout] is not None:
        return True
    if not span.phase.startswith("redistribute"):
        return False
    sources = (model.ends[e][0] for e in model.edges_into[span.unit])
    return any(kind.samples[decisions[k].layout] is not None for k in sources)


def _part(model: CostModel, k: int, option: Option, kind: PositionClass, phase: str) -> float:
    """The share of the busiest device's seconds that one of that kind computes."""
    samples = kind.samples[option.layout]
    if samples is None:
        return 0.0
    if phase == "update":
        return 1.0
    seconds = forward_s if phase == "forward" else backward_s
    most = zip(model.kinds, model.samples_by_kind(option.layout), strict=True)
    device = next(one for one in model.kinds if kind.positions[0] in one.positions)

    def took(profile: ModelProfile, count: int) -> float:
        return seconds(profile.units[k], option.style, option.layout.degree, count)

    whole = max(took(one.profile, count) for one, count in most)
    return min(took(device.profile, samples) / whole, 1.0) if whole else 1.0


# -- jobs ------------------------------------------------------------------------------------------

Slowdown = Annotated[float, msgspec.Meta(ge=1)]


class Assumptions(Record, frozen=True, kw_only=True):
    """What sharing a device is taken to cost; none of it was measured here.

    ``slowdown`` is how much longer everything that a foreground computes takes on devices that are
    shared, as if a kernel of the background were always in flight. A background runs in pieces of
    ``piece_s`` of its own time, none of which starts that would not end before the foreground needs
    the device (the plan tells when): of each gap ``switch_s`` is lost, and what is left after the
    last whole piece. In a gap it has the share ``idle_speed`` of the speed it has alone, all of it
    on devices on which no foreground ever computes, and ``communicating_speed`` while its device
    takes part in a foreground's communication, whose kernels take some of the multiprocessors.
    """

    slowdown: Slowdown = 1.05
    piece_s: Positive = 200e-6
    switch_s: Seconds = 20e-6
    idle_speed: Share = 0.95
    communicating_speed: Share = 0.75


class ForegroundJob(NamedTuple):
    """A job under a plan: its step by kinds of devices, on devices of its own (``unshared``) and
    with a background on them (``shared``: its computing slowed), its global ``batch``, and what
    data parallelism reaches by itself (samples/s, 0 where not known). Jobs of higher ``priority``
    get devices first, then those that came earlier; one without a number of ``steps`` runs to the
    end."""

    name: str
    batch: int
    unshared: StepTimelines
    shared: StepTimelines
    data_parallel_samples_s: float = 0.0
    priority: int = 0
    arrival_s: float = 0.0
    steps: int | None = None

    @property
    def devices(self) -> int:
        return self.unshared.devices


class BackgroundJob(NamedTuple):
    """A job of one device: ``batch`` samples in ``step_s`` alone, holding ``peak_bytes``. It runs
    on ``copies`` devices, or wherever there is room; of higher ``priority`` first."""

    name: str
    batch: int
    step_s: float
    peak_bytes: int = 0
    copies: int | None = None
    priority: int = 0

    @property
    def samples_per_s(self) -> float:
        """What one device reaches alone."""
        return self.batch / self.step_s


def shared_device_model(model: CostModel, slowdown: float) -> CostModel:
    """The cost model of the same job on devices that it shares."""
    return model.with_profile(slowed(model.profile, slowdown))


def foreground(
    name: str, model: CostModel, decisions: Decisions, schedule: ScheduleName, slowdown: float
) -> ForegroundJob:
    """The job of decisions under a cost model."""
    unshared = shared = timelines(model, decisions, schedule)
    if slowdown != 1.0:
        shared = timelines(shared_device_model(model, slowdown), decisions, schedule)
    return ForegroundJob(name, model.goal.batch, unshared, shared)


def best_background(
    profile: ModelProfile, device: Device, optimizer: str = "sgd", foreground_bytes: int = 0
) -> BackgroundJob:
    """The background that trains ``profile``'s model on one ``device``, of whose memory
    ``foreground_bytes`` are the foreground's. Raises ``InputError`` where not even the smallest
    batch fits."""
    cluster = Cluster(name="one device", nodes=(Node(name="node", devices=(device,)),), levels=())
    left, made = device.usable_bytes - foreground_bytes, []
    # Its step is predicted, not measured: by the same cost model as that of the foreground, so that
    # the two are compared without the difference between a prediction and a measurement.
    for batch in profile.batches:
        found = evaluate(profile, cluster, Goal(batch=batch, optimizer=optimizer))  # type: ignore[arg-type]
        if found.step_s > 0:
            made.append(BackgroundJob(profile.target, batch, found.step_s, found.peak_bytes[0]))
    fitting = [each for each in made if each.peak_bytes <= left]
    if not fitting:
        least = min((each.peak_bytes for each in made), default=0)
        raise InputError(
            f"a background of {profile.target} needs {least:,} bytes beside the foreground and "
            f"{max(left, 0):,} are left on {device.name}: choose a smaller model or leave it out"
        )
    best = max(each.samples_per_s for each in fitting)
    return next(each for each in fitting if each.samples_per_s >= best * (1 - NEAR))
