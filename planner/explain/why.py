"""Why a plan is as it is: each unit's alternatives, what binds, where communication is exposed.

One unit at a time (with the units tied to it) is given every other option that it could have, the
formula ranks them, and the best are simulated. Nothing else changes with it: what the whole plan
would gain from more of anything is ``what_if``'s, which plans again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..cost.budget import (
    energy_budget,
    gpu_seconds,
    gpu_seconds_limit,
    lost_energy,
    unit_amplification,
)
from ..cost.cost import CostModel
from ..cost.step_time import LINKS, binding_term
from ..schema.capability import PLAIN, Capability
from ..schema.cluster import Cluster, LevelName
from ..schema.errors import InputError
from ..schema.layout import Layout, Style
from ..schema.options import Decisions, Option
from ..schema.plan import ExchangePolicy, FeedbackPolicy, MemoryPolicy, Plan, ScheduleName
from ..schema.profile import ModelProfile
from ..schema.record import Bytes, Index, Record, Seconds
from ..simulate.events import Simulation
from ..simulate.schedule import COMPUTE
from ..solve.evaluate import Evaluation, decisions_of, evaluation, excess
from ..solve.heuristic.space import OptionSpace, ScoredDecisions
from .device_time import DeviceTime, device_time
from .what_if import Gain, with_bandwidth

ROUNDING = 1 + 1e-9
MEMORY, GPU_SECONDS, UNIT, STEP, FIDELITY, PINS = (
    "memory_limit_bytes",
    "amplification_limit",
    "unit_amplification_limit",
    "time_limit_s",
    "min_fidelity",
    "pins",
)


Part = Literal["compute", "blocking", "exchange"]


class Exposure(NamedTuple):
    """Seconds of a step that a rank waits for one message of gradients: the units whose gradients
    it carries, and the link."""

    units: tuple[str, ...]
    link: str
    seconds: float


class LimitUse(Record, frozen=True, kw_only=True):
    """One limit (the goal's field, memory's also where it is the device's own): how much of it a
    plan uses, both in the limit's unit (bytes, device-seconds, seconds, times one device's time,
    share of the gradient's energy that is not sent)."""

    limit: str
    used: float
    available: float

    @property
    def kept(self) -> bool:
        """Whether the plan keeps it."""
        return self.used <= self.available * ROUNDING + 1e-12


class BindingTerm(Record, frozen=True, kw_only=True):
    """The term that the step's formula is equal to: the gradients of all units up to ``unit`` on
    ``link``, sent while backward comes down to it (by priority: before forward comes up to it).
    Both are None where it is what the rank itself computes and waits for."""

    link: str | None = None
    unit: str | None = None


class Alternative(Record, frozen=True, kw_only=True):
    """Another option for a unit: the step that it would give, its device-seconds, the fullest
    rank's bytes, and the limits of the goal (pins among them) that it would break."""

    layout: Layout
    style: Style
    memory: MemoryPolicy = "keep"
    exchange: ExchangePolicy = "dense"
    exchange_ratio: float = 1.0
    early_release: bool = False
    feedback: FeedbackPolicy = "residual"
    step_s: Seconds
    gpu_seconds: Seconds
    peak_bytes: Bytes
    breaks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it keeps the limit on memory."""
        return MEMORY not in self.breaks


class UnitExplanation(Record, frozen=True, kw_only=True):
    """One unit's cost, part by part, for one micro-batch (exchange: for one step), and its best
    alternatives, the quickest first. ``with_it`` are the units tied to it."""

    name: str
    layout: Layout
    style: Style
    memory: MemoryPolicy = "keep"
    exchange: ExchangePolicy = "dense"
    exchange_ratio: float = 1.0
    early_release: bool = False
    feedback: FeedbackPolicy = "residual"
    forward_s: Seconds
    backward_s: Seconds
    redistribute_s: Seconds
    inner_s: Seconds
    exchange_s: Seconds
    update_s: Seconds
    with_it: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


class Explanation(Record, frozen=True, kw_only=True):
    """The largest part of the step (``bound_by``), the term of the formula that it is equal to, the
    limits and what is used of them, those that keep a quicker alternative of one unit out
    (``binding``; of fewer device-seconds where that is the objective), where memory is tightest,
    what is exposed, every unit, and what more of anything would buy where that was asked.
    ``slowed_s`` is what a step may take with the background job that the goal allows (``step_s``
    without one), ``device_time`` what its device-seconds are made of."""

    step_s: Seconds
    slowed_s: Seconds
    baseline_s: Seconds
    bound_by: Part
    term: BindingTerm | None
    limits: tuple[LimitUse, ...]
    binding: tuple[str, ...]
    tightest_rank: Index
    tightest_unit: str
    needed_bytes: Bytes
    available_bytes: Bytes
    exposed: tuple[Exposure, ...]
    units: tuple[UnitExplanation, ...]
    device_time: DeviceTime
    gains: tuple[Gain, ...] = ()


def explain(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    capability: Capability = PLAIN,
    best: int = 3,
) -> Explanation:
    """Explains ``plan``, made from ``profile`` and ``cluster``, with ``best`` alternatives of each
    unit."""
    check_belongs(plan, profile, cluster)
    model, schedule = CostModel.of_plan(plan, profile, cluster), plan.schedule
    decisions = decisions_of(plan)
    done = evaluation(model, decisions, schedule=schedule)
    # What pins and unit limits forbid is an alternative too, one that breaks them. A limit on the
    # whole step is not: it is looked at after an alternative has been simulated.
    free = msgspec.structs.replace(plan.goal, pins=(), unit_amplification_limit=None)
    free_model = CostModel.of_plan(plan, profile, cluster, free)
    scored = ScoredDecisions(OptionSpace(free_model, capability), schedule)
    units = []
    for k in range(len(decisions)):
        scored.move_to(decisions)
        nearest = _nearest(scored, k, best)
        found = tuple(_alternative(model, k, d, schedule) for d in nearest)
        units.append(_unit(done, k, tuple(sorted(found, key=lambda a: a.step_s))))
    tight = excess(model, done.memory)
    return Explanation(
        step_s=done.prediction.step_s,
        slowed_s=done.prediction.step_s * plan.goal.slowdown,
        baseline_s=plan.baseline.step_s,
        bound_by=largest_part(done.simulation)[0],
        term=term_of(done, schedule),
        limits=limit_uses(done),
        binding=tuple(_binding(done, units)),
        tightest_rank=plan.placement[tight.position],
        tightest_unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        exposed=tuple(exposures(done)),
        units=tuple(units),
        device_time=device_time(done),
    )


def _binding(done: Evaluation, units: Sequence[UnitExplanation]) -> Iterator[str]:
    """The limits that alternatives break which would be better without them."""
    economical = done.model.goal.objective == "gpu_seconds"
    ours = done.prediction.gpu_seconds if economical else done.prediction.step_s
    better = [
        a
        for unit in units
        for a in unit.alternatives
        if (a.gpu_seconds if economical else a.step_s) < ours * (1 - 1e-9)
    ]
    yield from dict.fromkeys(limit for a in better for limit in a.breaks)


class Bottleneck(NamedTuple):
    """The largest part of a step of ``step_s``, and what would shorten it with the same decisions.

    ``link`` is where most of the communication that the rank waits for goes over, and ``faster_s``
    the step with twice its bandwidth; None where nothing is waited for. ``recompute_s`` is
    computing that is done again for lack of memory. ``may_drop`` says that a lossy exchange was not
    allowed although it was measured what it would keep.
    """

    part: Part
    part_s: float
    step_s: float
    recompute_s: float
    link: LevelName | None = None
    faster_s: float | None = None
    may_drop: bool = False


def bottleneck(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Bottleneck:
    """What bounds ``plan``, made from ``profile`` and ``cluster``. Nothing is searched: the plan is
    simulated as it is, and once more with the faster link."""
    model, decisions = CostModel.of_plan(plan, profile, cluster), decisions_of(plan)
    done = evaluation(model, decisions, schedule=plan.schedule)
    part, part_s = largest_part(done.simulation)
    recomputed = (unit.forward_s for unit in plan.units if unit.memory == "recompute")
    found = Bottleneck(
        part, part_s, done.prediction.step_s, sum(recomputed) * plan.micro_batches,
        may_drop=not plan.goal.allow_lossy and any(unit.fidelity for unit in profile.units),
    )  # fmt: skip
    waited: dict[LevelName, float] = {}
    for link, seconds in _waited(done):
        waited[link] = waited.get(link, 0.0) + seconds
    level = cluster.level(max(waited, key=lambda name: waited[name])) if waited else None
    if level is None:
        return found
    faster = CostModel.of_plan(
        plan, profile, with_bandwidth(cluster, level.name, level.bytes_per_s)
    )
    after = evaluation(faster, decisions, schedule=plan.schedule)
    return found._replace(link=level.name, faster_s=after.prediction.step_s)


def _waited(done: Evaluation) -> Iterator[tuple[LevelName, float]]:
    """Seconds for which the rank waits for each link: exposed messages and blocking communication
    (under the schedule by priority several steps of it, which does not change what is most)."""
    for exposed in exposures(done):
        yield exposed.link, exposed.seconds  # type: ignore[misc]
    for span in done.simulation.spans:
        if span.phase != "exchange" and span.resource != COMPUTE:
            yield span.resource, span.end_s - span.start_s  # type: ignore[misc]


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


def _nearest(scored: ScoredDecisions, k: int, best: int) -> list[Decisions]:
    """The decisions that differ from the plan's in unit ``k`` only, the best by formula."""
    found = []
    for option in scored.space.options[k]:
        changes = scored.space.tied(k, option)
        if option == scored.decisions[k] or changes is None:
            continue
        candidate = scored.tried(changes)
        if candidate is not None:
            found.append(candidate)
    fitting = sorted(found, key=lambda f: f[0])[:best]
    quickest = sorted(found, key=lambda f: f[0].step_s)[:1]  # even if a limit forbids it
    return list(dict.fromkeys(d for _, d in [*fitting, *quickest]))


def _alternative(
    model: CostModel, k: int, decisions: Decisions, schedule: ScheduleName
) -> Alternative:
    done = evaluation(model, decisions, schedule=schedule)
    option: Option = decisions[k]
    return Alternative(
        layout=option.layout,
        style=option.style,
        memory=option.memory,
        exchange=option.exchange,
        exchange_ratio=option.ratio,
        early_release=option.early_release,
        feedback=option.feedback,
        step_s=done.prediction.step_s,
        gpu_seconds=done.prediction.gpu_seconds,
        peak_bytes=max(done.prediction.peak_bytes),
        breaks=broken(done),
    )


def _unit(done: Evaluation, k: int, alternatives: tuple[Alternative, ...]) -> UnitExplanation:
    units, chain, option = done.model.profile.units, done.chain, done.decisions[k]
    return UnitExplanation(
        name=units[k].name,
        layout=option.layout,
        style=option.style,
        memory=option.memory,
        exchange=option.exchange,
        exchange_ratio=option.ratio,
        early_release=option.early_release,
        feedback=option.feedback,
        forward_s=float(chain.forward_s[k]),
        backward_s=float(chain.backward_s[k]),
        redistribute_s=float((chain.entry_forward_s + chain.entry_backward_s)[:, k].sum()),
        inner_s=float((chain.inner_forward_s + chain.inner_backward_s)[:, k].sum()),
        exchange_s=float(chain.exchange_s[:, k].sum()),
        update_s=float(chain.update_s[k]),
        with_it=tuple(units[o].name for o in done.model.ties[k] if o != k),
        alternatives=alternatives,
    )


def term_of(done: Evaluation, schedule: ScheduleName) -> BindingTerm | None:
    """The term that binds a plan's step; None where units begin at other positions than the first
    (branches side by side), for which there is no formula."""
    if any(option.layout.first for option in done.decisions):
        return None
    found = binding_term(done.chain, priority=schedule == "priority")
    if found is None:
        return BindingTerm()
    link, k = found
    return BindingTerm(link=LINKS[link], unit=done.model.profile.units[k].name)


def limit_uses(done: Evaluation) -> tuple[LimitUse, ...]:
    """The limits that there are, and what the plan uses of each as it is predicted (solvers keep
    them by the formula)."""
    model, decisions, goal = done.model, done.decisions, done.model.goal
    tight = excess(model, done.memory)
    found = [_use(MEMORY, tight.needed_bytes, tight.available_bytes)]
    step_s = done.prediction.step_s
    if goal.amplification_limit is not None:
        used = gpu_seconds(model, decisions, step_s)
        found.append(_use(GPU_SECONDS, used, gpu_seconds_limit(model)))
    if goal.unit_amplification_limit is not None:
        most = max(unit_amplification(model, k, o) for k, o in enumerate(decisions))
        found.append(_use(UNIT, most, goal.unit_amplification_limit))
    if goal.time_limit_s is not None:
        found.append(_use(STEP, step_s * goal.slowdown, goal.time_limit_s))
    if goal.allow_lossy:
        lost = sum(lost_energy(model, k, o) for k, o in enumerate(decisions))
        found.append(_use(FIDELITY, lost, energy_budget(model)))
    return tuple(found)


def _use(limit: str, used: float, available: float) -> LimitUse:
    return LimitUse(limit=limit, used=float(used), available=float(available))


def broken(done: Evaluation) -> tuple[str, ...]:
    """The limits that a plan does not keep, pins among them."""
    over = [use.limit for use in limit_uses(done) if not use.kept]
    return (*over, PINS) if _unpinned(done.model, done.decisions) else tuple(over)


def _unpinned(model: CostModel, decisions: Sequence[Option]) -> bool:
    units = zip(model.profile.units, decisions, strict=True)
    return not all(model.goal.permits(u.name, o.layout, o.style) for u, o in units)


def largest_part(simulation: Simulation) -> tuple[Part, float]:
    """What a step takes longest for, and how long."""
    parts: dict[Part, float] = {
        "compute": simulation.compute_s,
        "blocking": simulation.blocking_s,
        "exchange": simulation.exposed_s,
    }
    return max(parts.items(), key=lambda part: part[1])


def exposures(done: Evaluation) -> Iterator[Exposure]:
    """Each message's part in the stalls of the step, those without one left out."""
    units = done.model.profile.units
    stalls = list(_stalls(done.simulation))
    # A message is exposed for as long as it is under way while the rank does nothing. Messages on
    # two links at once share a stall, so these seconds may add up to more than the step's.
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
    if end > last:  # Nothing follows the exchange: without trained parameters there is no update.
        yield last, end
