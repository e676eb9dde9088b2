"""The programs of one problem: one for each number of micro-batches and each slice size."""

from __future__ import annotations

from typing import NamedTuple

from ...cost.cost import CostModel
from ..answer import choice
from ..choices import unit_options
from ..problem import Problem
from .classes import memory_classes
from .integer import Program
from .ledger import Ledger

SCALE = 100.0
"""The step of plain data parallelism is so many units of time."""


class Case(NamedTuple):
    """One number of micro-batches and slice size: its model, coefficients and unit of time."""

    model: CostModel
    ledger: Ledger
    time_unit_s: float

    def program(
        self, problem: Problem, *, excess: bool = False, limits_of: CostModel | None = None
    ) -> Program:
        """The integer program; with ``excess`` memory may be exceeded, by a variable share, and
        the limits are those of another model's goal."""
        classes = memory_classes(self.ledger, limits_of or self.model)
        return Program(self.ledger, classes, problem.schedule, self.time_unit_s, excess=excess)


def case(problem: Problem, model: CostModel) -> Case:
    """A model with the options that its units may have."""
    units = range(len(model.profile.units))
    options = [unit_options(model, k, problem.capability) for k in units]
    step_s = choice(model, model.baseline, problem.schedule).value.step_s
    return Case(model, Ledger(model, options), max(step_s, 1e-9) / SCALE)
