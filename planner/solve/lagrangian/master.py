"""The small linear program that sets the weights: which mixture of plans found so far is best.

    minimise    T + penalty · v, or in place of T the device-seconds W·T - Σ w_i · idle(i)
    over        w_i ≥ 0 with Σ w_i = 1 (a mixture of the plans i), v ≥ 0
    such that   Σ w_i · row_r(i) ≤ T                     for every row r of seconds
                Σ w_i · row_r(i) ≤ limit_r · (1 + v)     for every row r of bytes, and energy lost
                W·T - Σ w_i · idle(i) ≤ budget · (1 + v) device-seconds, where they are limited
                T ≤ limit · (1 + v)                      seconds, where they are limited

Its optimal duals are weights on the rows. For any such weights the cheapest plan at their prices
is a lower bound (Lagrange), and, if it is new, a plan that the next mixture can use: column
generation after Dantzig and Wolfe, 1960. Of the thousands of rows few ever bind: rows enter when a
mixture violates them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from ...cost.step_time import Vector
from ...memory.rows import ALWAYS, LOST, UPDATE, Matrix, Values
from .array_program import ArrayProgram
from .judging import INFINITE, Limits

Mask = npt.NDArray[np.bool_]

PENALTY = 50.0
"""Price of going over a limit by all of it, in steps."""
ROUNDS = 12
TOLERANCE = 1e-7


class Weights(NamedTuple):
    """Weights on the rows, shaped as ``rows.Values``; ``gpu`` on the limit of device-seconds and
    ``step`` on that of seconds."""

    tracks: Matrix
    totals: Vector
    gpu: float = 0.0
    step: float = 0.0

    def mixed(self, other: Weights, share: float) -> Weights:
        """``share`` of these and the rest of the others."""
        rest = 1.0 - share
        return Weights(
            share * self.tracks + rest * other.tracks,
            share * self.totals + rest * other.totals,
            share * self.gpu + rest * other.gpu,
            share * self.step + rest * other.step,
        )

    def charge(self, limits: Limits, timed: int) -> float:
        """What keeping to the limits is worth: each weight times its limit."""
        memory = float(self.tracks[timed:].sum() + self.totals[UPDATE])
        charged = memory * limits.memory_bytes + float(self.totals[LOST]) * limits.lost
        for weight, limit in ((self.gpu, limits.gpu_s), (self.step, limits.step_s)):
            charged += weight * limit if weight else 0.0
        return charged


class Mixture(NamedTuple):
    """The best mixture: the share of each plan, its seconds, the share that it is over its limits,
    and the weights that prove that no mixture of these plans is better."""

    shares: Vector
    step_s: float
    over: float
    weights: Weights


class Master:
    """The plans found so far and the rows that have mattered."""

    def __init__(self, timed: int, limits: Limits) -> None:
        self.timed, self.limits = timed, limits
        self.plans: list[Vector] = []
        self.idle: list[float] = []
        self.shape = (0, 0)
        self.active: list[int] = []
        self.scale = 1.0

    def add(self, plan: Values, idle_s: float) -> None:
        """Adds a plan and the rows in which it is largest."""
        self.shape = plan.tracks.shape
        flat = np.concatenate([plan.tracks.ravel(), plan.totals])
        if not self.plans:
            self.scale = max(float(flat[self._seconds()].max()), 1e-12)
        self.plans.append(flat / self._unit())
        self.idle.append(idle_s / (self.limits.devices * self.scale))
        self._activate(self.plans[-1])

    def _seconds(self) -> Mask:
        """Which rows are seconds."""
        tracks = np.zeros(self.shape, dtype=bool)
        tracks[: self.timed] = True
        totals = np.zeros(3, dtype=bool)
        totals[ALWAYS] = True
        return np.concatenate([tracks.ravel(), totals])

    def _unit(self) -> Vector:
        """What each row is counted in: the first plan's step, or the row's limit."""
        unit = np.where(self._seconds(), self.scale, max(self.limits.memory_bytes, 1.0))
        unit[len(unit) - 3 + LOST] = max(self.limits.lost, 1e-12)
        return unit

    def _families(self) -> list[slice]:
        """Rows of one kind: each track, each total."""
        units = self.shape[1]
        end = units * self.shape[0]
        tracks = [slice(a, a + units) for a in range(0, end, units)]
        return [*tracks, *(slice(i, i + 1) for i in range(end, end + 3))]

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
        table, seconds = np.array(self.plans), self._seconds()
        for _ in range(ROUNDS):
            shares, step, over, duals = self._program(table[:, self.active], seconds[self.active])
            rows = shares @ table
            beyond = np.where(seconds, rows - step, rows - 1 - over)
            if beyond.max() <= TOLERANCE or not self._activate(beyond):
                break
        return Mixture(shares, step * self.scale, over, self._weights(duals))

    def _program(self, table: Matrix, seconds: Mask) -> tuple[Vector, float, float, Vector]:
        """(shares, T, v, duals: of the active rows, of device-seconds, of seconds)."""
        plans, count = table.shape
        idle, limits = np.array(self.idle), self.limits
        rows = np.zeros((count + 3, plans + 2))
        rows[:count, :plans] = table.T
        rows[:count, plans] = np.where(seconds, -1.0, 0.0)
        rows[:count, plans + 1] = np.where(seconds, 0.0, -1.0)
        rows[count + 2, :plans] = 1.0
        right = np.append(np.where(seconds, 0.0, 1.0), [0.0, 0.0, 1.0])
        self._limit(rows[count], np.append(-idle, 1.0), limits.gpu_s / limits.devices, right, count)
        only_step = np.append(np.zeros(plans), 1.0)
        self._limit(rows[count + 1], only_step, limits.step_s, right, count + 1)
        cost = np.append(-idle if limits.economical else 0 * idle, [1.0, PENALTY])
        lower = np.append(np.full(count + 2, -np.inf), 1.0)
        program = ArrayProgram(
            cost, csr_array(rows), lower, right, np.full(plans + 2, np.inf), whole=0
        )
        found, prices = program.relaxed()
        shares, duals = np.maximum(found[:plans], 0.0), np.maximum(-prices[:-1], 0.0)
        return shares / shares.sum(), float(found[plans]), float(found[plans + 1]), duals

    def _limit(
        self, row: Vector, sides: Vector, limit_s: float, right: Vector, number: int
    ) -> None:
        """Writes a limit in seconds as a row, one that says nothing where there is none."""
        if limit_s < INFINITE:
            scaled = limit_s / self.scale
            row[:-1], row[-1], right[number] = sides, -scaled, scaled

    def _weights(self, duals: Vector) -> Weights:
        """Duals in the units of the objective for each unit of a row."""
        limits, per = self.limits, 1.0
        if limits.economical:
            per = float(limits.devices)
        flat = np.zeros(self.shape[0] * self.shape[1] + 3)
        flat[self.active] = duals[:-2]
        gpu, step = (float(d) for d in duals[-2:])
        seconds = self._seconds()
        # rounding in the duals must not leave weights that prove nothing
        flat[seconds] *= (1.0 + gpu + step) / flat[seconds].sum()
        flat *= per * self.scale / self._unit()
        end = self.shape[0] * self.shape[1]
        return Weights(
            flat[:end].reshape(self.shape), flat[end:], gpu * per / limits.devices, step * per
        )
