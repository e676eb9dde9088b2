"""Solves an integer program with HiGHS in this process; says what was found and what was proved.

PuLP states the program and hands it to HiGHS (through highspy). The outcome is read from PuLP's
``sol_status``: its ``status`` says "Optimal" of a solver that ran out of time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import pulp
from highspy import SolutionStatus, cb

Outcome = Literal["optimal", "feasible", "infeasible", "unknown"]

# [Note: Tolerances of HiGHS]
# Rows are scaled so that their terms are of the order of 1 to 100: seconds so that the step of
# plain data parallelism is 100 (``cases.SCALE``), bytes so that the memory limit is 1.
# FEASIBLE is below HiGHS's default of 1e-7, because a plan that passes the memory limit by a share
# of 1e-7 passes it by thousands of bytes; HiGHS takes no less than 1e-10.
# INTEGRAL stays at HiGHS's default. With 1e-9 its presolve (1.15.1) called programs infeasible
# that are not, or a worse solution optimal (4 of 416 random programs). So a binary may be off by a
# millionth, and a plan may still pass a limit by rounding: ``solve.Search`` judges every solution
# by the cost model, and excludes one that does (``solve.CUTS``).
# GAP is absolute and the relative gap 0: the default of 1e-4 would call a plan optimal that is a
# hundredth of a percent above the best.
FEASIBLE = 1e-9
INTEGRAL = 1e-6
GAP = 1e-8

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


def run(
    problem: pulp.LpProblem,
    seconds: float,
    interruption: Interruption,
    progress: Callable[[float], None] = lambda gap: None,
) -> Solved:
    """Solves for no longer than ``seconds``; calls ``progress`` with the current relative gap."""
    if seconds <= 0 or interruption.set:
        return Solved("unknown", None, float("-inf"))

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
    value, bound = float(info.objective_function_value), float(info.mip_dual_bound)
    if found == "infeasible":
        return Solved(found, None, float("inf"))
    if found == "optimal":
        return Solved(found, value, min(value, bound))
    # Without a solution HiGHS gives its infinity (1e30) as the value.
    if value >= 1e29 or info.primal_solution_status != SolutionStatus.kSolutionStatusFeasible:
        return Solved("unknown", None, bound)
    return Solved("feasible", value, bound)


def _outcome(problem: pulp.LpProblem) -> Outcome:
    return {
        pulp.LpSolutionOptimal: "optimal",
        pulp.LpSolutionIntegerFeasible: "feasible",
        pulp.LpSolutionInfeasible: "infeasible",
    }.get(problem.sol_status, "unknown")  # type: ignore[return-value]
