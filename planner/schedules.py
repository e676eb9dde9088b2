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


WORTHWHILE = 0.05
"""By so much priority must be quicker to be taken: predictions are not much nearer than that."""


def by_either(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    """The better of ``search``'s answers by barrier and by priority; the barrier's where they are
    near each other."""
    plain = search(replace(problem, schedule="barrier", either=False))
    sizes = problem.goal.slice_bytes or SLICE_BYTES
    goal = msgspec.structs.replace(problem.goal, slice_bytes=sizes)
    sliced = replace(problem, goal=goal, schedule="priority", either=False)
    if plain.plan is None:
        return search(sliced) if _saves_memory(problem) else plain
    sliced = without_shards(sliced)
    if not (problem.goal.allow_lossy or _promising(sliced, plain, plain.plan)):
        return plain
    other = search(sliced)
    if other.plan is None:
        return plain
    better = _worth(problem, other.plan.prediction) < _enough(problem, plain.plan)
    return _said(other, "priority", plain) if better else _said(plain, "barrier", other)


def sharding_sparingly(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    """``search``'s answer without sharded exchange, or with it where nothing else fits: it is there
    for memory, and the executor waits at each step where the cost model overlaps all of it."""
    plain = without_shards(problem)
    if plain is problem:
        return search(problem)
    found = search(plain)
    return found if found.plan is not None else search(problem)


def without_shards(problem: Problem) -> Problem:
    """The problem with no exchange sharded, the same one where that is not allowed anyway."""
    known = problem.capability.exchange
    if "sharded" not in known:
        return problem
    kept = tuple(policy for policy in known if policy != "sharded")
    capability = msgspec.structs.replace(problem.capability, exchange=kept)
    return replace(problem, capability=capability)


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
    return _worth(problem, plan.prediction) * (1 - WORTHWHILE)


def _said(result: Result, schedule: str, other: Result) -> Result:
    assert result.plan is not None
    assert other.plan is not None
    words = (
        f"planned by barrier and by priority, took {schedule} "
        f"({result.plan.prediction.step_s:.3g} s against {other.plan.prediction.step_s:.3g} s)"
    )
    both = result.seconds + other.seconds
    return result._replace(reason=f"{result.reason}; {words}", seconds=both)
