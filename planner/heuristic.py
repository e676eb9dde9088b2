"""The heuristic as a solver: GHP's groups and split points, improved and simulated; no proof."""

from __future__ import annotations

import time

from .evaluate import make_plan, provenance_of
from .infeasible import explain_infeasible
from .solver import Problem, Result
from .splits import Found, placed, search


class Heuristic:
    """The solver of that name: milliseconds, no proof."""

    name = "heuristic"

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        start = time.perf_counter()
        problem = placed(problem)
        found = search(problem, time_limit_s)
        if found.tightest.over_bytes > 0:
            return self._infeasible(problem, found, start)
        model, decisions = found.evaluation.model, found.evaluation.decisions
        seconds = time.perf_counter() - start
        plan = make_plan(
            problem.profile,
            problem.cluster,
            problem.goal,
            decisions,
            model.micro_batches,
            model.placement,
            provenance=provenance_of(
                problem.profile, problem.cluster, self.name, "heuristic", solve_s=seconds
            ),
            schedule=problem.schedule,
            bucket_bytes=problem.bucket_bytes,
            executor=problem.executor or problem.capability,
        )
        step = plan.prediction.step_s
        return Result(self.name, "heuristic", step, None, None, plan, decisions, seconds)

    def _infeasible(self, problem: Problem, found: Found, start: float) -> Result:
        why = explain_infeasible(problem, found)
        seconds = time.perf_counter() - start
        return Result(self.name, "infeasible", None, None, None, None, None, seconds, why)
