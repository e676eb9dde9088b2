"""A plan's step as each kind of device sees it: when it computes, when it communicates.

That step is the one of the simulation by which a plan is predicted (``simulate_decisions``): it has
the times of the busiest device, of which the others do what concerns their units and their share of
the samples.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..cost.compute import backward_s, forward_s
from ..cost.cost import CostModel
from ..cost.ownership import PositionClass, position_classes
from ..schema.options import Decisions, Option
from ..schema.plan import ScheduleName
from ..schema.profile import ModelProfile
from ..simulate.events import Simulation, Span
from ..simulate.rank_classes import simulate_decisions
from ..simulate.schedule import COMPUTE, step_of
from .evaluate import issued_s, rank_memory, seen_by

# Steps that are simulated under priority; the last but one is told, so that what it sends late is
# seen to arrive.
STEADY = 5


class Busy(NamedTuple):
    """From ``start_s`` to ``end_s`` of the step the devices work on ``unit`` (its index);
    ``resource`` is compute or a link."""

    start_s: float
    end_s: float
    unit: int
    phase: str
    resource: str = COMPUTE


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


def timelines(
    model: CostModel, decisions: Decisions, schedule: ScheduleName, *, slowest: float = 1.0
) -> StepTimelines:
    """The step of those decisions in the steady state, on ranks that compute ``slowest`` times as
    long as measured."""
    steps = 1 if schedule == "barrier" else STEADY

    def simulated(each: CostModel) -> Simulation:
        step = step_of(each, decisions, each.chain(decisions), schedule)
        return simulate_decisions(each, decisions, step, steps, slowest=slowest)

    # Where devices are unequal the step is that of the slowest, as it is predicted.
    found, slow = max(
        ((simulated(each), each) for each in seen_by(model, decisions)),
        key=lambda one: one[0].step_s,
    )
    step_s = found.issued_in(issued_s(slow, decisions, slow.chain(decisions))).step_s
    until_s = found.step_s  # the barrier's one step begins at zero
    # By priority a step's messages arrive while the next one computes. The last step has no next
    # one, so the step before it is taken, which ends where the last one begins.
    if schedule == "priority":
        until_s = max((s.end_s for s in found.spans if s.phase != "exchange"), default=0.0)
        until_s -= found.step_s
    spans = list(_within(found.spans, until_s - found.step_s, until_s))
    # Devices of one kind that take the same part in every unit see the same step and are told once.
    classes = [
        each._replace(positions=alike)
        for each in position_classes(model.counts, [o.layout for o in decisions])
        for device in model.kinds
        if (alike := tuple(sorted(set(each.positions) & set(device.positions))))
    ]
    return StepTimelines(
        step_s,
        tuple(_timeline(model, slow, decisions, each, spans) for each in classes),
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
    model: CostModel,
    slow: CostModel,
    decisions: Decisions,
    kind: PositionClass,
    spans: Sequence[Span],
) -> DeviceTimeline:
    """The part that devices of that kind have of ``spans``, which are as ``slow`` sees them."""
    computing, communicating = [], []
    for span in spans:
        if span.resource != COMPUTE:
            if _communicates(model, decisions, kind, span):
                communicating.append(
                    Busy(span.start_s, span.end_s, span.unit, span.phase, span.resource)
                )
            continue
        part = _part(model, slow, span.unit, decisions[span.unit], kind, span.phase)
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


def _part(
    model: CostModel, slow: CostModel, k: int, option: Option, kind: PositionClass, phase: str
) -> float:
    """The share of the busiest device's seconds, as ``slow`` sees it, that one of that kind
    computes."""
    samples = kind.samples[option.layout]
    if samples is None:
        return 0.0
    if phase == "update":
        return 1.0
    seconds = forward_s if phase == "forward" else backward_s
    most = zip(slow.kinds, slow.samples_by_kind(option.layout), strict=True)
    device = next(one for one in model.kinds if kind.positions[0] in one.positions)

    def took(profile: ModelProfile, count: int) -> float:
        return seconds(profile.units[k], option.style, option.layout.degree, count)

    whole = max(took(one.profile, count) for one, count in most)
    return min(took(device.profile, samples) / whole, 1.0) if whole else 1.0
