"""Limits on device-seconds and time in the search over many units: a plan that keeps them where one
is known, else the least value that would do.

Weights on rows and rounding may miss the few plans that a tight limit leaves. So what the limit
bounds is made small first, without the limit: that search ends with the first plan that keeps it,
which is then one to begin with, or with the least that any plan needs and a bound on that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..answer import Choice
from ..cost import CostModel
from ..enlarge import more_ranks
from ..exact.cases import models
from ..exact.unfit import DEVICE_LIMITS, explain_unproved, explain_with
from ..infeasible import explain_infeasible
from ..options import Decisions
from ..problem import Infeasibility, Problem, Relaxation
from ..remedies import LIFTED, alone_s, higher, higher_unit_limit, lifted, needed, with_limit
from ..splits import feasible
from ..splits import search as heuristic_search

CLOSE = 0.015
"""A value that is named is called the least where nothing this share below it would do."""
ROUNDING = 1e-6
HEURISTIC_S = 60.0


class Lean(NamedTuple):
    """What was found without the limit ``what``: the choice that needs least of it, the bound on
    that (in the objective's unit), the decisions to begin with by micro-batches and slice size, and
    whether the bound shows that no plan keeps the limit."""

    what: str
    choice: Choice | None
    bound: float
    starts: dict[tuple[int, int], Decisions]
    hopeless: bool

    @property
    def least(self) -> float:
        """What the best choice needs of the limit."""
        assert self.choice is not None
        return needed(self.what, self.choice.value, self.choice.model)

    def relaxation(self) -> Relaxation:
        """The value that would do."""
        assert self.choice is not None
        objective = self.choice.objective_s
        return higher(self.what, self.least, proved=self.bound >= objective * (1 - CLOSE))


Part = Callable[[Problem, CostModel, float, float], tuple[Choice | None, float]]
"""Searches one model of a problem until a time, or until its objective is at most a target: the
best choice and the bound."""


def key_of(model: CostModel) -> tuple[int, int]:
    """Which of a problem's models it is."""
    return model.micro_batches, model.bucket_bytes


def lean(problem: Problem, what: str, deadline: float, part: Part) -> Lean:
    """The plans that need the least of ``what``; ends with the first that keeps it."""
    free = lifted(problem, what)
    best, bound, starts, hopeless = None, float("inf"), {}, True
    for model in models(free):
        target = _target(problem, what, model)
        found, proved = part(free, model, deadline, target)
        bound, hopeless = min(bound, proved), hopeless and proved > target * (1 + ROUNDING)
        if found is None or not found.feasible:
            continue
        starts[key_of(model)] = found.decisions
        if best is None or found.objective_s < best.objective_s:
            best = found
    return Lean(what, best, bound, starts, hopeless)


def _target(problem: Problem, what: str, model: CostModel) -> float:
    """The objective of the lifted problem at which the limit is kept."""
    if what == "time_limit_s":
        return problem.goal.undisturbed_limit_s or 0.0
    limited = problem.goal.amplification_limit or 0.0
    return limited * alone_s(model)


def why_nothing(
    problem: Problem, known: Lean | None, deadline: float, solve: Callable[[Problem], bool]
) -> Infeasibility:
    """What is missing where no plan was found; ``known`` is what was found without one limit."""
    if known is not None and known.choice is not None:
        why = explain_with(problem, known.what, known.relaxation())
        larger = more_ranks(problem) if why.limit == "time_limit_s" else None
        return why._replace(enlargement=larger)  # more ranks never save device-seconds
    asked = [what for what in DEVICE_LIMITS if getattr(problem.goal, what) is not None]
    if "unit_amplification_limit" in asked:
        end = max(deadline, time.perf_counter() + 10.0)
        found = higher_unit_limit(problem, lambda one: list(models(one)), solve, end)
        if found is not None:
            return explain_with(problem, "unit_amplification_limit", found)
    free = problem
    for what in asked:
        free = with_limit(free, what, None)
    if asked and feasible(free):
        return explain_unproved(problem)
    return explain_infeasible(problem, heuristic_search(problem, HEURISTIC_S))


def limit_of(problem: Problem) -> str | None:
    """The limit that is looked at first: on device-seconds, else on time."""
    return next((what for what in LIFTED if getattr(problem.goal, what) is not None), None)
