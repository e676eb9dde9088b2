"""Plans whose recomputed units form segments, where memory asks for that.

The solvers decide units one by one. Where one of their plans saves memory, or none of them fits,
what is kept, recomputed and in which segments is decided anew (``checkpointing``) for a few choices
of layouts and exchanges: the solver's own, data parallelism under each number of micro-batches, and
what the heuristic takes where memory does not matter. The plan that comes of it is taken where
it fits and the solver's does not, or where its step is quicker, by formula and as simulated.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import msgspec

from ...cost.budget import permitted
from ...cost.cost import CostModel
from ...schema.options import Decisions, segments_of
from ..answer import answer
from ..choice import Choice, choice
from ..evaluate import binding_rank, evaluation
from ..problem import Problem, Result
from ..unit_options import may_have
from .checkpointing import Checkpointing, has_segments, limited_by_memory, plain_starts
from .space import BETTER
from .splits import search

EFFORT_S = 5.0
"""Seconds after which no further choice is begun with."""
UNLIMITED_S = 2.0
"""Seconds for the heuristic's plan that memory does not limit."""
UNLIMITED_SCORES = 1000
"""Plans that it may score for each number of micro-batches."""
# Without a limit a goal means the devices' own memory, so that no limit must be a large one.
UNLIMITED_BYTES = 2**62


def quicker_in_segments(
    problem: Problem, result: Result, time_limit_s: float | None = None
) -> Result:
    """The result, or that of a plan with segments that is quicker. ``time_limit_s`` is what the
    search for the result was given; this takes up to a fifth of it besides."""
    plan = result.plan
    if plan is None or result.decisions is None or not has_segments(problem):
        return result
    if not limited_by_memory(plan):
        return result
    start, problem = time.perf_counter(), problem.placed()
    own = problem.cost_model(plan.micro_batches, plan.message_bytes, plan.placement)
    known = choice(own, result.decisions, problem.schedule)
    effort_s = EFFORT_S if time_limit_s is None else min(EFFORT_S, time_limit_s / 5)
    best = _best(problem, [(own, result.decisions)], start + effort_s)
    if best is None or not segments_of(best.decisions) or not _is_quicker(problem, best, known):
        return result
    made = _answer(problem, best, result.solver)
    return made._replace(reason="; ".join(r for r in (result.reason, made.reason) if r))


def fitting_in_segments(problem: Problem, solver: str) -> Result | None:
    """A plan with segments for a problem for which ``solver`` found none, if there is one."""
    if not has_segments(problem):
        return None
    best = _best(problem, [], time.perf_counter() + EFFORT_S)
    if best is None:
        return None
    return _answer(problem, best, solver)


def _answer(problem: Problem, best: Choice, solver: str) -> Result:
    made = answer(problem, best, solver, None, proved=False)
    count = len(segments_of(best.decisions))
    return made._replace(reason=f"{count} segments of units recomputed together, without a proof")


def _best(problem: Problem, first: list[tuple[CostModel, Decisions]], end: float) -> Choice | None:
    """The plan with least of the objective that keeps all limits, of those that begin with each
    choice of layouts and exchanges."""
    best: Choice | None = None
    for i, (model, start) in enumerate(chain(first, _starts(problem, end))):
        # The first is looked at however late it is: it is the solver's own plan, if there is one.
        if i and time.perf_counter() > end:
            break
        problem.report("recomputing in segments", min(i / 10, 0.9))
        limit = binding_rank(model).limit_bytes
        chosen = Checkpointing(model, start, problem.capability).quickest(limit)
        if chosen is None:
            continue
        new = choice(model, chosen, problem.schedule)
        if not (new.feasible and permitted(model, chosen)):
            continue
        if best is None or new.objective_s < best.objective_s * BETTER:
            best = new
    return best


def _is_quicker(problem: Problem, new: Choice, known: Choice) -> bool:
    """By formula and, where time is the objective, as simulated."""
    # Plans within ``tie_tolerance`` of each other count as equal, and one without segments is
    # simpler.
    if new.objective_s >= known.objective_s * min(1 - problem.tie_tolerance, BETTER):
        return False
    new_s, known_s = (
        evaluation(each.model, each.decisions, schedule=problem.schedule).prediction.step_s
        for each in (new, known)
    )
    return problem.goal.objective != "time" or new_s < known_s * BETTER


def _starts(problem: Problem, end: float) -> Iterator[tuple[CostModel, Decisions]]:
    """Layouts and exchanges to begin with, each under every number of micro-batches and slice
    size."""
    every = list(problem.cost_models())
    for model in every:
        for start in plain_starts(problem, model):
            yield model, start
    left_s = end - time.perf_counter()
    if left_s <= 0:
        return
    free = msgspec.structs.replace(problem.goal, memory_limit_bytes=UNLIMITED_BYTES)
    quiet = replace(problem, goal=free, progress=None)
    found = search(quiet, min(UNLIMITED_S, left_s), UNLIMITED_SCORES).evaluation.decisions
    for model in every:
        if all(may_have(model, k, option, problem.capability) for k, option in enumerate(found)):
            yield model, found
