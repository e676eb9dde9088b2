"""Linear and integer programs, solved by HiGHS in this process: PuLP's, and programs of arrays.

Of PuLP's programs it says what was found and what was proved. The outcome is read from PuLP's
``sol_status``: its ``status`` says "Optimal" of a solver that ran out of time.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import highspy
import numpy as np
import pulp
from highspy import cb
from scipy.sparse import csr_array

from ..cost.step_time import Vector

Outcome = Literal["optimal", "feasible", "infeasible", "unknown"]

# [Note: Two ways to HiGHS]
# Programs that people should be able to read are stated in PuLP (``ilp/integer``). Those of the
# Lagrangian are put together from tables of figures, so they go to HiGHS as arrays: PuLP would make
# an object of each unit's coefficient in each row. scipy has a copy of HiGHS too; highspy can end
# as soon as a value is good enough, and never writes to stdout, which scipy's (1.17) does on
# occasion.
#
# [Note: Tolerances of HiGHS]
# Rows are scaled so that their terms are of the order of 1 to 100: seconds so that the step of
# plain data parallelism is 100 (``ilp/integer.SCALE``), bytes so that the memory limit is 1.
# FEASIBLE is below HiGHS's default of 1e-7, because a plan that passes the memory limit by a share
# of 1e-7 passes it by thousands of bytes; HiGHS takes no less than 1e-10.
# INTEGRAL stays at HiGHS's default. With 1e-9 its presolve (1.15.1) called programs infeasible
# that are not, or a worse solution optimal (4 of 416 random programs). So a binary may be off by a
# millionth, and a plan may still pass a limit by rounding: ``ilp/solver`` judges every solution by
# the cost model, and excludes one that does (``CUTS``).
# GAP is absolute and the relative gap 0: the default of 1e-4 would call a plan optimal that is a
# hundredth of a percent above the best.
FEASIBLE = 1e-9
INTEGRAL = 1e-6
GAP = 1e-8
# A bound that differs from the value by this share of it is equal but for rounding.
ROUNDING = 1e-7
# Presolve rule that is left out: with it HiGHS 1.15.1 was seen to go round without end on a program
# of 64 columns whose step time had a limit, and no time limit stopped it.
PROBING = 1 << 12
# Heuristics that take longer than they save: 17 programs of reports of what does not fit, on memory
# in five networks, take 3.4 s together without the first two and 5.9 with; the three of VGG-16 on
# eight ranks in 512 MiB take 10 s without all four, and 26 with. The others find solutions, too. An
# older HiGHS does not know these options, and goes on.
NO_HEURISTICS = {
    f"mip_heuristic_run_{name}": False
    for name in ("root_reduced_cost", "feasibility_jump", "rins", "rens")
}


# -- programs stated in PuLP -----------------------------------------------------------------------


class Solved(NamedTuple):
    """What is known of a program: ``value`` of the solution that its variables hold (None without
    one) and ``bound``, both of the objective; and how many ``iterations`` of the simplex that took,
    by which searches are held to the same work on every machine."""

    outcome: Outcome
    value: float | None
    bound: float
    iterations: int = 0


class Interruption:
    """Set by Ctrl-C while a program is being solved, and looked at by the solver's callback."""

    def __init__(self) -> None:
        self.set = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes Ctrl-C as a wish to stop."""

        def stop(*_: object) -> None:
            self.set = True

        # Python takes signals in the main thread only, and lets no other set a handler.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def run(
    problem: pulp.LpProblem,
    seconds: float,
    interruption: Interruption,
    progress: Callable[[float], None] = lambda gap: None,
    *,
    enough: float = 0.0,
    heuristics: bool = False,
) -> Solved:
    """Solves for no longer than ``seconds``, or until the relative gap is ``enough``; calls
    ``progress`` with the current one. Without ``heuristics`` it leaves out those of
    ``NO_HEURISTICS``."""
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
        gapRel=enough,
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
        **({} if heuristics else NO_HEURISTICS),
    )
    problem.solve(solver)
    info = problem.solverModel.getInfo()
    value, bound = float(info.objective_function_value), float(info.mip_dual_bound)
    iterations = max(info.simplex_iteration_count, 0)
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return Solved("infeasible", None, float("inf"), iterations)
    if problem.sol_status == pulp.LpSolutionOptimal:
        # HiGHS calls optimal what is near enough, too. The bound may pass the value by GAP.
        if value - bound > max(GAP, ROUNDING * abs(value)):
            return Solved("feasible", value, bound, iterations)
        return Solved("optimal", value, min(value, bound), iterations)
    # Without a solution HiGHS gives its infinity (1e30) as the value.
    known = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if value >= 1e29 or not known:
        return Solved("unknown", None, bound, iterations)
    return Solved("feasible", value, bound, iterations)


# -- programs of arrays ----------------------------------------------------------------------------


class ArrayProgram(NamedTuple):
    """Minimise cost · x for lower ≤ table · x ≤ upper and 0 ≤ x ≤ top; the first ``whole``
    variables are integers."""

    cost: Vector
    table: csr_array
    lower: Vector
    upper: Vector
    top: Vector
    whole: int

    def solve(self, seconds: float, gap: float, target: float) -> Vector | None:
        """A solution within that relative gap of the best, or at most ``target``, or the best that
        was found in that time; None where none was."""
        solver = self._run(
            time_limit=seconds,
            mip_rel_gap=gap,
            objective_target=target,
            # A second of a plan for a thousand units, which is the same without it.
            mip_heuristic_run_feasibility_jump=False,
        )
        status = solver.getInfo().primal_solution_status
        if status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return np.array(solver.getSolution().col_value)

    def relaxed(self) -> tuple[Vector, Vector]:
        """The optimum of a program without integers, and the dual of each row."""
        solver = self._run()
        status = solver.getModelStatus()
        assert status == highspy.HighsModelStatus.kOptimal, f"the master program ended as {status}"
        found = solver.getSolution()
        return np.array(found.col_value), np.array(found.row_dual)

    def _run(self, **options: float) -> highspy.Highs:
        rows, columns = self.table.shape
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, rows
        model.col_cost_, model.col_lower_, model.col_upper_ = self.cost, np.zeros(columns), self.top
        model.row_lower_, model.row_upper_ = self.lower, self.upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = self.table.indptr
        model.a_matrix_.index_ = self.table.indices
        model.a_matrix_.value_ = self.table.data
        kinds = highspy.HighsVarType
        model.integrality_ = [
            kinds.kInteger if i < self.whole else kinds.kContinuous for i in range(columns)
        ]
        solver = highspy.Highs()
        for name, value in {"output_flag": False, "threads": 1, **options}.items():
            solver.setOptionValue(name, value)
        solver.passModel(model)
        solver.run()
        return solver
