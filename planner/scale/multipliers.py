"""The solver for many units on many ranks: plans with a proven bound, from ``lagrange``'s search.

Each number of micro-batches and each slice size is a search of its own; one whose bound is above a
plan already found is left early, so that the bound that is reported holds over all of them. Among
these the best plan wins: with a gap of up to a percent nothing simpler is looked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from ..answer import Choice, answer, choice
from ..budget import energy_budget, gpu_seconds_limit
from ..bursts import LIMITS, greedy
from ..cost import CostModel
from ..evaluate import limits_bytes
from ..exact.cases import models
from ..exact.solve import Integer
from ..exact.unfit import DEVICE_LIMITS, explain_unproved
from ..infeasible import explain_infeasible
from ..memory import MemoryModel
from ..options import Decisions
from ..problem import INTEGER_PAIRS, Problem, Result, state_pairs
from ..rows import AT, Rows, bucket_share, rows
from ..search import Space
from ..segmented import fitting_in_segments, less_in_segments
from ..splits import placed
from ..splits import search as heuristic_search
from .lagrange import Lagrangian, Search
from .limits import INFINITE, Limits
from .sheet import Sheet

GAP = 0.0075
"""The search ends when plan and bound are this close."""
PROVED = 1e-9
"""A gap that is rounding."""
TIME_LIMIT_S = 60.0
"""Where the caller gives none."""
REPAIRS = 3
"""How often a plan that is over the limit on another rank, or by its buckets, is searched anew
under a limit lowered by that much."""
FEW_UNITS = 60
"""Up to here the heuristic's plan is worth its time as one to begin with."""


class Part(NamedTuple):
    """The outcome for one number of micro-batches and one slice size."""

    choice: Choice | None
    bound: float


class Multipliers:
    """The solver of that name."""

    name = "multipliers"

    def __init__(self, gap: float = GAP) -> None:
        self.gap = gap

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        start = time.perf_counter()
        deadline = start + (TIME_LIMIT_S if time_limit_s is None else time_limit_s)
        problem = placed(problem)
        every, best, bound = list(models(problem)), None, INFINITE
        for i, model in enumerate(every):
            problem.report(f"{model.micro_batches} micro-batches", i / len(every))
            cutoff = best.objective_s if best else INFINITE
            found = search_part(problem, model, deadline, cutoff, self.gap)
            bound = min(bound, found.bound)
            new = found.choice
            if new is None or not new.feasible:
                continue
            if best is None or new.objective_s < best.objective_s:
                best = new
        if best is None:
            return self._nothing(problem, start, deadline)
        seconds = time.perf_counter() - start
        bound = min(bound, best.objective_s)
        proved = best.objective_s - bound <= PROVED * best.objective_s
        return answer(problem, best, self.name, bound, proved=proved, seconds=seconds)

    def _nothing(self, problem: Problem, start: float, deadline: float) -> Result:
        """No plan that keeps the limits was found. That proves nothing: where the integer program
        is quick it has the last word, else the heuristic's closest plan says what is missing."""
        rescued = fitting_in_segments(problem, self.name, start)
        if rescued is not None:
            return rescued
        few = state_pairs(problem) <= INTEGER_PAIRS
        if len(problem.profile.units) <= FEW_UNITS and few:
            return Integer().solve(problem, max(deadline - time.perf_counter(), 1.0))
        if any(getattr(problem.goal, what) is not None for what in DEVICE_LIMITS):
            why = explain_unproved(problem)
        else:
            closest = heuristic_search(problem, TIME_LIMIT_S)
            why = less_in_segments(problem, explain_infeasible(problem, closest))
        seconds = time.perf_counter() - start
        return Result(self.name, "infeasible", None, None, None, None, None, seconds, why)


def lagrangian_of(problem: Problem, model: CostModel) -> Lagrangian | None:
    """The tables and limits of a problem for one cost model, as the position with the tightest
    memory sees them; None where a unit has no option."""
    limits = limits_bytes(model.cluster, model.goal, model.placement)
    position = min(range(len(limits)), key=lambda p: (limits[p], p))
    sheet = Sheet(Space(model, problem.capability), MemoryModel(model), position)
    if not all(unit.states for unit in sheet.units):
        return None
    at = AT["exchanged"]
    most = sum(
        float(u.memory.figures[..., at].max() + u.exchange.figures[..., at].max())
        for u in sheet.units
    )
    share = 0.0 if model.sliced else bucket_share(most, model.bucket_bytes)
    goal = model.goal
    economical = goal.objective == "gpu_seconds"
    bounds = Limits(
        memory_bytes=limits[position],
        lost=energy_budget(model),
        gpu_s=gpu_seconds_limit(model),
        step_s=goal.time_limit_s if goal.time_limit_s is not None else INFINITE,
        devices=model.world_size,
        economical=economical,
    )
    return Lagrangian(sheet, _rows(sheet, problem, share), bounds)


def _rows(sheet: Sheet, problem: Problem, bucket: float) -> Rows:
    together = sheet.memory.updates_together
    return rows(sheet.model.micro_batches, problem.schedule, bucket, together=together)


def search_part(
    problem: Problem, model: CostModel, deadline: float, cutoff: float, gap: float = GAP
) -> Part:
    """The search for one cost model; its bound holds for every plan of that model."""
    lagrangian = lagrangian_of(problem, model)
    if lagrangian is None:
        return Part(None, INFINITE)
    known = (lagrangian.sheet.numbers(d) for d in _first(problem, model))
    first = [n for n in known if n is not None]
    bound, best = 0.0, None
    for attempt in range(REPAIRS):
        outcome = Search(lagrangian, deadline, gap).run(first, cutoff)
        bound = outcome.bound if attempt == 0 else bound
        decisions = lagrangian.sheet.choose(outcome.best.numbers)
        made = choice(model, decisions, problem.schedule)
        best = made if best is None or made.feasible else best
        over = made.value.over_bytes
        if over <= 0 or outcome.best.score.over:
            break
        tighter = lagrangian.limits.memory_bytes - over
        limits = lagrangian.limits._replace(memory_bytes=tighter)
        lagrangian = Lagrangian(lagrangian.sheet, lagrangian.rows, limits)
    return Part(best, bound)


def _first(problem: Problem, model: CostModel) -> Iterator[Decisions]:
    """Plans to begin with: plain data parallelism, and bursts or what the heuristic finds."""
    yield model.baseline
    if len(model.baseline) > FEW_UNITS:
        return
    if problem.capability.idle_positions:
        yield from dict.fromkeys(greedy(model, limit) for limit in LIMITS)
    else:
        yield heuristic_search(problem, 1.0).evaluation.decisions
