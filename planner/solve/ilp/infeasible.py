"""Why nothing keeps the limits, proved: the least memory, device-seconds or time that would do.

The integer program is solved again without one of its limits, with what that limit bounds as its
objective, for every number of micro-batches and slice size; the least of these is the smallest
relaxation there is. More micro-batches are tried in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from ...cost.cost import CostModel
from ...schema.goal import Goal
from ..answer import Choice, choice
from ..choices import unit_options
from ..evaluate import excess, rank_memory
from ..heuristic.enlarge import more_ranks
from ..heuristic.fitting import fits_in_segments
from ..heuristic.relaxations import higher, higher_unit_limit, more_memory, needed
from ..heuristic.standing import least_standing, never_fits
from ..objective import Value, value
from ..problem import INTEGER_PAIRS, Enlargement, Infeasibility, Problem, Relaxation, state_pairs
from .backend import Interruption, Solved, run
from .cases import Case, case
from .integer import Program

EFFORT_S = 20.0
"""Seconds that may go into each explanation."""
DEVICE_LIMITS = ("unit_amplification_limit", "amplification_limit", "time_limit_s")
MARGIN = 1e-6
"""A relaxed limit is this share above what the plan needs, against rounding."""


class Closest(NamedTuple):
    """The plan that needs the least of what was lifted, how much that is, and whether it is proved
    that none needs less."""

    chosen: Choice
    least: float
    proved: bool = False


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
    return _nothing(problem, every[0], _unit_limit(problem, end))


def _unit_limit(problem: Problem, end: float) -> Relaxation | None:
    """The least limit on every unit's device-seconds that would do."""
    if problem.goal.unit_amplification_limit is None:
        return None
    return higher_unit_limit(
        problem,
        lambda one: list(one.cost_models()),
        lambda one: _feasible(one, end),
        end,
        proves=True,
    )


def _least(problem: Problem, every: Sequence[CostModel], what: str, end: float) -> Closest | None:
    """The plan that needs the least of ``what`` and keeps every other limit."""
    best: Closest | None = None
    proved = True
    free = msgspec.structs.replace(problem.goal, **{what: None})
    for model in every:
        this = case(problem, _with_goal(problem, model, free))
        if not all(this.ledger.options):
            continue
        solved, program = _solve(problem, this, what, model, end)
        proved &= solved.outcome in ("optimal", "infeasible")
        if solved.value is None:
            continue
        decisions = this.ledger.choose(program.chosen())
        chosen = choice(model, decisions, problem.schedule)
        least = _needed(what)(chosen.value, model, chosen)
        if best is None or least < best.least:
            best = Closest(chosen, least)
    return None if best is None else best._replace(proved=proved)


def _with_goal(problem: Problem, model: CostModel, goal: Goal) -> CostModel:
    return next(
        m
        for m in replace(problem, goal=goal).cost_models()
        if (m.micro_batches, m.bucket_bytes) == (model.micro_batches, model.bucket_bytes)
    )


def _solve(
    problem: Problem, this: Case, what: str, model: CostModel, end: float
) -> tuple[Solved, Program]:
    """The program with what is lifted as its objective."""
    lifts_memory = what == "memory_limit_bytes"
    limits = _scaled(problem, this, model) if lifts_memory else model
    program = this.program(problem, excess=lifts_memory, limits_of=limits)
    program.minimise(what)
    left = max(end - time.perf_counter(), 1.0)
    return run(program.problem, left, Interruption()), program


def _scaled(problem: Problem, this: Case, model: CostModel) -> CostModel:
    """The model under the largest limit that every plan is over, which changes no order of plans:
    bytes are counted in units of the limit, and thousands of millions of them are no numbers to
    solve with."""
    limit = model.goal.memory_limit_bytes
    least = least_standing(this.model, this.ledger.options)
    if limit is None or least is None or least <= limit * model.world_size:
        return model
    each = max(int(least // model.world_size), limit)
    goal = msgspec.structs.replace(model.goal, memory_limit_bytes=each)
    return _with_goal(problem, model, goal)


def _needed(what: str) -> Callable[[Value, CostModel, Choice], float]:
    """How much of a limit a choice needs."""
    if what == "memory_limit_bytes":
        return lambda v, m, c: float(_over(m, c))
    return lambda v, m, c: needed(what, v, m)


def _over(model: CostModel, chosen: Choice) -> int:
    return excess(model, rank_memory(model, chosen.decisions)).over_bytes


def _memory(problem: Problem, closest: Closest, end: float) -> Infeasibility:
    model, decisions = closest.chosen.model, closest.chosen.decisions
    memory = rank_memory(model, decisions)
    tight = excess(model, memory)
    most = max(m.peak_bytes for m in memory)
    why = Infeasibility(
        rank=model.placement[tight.position],
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=(more_memory(most, proved=closest.proved),),
        kind=tight.kind,
    )
    if problem.brief:
        return why
    found = (_more_micro_batches(problem, end), _smaller_batch(problem, end))
    return why._replace(
        relaxations=(*(r for r in found if r is not None), *why.relaxations),
        enlargement=more_ranks(problem, lambda larger: _fits(larger, end), end),
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
    cases = [case(changed, model) for model in changed.cost_models()]
    every = [this for this in cases if not never_fits(this.model, this.ledger.options)]
    return any(_has_plan(changed, this, end) for this in every) or any(
        fits_in_segments(changed, this.model) for this in every
    )


def _has_plan(problem: Problem, this: Case, end: float) -> bool:
    """Whether the program has any solution; much quicker than the one that needs least."""
    if not all(this.ledger.options):
        return False
    program = this.program(problem)
    program.minimise("memory_limit_bytes")  # without excess there is nothing to make small
    if run(program.problem, max(end - time.perf_counter(), 1.0), Interruption()).value is None:
        return False
    decisions = this.ledger.choose(program.chosen())
    if choice(this.model, decisions, problem.schedule).feasible:
        return True
    closest = _least(problem, [this.model], "memory_limit_bytes", end)  # over a limit by rounding
    return closest is not None and closest.chosen.feasible


def _other(problem: Problem, closest: Closest, what: str, end: float) -> Infeasibility:
    """Where memory is not what is missing."""
    model, chosen = closest.chosen.model, closest.chosen
    tight = excess(model, rank_memory(model, chosen.decisions))
    least = higher(what, closest.least * (1 + MARGIN), proved=closest.proved)
    return Infeasibility(
        rank=model.placement[tight.position],
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=(least,),
        limit=what,
        enlargement=_larger(problem, what, end),
    )


def _larger(problem: Problem, what: str, end: float) -> Enlargement | None:
    """More ranks may shorten a step; they never save device-seconds."""
    if what != "time_limit_s" or problem.brief:
        return None
    return more_ranks(problem, lambda larger: _fits(larger, end), end)


def explain_unproved(problem: Problem) -> Infeasibility:
    """What is missing where a search found nothing and a proof would take too long."""
    return _nothing(problem, next(problem.cost_models()))


def explain_with(problem: Problem, limit: str, least: Relaxation) -> Infeasibility:
    """That a limit which is not memory's cannot be kept, and a value that would do."""
    found = _nothing(problem, next(problem.cost_models()))
    return found if found.limit == "pins" else found._replace(limit=limit, relaxations=(least,))


def _nothing(
    problem: Problem, model: CostModel, unit_limit: Relaxation | None = None
) -> Infeasibility:
    """No single limit is to blame but perhaps that on units: a unit has no option, or several
    limits exclude each other; or which one was not found out."""
    figures = value(model, model.baseline, problem.schedule)
    tight = excess(model, rank_memory(model, model.baseline))
    asked = [what for what in DEVICE_LIMITS if getattr(problem.goal, what) is not None]
    over = figures.over_bytes > 0
    limit = "memory_limit_bytes" if over and not asked else "several limits"
    limit = asked[0] if len(asked) == 1 and not over else limit
    limit = limit if unit_limit is None else "unit_amplification_limit"
    pinned = _pinned(problem, model)
    return Infeasibility(
        rank=model.placement[tight.position],
        unit=pinned or tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        relaxations=() if unit_limit is None or pinned else (unit_limit,),
        limit="pins" if pinned else limit,
    )


def _pinned(problem: Problem, model: CostModel) -> str | None:
    """A unit that could be something but for its pins, whatever else is limited."""
    unlimited = msgspec.structs.replace(problem.goal, unit_amplification_limit=None)
    pinned = _with_goal(problem, model, unlimited)
    free = _with_goal(problem, model, msgspec.structs.replace(unlimited, pins=()))
    for k, unit in enumerate(model.profile.units):
        if not unit_options(pinned, k, problem.capability):
            return unit.name if unit_options(free, k, problem.capability) else None
    return None
