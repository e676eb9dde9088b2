"""The solver for many units on many ranks: plans with a proven bound, from ``lagrange``'s search.

Each number of micro-batches and each slice size is a search of its own; one whose bound is above a
plan already found is left early, so that the bound that is reported holds over all of them. Among
these the best plan wins: with a gap of up to a percent nothing simpler is looked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...cost.budget import energy_budget, gpu_seconds_limit, within_unit_limit
from ...cost.cost import CostModel
from ...memory.rows import AT, Rows, bucket_share, rows
from ...schema.options import Decisions
from ..answer import Choice, answer, choice
from ..evaluate import limits_bytes
from ..heuristic.bursts import LIMITS, greedy
from ..heuristic.infeasible import EXPLAIN_S, explain
from ..heuristic.segmented import fitting_in_segments
from ..heuristic.splits import search as heuristic_search
from ..ilp.solve import Integer
from ..option_table import OptionTable
from ..problem import INTEGER_PAIRS, Infeasibility, Problem, Result, state_pairs
from .infeasible import LAST_S, LagrangianEvidence, LeastUse, key_of, least_use, limit_of
from .judging import INFINITE, Limits
from .lagrange import Lagrangian, Search

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


class ModelOutcome(NamedTuple):
    """The outcome for one number of micro-batches and one slice size."""

    choice: Choice | None
    bound: float


class LagrangianSolver:
    """The solver that is registered as ``lagrangian``."""

    # What plans record (``Provenance.solver``) stays the word that plans have had from the first:
    # ``solver.SPELLINGS`` takes it for ``lagrangian``.
    name = "multipliers"

    def __init__(self, gap: float = GAP) -> None:
        self.gap = gap

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        start = time.perf_counter()
        deadline = start + (TIME_LIMIT_S if time_limit_s is None else time_limit_s)
        problem = problem.placed()
        known: LeastUse | None = None
        best: Choice | None = None
        bound = INFINITE
        if limit_of(problem) is None or _begins(problem):
            best, bound = self._best(problem, deadline, {})
        if best is None:
            what = limit_of(problem)
            if what is not None:
                known = self._least_use(problem, what, start + (deadline - start) / 2)
                if not known.hopeless:
                    best, bound = self._best(problem, deadline, known.starts)
        if best is None:
            return self._without_plan(problem, start, deadline, known)
        seconds = time.perf_counter() - start
        bound = min(bound, best.objective_s)
        proved = best.objective_s - bound <= PROVED * best.objective_s
        return answer(problem, best, self.name, bound, proved=proved, seconds=seconds)

    def _least_use(self, problem: Problem, what: str, deadline: float) -> LeastUse:
        """The plans that need least of a limit on device-seconds or time."""

        def part(
            free: Problem, model: CostModel, end: float, target: float, begin: Decisions | None
        ) -> ModelOutcome:
            found = search_part(free, model, end, INFINITE, self.gap, start=begin, target=target)
            given = None if begin is None else choice(model, begin, problem.schedule)
            return ModelOutcome(_better(found.choice, given), found.bound)

        return least_use(problem, what, deadline, part)

    def _best(
        self, problem: Problem, deadline: float, starts: Mapping[tuple[int, int], Decisions]
    ) -> ModelOutcome:
        """The best choice over all models, and the bound."""
        every, bound = list(problem.cost_models()), INFINITE
        best: Choice | None = None
        for i, model in enumerate(every):
            problem.report(f"{model.micro_batches} micro-batches", i / len(every))
            cutoff = best.objective_s if best else INFINITE
            start = starts.get(key_of(model))
            found = search_part(problem, model, deadline, cutoff, self.gap, start=start)
            bound = min(bound, found.bound)
            begun = None if start is None else choice(model, start, problem.schedule)
            best = _better(best, _better(found.choice, begun))
        return ModelOutcome(best, bound)

    def _without_plan(
        self, problem: Problem, start: float, deadline: float, known: LeastUse | None
    ) -> Result:
        """No plan that keeps the limits was found. That proves nothing: where the integer program
        is quick it has the last word, else the closest plan says what is missing."""
        rescued = fitting_in_segments(problem, self.name, start)
        if rescued is not None:
            return rescued
        if _small(problem):
            return Integer().solve(problem, max(deadline - time.perf_counter(), 1.0))
        why = None
        if problem.explains:
            end = max(deadline, time.perf_counter() + EXPLAIN_S)
            why = explain([problem], self._evidence(known), end)
        return Result.without_plan(self.name, why, time.perf_counter() - start)

    def explain(self, problems: Sequence[Problem]) -> Infeasibility:
        """See ``solver.Solver``."""
        placed = [problem.placed() for problem in problems]
        if all(map(_small, placed)):
            return Integer().explain(placed)
        return explain(placed, self._evidence(None))

    def _evidence(self, known: LeastUse | None) -> LagrangianEvidence:
        def search(problem: Problem, what: str, deadline: float) -> LeastUse:
            return self._least_use(problem, what, deadline)

        return LagrangianEvidence(search, self._solves, known)

    def _solves(self, problem: Problem, deadline: float) -> bool:
        """Whether it finds a plan for another problem."""
        now = time.perf_counter()
        left_s = max(deadline - now, LAST_S)
        what = limit_of(problem)
        starts: Mapping[tuple[int, int], Decisions] = {}
        if what is not None and not _begins(problem):
            known = self._least_use(problem, what, now + left_s / 2)
            if known.hopeless:
                return False
            starts = known.starts
        return self._best(problem, now + left_s, starts).choice is not None


def _small(problem: Problem) -> bool:
    """Whether the integer program is quick."""
    few = state_pairs(problem) <= INTEGER_PAIRS
    return len(problem.profile.units) <= FEW_UNITS and few


def _better(one: Choice | None, other: Choice | None) -> Choice | None:
    """Of two choices that keep all limits the one with the smaller objective, the first of equals;
    None where neither keeps them."""
    kept = [each for each in (one, other) if each is not None and each.feasible]
    return min(kept, key=lambda each: each.objective_s, default=None)


def lagrangian_of(problem: Problem, model: CostModel) -> Lagrangian | None:
    """The tables and limits of a problem for one cost model, as the position with the tightest
    memory sees them; None where a unit has no option."""
    limits = limits_bytes(model)
    position = min(range(len(limits)), key=lambda p: (limits[p], p))
    table = OptionTable(model, problem.capability, position)
    if not all(table.states):
        return None
    at = AT["bucketed"]
    most = sum(
        float(u.memory.figures[..., at].max() + u.exchange.figures[..., at].max())
        for u in table.units
    )
    closes = any(model.closes_bucket(k, option) for k, option in enumerate(model.baseline))
    share = 0.0 if model.sliced or closes else bucket_share(most, model.message_bytes)
    goal = model.goal
    economical = goal.objective == "gpu_seconds"
    bounds = Limits(
        memory_bytes=limits[position],
        lost=energy_budget(model),
        gpu_s=gpu_seconds_limit(model),
        step_s=INFINITE if goal.undisturbed_limit_s is None else goal.undisturbed_limit_s,
        devices=model.world_size,
        economical=economical,
    )
    return Lagrangian(table, _rows(table, problem, share), bounds)


def _rows(table: OptionTable, problem: Problem, bucket: float) -> Rows:
    together = table.memory.updates_together
    return rows(table.model.micro_batches, problem.schedule, bucket, together=together)


def search_part(
    problem: Problem,
    model: CostModel,
    deadline: float,
    cutoff: float,
    gap: float = GAP,
    *,
    start: Decisions | None = None,
    target: float = -1.0,
) -> ModelOutcome:
    """The search for one cost model, from ``start`` on and until its objective is at most
    ``target``; its bound holds for every plan of that model."""
    lagrangian = lagrangian_of(problem, model)
    if lagrangian is None:
        return ModelOutcome(None, INFINITE)
    begin = [*_first(problem, model), *([] if start is None else [start])]
    known = (lagrangian.table.numbers(d) for d in begin)
    first = [n for n in known if n is not None]
    bound, best = 0.0, None
    for attempt in range(REPAIRS):
        outcome = Search(lagrangian, deadline, gap, target).run(first, cutoff)
        bound = outcome.bound if attempt == 0 else bound
        decisions = lagrangian.table.choose(outcome.best.numbers)
        made = choice(model, decisions, problem.schedule)
        best = made if best is None or made.feasible else best
        over = made.over_bytes
        if over <= 0 or outcome.best.score.over:
            break
        tighter = lagrangian.limits.memory_bytes - over
        limits = lagrangian.limits._replace(memory_bytes=tighter)
        lagrangian = Lagrangian(lagrangian.table, lagrangian.rows, limits)
    return ModelOutcome(best, bound)


def _begins(problem: Problem) -> bool:
    """Whether plain data parallelism or a burst keeps all limits: then a search begins with it."""
    for model in problem.cost_models():
        plans = {model.baseline}
        if problem.capability.idle_positions and len(model.baseline) <= FEW_UNITS:
            plans.update(greedy(model, limit) for limit in LIMITS)
        for decisions in plans:
            legal = all(within_unit_limit(model, k, d) for k, d in enumerate(decisions))
            if legal and choice(model, decisions, problem.schedule).feasible:
                return True
    return False


def _first(problem: Problem, model: CostModel) -> Iterator[Decisions]:
    """Plans to begin with: plain data parallelism, and bursts or what the heuristic finds."""
    yield model.baseline
    if len(model.baseline) > FEW_UNITS:
        return
    if problem.capability.idle_positions:
        yield from dict.fromkeys(greedy(model, limit) for limit in LIMITS)
    else:
        yield heuristic_search(problem, 1.0).evaluation.decisions
