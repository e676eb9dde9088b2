"""The solver for many units on many ranks: plans with a proven bound, from ``lagrange``'s search.

Each number of micro-batches and each slice size is a search of its own; one whose bound is above a
plan already found is left early, so that the bound that is reported holds over all of them. Among
these the best plan wins: with a gap of up to a percent nothing simpler is looked for.

Weights on rows and rounding may miss the few plans that a tight limit on device-seconds or time
leaves. So what the limit bounds is made small first, without the limit: that search (``least_use``)
ends with the first plan that keeps it, which is then one to begin with, or with the least that any
plan needs and a bound on that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from ...cost.budget import (
    energy_budget,
    gpu_seconds_limit,
    single_device_batch_s,
    within_unit_limit,
)
from ...cost.cost import CostModel
from ...memory.rows import rows
from ...schema.options import Decisions
from ..answer import answer
from ..choice import Choice, choice
from ..evaluate import binding_rank, limits_bytes
from ..heuristic import splits
from ..heuristic.bursts import LIMITS, greedy
from ..heuristic.heuristic import Heuristic
from ..heuristic.infeasible import (
    DEVICE_LIMITS,
    EXPLAIN_S,
    LIFTED,
    Closest,
    explain,
    lifted,
    needed,
    rounded_up,
    with_limit,
)
from ..heuristic.segmented import fitting_in_segments
from ..ilp.solver import IntegerSolver
from ..option_table import OptionTable
from ..problem import INTEGER_PAIRS, Infeasibility, Problem, Result, state_pairs
from ..unit_options import all_may_have
from .judging import INFINITE, Limits
from .lagrange import Lagrangian, LagrangianSearch

# The search ends when plan and bound are this close.
GAP = 0.0075
# A gap that is rounding.
PROVED = 1e-9
# Where the caller gives none.
TIME_LIMIT_S = 60.0
# How often a plan that is over the limit on another rank, or by its buckets, is searched anew under
# a limit lowered by that much.
REPAIRS = 3
# Up to here the heuristic's plan is worth its time as one to begin with.
FEW_UNITS = 60
# Seconds that the heuristic may take for a plan to begin with.
BEGIN_S = 1.0
# To such a share the least that is found is looked for where nothing is proved, and for how long.
STEP = 0.02
TIGHTEN_S = 5.0
# Seconds that each question may take which is asked when the time is over.
LAST_S = 2.0
# A value that is named is called the least where nothing this share below it would do.
CLOSE = 0.015
ROUNDING = 1e-6


class LagrangianSolver:
    """The solver that is registered as ``lagrangian``."""

    name = "lagrangian"

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        start = time.perf_counter()
        deadline = start + (TIME_LIMIT_S if time_limit_s is None else time_limit_s)
        problem = problem.placed()
        best, bound = None, INFINITE
        known: LeastUse | None = None
        what = limit_of(problem)
        if what is None or _begins(problem):
            best, bound = _best(problem, deadline, {})
        if best is None and what is not None:
            known = least_use(problem, what, start + (deadline - start) / 2)
            if not known.hopeless:
                best, bound = _best(problem, deadline, known.starts)
        if best is None:
            return self._without_plan(problem, deadline, known)
        if best.objective_s > problem.wanted_s:  # the search for better ones was left
            return Result.without_plan(self.name, None)
        bound = min(bound, best.objective_s)
        proved = best.objective_s - bound <= PROVED * best.objective_s
        return answer(problem, best, self.name, bound, proved=proved)

    def _without_plan(self, problem: Problem, deadline: float, known: LeastUse | None) -> Result:
        # That no plan was found proves nothing: where the integer program is quick it has the last
        # word, else the closest plan says what is missing.
        rescued = fitting_in_segments(problem, self.name)
        if rescued is not None:
            return rescued
        if _small(problem):
            return IntegerSolver().solve(problem, max(deadline - time.perf_counter(), 1.0))
        why = None
        if problem.explains:
            end = max(deadline, time.perf_counter() + EXPLAIN_S)
            why = explain([problem], LagrangianEvidence(known), end)
        return Result.without_plan(self.name, why)

    def explain(self, problems: Sequence[Problem]) -> Infeasibility:
        """See ``solver.Solver``."""
        placed = [problem.placed() for problem in problems]
        if all(map(_small, placed)):
            return IntegerSolver().explain(placed)
        return explain(placed, LagrangianEvidence(None))


def _small(problem: Problem) -> bool:
    """Whether the integer program is quick."""
    few = state_pairs(problem) <= INTEGER_PAIRS
    return len(problem.profile.units) <= FEW_UNITS and few


# -- one number of micro-batches and one slice size ------------------------------------------------


class ModelOutcome(NamedTuple):
    """The best plan that keeps all limits, None where none was found, and the bound."""

    choice: Choice | None
    bound: float


def _better(one: Choice | None, other: Choice | None) -> Choice | None:
    """Of two choices that keep all limits the one with the smaller objective, the first of equals;
    None where neither keeps them."""
    kept = [each for each in (one, other) if each is not None and each.feasible]
    return min(kept, key=lambda each: each.objective_s, default=None)


def _best(
    problem: Problem, deadline: float, starts: Mapping[tuple[int, int], Decisions]
) -> ModelOutcome:
    """The best choice over all models, and the bound on all of them."""
    every, bound = list(problem.cost_models()), INFINITE
    best: Choice | None = None
    for i, model in enumerate(every):
        problem.report(f"{model.micro_batches} micro-batches", i / len(every))
        cutoff = min(best.objective_s if best else INFINITE, problem.wanted_s)
        found = search_part(problem, model, deadline, cutoff, start=starts.get(_key(model)))
        bound = min(bound, found.bound)
        best = _better(best, found.choice)
    return ModelOutcome(best, bound)


def _key(model: CostModel) -> tuple[int, int]:
    """Which of a problem's models it is."""
    return model.micro_batches, model.message_bytes


def search_part(
    problem: Problem,
    model: CostModel,
    deadline: float,
    cutoff: float,
    *,
    start: Decisions | None = None,
    target: float = -1.0,
) -> ModelOutcome:
    """The search for one cost model, from ``start`` on and until its objective is at most
    ``target``; its bound holds for every plan of that model."""
    lagrangian = lagrangian_of(problem, model)
    if lagrangian is None:
        return ModelOutcome(None, INFINITE)
    begin = list(_simple_plans(problem, model))
    if not problem.capability.idle_positions and len(model.baseline) <= FEW_UNITS:
        begin.append(splits.search(problem, BEGIN_S).evaluation.decisions)
    begin += [] if start is None else [start]
    known = (lagrangian.table.numbers(d) for d in begin)
    first = [n for n in known if n is not None]
    bound, best = 0.0, None
    for attempt in range(REPAIRS):
        outcome = LagrangianSearch(lagrangian, deadline, GAP, target).run(first, cutoff)
        # Under a lowered limit there are fewer plans: only the first bound is one for all.
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
    given = None if start is None else choice(model, start, problem.schedule)
    return ModelOutcome(_better(best, given), bound)


def lagrangian_of(problem: Problem, model: CostModel) -> Lagrangian | None:
    """The tables and limits of a problem for one cost model, as the position with the tightest
    memory sees them; None where a unit has no option."""
    limits, binding = limits_bytes(model), binding_rank(model)
    position = binding.position
    if position is None:
        position = min(range(len(limits)), key=lambda p: (limits[p], p))
    table = OptionTable(model, problem.capability, position)
    if not all(table.states):
        return None
    goal, together = model.goal, table.memory.updates_together
    bounds = Limits(
        memory_bytes=limits[position],
        lost=energy_budget(model),
        gpu_s=gpu_seconds_limit(model),
        step_s=INFINITE if goal.undisturbed_limit_s is None else goal.undisturbed_limit_s,
        devices=model.world_size,
        economical=goal.objective == "gpu_seconds",
    )
    made = rows(
        model.micro_batches, problem.schedule, together=together, hosts=model.hosts_take_time
    )
    return Lagrangian(table, made, bounds)


def _simple_plans(problem: Problem, model: CostModel) -> Iterator[Decisions]:
    """Plain data parallelism, and bursts where ranks may idle."""
    yield model.baseline
    if problem.capability.idle_positions and len(model.baseline) <= FEW_UNITS:
        yield from dict.fromkeys(greedy(model, limit) for limit in LIMITS)


def _begins(problem: Problem) -> bool:
    """Whether a simple plan keeps all limits: then a search begins with it."""
    return any(
        all(within_unit_limit(model, k, option) for k, option in enumerate(decisions))
        and choice(model, decisions, problem.schedule).feasible
        for model in problem.cost_models()
        for decisions in _simple_plans(problem, model)
    )


# -- limits on device-seconds and time -------------------------------------------------------------


class LeastUse(NamedTuple):
    """What was found without the limit ``what``: the choice that needs least of it; the bound on
    the objective, and what it proves that any plan needs of the limit; a limit that is enough; the
    decisions to begin with by micro-batches and slice size; and whether the bound shows that no
    plan keeps the limit that is asked."""

    what: str
    choice: Choice | None
    bound: float
    proved_least: float
    enough: float
    starts: dict[tuple[int, int], Decisions]
    hopeless: bool

    def kept(self, problem: Problem) -> bool:
        return self.enough <= float(getattr(problem.goal, self.what))

    @property
    def proved(self) -> bool:
        """Whether nothing much less than ``enough`` would do."""
        return self.proved_least >= self.enough * (1 - CLOSE)


def limit_of(problem: Problem) -> str | None:
    """The limit that is looked at first: on device-seconds, else on time."""
    return next((what for what in LIFTED if getattr(problem.goal, what) is not None), None)


def least_use(problem: Problem, what: str, deadline: float) -> LeastUse:
    """The plans that need the least of ``what``; ends with the first that keeps it."""
    free = lifted(problem, what)
    found = _least_use_from(None, problem, free, what, deadline)
    if found.hopeless or found.choice is None or found.kept(problem) or what == "time_limit_s":
        return found
    # All plans passed the limit and none has proved that it must be: the search begins once more,
    # with the quickest plan.
    quick = replace(free, goal=msgspec.structs.replace(free.goal, objective="time"))
    start = search_part(quick, next(quick.cost_models()), deadline, INFINITE).choice
    if start is None:
        return found
    again = _least_use_from(start.decisions, problem, free, what, deadline)
    if again.choice is None or again.choice.objective_s >= found.choice.objective_s:
        return found
    proved = max(found.proved_least, again.proved_least)
    return again._replace(bound=max(found.bound, again.bound), proved_least=proved)


def _least_use_from(
    start: Decisions | None, problem: Problem, free: Problem, what: str, deadline: float
) -> LeastUse:
    """One search for each model of the problem that is ``free`` of the limit, each of which begins
    with the best plan so far."""
    best: Choice | None = None
    bound, hopeless = INFINITE, True
    starts: dict[tuple[int, int], Decisions] = {}
    for model in free.cost_models():
        if what == "time_limit_s":
            target = problem.goal.undisturbed_limit_s or 0.0
        else:
            target = (problem.goal.amplification_limit or 0.0) * single_device_batch_s(model)
        begin = start if best is None else best.decisions
        # Gradients that add up over micro-batches cannot be released early, and the like: what one
        # model's units may have another's may not.
        if begin is not None and not all_may_have(model, begin, problem.capability):
            begin = None
        found = search_part(free, model, deadline, INFINITE, start=begin, target=target)
        bound = min(bound, found.bound)
        hopeless = hopeless and found.bound > target * (1 + ROUNDING)
        if found.choice is not None:
            starts[_key(model)] = found.choice.decisions
            best = _better(best, found.choice)
    enough, least = INFINITE, 0.0
    if best is not None:
        enough = needed(what, best)
        # What a plan needs of the limit is in proportion to its objective.
        least = enough * bound / best.objective_s if best.objective_s else 0.0
    return LeastUse(what, best, bound, least, enough, starts, hopeless)


def tightened(problem: Problem, known: LeastUse, end: float, deadline: float) -> LeastUse:
    """What is known, with a lower limit under which a plan is found: halfway between what is asked
    or proved and what is known to do, until a share of ``STEP`` is left, or ``end``."""
    if known.choice is None:
        return known
    low = max(float(getattr(problem.goal, known.what)), known.proved_least)
    while known.enough > low * (1 + STEP) and time.perf_counter() < end:
        middle = rounded_up((low + known.enough) / 2)
        if _solves(with_limit(problem, known.what, middle), deadline):
            known = known._replace(enough=middle)
        else:
            low = middle
    return known


def _solves(problem: Problem, deadline: float) -> bool:
    """Whether a plan is found for another problem."""
    now = time.perf_counter()
    left_s = max(deadline - now, LAST_S)
    what = limit_of(problem)
    starts: Mapping[tuple[int, int], Decisions] = {}
    if what is not None and not _begins(problem):
        known = least_use(problem, what, now + left_s / 2)
        if known.hopeless:
            return False
        starts = known.starts
    return _best(problem, now + left_s, starts).choice is not None


class LagrangianEvidence:
    """What the Lagrangian tells of problems without a plan; see ``infeasible.Evidence``. ``known``
    is what a search that has been made found out about the limit that is looked at first."""

    proves = False

    def __init__(self, known: LeastUse | None) -> None:
        self.known = known

    def closest(self, problems: Sequence[Problem], what: str, deadline: float) -> Closest | None:
        if what != "memory_limit_bytes":
            return self._closest_to(problems, what, deadline)
        asked = limit_of(problems[-1])
        if asked is not None and self._closest_to(problems, asked, deadline) is not None:
            return None
        free = dict.fromkeys(DEVICE_LIMITS)
        if _limited(problems[-1]) and any(
            splits.feasible(replace(p, goal=msgspec.structs.replace(p.goal, **free), progress=None))
            for p in problems
        ):
            return None
        # Of memory the Lagrangian knows no more than the heuristic does.
        return Heuristic().closest(problems, what, deadline)

    def fits(self, problem: Problem, deadline: float) -> bool:
        return _solves(problem, deadline) if _limited(problem) else splits.feasible(problem)

    def _closest_to(
        self, problems: Sequence[Problem], what: str, deadline: float
    ) -> Closest | None:
        found: list[LeastUse] = []
        for problem in problems:
            known = self.known
            if known is None or known.what != what:
                now = time.perf_counter()
                known = least_use(problem, what, now + max((deadline - now) / 2, LAST_S))
                end = min(deadline, time.perf_counter() + TIGHTEN_S)
                known = tightened(problem, known, end, deadline)
            found.append(known)
        if len(problems) == 1:
            self.known = found[0]
        best = min(found, key=lambda use: use.enough)
        if best.choice is None:
            return None
        least = min(use.proved_least for use in found)
        return Closest(best.choice, best.enough, best._replace(proved_least=least).proved)


def _limited(problem: Problem) -> bool:
    return any(getattr(problem.goal, what) is not None for what in DEVICE_LIMITS)
