"""Linear and mixed integer programs as arrays, solved by HiGHS."""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np
from scipy.sparse import csr_array

from ...cost.step_time import Vector


# [Note: Two ways to HiGHS]
# Programs that people should be able to read are stated in PuLP (``ilp/integer``). Those here are
# put together from tables of figures, so they go to HiGHS as arrays: PuLP would make an object of
# each unit's coefficient in each row. scipy has a copy of HiGHS too; highspy can end as soon as a
# value is good enough, and never writes to stdout, which scipy's (1.17) does on occasion.
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
        solver = self._run(time_limit=seconds, mip_rel_gap=gap, objective_target=target)
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
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._model())
        solver.run()
        return solver

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        rows, columns = self.table.shape
        model.num_col_, model.num_row_ = columns, rows
        model.col_cost_, model.col_lower_, model.col_upper_ = self.cost, np.zeros(columns), self.top
        model.row_lower_, model.row_upper_ = self.lower, self.upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = self.table.indptr
        model.a_matrix_.index_ = self.table.indices
        model.a_matrix_.value_ = self.table.data
        kinds = [highspy.HighsVarType.kInteger] * self.whole
        kinds += [highspy.HighsVarType.kContinuous] * (columns - self.whole)
        model.integrality_ = kinds
        return model
