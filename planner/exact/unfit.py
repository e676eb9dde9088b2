"""Why nothing keeps the limits, proved: the least memory, device-seconds or time that would do.

The integer program is solved again without one of its limits, with what that limit bounds as its
objective, for every number of micro-batches and slice size; the least of these is the smallest
relaxation there is. More micro-batches are tried in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import msgspec

from ..answer import Choice, choice
from ..budget import single_device_s
from ..choices import unit_options
from ..cost import CostModel
from ..enlarge import more_ranks
from ..evaluate import excess, rank_memory
from ..fitting import fits_in_segments
from ..objective import Value, value
from ..problem import INTEGER_PAIRS, Enlargement, Infeasibility, Problem, Relaxation, state_pairs
from .backend import Interruption, Solved, run
from .cases import Case, case, models
from .integer import Program

EFFORT_S = 20.0
"""Seconds that may go into each explanation."""
DEVICE_LIMITS = ("unit_amplification_limit", "amplification_limit", "time_limit_s")
MARGIN = 1e-6
"""A relaxed limit is this share above what the plan needs, against rounding."""


class Closest(NamedTuple):
    """The plan that needs the least of what was lifted, and how much that is."""

    chosen: Choice
    least: float


def explain_proved(problem: Problem, every: Sequence[CostModel]) -> Infeasibility:
    """What is missing, and the smallest changes that help."""
    end = time.perf_counter() + EFFORT_S
    closest = _least(problem, every, "memory_limit_bytes", end)
    if closest is not None:
        return _memory(problem, closest, end)
    for what in ("amplification_limit", "time_limit_s"):
        if getattr(problem.goal, what) is not None:
            closest = _least(problem, every, what, end)
            if closest is not None:
                return _other(problem, closest, what, end)
    return _nothing(problem, every[0])


def _least(problem: Problem, every: Sequence[CostModel], what: str, end: float) -> Closest | None:
    """The plan that needs the least of ``what`` and keeps every other limit."""
    best: Closest | None = None
    free = msgspec.structs.replace(problem.goal, **{what: None})
    for model in every:
        this = case(problem, _with_goal(problem, model, free))
        if not all(this.ledger.options):
            continue
        solved, program = _solve(problem, this, what, model, end)
        if solved.value is None:
            continue
        decisions = this.ledger.choose(program.chosen())
        chosen = choice(model, decisions, problem.schedule)
        least = _needed(what)(chosen.value, model, chosen)
        if best is None or least < best.least:
            best = Closest(chosen, least)
    return best


def _with_goal(problem: Problem, model: CostModel, goal: object) -> CostModel:
    return next(
        m
        for m in models(replace(problem, goal=goal))  # type: ignore[arg-type]
        if (m.micro_batches, m.bucket_bytes) == (model.micro_batches, model.bucket_bytes)
    )


def _solve(
    problem: Problem, this: Case, what: str, model: CostModel, end: float
) -> tuple[Solved, Program]:
    """The program with what is lifted as its objective."""
    program = this.program(problem, excess=what == "memory_limit_bytes", limits_of=model)
    program.minimise(what)
    left = max(end - time.perf_counter(), 1.0)
    return run(program.problem, left, Interruption()), program


def _needed(what: str) -> Callable[[Value, CostModel, Choice], float]:
    """How much of a limit a choice needs."""
    if what == "memory_limit_bytes":
        return lambda v, m, c: float(_over(m, c))
    if what == "amplification_limit":
        return lambda v, m, c: v.gpu_seconds / _single_s(m)
    return lambda v, m, c: v.step_s


def _over(model: CostModel, chosen: Choice) -> int:
    return excess(model, rank_memory(model, chosen.decisions)).over_bytes


def _single_s(model: CostModel) -> float:
    return sum(single_device_s(model, k) for k in range(len(model.profile.units)))


def _memory(problem: Problem, closest: Closest, end: float) -> Infeasibility:
    model, decisions = closest.chosen.model, closest.chosen.decisions
    memory = rank_memory(model, decisions)
    tight = excess(model, memory)
    needed = max(m.peak_bytes for m in memory)
    rounded = f"{ceil(needed / 2**20 * 10) / 10:.1f}MiB"
    sentence = f"allow {needed:,} bytes per rank (--memory-limit {rounded})"
    relaxations = [Relaxation("memory_limit_bytes", needed, sentence)]
    found = (_more_micro_batches(problem, end), _smaller_batch(problem, end))
    return Infeasibility(
        rank=model.placement[tight.position],
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=(*(r for r in found if r is not None), *relaxations),
        enlargement=more_ranks(problem, lambda larger: _fits(larger, end), end),
        kind=tight.kind,
    )


def _fits(problem: Problem, end: float) -> bool:
    """Whether a plan keeps all limits, where the program is small enough to ask."""
    return state_pairs(problem) <= INTEGER_PAIRS and _feasible(problem, end)


def _more_micro_batches(problem: Problem, end: float) -> Relaxation | None:
    """The fewest micro-batches, by doubling, with which a plan keeps all limits."""
    count = 2 * max(problem.goal.micro_batches)
    most = problem.goal.batch // problem.cluster.world_size
    while problem.capability.micro_batches and count <= most and time.perf_counter() < end:
        if _feasible(problem, end, micro_batches=(count,)):
            sentence = f"allow {count} micro-batches (--micro-batches {count})"
            return Relaxation("micro_batches", count, sentence)
        count *= 2
    return None


def _smaller_batch(problem: Problem, end: float) -> Relaxation | None:
    """The largest multiple of the ranks below the batch with which a plan keeps all limits (taking
    it that smaller batches do, too)."""
    world = problem.cluster.world_size
    low, high = 0, (problem.goal.batch - 1) // world
    while low < high:
        middle = (low + high + 1) // 2
        if time.perf_counter() > end:
            return None
        good = _feasible(problem, end, batch=middle * world)
        low, high = (middle, high) if good else (low, middle - 1)
    if not low:
        return None
    size = low * world
    return Relaxation("batch", size, f"lower the global batch to {size} (--batch {size})")


def _feasible(problem: Problem, end: float, **changes: object) -> bool:
    """Whether a plan keeps all limits when fields of the goal are changed."""
    changed = replace(problem, goal=msgspec.structs.replace(problem.goal, **changes))
    closest = _least(changed, list(models(changed)), "memory_limit_bytes", end)
    if closest is not None and closest.chosen.feasible:
        return True
    return any(fits_in_segments(changed, model) for model in models(changed))


def _other(problem: Problem, closest: Closest, what: str, end: float) -> Infeasibility:
    """Where memory is not what is missing."""
    model, chosen = closest.chosen.model, closest.chosen
    tight = excess(model, rank_memory(model, chosen.decisions))
    least = closest.least * (1 + MARGIN)
    value_ = ceil(least * 1e6) / 1e6 if least > 1e-3 else least
    names = {"amplification_limit": "an amplification limit of", "time_limit_s": "a step of"}
    unit = " s" if what == "time_limit_s" else ""
    sentence = f"allow {names[what]} {value_:.9g}{unit}"
    return Infeasibility(
        rank=model.placement[tight.position],
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=(Relaxation(what, value_, sentence),),  # type: ignore[arg-type]
        limit=what,
        enlargement=_larger(problem, what, end),
    )


def _larger(problem: Problem, what: str, end: float) -> Enlargement | None:
    """More ranks may shorten a step; they never save device-seconds."""
    if what != "time_limit_s":
        return None
    return more_ranks(problem, lambda larger: _fits(larger, end), end)


def explain_unproved(problem: Problem) -> Infeasibility:
    """What is missing where a search found nothing and a proof would take too long."""
    return _nothing(problem, next(models(problem)))


def _nothing(problem: Problem, model: CostModel) -> Infeasibility:
    """No single limit is to blame: a unit has no option, or several limits exclude each other; or
    which one was not found out."""
    figures = value(model, model.baseline, problem.schedule)
    tight = excess(model, rank_memory(model, model.baseline))
    asked = [what for what in DEVICE_LIMITS if getattr(problem.goal, what) is not None]
    limit = asked[0] if len(asked) == 1 and figures.over_bytes <= 0 else "several limits"
    pinned = _pinned(problem, model)
    return Infeasibility(
        rank=model.placement[tight.position],
        unit=pinned or tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=(),
        limit="pins" if pinned else limit,
    )


def _pinned(problem: Problem, model: CostModel) -> str | None:
    """A unit that could be something but for its pins."""
    free = msgspec.structs.replace(problem.goal, pins=())
    bare = _with_goal(problem, model, free)
    for k, unit in enumerate(model.profile.units):
        if not unit_options(model, k, problem.capability):
            return unit.name if unit_options(bare, k, problem.capability) else None
    return None
