"""Why a plan is as it is: each unit's alternatives, what binds, where communication is exposed.

One unit at a time (with the units tied to it) is given every other option that it could have, the
formula ranks them, and the best are simulated. Nothing else changes with it: what the whole plan
would gain from more of anything is ``sensitivity``'s, which plans again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..cost.cost import CostModel
from ..memory.unit_memory import MemoryModel
from ..schema.capability import PLAIN, Capability
from ..schema.cluster import Cluster
from ..schema.errors import InputError
from ..schema.goal import Goal
from ..schema.layout import Layout, Style
from ..schema.options import Decisions, Option
from ..schema.plan import ExchangePolicy, FeedbackPolicy, MemoryPolicy, Plan
from ..schema.profile import ModelProfile
from ..schema.record import Bytes, Index, Record, Seconds
from ..simulate.schedule import ScheduleName
from ..solve.evaluate import Evaluation, decisions_of, evaluation, excess
from ..solve.heuristic.space import Point, Space
from .binding import MEMORY, BindingTerm, LimitUse, broken, limit_uses, term_of
from .device_time import DeviceTime, device_time
from .exposure import Exposure, Part, exposures, largest_part
from .what_if import Gain


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

    @property
    def memory_binds(self) -> bool:
        """Whether memory keeps a quicker alternative out."""
        return MEMORY in self.binding


def explain(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    capability: Capability = PLAIN,
    schedule: ScheduleName | None = None,
    best: int = 3,
) -> Explanation:
    """Explains ``plan``, made from ``profile`` and ``cluster``, with ``best`` alternatives of each
    unit. ``schedule`` is the plan's unless told."""
    check_belongs(plan, profile, cluster)
    schedule = schedule or plan.schedule
    model = _model(plan, profile, cluster, plan.goal, schedule)
    decisions = decisions_of(plan)
    done = evaluation(model, decisions, schedule=schedule)
    # what pins and unit limits forbid is an alternative too, one that breaks them
    free = msgspec.structs.replace(plan.goal, pins=(), unit_amplification_limit=None)
    open_ = _model(plan, profile, cluster, free, schedule)
    point = Point(Space(open_, capability), MemoryModel(open_), schedule)
    units = []
    for k in range(len(decisions)):
        point.move_to(decisions)
        nearest = _nearest(point, k, best)
        found = tuple(_alternative(model, k, d, schedule) for d in nearest)
        units.append(_unit(done, k, tuple(sorted(found, key=lambda a: a.step_s))))
    tight = excess(model, done.memory)
    return Explanation(
        step_s=done.prediction.step_s,
        slowed_s=done.prediction.step_s * plan.goal.slowdown,
        baseline_s=plan.baseline.step_s,
        bound_by=largest_part(done.simulation),
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


def _model(
    plan: Plan, profile: ModelProfile, cluster: Cluster, goal: Goal, schedule: ScheduleName
) -> CostModel:
    return CostModel(
        profile,
        cluster,
        goal,
        micro_batches=plan.micro_batches,
        placement=plan.placement,
        bucket_bytes=plan.bucket_bytes,
        sliced=schedule == "priority",
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
