"""The small linear program that sets the weights: which mixture of plans found so far is best.

    minimise    T + penalty · v
    over        w_i ≥ 0 with Σ w_i = 1 (a mixture of the plans i), v ≥ 0
    such that   Σ w_i · row_r(i) ≤ T                for every row r of seconds
                Σ w_i · row_r(i) ≤ limit · (1 + v)  for every row r of bytes

Its optimal duals are weights on the rows: those of seconds add up to 1. For any such weights the
cheapest plan at their prices is a lower bound (Lagrange), and, if it is new, a plan that the next
mixture can use: column generation after Dantzig and Wolfe, 1960. Of the thousands of rows few ever
bind: rows enter when a mixture violates them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from .rows import Matrix, Values
from .step import Vector

Mask = npt.NDArray[np.bool_]

PENALTY = 20.0
"""Price of going over the memory limit by all of it, in steps."""
ROUNDS = 12
TOLERANCE = 1e-7


class Weights(NamedTuple):
    """Weights on the rows, shaped as ``rows.Values``: seconds per second, seconds per byte."""

    tracks: Matrix
    totals: Vector

    def mixed(self, other: Weights, share: float) -> Weights:
        """``share`` of these and the rest of the others."""
        return Weights(
            share * self.tracks + (1 - share) * other.tracks,
            share * self.totals + (1 - share) * other.totals,
        )


class Mixture(NamedTuple):
    """The best mixture: the share of each plan, its seconds, the share that it is over the memory
    limit, and the weights that prove that no mixture of these plans is better."""

    shares: Vector
    step_s: float
    over: float
    weights: Weights


class Master:
    """The plans found so far and the rows that have mattered."""

    def __init__(self, timed: int, limit_bytes: float) -> None:
        self.timed, self.limit = timed, max(limit_bytes, 1.0)
        self.plans: list[Vector] = []
        self.shape = (0, 0)
        self.active: list[int] = []
        self.scale = 1.0

    def add(self, plan: Values) -> None:
        """Adds a plan and the rows in which it is largest."""
        if not self.plans:
            self.scale = max(plan.step_s(self.timed), 1e-12)
        self.shape = plan.tracks.shape
        flat = self._scaled(plan)
        self.plans.append(flat)
        self._activate(flat)

    def _scaled(self, plan: Values) -> Vector:
        """All rows in one vector, seconds over the first plan's step, bytes over the limit."""
        unit = np.where(self._seconds_rows(), self.scale, self.limit)
        flat: Vector = np.concatenate([plan.tracks.ravel(), plan.totals]) / unit
        return flat

    def _seconds_rows(self) -> Mask:
        """Which rows are seconds."""
        tracks = np.zeros(self.shape, dtype=bool)
        tracks[: self.timed] = True
        mask: Mask = np.concatenate([tracks.ravel(), np.array([True, False])])
        return mask

    def _families(self) -> list[slice]:
        """Rows of one kind: each track, each total."""
        units = self.shape[1]
        starts = [units * t for t in range(self.shape[0])]
        end = units * self.shape[0]
        return [slice(a, a + units) for a in starts] + [
            slice(end, end + 1),
            slice(end + 1, end + 2),
        ]

    def _activate(self, flat: Vector) -> bool:
        """Takes in the largest row of each family; says whether one of them is new."""
        known = set(self.active)
        for family in self._families():
            row = family.start + int(flat[family].argmax())
            if row not in known:
                self.active.append(row)
        return len(self.active) > len(known)

    def solve(self) -> Mixture:
        """The best mixture."""
        table = np.array(self.plans)
        seconds = self._seconds_rows()
        for _ in range(ROUNDS):
            shares, step, over, duals = self._program(table[:, self.active], seconds[self.active])
            rows = shares @ table
            worst = max(
                float((rows[seconds] - step).max()), float((rows[~seconds] - 1 - over).max())
            )
            if worst <= TOLERANCE or not self._activate(
                np.where(seconds, rows - step, rows - over)
            ):
                break
        return Mixture(shares, step * self.scale, over, self._weights(duals))

    def _program(self, table: Matrix, seconds: Mask) -> tuple[Vector, float, float, Vector]:
        """(shares, T, v, duals of the active rows) of the program over the active rows."""
        plans, count = table.shape
        rows = np.zeros((count, plans + 2))
        rows[:, :plans] = table.T
        rows[seconds, plans] = -1.0
        rows[~seconds, plans + 1] = -1.0
        cost = np.zeros(plans + 2)
        cost[plans:] = 1.0, PENALTY
        whole = np.append(np.ones(plans), [0.0, 0.0])[None]
        found = linprog(
            cost, rows, np.where(seconds, 0.0, 1.0), whole, [1.0], (0, None), method="highs"
        )
        assert found.status == 0 and found.x is not None, (
            f"the master program ended with: {found.message}"
        )
        shares = np.maximum(found.x[:plans], 0.0)
        duals = np.maximum(-found.ineqlin.marginals, 0.0)
        return shares / shares.sum(), float(found.x[plans]), float(found.x[plans + 1]), duals

    def _weights(self, duals: Vector) -> Weights:
        """Duals as weights on all rows, in seconds per second and per byte."""
        flat = np.zeros(self.shape[0] * self.shape[1] + 2)
        flat[self.active] = duals
        seconds = self._seconds_rows()
        flat[seconds] /= flat[seconds].sum()
        flat[~seconds] *= self.scale / self.limit
        end = self.shape[0] * self.shape[1]
        return Weights(flat[:end].reshape(self.shape), flat[end:])
