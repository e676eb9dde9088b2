"""Which schedule a plan's gradients travel by: in buckets to a barrier, or in slices by priority.

The barrier is the simpler one and is planned first. Only if its decisions, or plain data
parallelism, would be clearly quicker by priority is it planned for that too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from .evaluate import evaluate
from .plan import Plan, Prediction
from .problem import Problem, Result

SLICE_BYTES = (2**20, 2**22, 2**24)
"""Slices that a plan chooses from where the goal names none. Below 1 MiB the latency of gloo over
TCP (0.2 ms) is a twentieth of a slice's time on 1 Gbit/s."""


def by_either(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    """The better of ``search``'s answers by barrier and by priority; the barrier's where they are
    within the problem's ``near``."""
    plain = search(replace(problem, schedule="barrier", either=False))
    sizes = problem.goal.slice_bytes or SLICE_BYTES
    goal = msgspec.structs.replace(problem.goal, slice_bytes=sizes)
    sliced = replace(problem, goal=goal, schedule="priority", either=False)
    if plain.plan is None and not _saves_memory(problem):
        return plain
    if plain.plan is not None and not _promising(sliced, plain, plain.plan):
        return plain
    other = search(sliced)
    if plain.plan is None or other.plan is None:
        return plain if other.plan is None else other
    better = _worth(problem, other.plan.prediction) < _enough(problem, plain.plan)
    return _said(other, "priority", plain) if better else _said(plain, "barrier", other)


def _saves_memory(problem: Problem) -> bool:
    """Whether slices allow policies that hold less; by themselves they hold as much or more."""
    return "sharded" in problem.capability.exchange or problem.capability.early_release


def _promising(problem: Problem, plain: Result, plan: Plan) -> bool:
    """Whether what was decided for the barrier, or data parallelism, is quicker by priority."""
    tried = (plain.decisions, None)
    found = (
        evaluate(
            problem.profile, problem.cluster, problem.goal, decisions, plan.micro_batches,
            plan.placement, schedule="priority", bucket_bytes=size,
        )
        for decisions in tried
        for size in problem.slice_bytes
    )  # fmt: skip
    return any(_worth(problem, one) < _enough(problem, plan) for one in found)


def _worth(problem: Problem, prediction: Prediction) -> float:
    by_time = problem.goal.objective == "time"
    return prediction.step_s if by_time else prediction.gpu_seconds


def _enough(problem: Problem, plan: Plan) -> float:
    """Below this a plan is better than the barrier's."""
    return _worth(problem, plan.prediction) * (1 - problem.near)


def _said(result: Result, schedule: str, other: Result) -> Result:
    assert result.plan is not None
    assert other.plan is not None
    words = (
        f"planned by barrier and by priority, took {schedule} "
        f"({result.plan.prediction.step_s:.3g} s against {other.plan.prediction.step_s:.3g} s)"
    )
    both = result.seconds + other.seconds
    return result._replace(reason=f"{result.reason}; {words}", seconds=both)
