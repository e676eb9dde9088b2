"""Why a plan is as it is: each unit's alternatives, what binds, where communication is exposed.

The figures come from planning again: one unit at a time (with the units tied to it) is given every
other option that it may have, the formula ranks them, and the best are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from .capability import PLAIN, Capability
from .cluster import Cluster
from .cost import CostModel
from .errors import InputError
from .evaluate import Evaluation, decisions_of, evaluation, excess
from .layout import Layout, Style
from .memory import MemoryModel
from .noun import Bytes, Index, Noun, Seconds
from .options import Decisions, Option
from .plan import Plan
from .profile import ModelProfile
from .schedule import ScheduleName
from .search import Point, Space
from .simulate import Simulation

Part = Literal["compute", "blocking", "exchange"]


class Alternative(Noun, frozen=True, kw_only=True):
    """Another option for a unit: the step that it would give and the fullest rank's bytes."""

    layout: Layout
    style: Style
    step_s: Seconds
    peak_bytes: Bytes
    fits: bool


class UnitExplanation(Noun, frozen=True, kw_only=True):
    """One unit's cost, part by part, for one micro-batch (exchange: for one step), and its best
    alternatives, the quickest first. ``with_it`` are the units tied to it."""

    name: str
    layout: Layout
    style: Style
    forward_s: Seconds
    backward_s: Seconds
    redistribute_s: Seconds
    inner_s: Seconds
    exchange_s: Seconds
    update_s: Seconds
    with_it: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


class Exposure(NamedTuple):
    """Seconds of a step that a rank waits for one message of gradients: the units whose gradients
    it carries, and the link."""

    units: tuple[str, ...]
    link: str
    seconds: float


class Explanation(Noun, frozen=True, kw_only=True):
    """The largest part of the step (``bound_by``), whether a quicker neighbour does not fit
    (``memory_binds``), where memory is tightest, what is exposed, and every unit."""

    step_s: Seconds
    baseline_s: Seconds
    bound_by: Part
    memory_binds: bool
    tightest_rank: Index
    tightest_unit: str
    needed_bytes: Bytes
    available_bytes: Bytes
    exposed: tuple[Exposure, ...]
    units: tuple[UnitExplanation, ...]


def explain(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    capability: Capability = PLAIN,
    schedule: ScheduleName = "barrier",
    best: int = 3,
) -> Explanation:
    """Explains ``plan``, made from ``profile`` and ``cluster``, with ``best`` alternatives of each
    unit."""
    check_belongs(plan, profile, cluster)
    model = CostModel(
        profile,
        cluster,
        plan.goal,
        plan.micro_batches,
        plan.placement,
        plan.bucket_bytes,
        schedule == "priority",
    )
    decisions = decisions_of(plan)
    done = evaluation(model, decisions, schedule=schedule)
    point = Point(Space(model, capability), MemoryModel(model), schedule)
    units = []
    for k in range(len(decisions)):
        point.move_to(decisions)
        nearest = _nearest(point, k, best)
        found = tuple(_alternative(model, k, d, schedule) for d in nearest)
        units.append(_unit(done, k, tuple(sorted(found, key=lambda a: a.step_s))))
    tight, step_s = excess(model, done.memory), done.prediction.step_s
    blocked = (not a.fits and a.step_s < step_s for u in units for a in u.alternatives)
    return Explanation(
        step_s=step_s,
        baseline_s=plan.baseline.step_s,
        bound_by=_largest(done.simulation),
        memory_binds=any(blocked),
        tightest_rank=plan.placement[tight.position],
        tightest_unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        exposed=tuple(_exposed(done)),
        units=tuple(units),
    )


def check_belongs(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raises where a plan is of another model or of another number of ranks."""
    if plan.model != profile.model or [u.name for u in plan.units] != [
        u.name for u in profile.units
    ]:
        raise InputError(
            f"the plan is of {plan.target} ({plan.model}) and the profile of {profile.target} "
            f"({profile.model}): plan again from this profile"
        )
    if plan.world_size != cluster.world_size:
        raise InputError(
            f"the plan is for {plan.world_size} ranks and cluster {cluster.name!r} has "
            f"{cluster.world_size}: plan again for this cluster"
        )


def _nearest(point: Point, k: int, best: int) -> list[Decisions]:
    """The decisions that differ from the plan's in unit ``k`` only, the best by formula."""
    found = []
    for option in point.space.options[k]:
        changes = point.space.tied(k, option)
        if option == point.decisions[k] or changes is None:
            continue
        before = point.set(changes.items())
        found.append((point.score(), point.taken()))
        point.set(before.items())
    fitting = sorted(found, key=lambda f: f[0])[:best]
    quickest = sorted(found, key=lambda f: f[0].step_s)[:1]
    return list(dict.fromkeys(d for _, d in [*fitting, *quickest]))[: max(best, 1)]


def _alternative(
    model: CostModel, k: int, decisions: Decisions, schedule: ScheduleName
) -> Alternative:
    done = evaluation(model, decisions, schedule=schedule)
    option: Option = decisions[k]
    return Alternative(
        layout=option.layout,
        style=option.style,
        step_s=done.prediction.step_s,
        peak_bytes=max(done.prediction.peak_bytes),
        fits=excess(model, done.memory).over_bytes <= 0,
    )


def _unit(done: Evaluation, k: int, alternatives: tuple[Alternative, ...]) -> UnitExplanation:
    units, chain, option = done.model.profile.units, done.chain, done.decisions[k]
    return UnitExplanation(
        name=units[k].name,
        layout=option.layout,
        style=option.style,
        forward_s=float(chain.forward_s[k]),
        backward_s=float(chain.backward_s[k]),
        redistribute_s=float((chain.entry_forward_s + chain.entry_backward_s)[:, k].sum()),
        inner_s=float((chain.inner_forward_s + chain.inner_backward_s)[:, k].sum()),
        exchange_s=float(chain.exchange_s[:, k].sum()),
        update_s=float(chain.update_s[k]),
        with_it=tuple(units[o].name for o in done.model.ties[k] if o != k),
        alternatives=alternatives,
    )


def _largest(simulation: Simulation) -> Part:
    parts: dict[Part, float] = {
        "compute": simulation.compute_s,
        "blocking": simulation.blocking_s,
        "exchange": simulation.exposed_s,
    }
    return max(parts, key=lambda p: parts[p])


def _exposed(done: Evaluation) -> Iterator[Exposure]:
    """Each message's part in the stalls of the step, those without one left out."""
    units = done.model.profile.units
    stalls = list(_stalls(done.simulation))
    for index, message in enumerate(done.step.messages):
        seconds = sum(
            max(min(span.end_s, end) - max(span.start_s, start), 0.0)
            for span in done.simulation.spans
            if span.message == index
            for start, end in stalls
        )
        if seconds > 0:
            yield Exposure(tuple(units[k].name for k in message.units), message.link, seconds)


def _stalls(simulation: Simulation) -> Iterator[tuple[float, float]]:
    """When the rank neither computes nor communicates for itself."""
    last = 0.0
    for span in simulation.spans:
        if span.phase == "exchange":
            continue
        if span.start_s > last:
            yield last, span.start_s
        last = max(last, span.end_s)
    end = max((s.end_s for s in simulation.spans), default=0.0)
    if end > last:  # no update follows the exchange
        yield last, end
