"""Why nothing fits, and the smallest changes that help: each is tried before it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import msgspec

from .enlarge import more_ranks
from .problem import Infeasibility, Problem, Relaxation
from .splits import Found, feasible


def explain_infeasible(problem: Problem, closest: Found) -> Infeasibility:
    """The tightest rank and unit of the plan that comes closest, and what would make one fit."""
    tight = closest.tightest
    rank = closest.evaluation.model.placement[tight.position]
    found = (_more_micro_batches(problem), _smaller_batch(problem), _higher_limit(problem, closest))
    return Infeasibility(
        rank=rank,
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=tuple(r for r in found if r is not None),
        enlargement=more_ranks(problem),
        kind=tight.kind,
    )


def fits(problem: Problem, **changes: object) -> bool:
    """Whether the search finds a plan that fits when fields of the goal are changed."""
    goal = msgspec.structs.replace(problem.goal, **changes)
    return feasible(replace(problem, goal=goal, progress=None))


def _most(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest value in [low, high] that is good, if smaller ones are good too; None if even
    ``low`` is not."""
    if high < low or not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def _more_micro_batches(problem: Problem) -> Relaxation | None:
    """The fewest micro-batches, by doubling, with which a plan fits."""
    if not problem.capability.micro_batches:
        return None
    count = 2 * max(problem.goal.micro_batches)
    while count * problem.cluster.world_size <= problem.goal.batch:
        if fits(problem, micro_batches=(count,)):
            return Relaxation(
                "micro_batches", count, f"allow {count} micro-batches (--micro-batches {count})"
            )
        count *= 2
    return None


def _smaller_batch(problem: Problem) -> Relaxation | None:
    """The largest multiple of the ranks below the batch with which a plan fits."""
    world, batch = problem.cluster.world_size, problem.goal.batch
    most = _most(1, (batch - 1) // world, lambda n: fits(problem, batch=n * world))
    if most is None:
        return None
    size = most * world
    return Relaxation("batch", size, f"lower the global batch to {size} (--batch {size})")


def _higher_limit(problem: Problem, closest: Found) -> Relaxation | None:
    """The limit that the closest plan needs (on its fullest rank)."""
    needed = max(closest.evaluation.prediction.peak_bytes)
    for _ in range(4):  # the search may take another way under another limit
        if fits(problem, memory_limit_bytes=needed):
            rounded = f"{ceil(needed / 2**20 * 10) / 10:.1f}MiB"
            sentence = f"allow {needed:,} bytes per rank (--memory-limit {rounded})"
            return Relaxation("memory_limit_bytes", needed, sentence)
        needed += needed // 50
    return None
