"""What-if curves: the step over the bandwidth of links, over memory, and over the number of ranks.

Each point changes one thing. Of it three steps are told: that of the plan's own decisions, priced
anew; that of a plan made anew for it by the heuristic solver, which takes milliseconds (or of the
plan's own decisions, where these are quicker); and that of plain data parallelism. The model, the
global batch, the optimizer, the goal's other limits and the schedule stay.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec

from ..cost.cost import CostModel
from ..schema.cluster import Cluster, LevelName
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..schema.record import Positive, Record, Seconds
from ..solve.evaluate import decisions_of, evaluation
from ..solve.heuristic.resize import resized_problem
from ..solve.local_steps import round_of
from ..solve.problem import Problem
from ..solve.solver import solve
from .what_if import with_rates
from .why import check_belongs

CHANGES = (0.5, 2.0, 0.25, 4.0)
"""Times the bandwidth and the number of ranks as they are: the nearest first, as time may run
out."""
OF_PEAK = (0.75, 1.5, 0.5, 0.35)
"""Limits on memory, as multiples of what the fullest rank holds under the plan."""

CurveName = Literal["inter", "intra", "memory", "ranks"]


class CurvePoint(Record, frozen=True, kw_only=True):
    """The steps where the quantity is ``x``: of the plan's decisions (``held_s``), of a plan made
    for it (``again_s``), of data parallelism. None where it does not fit in memory, or where it
    cannot be."""

    x: Positive
    held_s: Seconds | None
    again_s: Seconds | None
    data_parallel_s: Seconds | None


class WhatIfCurve(Record, frozen=True, kw_only=True):
    """Points over one quantity: the bandwidth of a level's links (bytes/s), the memory limit of a
    rank (bytes) or the number of ranks; ``now`` is what the plan was made for (for memory: what its
    fullest rank holds)."""

    name: CurveName
    now: Positive
    points: tuple[CurvePoint, ...]


class WhatIfCurves(Record, frozen=True, kw_only=True):
    """The curves, and whether all of their points were found within the time limit."""

    curves: tuple[WhatIfCurve, ...]
    complete: bool = True


class _Question(NamedTuple):
    """Where a curve is asked for a point; ``answer`` makes it."""

    name: CurveName
    x: float
    answer: Callable[[float], CurvePoint]


def what_if_curves(
    plan: Plan, problem: Problem, time_limit_s: float, report: Callable[[str, float], None]
) -> WhatIfCurves:
    """The curves of ``plan``, which answers ``problem``. Points that are not reached within the
    limit are left out; ``report`` is told how far it is. Of a plan with local steps only the
    bandwidth between nodes is changed, and nothing is planned again."""
    check_belongs(plan, problem.profile, problem.cluster)
    end_s = time.perf_counter() + time_limit_s
    asked = list(_questions(plan, problem))
    now = {question.name: question.x for question in reversed(asked)}
    points: dict[CurveName, list[CurvePoint]] = {}
    done = 0
    # The first of each are those as it is now, then those nearest to it.
    for question in asked:
        left_s = end_s - time.perf_counter()
        if left_s <= 0:
            break
        report(f"with other {question.name}", done / len(asked))
        points.setdefault(question.name, []).append(question.answer(left_s))
        done += 1
    curves = (
        WhatIfCurve(name=name, now=now[name], points=tuple(sorted(found, key=lambda p: p.x)))
        for name, found in points.items()
    )
    return WhatIfCurves(
        curves=tuple(curve for curve in curves if len(curve.points) > 1),
        complete=done == len(asked),
    )


def _questions(plan: Plan, problem: Problem) -> Iterator[_Question]:
    """All questions, those that are nearest to what is there first."""
    # The placement is left open, as other links may want another. Nothing is given away for
    # simplicity, which would be taken for what the change costs; and why nothing fits takes long.
    asked = replace(problem, placement=None, tie_tolerance=0.0, explains=False, progress=None)
    found = [
        list(_bandwidths(plan, asked)),
        list(_memories(plan, asked)),
        list(_sizes(plan, asked)),
    ]
    for at in range(max(map(len, found))):
        yield from (questions[at] for questions in found if at < len(questions))


def _bandwidths(plan: Plan, problem: Problem) -> Iterator[_Question]:
    cluster, name = problem.cluster, _level_asked(problem.cluster)
    if plan.local_steps is not None:
        name = "inter"
    level = cluster.level(name) if name is not None else None
    if name is None or level is None:
        return

    def ask(factor: float) -> Callable[[float], CurvePoint]:
        def answer(left_s: float) -> CurvePoint:
            if factor == 1.0 and plan.local_steps is None:
                return _as_it_is(plan, level.bytes_per_s)
            other = with_rates(cluster, name, lambda rate: rate * factor)
            x = level.bytes_per_s * factor
            if plan.local_steps is not None:
                held_s = round_of(plan, problem.profile, other).step_s
                return CurvePoint(x=x, held_s=held_s, again_s=None, data_parallel_s=None)
            held_s = _held_s(plan, problem.profile, other)
            return _point(x, replace(problem, cluster=other), held_s, left_s)

        return answer

    for factor in (1.0, *CHANGES):
        yield _Question(name, level.bytes_per_s * factor, ask(factor))


def _level_asked(cluster: Cluster) -> LevelName | None:
    """The level whose links are asked about: between nodes where there are several."""
    if len(cluster.nodes) > 1:
        return "inter"
    return "intra" if len(cluster.devices) > 1 else None


def _held_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """The step of the plan's decisions on another cluster."""
    model = CostModel.of_plan(plan, profile, cluster)
    return evaluation(model, decisions_of(plan), schedule=plan.schedule).prediction.step_s


def _memories(plan: Plan, problem: Problem) -> Iterator[_Question]:
    peak = max(plan.prediction.peak_bytes, default=0)
    if plan.local_steps is not None or not peak:
        return

    def ask(factor: float) -> Callable[[float], CurvePoint]:
        def answer(left_s: float) -> CurvePoint:
            limit = int(peak * factor)
            if factor == 1.0:
                return _as_it_is(plan, peak)
            goal = msgspec.structs.replace(problem.goal, memory_limit_bytes=limit)
            held_s = plan.prediction.step_s if peak <= limit else None
            return _point(float(limit), replace(problem, goal=goal), held_s, left_s)

        return answer

    for factor in (1.0, *OF_PEAK):
        yield _Question("memory", peak * factor, ask(factor))


def _sizes(plan: Plan, problem: Problem) -> Iterator[_Question]:
    ranks = plan.world_size
    if plan.local_steps is not None:
        return

    def ask(count: int) -> Callable[[float], CurvePoint]:
        def answer(left_s: float) -> CurvePoint:
            if count == ranks:
                return _as_it_is(plan, ranks)
            # Pins are of the layouts of as many ranks as there are.
            goal = msgspec.structs.replace(problem.goal, pins=())
            other = replace(resized_problem(problem, count), goal=goal)
            if other.uncut:
                return CurvePoint(x=float(count), held_s=None, again_s=None, data_parallel_s=None)
            return _point(float(count), other, None, left_s)

        return answer

    for count in sizes_asked(problem.cluster, problem.goal.batch):
        yield _Question("ranks", count, ask(count))


def sizes_asked(cluster: Cluster, batch: int) -> Sequence[int]:
    """Numbers of ranks to ask for, the cluster's own first: parts of a node or whole nodes, no more
    than there are samples."""
    ranks, each = cluster.world_size, len(cluster.nodes[0].devices)
    linked = cluster.level("inter") is not None
    found = [ranks]
    for factor in CHANGES:
        count = int(ranks * factor)
        whole = count <= each or (linked and count % each == 0)
        if 1 <= count <= batch and whole and count not in found:
            found.append(count)
    return found


def _as_it_is(plan: Plan, x: float) -> CurvePoint:
    """What the plan says of itself: it was searched for longer than a point here is. (Memory as
    much as its fullest rank holds may be too little for data parallelism.)"""
    peak = max(plan.prediction.peak_bytes, default=0)
    fits = plan.baseline_fits
    if x == peak:
        fits = max(plan.baseline.peak_bytes, default=0) <= peak
    step_s = plan.prediction.step_s
    return CurvePoint(
        x=x,
        held_s=step_s,
        again_s=step_s,
        data_parallel_s=plan.baseline.step_s if fits else None,
    )


def _point(x: float, problem: Problem, held_s: float | None, left_s: float) -> CurvePoint:
    """What the heuristic solver finds there, and the plan's own decisions."""
    plan = solve(problem, "heuristic", left_s).plan
    if plan is None:
        return CurvePoint(x=x, held_s=held_s, again_s=held_s, data_parallel_s=None)
    again_s = plan.prediction.step_s
    return CurvePoint(
        x=x,
        held_s=held_s,
        again_s=again_s if held_s is None else min(again_s, held_s),
        data_parallel_s=plan.baseline.step_s if plan.baseline_fits else None,
    )
