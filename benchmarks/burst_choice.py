"""Burst plans with the background in mind: the most of foreground and background together, with the
foreground no slower than data parallelism alone.

The planner's own search is asked for the fewest device-seconds within the limit on time, for the
fastest plan under each of several limits on units' amplification, and DeepPool's greedy plans are
tried beside these; each is then simulated with the background in its gaps, and the best is taken.
Where nothing keeps the limit beside a background, the fastest plan runs by itself.
Plans are also narrowed: from a plan that keeps the limit, runs of neighbouring units are given
another number of devices, as long as that helps by formula. See [Note: What a burst is worth].
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import msgspec
from meshwright.planner.cost.budget import unit_s
from meshwright.planner.cost.cost import BUCKET_BYTES, CostModel
from meshwright.planner.cost.device_kinds import slowed
from meshwright.planner.cost.step_time import barrier_step, priority_step
from meshwright.planner.multiplex.jobs import (
    Assumptions,
    BackgroundJob,
    shared_device_model,
)
from meshwright.planner.multiplex.simulation import background_share
from meshwright.planner.schema.capability import Capability
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Decisions, Option, allowed
from meshwright.planner.schema.plan import ScheduleName
from meshwright.planner.simulate.schedule import bucketed_s
from meshwright.planner.solve.choice import over_bytes
from meshwright.planner.solve.device_timelines import timelines
from meshwright.planner.solve.evaluate import evaluation
from meshwright.planner.solve.heuristic.bursts import LIMITS, greedy
from meshwright.planner.solve.heuristic.space import OptionSpace, ScoredDecisions
from meshwright.planner.solve.problem import Problem, Result
from meshwright.planner.solve.solver import solve

ROUNDING = 1 + 1e-6
# Limits on units' amplification under which the fastest plan is searched.
AMPLIFICATIONS = (2.0, 4.0)
# Sizes of slices and buckets that data parallelism chooses from; the last takes everything.
BUCKETS = (2**20, 2**22, BUCKET_BYTES, 2**27, 2**40)
# Lengths of runs of units that change together.
RUNS = (1, 2, 4, 8, 16)
# A share of the samples per second below which a gain is rounding.
BETTER = 1e-6
# A change that adds less than this share of the step counts as if it added that.
CHEAP = 1e-3


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
    its speed alone, and samples of both per second. ``copies`` is on how many devices it is, None
    for all of them."""

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
    micro-batches of the goal's, of what fits in memory. The best of each schedule by formula is
    simulated. Raises ``InputError`` where none fits."""
    # It normalises over each rank's own share as DistributedDataParallel does: that costs nothing.
    goal = msgspec.structs.replace(problem.goal, batch_statistics="local")
    found = []
    for schedule in ("priority", "barrier"):
        own = replace(problem, goal=goal, schedule=schedule)
        times = filter(own.divides_into, goal.micro_batches)
        every = [own.cost_model(count, size) for count, size in product(times, sizes)]
        models = [m for m in every if over_bytes(m, m.baseline) <= 0]
        if models:
            best = min(models, key=lambda m: _formula_s(m, schedule))
            done = evaluation(best, best.baseline, schedule=schedule)
            found.append(DataParallel(best, schedule, done.prediction.step_s))
    if not found:
        raise InputError(
            f"data parallelism with {goal.batch} samples on {problem.cluster.world_size} devices "
            f"does not fit with {list(goal.micro_batches)} micro-batches: allow more of them"
        )
    return min(found, key=lambda each: each.step_s)


def _formula_s(model: CostModel, schedule: ScheduleName) -> float:
    """Seconds of data parallelism by formula, with its buckets or slices."""
    chain = model.chain(model.baseline)
    if schedule == "priority":
        return priority_step(chain, model.micro_batches)
    buckets = chain._replace(exchange_s=bucketed_s(model, model.baseline))
    return barrier_step(buckets, model.micro_batches)


def shared(
    how: str,
    model: CostModel,
    decisions: Decisions,
    schedule: ScheduleName,
    background: BackgroundJob,
    given: Assumptions,
    *,
    apart: bool = False,
) -> Shared:
    """What decisions reach with the background in their gaps on every device, of which ``model`` is
    the cost model (``jobs.shared_device_model``); or ``apart``, on those devices only that never
    compute for them, so that nothing is slowed."""
    step = timelines(model, decisions, schedule)
    kinds = [kind for kind in step.kinds if not (apart and kind.computing)]
    own = sum(len(k.positions) * background_share(k, step.step_s, given) for k in kinds)
    return Shared(
        f"{how}, apart" if apart and kinds else how,
        decisions,
        step.step_s,
        own / step.devices,
        model.goal.batch / step.step_s,
        own * background.samples_per_s,
        sum(len(kind.positions) for kind in kinds) if apart else None,
    )


def candidates(
    problem: Problem, given: Assumptions, limit_s: float, time_limit_s: float = 2.0
) -> dict[Decisions, str]:
    """Plans to choose from, and how each was found. The search knows that computing takes longer on
    shared devices; each takes ``time_limit_s`` at most. The goal has one number of micro-batches.
    """
    searched = replace(problem, profile=slowed(problem.profile, given.slowdown)).placed()
    model = searched.cost_model(problem.goal.micro_batches[0])
    # Units that normalise over a rank's own samples would train another function on fewer ranks.
    local = model.goal.batch_statistics == "local"
    fixed = [unit.fixed or (unit.batch_statistics and local) for unit in model.profile.units]
    found = {model.baseline: "data parallel"}
    for i in range(model.world_size.bit_length()):
        few = Option(Layout(groups=2**i))
        narrow = (home if stays else few for home, stays in zip(model.baseline, fixed, strict=True))
        found.setdefault(tuple(narrow), f"all units on {2**i} devices")
    for limit in LIMITS:
        found.setdefault(greedy(model, limit), f"greedy, amplification {limit:g}")

    def answer(how: str, **changes: object) -> Result:
        goal = msgspec.structs.replace(searched.goal, **changes)
        result = solve(replace(searched, goal=goal), "lagrangian", time_limit_s)
        if result.decisions is not None:
            found.setdefault(result.decisions, how)
        return result

    fastest = answer("fastest")
    for limit in AMPLIFICATIONS:
        answer(f"units' amplification {limit:g}", unit_amplification_limit=limit)
    # A limit below the fastest step leaves nothing to find.
    if fastest.objective_s is not None and fastest.objective_s <= limit_s:
        answer("fewest device-seconds", objective="gpu_seconds", time_limit_s=limit_s)
    return found


def burst_with_background(
    problem: Problem,
    tried: Mapping[Decisions, str],
    background: BackgroundJob,
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
    # On devices of its own the foreground is not slowed: by this model its memory is judged.
    model = problem.cost_model(problem.goal.micro_batches[0])
    shared_model = shared_device_model(model, given.slowdown)
    fitting = {d: how for d, how in tried.items() if over_bytes(model, d) <= 0}
    rate = given.idle_speed * background.samples_per_s
    for start in _starts(shared_model, problem, fitting, rate, limit_s):
        better = narrowed(
            shared_model, problem.capability, start, problem.schedule, rate, limit_s, time_limit_s
        )
        if over_bytes(model, better) <= 0:
            fitting.setdefault(better, f"{fitting[start]}, narrowed")
    asked = (problem.schedule, background, given)
    found = [shared(how, shared_model, d, *asked) for d, how in fitting.items()]
    # The background by itself on a device, where decisions leave some on which nothing is computed.
    for d, how in fitting.items():
        working = (o.layout.size for k, o in enumerate(d) if unit_s(model, k, o) > 0)
        if max(working, default=0) < model.world_size:
            found.append(shared(how, model, d, *asked, apart=True))
    kept = [each for each in found if each.step_s <= limit_s * ROUNDING]
    if kept:
        return model, max(kept, key=lambda each: each.samples_per_s)
    alone = [shared(how, model, d, *asked, apart=True) for d, how in fitting.items()]
    fastest = min(alone, key=lambda each: each.step_s)
    return model, fastest._replace(share=0.0, background_samples_s=0.0, copies=0)


def _starts(
    model: CostModel, problem: Problem, found: Mapping[Decisions, str], rate: float, limit_s: float
) -> list[Decisions]:
    """Where narrowing begins: the plan that is worth most, and the one with the shortest step."""
    scored = ScoredDecisions(OptionSpace(model, problem.capability), problem.schedule)
    judged = []
    for decisions in found:
        scored.move_to(decisions)
        judged.append((worth(scored, rate, limit_s).samples_per_s, -scored.step_s(), decisions))
    # Decisions have no order: they are left out of the comparison.
    most = max(judged, key=lambda each: each[:2])
    quickest = max(judged, key=lambda each: each[1])
    return list(dict.fromkeys((most[2], quickest[2])))


# [Note: What a burst is worth]
# With N samples in a step of T seconds, r samples per second of a background on an idle device, and
# W devices of which the foreground keeps U device-seconds, the cluster makes
#
#     N / T + r · (W · T - U) / T = r · W + (N - r · U) / T
#
# in a second. Where small shares of a batch make a device less efficient than a background is
# (N < r · U), a step that uses fewer device-seconds is worth more than one that is quicker, up to
# the limit on T.


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
    # What the background makes of the idle time is an upper bound: gaps lose their beginnings.
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
            option = Option(Layout(groups=width))
            rules = option, model.goal, capability, model.world_size
            # Each with the units tied to it; those that may not be so stay as they are.
            change = [
                (u, option)
                for k in run
                if all(allowed(model.profile.units[u], *rules) for u in model.ties[k])
                for u in model.ties[k]
            ]
            before = scored.set(change)
            if not before:
                continue
            found = worth(scored, background_samples_s, limit_s)
            scored.set(before.items())
            # Samples per second gained for each second added to the step.
            gained = found.samples_per_s - best.samples_per_s
            gain = gained / max(found.step_s - best.step_s, CHEAP * best.step_s)
            if gained > BETTER * abs(best.samples_per_s) and gain > most:
                most, chosen = gain, change
            if time.perf_counter() > deadline:
                break
        if chosen is None:
            return scored.taken()
        scored.set(chosen)
        best = worth(scored, background_samples_s, limit_s)


def _changes(model: CostModel) -> Iterator[tuple[range, int]]:
    """(units, devices): long runs first, and few devices first."""
    units = len(model.profile.units)
    for length in reversed(RUNS):
        for first in range(max(units - length, 0) + 1):
            for power in range(model.world_size.bit_length()):
                yield range(first, min(first + length, units)), 2**power
