"""Why nothing keeps the limits, proved: the least memory, device-seconds or time that would do.

The integer program is solved again without one of its limits, with what that limit bounds as its
objective, for every number of micro-batches and slice size; the least of these is the smallest
relaxation there is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import msgspec

from ...cost.cost import CostModel
from ...schema.goal import Goal
from ...schema.options import Decisions, ties_agree
from ..answer import Choice, choice
from ..evaluate import rank_memory
from ..heuristic.checkpointing import fits_in_segments
from ..heuristic.infeasible import Closest, needed
from ..heuristic.least_memory import LeastMemory, least_memory, memory_models, never_fits
from ..highs import Interruption, Solved, run
from ..option_table import OptionTable
from ..problem import Problem
from .integer import Program

# A relaxed limit is this share above what the plan needs, against rounding.
MARGIN = 1e-6
# Seconds that a program may take at least, though the deadline is near.
LAST_S = 1.0


class IntegerEvidence:
    """What the integer program tells of problems without a plan; see ``infeasible.Evidence``."""

    proves = True

    def closest(self, problems: Sequence[Problem], what: str, deadline: float) -> Closest | None:
        if what == "memory_limit_bytes":
            memory = [(p, model) for p in problems for model in memory_models(p)]
            return _least_memory(memory, deadline)
        best: Closest | None = None
        proved = True
        for problem, model in ((p, m) for p in problems for m in p.cost_models()):
            chosen, known = _least(problem, model, what, deadline)
            proved &= known
            if chosen is not None:
                limit = needed(what, chosen) * (1 + MARGIN)
                if best is None or limit < (best.limit or inf):
                    best = Closest(chosen, limit)
        return None if best is None else best._replace(proved=proved)

    def fits(self, problem: Problem, deadline: float) -> bool:
        models = (m for m in memory_models(problem) if not never_fits(problem, m))
        bounds = [(model, least_memory(problem, model)) for model in models]
        known = [(model, bound) for model, bound in bounds if bound is not None]
        # The program is asked only where the bound from below does not rule a plan out.
        return any(
            _has_plan(problem, model, deadline, bound.decisions)
            for model, bound in known
            if bound.over_bytes <= 0
        ) or any(
            fits_in_segments(problem, model)
            for model, bound in known
            if bound.over_bytes_in_segments <= 0
        )


def _least_memory(every: Sequence[tuple[Problem, CostModel]], deadline: float) -> Closest | None:
    """The plan that is least over the memory limits of its ranks."""
    best: Choice | None = None
    proved = True
    bounds = ((least_memory(problem, model), problem, model) for problem, model in every)
    known = [(bound, problem, model) for bound, problem, model in bounds if bound is not None]
    # A program is solved only where the bound from below leaves room for a plan that is better than
    # those known; the lowest bound first, so that few are.
    for bound, problem, model in sorted(known, key=lambda each: each[0].over_bytes):
        if best is not None and bound.over_bytes >= best.over_bytes:
            break
        easiest = choice(model, bound.decisions, problem.schedule)
        chosen: Choice | None = easiest
        if not _is_plan(easiest) or easiest.over_bytes > bound.over_bytes:
            chosen, solved = _least(problem, model, "memory_limit_bytes", deadline, bound)
            proved &= solved
        if chosen is not None and (best is None or chosen.over_bytes < best.over_bytes):
            best = chosen
    if best is None:
        return None
    peak = max(each.peak_bytes for each in rank_memory(best.model, best.decisions))
    return Closest(best, peak, proved)


def _is_plan(chosen: Choice) -> bool:
    """Whether tied units agree and all limits but memory's are kept."""
    model = chosen.model
    agree = all(
        ties_agree([model.profile.units[u] for u in ties], [chosen.decisions[u] for u in ties])
        for ties in model.ties
        if len(ties) > 1
    )
    return agree and chosen._replace(over_bytes=0).feasible


def _least(
    problem: Problem,
    model: CostModel,
    what: str,
    deadline: float,
    bound: LeastMemory | None = None,
) -> tuple[Choice | None, bool]:
    """The plan of one model that needs the least of a limit and keeps the others, and whether the
    program for it was solved to the end. ``bound`` is known of memory."""
    free = msgspec.structs.replace(problem.goal, **{what: None})
    table = OptionTable(_with_goal(problem, model, free), problem.capability)
    if not all(table.options):
        return None, True
    limits = model
    if bound is not None and model.goal.memory_limit_bytes is not None and bound.over_bytes > 0:
        # The largest limit that every plan is known to be over changes no order of plans. Bytes are
        # counted in units of the limit, and thousands of millions of them are no numbers to solve
        # with.
        scaled = model.goal.memory_limit_bytes + bound.over_bytes
        higher = msgspec.structs.replace(model.goal, memory_limit_bytes=scaled)
        limits = _with_goal(problem, model, higher)
    program = Program(problem, table, excess=what == "memory_limit_bytes", limits_of=limits)
    program.minimise(what)
    solved = _run(program, deadline)
    done = solved.outcome in ("optimal", "infeasible")
    if solved.value is None:
        return None, done
    return choice(model, program.chosen(), problem.schedule), done


def _run(program: Program, deadline: float) -> Solved:
    left_s = max(deadline - time.perf_counter(), LAST_S)
    return run(program.problem, left_s, Interruption())


def _with_goal(problem: Problem, model: CostModel, goal: Goal) -> CostModel:
    return replace(problem, goal=goal).cost_model(model.micro_batches, model.message_bytes)


def _has_plan(problem: Problem, model: CostModel, deadline: float, easiest: Decisions) -> bool:
    """Whether the program has any solution; much quicker than the one that needs least."""
    # The options that hold least where memory is fullest are often a plan, and seen without it.
    tried = choice(model, easiest, problem.schedule)
    if _is_plan(tried) and tried.feasible:
        return True
    table = OptionTable(model, problem.capability)
    if not all(table.options):
        return False
    program = Program(problem, table)
    program.minimise("memory_limit_bytes")  # without excess there is nothing to make small
    if _run(program, deadline).value is None:
        return False
    if choice(model, program.chosen(), problem.schedule).feasible:
        return True
    # The solution is over the limit by rounding: another may not be.
    closest, _ = _least(problem, model, "memory_limit_bytes", deadline)
    return closest is not None and closest.feasible
