"""Why the heuristic finds nothing, and the smallest changes that help: each is tried before it is
named, and of none is it proved that less would not do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ...cost.cost import CostModel
from ..objective import value
from ..problem import Infeasibility, Problem, Relaxation
from .enlarge import more_ranks
from .relaxations import LIFTED, higher, higher_unit_limit, lifted, more_memory, needed, with_limit
from .splits import Found, feasible, search

CLOSE = 0.01
"""The least bytes that do are looked for to this share."""
ENLARGED = ("memory_limit_bytes", "time_limit_s")
"""Limits that more ranks may help to keep; they never save device-seconds."""
SEARCH_S = 10.0
"""Seconds for the search without a limit that is not memory's."""


def explain_infeasible(
    problem: Problem, closest: Found, solves: Callable[[Problem], bool] | None = None
) -> Infeasibility:
    """The tightest rank and unit of the plan that comes closest, and what would make one fit.
    ``solves`` judges other limits than memory's (``feasible`` if not told)."""
    tight = closest.tightest
    rank = closest.evaluation.model.placement[tight.position]
    limit, found = "memory_limit_bytes", None
    if tight.over_bytes <= 0:
        limit, found = _other_limit(problem, closest, solves or feasible)
    relaxations = (found,) if found is not None else _for_memory(problem, closest)
    return Infeasibility(
        rank=rank,
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=tuple(r for r in relaxations if r is not None),
        limit=limit,
        enlargement=more_ranks(problem) if limit in ENLARGED and not problem.brief else None,
        kind=tight.kind,
    )


def _for_memory(problem: Problem, closest: Found) -> tuple[Relaxation | None, ...]:
    limit = _higher_limit(problem, closest)
    if problem.brief:
        return (limit,)
    return (_more_micro_batches(problem), _smaller_batch(problem), limit)


def _other_limit(
    problem: Problem, closest: Found, solves: Callable[[Problem], bool]
) -> tuple[str, Relaxation | None]:
    """The limit on device-seconds or time without which a plan is found, and what it takes."""
    model = closest.evaluation.model
    if problem.goal.unit_amplification_limit is not None:
        found = higher_unit_limit(
            problem, lambda one: _models(one, model.placement), solves, _end()
        )
        if found is not None:
            return "unit_amplification_limit", found
    for what in LIFTED:
        if getattr(problem.goal, what) is None:
            continue
        done = search(replace(lifted(problem, what), progress=None), SEARCH_S).evaluation
        reached = value(done.model, done.decisions, problem.schedule)
        least = needed(what, reached, done.model)
        for _ in range(4):  # the search may take another way under another limit
            named = higher(what, least, proved=False)
            if solves(with_limit(problem, what, named.value)):
                return what, named
            least *= 1.02
    return "several limits", None


def _end() -> float:
    return time.perf_counter() + SEARCH_S


def _models(problem: Problem, placement: tuple[int, ...]) -> list[CostModel]:
    """A cost model for each number of micro-batches and each slice size."""
    sliced, most = problem.schedule == "priority", problem.goal.batch // problem.cluster.world_size
    return [
        CostModel(
            problem.profile,
            problem.cluster,
            problem.goal,
            micro_batches=times,
            placement=placement,
            bucket_bytes=size,
            sliced=sliced,
        )
        for times in sorted(set(problem.goal.micro_batches))
        if times <= max(most, 1)
        for size in problem.slice_bytes
    ]


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
    """The least limit with which the search finds a plan, from what the closest plan needs (on its
    fullest rank) down to what there is."""
    high = max(closest.evaluation.prediction.peak_bytes)
    for _ in range(4):  # the search may take another way under another limit
        if fits(problem, memory_limit_bytes=high):
            break
        high += high // 50
    else:
        return None
    low = min(closest.tightest.available_bytes, high)
    while high - low > max(CLOSE * high, 1):
        middle = (low + high) // 2
        good = fits(problem, memory_limit_bytes=middle)
        low, high = (low, middle) if good else (middle, high)
    return more_memory(high, proved=False)
