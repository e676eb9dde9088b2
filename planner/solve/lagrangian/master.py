"""The small linear program that sets the weights: which mixture of plans found so far is best.

    minimise    T + penalty · v, or in place of T the device-seconds W·T - Σ w_i · idle(i)
    over        w_i ≥ 0 with Σ w_i = 1 (a mixture of the plans i), v ≥ 0
    such that   Σ w_i · row_r(i) ≤ T                     for every row r of seconds
                Σ w_i · row_r(i) ≤ limit_r · (1 + v)     for every row r of bytes, and energy lost
                W·T - Σ w_i · idle(i) ≤ budget · (1 + v) device-seconds, where they are limited
                T ≤ limit · (1 + v)                      seconds, where they are limited

Its optimal duals are weights on the rows. For any such weights the cheapest plan at their prices
is a lower bound (Lagrange), and, if it is new, a plan that the next mixture can use: column
generation after Dantzig and Wolfe, 1960.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from ...cost.step_time import Vector
from ...memory.rows import ALWAYS, LOST, UPDATE, Matrix, Rows, Values
from ..highs import ArrayProgram
from .judging import INFINITE, Limits

# Price of going over a limit by all of it, in steps.
PENALTY = 50.0
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
            charged += weight * limit if weight else 0.0  # 0 · ∞ where there is no limit
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

    def __init__(self, rows: Rows, units: int, limits: Limits) -> None:
        self.limits = limits
        self.plans: list[Vector] = []
        self.idle: list[float] = []
        # Of the thousands of rows few ever bind: rows enter when a mixture violates them.
        self.active: list[int] = []
        self.scale = 1.0
        self.shape = len(rows.before), units
        self.end = len(rows.before) * units
        tracks = [slice(a, a + units) for a in range(0, self.end, units)]
        self.families = [*tracks, *(slice(i, i + 1) for i in range(self.end, self.end + 3))]
        self.seconds = np.zeros(self.end + 3, dtype=bool)
        self.seconds[: rows.timed * units] = self.seconds[self.end + ALWAYS] = True

    def add(self, plan: Values, idle_s: float) -> None:
        """Adds a plan and the rows in which it is largest."""
        flat = np.concatenate([plan.tracks.ravel(), plan.totals])
        if not self.plans:
            self.scale = max(float(flat[self.seconds].max()), 1e-12)
        self.plans.append(flat / self._unit())
        self.idle.append(idle_s / (self.limits.devices * self.scale))
        self._activate(self.plans[-1])

    def _unit(self) -> Vector:
        """What each row is counted in: the first plan's step, or the row's limit."""
        unit = np.where(self.seconds, self.scale, max(self.limits.memory_bytes, 1.0))
        unit[self.end + LOST] = max(self.limits.lost, 1e-12)
        return unit

    def _activate(self, flat: Vector) -> bool:
        """Takes in the largest row of each family; says whether one of them is new."""
        known = set(self.active)
        largest = (family.start + int(flat[family].argmax()) for family in self.families)
        self.active += [row for row in largest if row not in known]
        return len(self.active) > len(known)

    def solve(self) -> Mixture:
        """The best mixture."""
        table = np.array(self.plans)
        for _ in range(ROUNDS):
            shares, step, over, duals = self._program(table[:, self.active])
            rows = shares @ table
            beyond = np.where(self.seconds, rows - step, rows - 1 - over)
            if beyond.max() <= TOLERANCE or not self._activate(beyond):
                break
        return Mixture(shares, step * self.scale, over, self._weights(duals))

    def _program(self, table: Matrix) -> tuple[Vector, float, float, Vector]:
        """(shares, T, v, duals: of the active rows, of device-seconds, of seconds)."""
        (plans, count), seconds = table.shape, self.seconds[self.active]
        idle, limits = np.array(self.idle), self.limits
        rows = np.zeros((count + 3, plans + 2))
        rows[:count, :plans] = table.T
        rows[:count, plans] = np.where(seconds, -1.0, 0.0)
        rows[:count, plans + 1] = np.where(seconds, 0.0, -1.0)
        rows[count + 2, :plans] = 1.0
        right = np.append(np.where(seconds, 0.0, 1.0), [0.0, 0.0, 1.0])
        limited = ((-idle, limits.gpu_s / limits.devices), (0 * idle, limits.step_s))
        for row, (own, limit_s) in enumerate(limited, count):
            # The row of a limit that there is not stays empty: duals keep their places.
            if limit_s < INFINITE:
                right[row] = limit_s / self.scale
                rows[row] = [*own, 1.0, -right[row]]
        cost = np.append(-idle if limits.economical else 0 * idle, [1.0, PENALTY])
        lower = np.append(np.full(count + 2, -np.inf), 1.0)
        top = np.full(plans + 2, np.inf)
        program = ArrayProgram(cost, csr_array(rows), lower, right, top, whole=0)
        found, prices = program.relaxed()
        # HiGHS's duals of rows with an upper side are at most 0, but for rounding.
        shares, duals = np.maximum(found[:plans], 0.0), np.maximum(-prices[:-1], 0.0)
        return shares / shares.sum(), float(found[plans]), float(found[plans + 1]), duals

    def _weights(self, duals: Vector) -> Weights:
        """Duals in the units of the objective for each unit of a row."""
        per = float(self.limits.devices) if self.limits.economical else 1.0
        flat = np.zeros(self.end + 3)
        flat[self.active] = duals[:-2]
        gpu, step = (float(d) for d in duals[-2:])
        # Rounding in the duals must not leave weights that prove nothing: those of seconds have to
        # add up to what one second is worth.
        flat[self.seconds] *= (1.0 + gpu + step) / flat[self.seconds].sum()
        flat *= per * self.scale / self._unit()
        tracks = flat[: self.end].reshape(self.shape)
        return Weights(tracks, flat[self.end :], gpu * per / self.limits.devices, step * per)
