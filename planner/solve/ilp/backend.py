"""Running an integer program: HiGHS in this process, or CBC; what it found and what it proved.

PuLP says "Optimal" of a solver that ran out of time: only ``sol_status`` tells, and only HiGHS
tells the bound; where CBC stops early the relaxation's value stands in for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import pulp

Outcome = Literal["optimal", "feasible", "infeasible", "unknown"]
Backend = Literal["highs", "cbc"]
FEASIBLE = 1e-9
"""Tolerance on constraints, whose terms are of the order of 1 to 100."""
INTEGRAL = 1e-6
"""Tolerance on integers, HiGHS's own. With 1e-9 its presolve (1.15.1) called programs infeasible
that are not, or a worse solution optimal (4 of 416). What breaks a limit by rounding, the search
excludes."""
GAP = 1e-8
"""The objective is of the order of 100."""


PROBING = 1 << 12
"""Presolve rule that is left out: with it HiGHS 1.15.1 was seen to go round without end on a
program of 64 columns whose step time had a limit, and no time limit stopped it."""


class Solved(NamedTuple):
    """What is known of a program: ``value`` of the solution that its variables hold (None without
    one) and ``bound``, both of the objective."""

    outcome: Outcome
    value: float | None
    bound: float


class Interruption:
    """Set by Ctrl-C while a program is being solved, and looked at by the solver's callback."""

    def __init__(self) -> None:
        self.set = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes Ctrl-C as a wish to stop (in the main thread, where Python allows it)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop(self, *_: object) -> None:
        self.set = True


def available() -> Backend:
    """The solver that is there: HiGHS, else CBC."""
    return "highs" if pulp.HiGHS().available() else "cbc"


def run(
    problem: pulp.LpProblem,
    seconds: float,
    interruption: Interruption,
    progress: Callable[[float], None] = lambda gap: None,
    backend: Backend | None = None,
) -> Solved:
    """Solves for no longer than ``seconds``; ``progress`` hears the current relative gap."""
    if seconds <= 0 or interruption.set:
        return Solved("unknown", None, float("-inf"))
    if (backend or available()) == "cbc":
        return _cbc(problem, seconds)
    return _highs(problem, seconds, interruption, progress)


def _highs(
    problem: pulp.LpProblem,
    seconds: float,
    interruption: Interruption,
    progress: Callable[[float], None],
) -> Solved:
    from highspy import cb

    def watch(kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        if kind == cb.HighsCallbackType.kCallbackMipLogging:
            progress(float(out.mip_gap))
        elif interruption.set:
            into.user_interrupt = True

    solver = pulp.HiGHS(
        msg=False,
        threads=1,
        timeLimit=None if seconds == float("inf") else seconds,
        gapRel=0.0,
        gapAbs=GAP,
        callbackTuple=(watch, None),
        callbacksToActivate=[
            cb.HighsCallbackType.kCallbackMipLogging,
            cb.HighsCallbackType.kCallbackMipInterrupt,
            cb.HighsCallbackType.kCallbackSimplexInterrupt,
        ],
        mip_feasibility_tolerance=INTEGRAL,
        primal_feasibility_tolerance=FEASIBLE,
        presolve_rule_off=PROBING,
    )
    problem.solve(solver)
    found = _outcome(problem)
    info = problem.solverModel.getInfo()
    if found == "infeasible":
        return Solved(found, None, float("inf"))
    value = float(info.objective_function_value)
    if found == "optimal":
        return Solved(found, value, min(value, float(info.mip_dual_bound)))
    bound = float(info.mip_dual_bound)
    if value >= 1e29 or info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return Solved("unknown", None, bound)
    return Solved("feasible", value, bound)


def _outcome(problem: pulp.LpProblem) -> Outcome:
    """The outcome by ``sol_status``; ``status`` alone may say optimal of a search cut short."""
    return {
        pulp.LpSolutionOptimal: "optimal",
        pulp.LpSolutionIntegerFeasible: "feasible",
        pulp.LpSolutionInfeasible: "infeasible",
    }.get(problem.sol_status, "unknown")  # type: ignore[return-value]


def _cbc(problem: pulp.LpProblem, seconds: float) -> Solved:
    limit = None if seconds == float("inf") else seconds
    start = time.perf_counter()
    exact = {"gapRel": 0.0, "gapAbs": GAP, "options": [f"primalTolerance {FEASIBLE}"]}
    problem.solve(pulp.PULP_CBC_CMD(msg=False, threads=1, timeLimit=limit, **exact))
    found = _outcome(problem)
    if found == "infeasible":
        return Solved(found, None, float("inf"))
    value = None if found == "unknown" else float(pulp.value(problem.objective))
    if found == "optimal":
        assert value is not None
        return Solved(found, value, value)
    left = seconds - (time.perf_counter() - start)
    return Solved(found, value, _relaxed(problem, max(left, 1.0)))


def _relaxed(problem: pulp.LpProblem, seconds: float) -> float:
    """The least value with fractions allowed: a bound; the variables keep their values."""
    values = {v: v.varValue for v in problem.variables()}
    status = problem.sol_status
    problem.solve(pulp.PULP_CBC_CMD(msg=False, mip=False, timeLimit=seconds))
    proved = problem.sol_status == pulp.LpSolutionOptimal
    bound = float(pulp.value(problem.objective)) if proved else float("-inf")
    for variable, old in values.items():
        variable.varValue = old
    problem.sol_status = status
    return bound
