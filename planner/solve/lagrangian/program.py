"""A mixed integer program as arrays, solved by HiGHS through highspy.

scipy has a copy of HiGHS too. This one ends as soon as a value is good enough, and never writes to
stdout, which scipy's (1.17) does on occasion, whatever it is told.
"""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np
from scipy.sparse import csr_array

from ...cost.step_time import Vector


class Program(NamedTuple):
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
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("objective_target", target)
        solver.passModel(self._model())
        solver.run()
        if (
            solver.getInfo().primal_solution_status
            != highspy.SolutionStatus.kSolutionStatusFeasible
        ):
            return None
        return np.array(solver.getSolution().col_value)

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
