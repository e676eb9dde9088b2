"""Limits on device-seconds and time in the search over many units: a plan that keeps them where one
is known, else the least value that would do.

Weights on rows and rounding may miss the few plans that a tight limit leaves. So what the limit
bounds is made small first, without the limit: that search ends with the first plan that keeps it,
which is then one to begin with, or with the least that any plan needs and a bound on that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from ...cost.budget import single_device_batch_s
from ...cost.cost import CostModel
from ...schema.options import Decisions
from ..answer import Choice
from ..choices import all_may_have
from ..heuristic.heuristic import Heuristic
from ..heuristic.infeasible import (
    DEVICE_LIMITS,
    LIFTED,
    Closest,
    lifted,
    needed,
    rounded_up,
    with_limit,
)
from ..heuristic.splits import feasible
from ..problem import Problem

STEP = 0.02
"""To such a share the least that is found is looked for where nothing is proved."""
TIGHTEN_S = 5.0
LAST_S = 2.0
"""Seconds that each question may take which is asked when the time is over."""
CLOSE = 0.015
"""A value that is named is called the least where nothing this share below it would do."""
ROUNDING = 1e-6


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
        """Whether the best choice keeps the problem's limit."""
        return self.enough <= float(getattr(problem.goal, self.what))

    @property
    def proved(self) -> bool:
        """Whether nothing much less than ``enough`` would do."""
        return self.proved_least >= self.enough * (1 - CLOSE)


Part = Callable[[Problem, CostModel, float, float, Decisions | None], tuple[Choice | None, float]]
"""Searches one model of a problem until a time, or until its objective is at most a target, from a
plan on if there is one: the best choice and the bound."""


def key_of(model: CostModel) -> tuple[int, int]:
    """Which of a problem's models it is."""
    return model.micro_batches, model.message_bytes


def least_use(problem: Problem, what: str, deadline: float, part: Part) -> LeastUse:
    """The plans that need the least of ``what``; ends with the first that keeps it. Each search
    begins with the best plan so far; where all of them passed the limit and none has proved that
    it must be, they begin once more with the quickest plan."""
    free = lifted(problem, what)
    found = _pass(problem, free, what, deadline, part, None)
    if found.hopeless or found.choice is None or found.kept(problem) or what == "time_limit_s":
        return found
    quick = replace(free, goal=msgspec.structs.replace(free.goal, objective="time"))
    start, _ = part(quick, next(quick.cost_models()), deadline, -1.0, None)
    if start is None:
        return found
    again = _pass(problem, free, what, deadline, part, start.decisions)
    if again.choice is None or again.choice.objective_s >= found.choice.objective_s:
        return found
    proved = max(found.proved_least, again.proved_least)
    return again._replace(bound=max(found.bound, again.bound), proved_least=proved)


def _pass(
    problem: Problem,
    free: Problem,
    what: str,
    deadline: float,
    part: Part,
    start: Decisions | None,
) -> LeastUse:
    best: Choice | None = None
    bound, hopeless = float("inf"), True
    starts: dict[tuple[int, int], Decisions] = {}
    for model in free.cost_models():
        target = _target(problem, what, model)
        begin = _within(model, free, start if best is None else best.decisions)
        found, proved = part(free, model, deadline, target, begin)
        bound, hopeless = min(bound, proved), hopeless and proved > target * (1 + ROUNDING)
        if found is None or not found.feasible:
            continue
        starts[key_of(model)] = found.decisions
        if best is None or found.objective_s < best.objective_s:
            best = found
    least = 0.0
    if best is not None and best.objective_s:  # they are in proportion
        least = needed(what, best) * bound / best.objective_s
    enough = float("inf") if best is None else needed(what, best)
    return LeastUse(what, best, bound, least, enough, starts, hopeless)


def _within(model: CostModel, problem: Problem, decisions: Decisions | None) -> Decisions | None:
    """The decisions where the model's units may have them: gradients that add up over micro-batches
    cannot be released early."""
    if decisions is None or not all_may_have(model, decisions, problem.capability):
        return None
    return decisions


def tightened(
    problem: Problem, known: LeastUse, end: float, solves: Callable[[Problem], bool]
) -> LeastUse:
    """What is known, with a lower limit under which ``solves`` finds a plan: halfway between what
    is asked or proved and what is known to do, until a share of ``STEP`` is left, or ``end``."""
    if known.choice is None:
        return known
    low = max(float(getattr(problem.goal, known.what)), known.proved_least)
    while known.enough > low * (1 + STEP) and time.perf_counter() < end:
        middle = rounded_up((low + known.enough) / 2)
        if solves(with_limit(problem, known.what, middle)):
            known = known._replace(enough=middle)
        else:
            low = middle
    return known


def _target(problem: Problem, what: str, model: CostModel) -> float:
    """The objective of the lifted problem at which the limit is kept."""
    if what == "time_limit_s":
        return problem.goal.undisturbed_limit_s or 0.0
    limited = problem.goal.amplification_limit or 0.0
    return limited * single_device_batch_s(model)


def limit_of(problem: Problem) -> str | None:
    """The limit that is looked at first: on device-seconds, else on time."""
    return next((what for what in LIFTED if getattr(problem.goal, what) is not None), None)


class LagrangianEvidence:
    """What the Lagrangian tells of problems without a plan; see ``infeasible.Evidence``.

    ``search`` finds the plans that need least of a limit until a time, ``solves`` says whether a
    problem has a plan, and ``known`` is what a search that has been made found out about the limit
    that is looked at first. Of memory it knows no more than the heuristic does.
    """

    proves = False

    def __init__(
        self,
        search: Callable[[Problem, str, float], LeastUse],
        solves: Callable[[Problem, float], bool],
        known: LeastUse | None = None,
    ) -> None:
        self.search, self.solves, self.known = search, solves, known

    def closest(self, problems: Sequence[Problem], what: str, deadline: float) -> Closest | None:
        """The plan that needs the least of ``what`` and keeps all other limits."""
        if what != "memory_limit_bytes":
            return self._closest_to(problems, what, deadline)
        asked = limit_of(problems[-1])
        if asked is not None and self._closest_to(problems, asked, deadline) is not None:
            return None
        if _limited(problems[-1]) and any(feasible(_without_limits(p)) for p in problems):
            return None
        return Heuristic().closest(problems, what, deadline)

    def fits(self, problem: Problem, deadline: float) -> bool:
        """Whether a plan is found."""
        return self.solves(problem, deadline) if _limited(problem) else feasible(problem)

    def _closest_to(
        self, problems: Sequence[Problem], what: str, deadline: float
    ) -> Closest | None:
        found: list[LeastUse] = []
        for problem in problems:
            known = self.known
            if known is None or known.what != what:
                now = time.perf_counter()
                known = self.search(problem, what, now + max((deadline - now) / 2, LAST_S))
                end = min(deadline, time.perf_counter() + TIGHTEN_S)
                known = tightened(problem, known, end, lambda one: self.solves(one, deadline))
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


def _without_limits(problem: Problem) -> Problem:
    goal = msgspec.structs.replace(problem.goal, **dict.fromkeys(DEVICE_LIMITS))
    return replace(problem, goal=goal, progress=None)
