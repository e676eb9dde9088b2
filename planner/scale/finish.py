"""The last step of rounding: with every unit's state fixed, which policies are best together.

Edges cost nothing more to decide then, and what is left is a small integer program: one binary for
each policy that a unit had in some plan of the search (in the state that it has now) or that is
among its cheapest at the weights that prove most, the few rows that matter, rows that turn out to
be violated added. It is solved to a share of a percent and the
plan is judged like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ..rows import ENTRY, LOST, LOST_FIGURE, RECEIVED, Matrix
from ..step import Vector
from .limits import INFINITE
from .rounding import IDLE, Rounding, Standing
from .sheet import Numbers, UnitTable

CLOSE = 5e-4
"""The share of the objective within which the program is solved."""
ROUNDS = 4
CHEAPEST = 6
"""Policies of each unit that are taken for their price."""
Row = tuple[int, int]
"""(track, unit), or (-1, total)."""


class Finish:
    """The program for one plan; ``others`` are the plans that policies are taken from, ``prices``
    [unit, figure] those at which more are chosen."""

    def __init__(
        self,
        rounding: Rounding,
        plan: Standing,
        others: Sequence[Standing],
        prices: Matrix | None = None,
    ) -> None:
        self.rounding, self.plan = rounding, plan
        units = rounding.sheet.units
        self.choices: list[tuple[int, int]] = []
        for k, unit in enumerate(units):
            state = unit.split(int(plan.numbers[k]))[0]
            found = {int(o.numbers[k]) for o in (plan, *others)}
            mine = {n for n in found if unit.split(n)[0] == state}
            if prices is not None:
                mine |= set(_cheap(unit, state, prices[k]))
            self.choices += [(k, n) for n in sorted(mine)]
        self.unit_of = np.array([k for k, _ in self.choices])
        self.figures = np.array([rounding.sheet.unit_figures(k, n) for k, n in self.choices])
        self.entries = np.zeros_like(plan.figures)
        kept = [*ENTRY, RECEIVED]
        self.entries[:, kept] = plan.figures[:, kept]
        self.rows: list[Row] = []

    def run(self, seconds: float) -> Standing:
        """The better of the plan and what the program found."""
        best = trial = self.plan
        for _ in range(ROUNDS):
            if not self._take_in(trial):
                break
            numbers = self._solve(seconds)
            if numbers is None:
                break
            trial = self.rounding.stand(numbers)
            best = trial if trial.score.beats(best.score) else best
        return best

    def _take_in(self, plan: Standing) -> bool:
        """Adds the rows in which a plan is largest; says whether one of them is new."""
        tracks, known = plan.rows.tracks, len(self.rows)
        wanted = [(t, int(np.argmax(tracks[t]))) for t in range(len(tracks))]
        wanted += [(t, len(tracks[t]) - 1) for t in range(len(tracks))]
        for row in [*wanted, *((-1, total) for total in range(len(plan.rows.totals)))]:
            if row not in self.rows:
                self.rows.append(row)
        return len(self.rows) > known

    def _coefficients(self, row: Row, units: Numbers, figures: Matrix) -> Vector:
        """What each line of ``figures`` adds to a row."""
        track, j = row
        rows = self.rounding.rows
        if track < 0:
            total: Vector = figures @ rows.totals[j]
            return total
        parts = [figures @ m[track] for m in (rows.before, rows.at, rows.after)]
        found: Vector = np.select([units < j, units == j], parts[:2], parts[2])
        return found

    def _solve(self, seconds: float) -> Numbers | None:
        count, limits = len(self.choices), self.rounding.limits
        timed = self.rounding.rows.timed
        scale = max(self.plan.score.objective, 1e-12)
        if limits.economical:
            scale /= limits.devices
        every = np.arange(len(self.entries))
        lines, upper = [], []
        for row in self.rows:
            line = self._coefficients(row, self.unit_of, self.figures)
            fixed = float(self._coefficients(row, every, self.entries).sum())
            if row[0] in range(timed) or row == (-1, 0):
                lines.append(np.append(line / scale, -1.0))
                upper.append(-fixed / scale)
                continue
            limit = limits.lost if row == (-1, LOST) else limits.memory_bytes
            if limit <= 0 and not line.any():
                continue
            lines.append(np.append(line, 0.0) / max(limit, 1e-12))
            upper.append((limit - fixed) / max(limit, 1e-12))
        idle = self.figures[:, IDLE] / (limits.devices * scale)
        if limits.gpu_s < INFINITE:
            lines.append(np.append(-idle, 1.0))
            upper.append(limits.gpu_s / (limits.devices * scale))
        cost = np.append(-idle if limits.economical else 0 * idle, 1.0)
        ones = csr_array(
            (np.ones(count), (self.unit_of, np.arange(count))), shape=(len(every), count + 1)
        )
        top = np.append(np.ones(count), limits.step_s / scale)
        found = milp(
            cost,
            integrality=np.append(np.ones(count), 0),
            bounds=Bounds(np.zeros(count + 1), top),
            constraints=[
                LinearConstraint(np.array(lines), -np.inf, np.array(upper)),
                LinearConstraint(ones, 1.0, 1.0),
            ],
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": CLOSE},
        )
        if found.x is None:
            return None
        numbers = self.plan.numbers.copy()
        for i in np.flatnonzero(found.x[:count] > 0.5):
            k, number = self.choices[i]
            numbers[k] = number
        return numbers


def _cheap(unit: UnitTable, state: int, price: Vector) -> list[int]:
    """The numbers of the cheapest policies of a unit in a state."""
    parts = []
    for block in (unit.memory, unit.exchange):
        found = block.figures[state] @ price + block.lost * price[LOST_FIGURE]
        parts.append(np.where(block.allowed[state], found, np.inf))
    both = parts[0][:, None] + parts[1][None]
    best = np.argsort(both, axis=None)[:CHEAPEST]
    pairs = zip(*np.unravel_index(best, both.shape), strict=True)
    return [unit.number(state, int(m), int(x)) for m, x in pairs if both[m, x] < np.inf]
