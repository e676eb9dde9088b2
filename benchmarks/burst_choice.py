"""Burst plans with the background in mind: the most of foreground and background together, with the
foreground no slower than data parallelism alone.

With N samples in a step of T seconds, r samples per second of a background on an idle device, W
devices of which the foreground keeps U device-seconds, the cluster makes

    N / T + r · (W · T - U) / T = r · W + (N - r · U) / T

in a second. Where small shares of a batch make a device less efficient than a background is (N < r
· U), a step that uses fewer device-seconds is worth more than one that is quicker, up to the limit
on T. So the planner's own search is asked for the fewest device-seconds within the limit on time,
for the fastest plan under each of several limits on units' amplification, and DeepPool's greedy
plans are tried beside these; each is then simulated with the background in its gaps, and the best
is taken. Where nothing keeps the limit beside a background, the fastest plan runs by itself.

Plans are also narrowed: from a plan that keeps the limit, runs of neighbouring units are given
another number of devices, as long as that helps by formula.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import msgspec
from meshwright.planner.cost.budget import unit_s
from meshwright.planner.cost.cost import BUCKET_BYTES, CostModel
from meshwright.planner.cost.step_time import barrier_step, priority_step
from meshwright.planner.multiplex.gaps import background_share
from meshwright.planner.multiplex.jobs import Assumptions, Background, shared_device_model, slowed
from meshwright.planner.multiplex.timeline import timelines
from meshwright.planner.schema.capability import Capability
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Decisions, Option, allowed
from meshwright.planner.schema.plan import ScheduleName
from meshwright.planner.simulate.schedule import bucketed_s
from meshwright.planner.solve.answer import over_bytes
from meshwright.planner.solve.evaluate import evaluation
from meshwright.planner.solve.heuristic.bursts import LIMITS, greedy
from meshwright.planner.solve.heuristic.space import OptionSpace, ScoredDecisions
from meshwright.planner.solve.problem import Problem, Result
from meshwright.planner.solve.solver import solve

ROUNDING = 1 + 1e-6
AMPLIFICATIONS = (2.0, 4.0)
"""Limits on units' amplification under which the fastest plan is searched."""
BUCKETS = (2**20, 2**22, BUCKET_BYTES, 2**27, 2**40)
"""Sizes of slices and buckets that data parallelism chooses from; the last takes everything."""


class DataParallel(NamedTuple):
    """The quickest plain data parallelism, and by which schedule it is so."""

    model: CostModel
    schedule: ScheduleName
    step_s: float

    @property
    def samples_per_s(self) -> float:
        """What it reaches alone."""
        return self.model.goal.batch / self.step_s


class Shared(NamedTuple):
    """Decisions on shared devices: the step beside the background, the background's mean share of
    its speed alone, and samples of both per second. ``alone`` says that there is none."""

    how: str
    decisions: Decisions
    step_s: float
    share: float
    foreground_samples_s: float
    background_samples_s: float
    copies: int | None = None

    @property
    def samples_per_s(self) -> float:
        """Foreground and background together."""
        return self.foreground_samples_s + self.background_samples_s


def best_data_parallel(problem: Problem, sizes: Sequence[int] = BUCKETS) -> DataParallel:
    """Plain data parallelism with its best schedule, size of slices or buckets, and number of
    micro-batches of the goal's, of what fits in memory; it normalises over each rank's own share as
    DistributedDataParallel does, which costs it nothing. The best of each schedule by formula is
    simulated. Raises ``InputError`` where none fits."""
    schedules: tuple[ScheduleName, ...] = ("priority", "barrier")
    found = []
    for schedule in schedules:
        every = _plain_models(problem, sizes, schedule)
        models = [m for m in every if over_bytes(m, m.baseline) <= 0]
        if models:
            best = min(models, key=lambda m: _formula_s(m, schedule))
            done = evaluation(best, best.baseline, schedule=schedule)
            found.append(DataParallel(best, schedule, done.prediction.step_s))
    if not found:
        raise InputError(
            f"data parallelism with {problem.goal.batch} samples on {problem.cluster.world_size} "
            f"devices does not fit with {list(problem.goal.micro_batches)} micro-batches: allow "
            "more of them"
        )
    return min(found, key=lambda each: each.step_s)


def _plain_models(
    problem: Problem, sizes: Sequence[int], schedule: ScheduleName
) -> Iterator[CostModel]:
    goal = msgspec.structs.replace(problem.goal, batch_statistics="local")
    for times, size in product(goal.micro_batches, sizes):
        if times == 1 or goal.batch >= times * problem.cluster.world_size:
            yield CostModel(
                problem.profile, problem.cluster, goal, micro_batches=times,
                placement=problem.placement, message_bytes=size, sliced=schedule == "priority",
            )  # fmt: skip


def _formula_s(model: CostModel, schedule: ScheduleName) -> float:
    """Seconds of data parallelism by formula, with its buckets or slices."""
    chain = model.chain(model.baseline)
    if schedule == "priority":
        return priority_step(chain, model.micro_batches)
    buckets = chain._replace(exchange_s=bucketed_s(model, model.baseline))
    return barrier_step(buckets, model.micro_batches)


def beside_of(
    how: str,
    beside: CostModel,
    decisions: Decisions,
    schedule: ScheduleName,
    background: Background,
    given: Assumptions,
) -> Shared:
    """What decisions reach with the background in their gaps on every device; ``beside`` is the
    cost model of shared devices (``jobs.shared_device_model``)."""
    step = timelines(beside, decisions, schedule)
    own = sum(len(k.positions) * background_share(k, step.step_s, given) for k in step.kinds)
    return Shared(
        how,
        decisions,
        step.step_s,
        own / step.devices,
        beside.goal.batch / step.step_s,
        own * background.samples_per_s,
    )


def apart_of(
    how: str,
    model: CostModel,
    decisions: Decisions,
    schedule: ScheduleName,
    background: Background,
    given: Assumptions,
) -> Shared:
    """What decisions reach with the background on those devices only that never compute for them,
    so that nothing is slowed."""
    step = timelines(model, decisions, schedule)
    idle = [kind for kind in step.kinds if not kind.computing]
    own = sum(len(k.positions) * background_share(k, step.step_s, given) for k in idle)
    return Shared(
        f"{how}, apart" if idle else how,
        decisions,
        step.step_s,
        own / step.devices,
        model.goal.batch / step.step_s,
        own * background.samples_per_s,
        sum(len(kind.positions) for kind in idle),
    )


def candidates(
    problem: Problem, given: Assumptions, limit_s: float, time_limit_s: float = 2.0
) -> dict[Decisions, str]:
    """Plans to choose from, and how each was found. The search knows that computing takes longer on
    shared devices; each takes ``time_limit_s`` at most. The goal has one number of micro-batches.
    """
    searched = replace(problem, profile=slowed(problem.profile, given.slowdown)).placed()
    model = _model(searched)
    found = {model.baseline: "data parallel"}
    for i in range(model.world_size.bit_length()):
        found.setdefault(_narrow(model, 2**i), f"all units on {2**i} devices")
    for limit in LIMITS:
        found.setdefault(greedy(model, limit), f"greedy, amplification {limit:g}")
    for how, result in _answers(searched, limit_s, time_limit_s):
        if result.decisions is not None:
            found.setdefault(result.decisions, how)
    return found


def _answers(problem: Problem, limit_s: float, time_limit_s: float) -> Iterator[tuple[str, Result]]:
    """What the planner finds for one goal after another."""
    fastest = _answer(problem, {}, time_limit_s)
    yield "fastest", fastest
    for limit in AMPLIFICATIONS:
        changes = {"unit_amplification_limit": limit}
        yield f"units' amplification {limit:g}", _answer(problem, changes, time_limit_s)
    if fastest.objective_s is not None and fastest.objective_s <= limit_s:
        economical = {"objective": "gpu_seconds", "time_limit_s": limit_s}
        yield "fewest device-seconds", _answer(problem, economical, time_limit_s)


def _answer(problem: Problem, changes: Mapping[str, object], time_limit_s: float) -> Result:
    """What the planner finds for the goal with those changes."""
    goal = msgspec.structs.replace(problem.goal, **changes)
    return solve(replace(problem, goal=goal), "lagrangian", time_limit_s)


def _narrow(model: CostModel, groups: int) -> Decisions:
    """Data parallelism on the first so many devices, as far as units may have it."""
    narrow = Option(Layout(groups=groups))
    local = model.goal.batch_statistics == "local"
    fixed = (unit.fixed or (unit.batch_statistics and local) for unit in model.profile.units)
    return tuple(
        home if stays else narrow for home, stays in zip(model.baseline, fixed, strict=True)
    )


def _model(problem: Problem) -> CostModel:
    return CostModel(
        problem.profile, problem.cluster, problem.goal,
        micro_batches=problem.goal.micro_batches[0], placement=problem.placement,
        message_bytes=problem.bucket_bytes, sliced=problem.schedule == "priority",
    )  # fmt: skip


def burst_beside(
    problem: Problem,
    tried: Mapping[Decisions, str],
    background: Background,
    given: Assumptions,
    limit_s: float,
    time_limit_s: float = 2.0,
) -> tuple[CostModel, Shared]:
    """Of the plans ``tried``, and of those that narrowing them leads to (``time_limit_s`` each),
    the one that makes most of the cluster with ``background`` in its gaps, among those whose step
    beside it takes no longer than ``limit_s`` and which fit in memory; and its cost model on
    devices of its own. The background is on all devices, or on those only that never compute. Where
    none keeps the limit, the fastest, without a background."""
    problem = problem.placed()
    model = _model(problem)
    beside = shared_device_model(model, given.slowdown)
    fitting = {d: how for d, how in tried.items() if over_bytes(model, d) <= 0}
    rate = given.idle_speed * background.samples_per_s
    for start in _starts(beside, problem, fitting, rate, limit_s):
        better = narrowed(
            beside, problem.capability, start, problem.schedule, rate, limit_s, time_limit_s
        )
        if over_bytes(model, better) <= 0:
            fitting.setdefault(better, f"{fitting[start]}, narrowed")
    asked = (problem.schedule, background, given)
    found = [beside_of(how, beside, d, *asked) for d, how in fitting.items()]
    narrow = {d: how for d, how in fitting.items() if _leaves_devices(model, d)}
    found += [apart_of(how, model, d, *asked) for d, how in narrow.items()]
    kept = [each for each in found if each.step_s <= limit_s * ROUNDING]
    if kept:
        return model, max(kept, key=lambda each: each.samples_per_s)
    alone = [apart_of(how, model, d, *asked) for d, how in fitting.items()]
    fastest = min(alone, key=lambda each: each.step_s)
    return model, fastest._replace(share=0.0, background_samples_s=0.0, copies=0)


def _leaves_devices(model: CostModel, decisions: Decisions) -> bool:
    """Whether there are devices on which nothing is computed."""
    working = (o.layout.size for k, o in enumerate(decisions) if unit_s(model, k, o) > 0)
    return max(working, default=0) < model.world_size


def _starts(
    model: CostModel, problem: Problem, found: Mapping[Decisions, str], rate: float, limit_s: float
) -> list[Decisions]:
    """Where narrowing begins: the plan that is worth most, and the one with the shortest step."""
    scored = ScoredDecisions(OptionSpace(model, problem.capability), problem.schedule)
    judged = []
    for decisions in found:
        scored.move_to(decisions)
        judged.append((worth(scored, rate, limit_s).samples_per_s, -scored.step_s(), decisions))
    most = max(judged, key=lambda each: each[:2])
    quickest = max(judged, key=lambda each: each[1])
    return list(dict.fromkeys((most[2], quickest[2])))


# -- narrowing --------------------------------------------------------------------------------

RUNS = (1, 2, 4, 8, 16)
"""Lengths of runs of units that change together."""
BETTER = 1e-6
"""A share of the samples per second below which a gain is rounding."""


CHEAP = 1e-3
"""A change that adds less than this share of the step counts as if it added that."""


class Worth(NamedTuple):
    """What a plan is worth: samples per second of foreground and background on all devices, by
    formula; -1 for one that takes too long or does not fit. And its step."""

    samples_per_s: float
    step_s: float


def worth(scored: ScoredDecisions, background_samples_s: float, limit_s: float) -> Worth:
    """The worth of the decisions as they stand."""
    model, step_s = scored.model, scored.step_s()
    if step_s > limit_s or scored.peak() > scored.limit_bytes or step_s <= 0:
        return Worth(-1.0, step_s)
    used_s = sum(o.layout.size * unit_s(model, k, o) for k, o in enumerate(scored.decisions))
    idle_s = model.world_size * step_s - used_s
    return Worth((model.goal.batch + background_samples_s * idle_s) / step_s, step_s)


def narrowed(
    model: CostModel,
    capability: Capability,
    start: Decisions,
    schedule: ScheduleName,
    background_samples_s: float,
    limit_s: float,
    time_limit_s: float,
) -> Decisions:
    """The plan that one change after another leads to from ``start``, until none helps or the time
    is over: each time the one that gains most for what it adds to the step, of which there is only
    so much. ``background_samples_s`` is what an idle device makes."""
    deadline = time.perf_counter() + time_limit_s
    scored = ScoredDecisions(OptionSpace(model, capability), schedule)
    scored.move_to(start)
    best = worth(scored, background_samples_s, limit_s)
    while True:
        most, chosen = 0.0, None
        for run, width in _changes(model):
            change = _on(model, capability, run, width)
            before = scored.set(change)
            if not before:
                continue
            found = worth(scored, background_samples_s, limit_s)
            scored.set(before.items())
            gain = _gain(best, found)
            if gain > most:
                most, chosen = gain, change
            if time.perf_counter() > deadline:
                break
        if chosen is None:
            return scored.taken()
        scored.set(chosen)
        best = worth(scored, background_samples_s, limit_s)


def _gain(old: Worth, new: Worth) -> float:
    """Samples per second gained for each second added to the step; 0 where none are."""
    gained = new.samples_per_s - old.samples_per_s
    if gained <= BETTER * abs(old.samples_per_s):
        return 0.0
    return gained / max(new.step_s - old.step_s, CHEAP * old.step_s)


def _changes(model: CostModel) -> Iterator[tuple[range, int]]:
    """(units, devices): long runs first, and few devices first."""
    units = len(model.profile.units)
    for length in reversed(RUNS):
        for first in range(max(units - length, 0) + 1):
            for power in range(model.world_size.bit_length()):
                yield range(first, min(first + length, units)), 2**power


def _on(
    model: CostModel, capability: Capability, run: range, width: int
) -> list[tuple[int, Option]]:
    """Units of a run, each with those tied to it, on so many devices; those that may not be so stay
    as they are."""
    option = Option(Layout(groups=width))
    rules = model.goal, capability, model.world_size
    return [
        (u, option)
        for k in run
        if all(allowed(model.profile.units[u], option, *rules) for u in model.ties[k])
        for u in model.ties[k]
    ]
