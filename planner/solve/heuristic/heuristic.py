"""The heuristic as a solver: GHP's groups and split points, improved and simulated; no proof."""

import time
from collections.abc import Sequence
from dataclasses import replace

from ...cost.budget import permitted
from ..answer import answer
from ..choice import Choice, choice
from ..problem import Infeasibility, Problem, Result
from .infeasible import Closest, explain, higher, is_least, lifted, needed, with_limit
from .segmented import fitting_in_segments
from .splits import FoundPlan, feasible, search

CLOSE = 0.01
"""The least bytes that do are looked for to this share."""
TRIES = 4
"""Values of a limit that are tried, from what the closest plan needs upwards."""


class Heuristic:
    """The solver of that name: milliseconds, no proof."""

    name = "heuristic"
    proves = False

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        problem = problem.placed()
        chosen = _best(problem, time_limit_s)
        if not _keeps_limits(chosen):
            rescued = fitting_in_segments(problem, self.name)
            if rescued is not None:
                return rescued
            why = self.explain([problem]) if problem.explains else None
            return Result.without_plan(self.name, why)
        return answer(problem, chosen, self.name, None, proved=False)

    def explain(self, problems: Sequence[Problem]) -> Infeasibility:
        """See ``solver.Solver``."""
        return explain([problem.placed() for problem in problems], self)

    def closest(self, problems: Sequence[Problem], what: str, deadline: float) -> Closest | None:
        """See ``infeasible.Evidence``."""
        if what != "memory_limit_bytes":
            return self._closest_to(problems, what, deadline)
        left_s = max(deadline - time.perf_counter(), 1e-3)
        found = [_found(replace(p, progress=None), left_s) for p in problems]
        i, best = min(enumerate(found), key=lambda pair: pair[1].score)
        if best.tightest.over_bytes <= 0:
            return None
        chosen, peak = _choice(best, problems[i]), max(best.evaluation.prediction.peak_bytes)
        if is_least(problems, chosen):
            return Closest(chosen, peak)
        return Closest(chosen, self._least_limit(problems, best.tightest.available_bytes, peak))

    def fits(self, problem: Problem, deadline: float) -> bool:
        """See ``infeasible.Evidence``."""
        return feasible(problem)

    def _least_limit(self, problems: Sequence[Problem], low: int, high: int) -> int | None:
        """The least memory limit with which a plan is found, between what there is and what the
        closest plan needs."""

        def good(limit: int) -> bool:
            return any(feasible(with_limit(p, "memory_limit_bytes", limit)) for p in problems)

        # The search may take another way under another limit, and miss what it found without.
        for _ in range(TRIES):
            if good(high):
                break
            high += high // 50
        else:
            return None
        while high - low > max(CLOSE * high, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if good(middle) else (middle, high)
        return high

    def _closest_to(
        self, problems: Sequence[Problem], what: str, deadline: float
    ) -> Closest | None:
        """The least of a limit on device-seconds or time with which a plan is found."""
        unit_limit = "unit_amplification_limit"
        if problems[-1].goal.unit_amplification_limit is not None:
            free = [with_limit(problem, unit_limit, None) for problem in problems]
            if any(_keeps_limits(_best(one)) for one in free):
                return None  # the limit on each unit is to blame
        free = [replace(lifted(problem, what), progress=None) for problem in problems]
        left_s = max(deadline - time.perf_counter(), 1e-3)
        # The quickest plan may need less than the one at which a search for the least has ended.
        free += [with_limit(problem, what, None) for problem in problems]
        every = [_best(problem, left_s) for problem in free]
        keeping = [each for each in every if _keeps_limits(each)]
        chosen = min(keeping or every, key=lambda each: needed(what, each))
        least = needed(what, chosen)
        # As in ``_least_limit``: under the limit the search may miss the plan that needs it.
        for _ in range(TRIES):
            limit = higher(what, least, proved=False).value
            if any(_keeps_limits(_best(with_limit(problem, what, limit))) for problem in problems):
                return Closest(chosen, least)
            least *= 1.02
        return None


def _found(problem: Problem, time_limit_s: float | None) -> FoundPlan:
    """The best plan over all slice sizes, each with its time limit."""
    sizes = (replace(problem, message_bytes=size) for size in problem.slice_bytes)
    return min((search(each, time_limit_s) for each in sizes), key=lambda each: each.score)


def _choice(found: FoundPlan, problem: Problem) -> Choice:
    done = found.evaluation
    return choice(done.model, done.decisions, problem.schedule)


def _best(problem: Problem, time_limit_s: float | None = None) -> Choice:
    return _choice(_found(problem, time_limit_s), problem)


def _keeps_limits(chosen: Choice) -> bool:
    """Whether all limits and pins are kept."""
    return chosen.feasible and permitted(chosen.model, chosen.decisions)
