"""The heuristic as a solver: GHP's groups and split points, improved and simulated; no proof."""

from __future__ import annotations

import time
from dataclasses import replace

from ...cost.budget import permitted
from ..answer import Choice, answer, choice
from ..problem import Problem, Result
from .infeasible import explain_infeasible
from .segmented import fitting_in_segments, less_in_segments
from .splits import Found, search


class Heuristic:
    """The solver of that name: milliseconds, no proof."""

    name = "heuristic"

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        start = time.perf_counter()
        problem = problem.placed()
        best, chosen = self._best(problem, time_limit_s)
        if not (chosen.feasible and permitted(chosen.model, chosen.decisions)):
            rescued = fitting_in_segments(problem, self.name, start)
            if rescued is not None:
                return rescued
            why = less_in_segments(problem, explain_infeasible(problem, best, self._solves))
            seconds = time.perf_counter() - start
            return Result.without_plan(self.name, why, seconds)
        seconds = time.perf_counter() - start
        return answer(problem, chosen, self.name, None, proved=False, seconds=seconds)

    def _best(self, problem: Problem, time_limit_s: float | None) -> tuple[Found, Choice]:
        found = [
            search(replace(problem, bucket_bytes=size), time_limit_s)
            for size in problem.slice_bytes
        ]
        best = min(found, key=lambda each: each.score)
        return best, _choice(best, problem)

    def _solves(self, problem: Problem) -> bool:
        """Whether it finds a plan for another problem."""
        _, chosen = self._best(problem, None)
        return chosen.feasible and permitted(chosen.model, chosen.decisions)


def _choice(found: Found, problem: Problem) -> Choice:
    done = found.evaluation
    return choice(done.model, done.decisions, problem.schedule)
