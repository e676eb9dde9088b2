"""A plan's step as a trace: as it is predicted, and beside that as a run has recorded it.

Every rank is a process of the trace. Its tracks are what it computes, what its optimizer updates,
and what each kind of link (predicted) or process group (recorded) carries, predicted above
recorded. Steps of both begin at the same moments, so far apart that the longest has room.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..cost.cost import CostModel
from ..cost.step_time import LINKS
from ..schema.cluster import LINK_NAMES, Cluster, LevelName
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..schema.recorded import RecordedGroup, RecordedSpan, RecordedSteps
from ..simulate.schedule import COMPUTE
from ..simulate.spread import slowest_of
from ..simulate.trace_events import (
    TraceProcess,
    TraceSpan,
    TraceTrack,
    encode_trace,
    parts_within,
)
from ..solve.device_timelines import DeviceTimeline, StepTimelines, timelines
from ..solve.evaluate import decisions_of
from ..solve.local_steps import plan_of_host
from .why import check_belongs

# Of more ranks only one of each kind is told, where nothing was recorded.
MOST_RANKS = 64
# What is left free behind the longest step, as a share of it.
MARGIN = 0.05
PREDICTED, RECORDED = "predicted", "measured"
UPDATE = "update"


class PredictedStep(NamedTuple):
    """The step of a plan by kinds of devices, and the ranks of each kind. Of a plan with local
    steps it is the step that a host makes by itself, on each."""

    timelines: StepTimelines
    ranks: tuple[tuple[int, ...], ...]
    node_of_rank: tuple[int, ...]

    def kind_of(self, rank: int) -> DeviceTimeline:
        kinds = zip(self.timelines.kinds, self.ranks, strict=True)
        return next(kind for kind, ranks in kinds if rank in ranks)


def predicted_step(plan: Plan, profile: ModelProfile, cluster: Cluster) -> PredictedStep:
    """The step of ``plan``, made from ``profile`` and ``cluster``, as it is predicted."""
    check_belongs(plan, profile, cluster)
    own, there = plan_of_host(plan, profile, cluster)
    model = CostModel.of_plan(own, profile, there)
    slowest = slowest_of(model.world_size, profile.spread)
    found = timelines(model, decisions_of(own), own.schedule, slowest=slowest)
    size = own.world_size
    ranks = tuple(
        tuple(
            plan.placement[host * size + position]
            for host in range(plan.world_size // size)
            for position in kind.positions
        )
        for kind in found.kinds
    )
    return PredictedStep(found, ranks, cluster.node_of_rank)


def step_trace(
    plan: Plan, predicted: PredictedStep | None, recorded: Sequence[RecordedSteps] = ()
) -> bytes:
    """The trace of what is ``predicted`` and of what ranks have ``recorded``, as far as either is
    known."""
    slot_s = _slot_s(predicted, recorded)
    steps = max((len(one.steps) for one in recorded), default=1)
    about = {"target": plan.target, "batch": str(plan.goal.batch), "schedule": plan.schedule}
    return encode_trace(
        (
            TraceProcess(name, list(_tracks(rank, predicted, mine, steps, slot_s)))
            for rank, name, mine in _ranks(predicted, recorded)
        ),
        **about,
    )


def _slot_s(predicted: PredictedStep | None, recorded: Sequence[RecordedSteps]) -> float:
    """From the start of one step to that of the next."""
    took = [step.end_s - step.start_s for one in recorded for step in one.steps]
    took += [predicted.timelines.step_s] if predicted is not None else []
    return (1 + MARGIN) * max(took, default=0.0)


def _ranks(
    predicted: PredictedStep | None, recorded: Sequence[RecordedSteps]
) -> Iterator[tuple[int, str, RecordedSteps | None]]:
    """Each rank that is told, how it is called, and what it has recorded."""
    if recorded:
        for one in sorted(recorded, key=lambda one: one.rank):
            yield one.rank, f"rank {one.rank}", one
    elif predicted is not None and sum(map(len, predicted.ranks)) <= MOST_RANKS:
        for rank in sorted(rank for ranks in predicted.ranks for rank in ranks):
            yield rank, f"rank {rank}", None
    elif predicted is not None:
        for ranks in predicted.ranks:
            yield ranks[0], f"rank {ranks[0]} and {len(ranks) - 1} more alike", None


def _tracks(
    rank: int,
    predicted: PredictedStep | None,
    recorded: RecordedSteps | None,
    steps: int,
    slot_s: float,
) -> Iterator[TraceTrack]:
    """The tracks of one rank, each that is predicted above those that were recorded."""
    above: dict[str, TraceTrack] = {}
    if predicted is not None:
        above = dict(_predicted_tracks(predicted, rank, steps, slot_s))
    below: dict[str, list[TraceTrack]] = {}
    if recorded is not None:
        nodes = predicted.node_of_rank if predicted is not None else ()
        below = _recorded_tracks(recorded, nodes, slot_s)
    for name in ("step", COMPUTE, "waiting", UPDATE, *LINKS, "other"):
        if name in above:
            yield above[name]
        yield from below.get(name, ())


def _predicted_tracks(
    predicted: PredictedStep, rank: int, steps: int, slot_s: float
) -> Iterator[tuple[str, TraceTrack]]:
    found, kind = predicted.timelines, predicted.kind_of(rank)
    spans: dict[str, list[TraceSpan]] = {"step": [], COMPUTE: [], UPDATE: []}
    spans["step"].append(TraceSpan("step", 0.0, found.step_s))
    for busy in (*kind.computing, *kind.communicating):
        row = UPDATE if busy.phase == UPDATE else busy.resource
        name = f"{busy.phase} {found.units[busy.unit]}"
        spans.setdefault(row, []).append(TraceSpan(name, busy.start_s, busy.end_s))
    titles = {"step": "step", COMPUTE: "computing", UPDATE: "optimizer"}
    titles |= {link: f"links {LINK_NAMES[link]}" for link in LINKS}
    for row, mine in spans.items():
        # The same step again and again: a run goes on and on.
        repeated = [
            span._replace(start_s=span.start_s + slot_s * n, end_s=span.end_s + slot_s * n)
            for n in range(steps)
            for span in mine
        ]
        yield row, TraceTrack(f"{titles[row]}, {PREDICTED}", repeated)


def _recorded_tracks(
    recorded: RecordedSteps, nodes: Sequence[int], slot_s: float
) -> dict[str, list[TraceTrack]]:
    def track(title: str, spans: Iterable[TraceSpan]) -> TraceTrack:
        every = list(spans)
        parts = (
            part
            for n, step in enumerate(recorded.steps)
            for part in parts_within(every, step.start_s, step.end_s, n * slot_s)
        )
        return TraceTrack(f"{title}, {RECORDED}", list(parts))

    steps = [TraceSpan("step", step.start_s, step.end_s) for step in recorded.steps]
    found: dict[str, list[TraceTrack]] = {
        "step": [track("step", steps)],
        COMPUTE: [track("computing", map(_span, recorded.computing))],
        "waiting": [track("waiting", map(_span, recorded.waiting))],
        UPDATE: [track("optimizer", map(_span, recorded.updating))],
    }
    for group in recorded.groups:
        level = _level_of(group.ranks, nodes)
        where = f" {LINK_NAMES[level]}" if level is not None else ""
        made = track(f"{group.label}{where}", _messages(group))
        found.setdefault(level or "other", []).append(made)
    return found


def _level_of(ranks: Sequence[int], nodes: Sequence[int]) -> LevelName | None:
    """The links that a group's messages cross; None where it is not known which ranks share a
    node."""
    if not nodes:
        return None
    return "inter" if len({nodes[rank] for rank in ranks}) > 1 else "intra"


def _span(one: RecordedSpan) -> TraceSpan:
    return TraceSpan(one.name, one.start_s, one.end_s)


def _messages(group: RecordedGroup) -> Iterator[TraceSpan]:
    """A group's messages one after another: where a message was issued while another was on its
    way, it is taken to go on from where that one has arrived."""
    last_s = float("-inf")
    for one in sorted(group.messages, key=lambda one: one.end_s):
        start_s = max(one.start_s, last_s)
        about: Mapping[str, object] = {
            "bytes": one.message_bytes,
            "ranks": ", ".join(map(str, group.ranks)),
            "behind_others_us": round(1e6 * (start_s - one.start_s), 1),
        }
        if one.end_s > start_s:
            yield TraceSpan(one.name, start_s, one.end_s, dict(about))
            last_s = one.end_s
