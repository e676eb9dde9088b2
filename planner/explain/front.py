"""The front of time and device-seconds: every plan on it is the fastest at what it uses.

The fastest plan stands at one end, the most economical at the other. Between them the allowance of
device-seconds is lowered in equal ratios, and the fastest plan within each is searched (the epsilon
constraint method). Points that another beats in both are dropped.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..cost.budget import single_device_batch_s
from ..cost.cost import CostModel
from ..schema.record import Count, Record, Seconds
from ..solve.choice import choice
from ..solve.problem import Problem, Result
from ..solve.solver import solve


class SolvedPoint(NamedTuple):
    """A plan's seconds of a step and its device-seconds by formula, and the answer it came with."""

    step_s: float
    gpu_seconds: float
    result: Result


class FrontPoint(Record, frozen=True, kw_only=True):
    """One plan of the front as it is predicted: ``amplification`` is its device-seconds over those
    of one device for the whole batch, ``gap`` what its solver proved of the objective that was
    asked (device-seconds at the economical end, else the step within a limit)."""

    step_s: Seconds
    gpu_seconds: Seconds
    amplification: float
    samples_per_s: float
    speedup: float
    layouts: tuple[str, ...]
    solver: str
    status: str
    gap: float | None = None


class Front(Record, frozen=True, kw_only=True):
    """Plans that no other found beats in both step time and device-seconds, fastest first, and what
    one device alone would take."""

    target: str
    batch: Count
    ranks: Count
    single_device_s: Seconds
    points: tuple[FrontPoint, ...]


PointT = TypeVar("PointT", SolvedPoint, FrontPoint)


def described_front(
    problem: Problem, points: int = 8, solver: str = "auto", time_limit_s: float | None = None
) -> Front:
    """``front`` as data, by what the plans predict; raises ``InfeasibleError`` where none fits."""
    single_device_s = _single_device_s(problem)
    found = [_described(p, single_device_s) for p in front(problem, points, solver, time_limit_s)]
    if not found:
        solve(problem, solver, time_limit_s).checked()
    return Front(
        target=problem.profile.target,
        batch=problem.goal.batch,
        ranks=problem.cluster.world_size,
        single_device_s=single_device_s,
        # The plans were searched by formula. Their simulated steps may be beaten again.
        points=undominated(found),
    )


def _described(point: SolvedPoint, single_device_s: float) -> FrontPoint:
    plan = point.result.checked()
    layouts = (str(u.layout) for u in plan.units if u.kind not in ("input", "output"))
    return FrontPoint(
        step_s=plan.prediction.step_s,
        gpu_seconds=plan.prediction.gpu_seconds,
        amplification=plan.prediction.gpu_seconds / max(single_device_s, 1e-300),
        samples_per_s=plan.prediction.samples_per_s,
        speedup=plan.speedup,
        layouts=tuple(dict.fromkeys(layouts)),
        solver=point.result.solver,
        status=point.result.status,
        gap=point.result.gap,
    )


def front(
    problem: Problem, points: int = 8, solver: str = "auto", time_limit_s: float | None = None
) -> tuple[SolvedPoint, ...]:
    """At most ``points`` points, fastest first; none where no plan fits. ``time_limit_s`` is for
    each of them. None has local steps, which are another training."""
    goal = msgspec.structs.replace(problem.goal, allow_local_steps=False)
    problem = replace(problem, goal=goal).placed()
    ends = (
        _asked(problem, solver, time_limit_s, objective="time"),
        # A limit on the step's time would cut the front off before its economical end.
        _asked(problem, solver, time_limit_s, objective="gpu_seconds", time_limit_s=None),
    )
    found = [p for p in ends if p is not None]
    if len(found) == 2:
        most, least = found[0].gpu_seconds, found[1].gpu_seconds
        for i in range(1, points - 1):
            problem.report(f"point {i + 2} of {points}", i / points)
            # Equal ratios, as device-seconds of two ends may differ by orders of magnitude.
            limit = most * (least / most) ** (i / (points - 1)) if least > 0 else most
            point = within(problem, limit, solver, time_limit_s)
            found += [point] if point is not None else []
    return undominated(found)


def undominated(points: Sequence[PointT]) -> tuple[PointT, ...]:
    """Those that no other beats, fastest first, equal ones once."""
    kept: list[PointT] = []
    # In this order a point is beaten by an earlier one, or by none.
    for point in sorted(points, key=lambda p: (p.step_s, p.gpu_seconds)):
        if not kept or point.gpu_seconds < kept[-1].gpu_seconds * (1 - 1e-9):
            kept.append(point)
    return tuple(kept)


def within(
    problem: Problem, limit_gpu_s: float, solver: str = "auto", time_limit_s: float | None = None
) -> SolvedPoint | None:
    """The fastest plan that uses at most so many device-seconds, None where none was found."""
    single_s = _single_device_s(problem)
    if not single_s:  # a profile without times: every plan takes as long
        return None
    limit = limit_gpu_s / single_s
    return _asked(problem, solver, time_limit_s, objective="time", amplification_limit=limit)


def cheapest_within(
    problem: Problem, limit_s: float, solver: str = "auto", time_limit_s: float | None = None
) -> SolvedPoint | None:
    """The plan with the fewest device-seconds whose step takes at most ``limit_s``."""
    return _asked(problem, solver, time_limit_s, objective="gpu_seconds", time_limit_s=limit_s)


def _single_device_s(problem: Problem) -> float:
    """Seconds that one device would take for the whole batch: what amplification is counted in."""
    return single_device_batch_s(CostModel(problem.profile, problem.cluster, problem.goal))


def _asked(
    problem: Problem, solver: str, search_s: float | None, **goal: Any
) -> SolvedPoint | None:
    """The plan for the problem with other fields of its ``goal``, None where none was found."""
    asked = replace(problem, goal=msgspec.structs.replace(problem.goal, **goal))
    result = solve(asked, solver, search_s)
    if result.plan is None or result.decisions is None:
        return None
    model = CostModel.of_plan(result.plan, asked.profile, asked.cluster, asked.goal)
    found = choice(model, result.decisions, result.plan.schedule)
    return SolvedPoint(found.step_s, found.gpu_seconds, result)
