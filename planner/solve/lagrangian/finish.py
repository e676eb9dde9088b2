"""The last step of rounding: the best plan among the states and policies of the plans found.

What is left to decide is a small integer program: a binary x for each policy of a unit, in each
state that it had in one of the plans, taken from these plans or for its price at the weights that
prove most; and a share w of each pair of states along an edge, which is 0 or 1 where the x are:

    Σ_{o in s} x(k, o) = Σ_{s'} w(e, s, s') for each edge e out of k, and likewise into k
    Σ_o x(k, o) = 1;  every row of the step ≤ T;  every row of a limit ≤ 1

Only the few rows that matter are in it; rows that turn out to be violated are added. It is solved
to a share of a percent, and the plan is judged like any other. Redistributions that units share
(``moves``) count for each of them here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array, vstack

from ...cost.step_time import Vector
from ...memory.rows import (
    ALWAYS,
    AT,
    ENTRY,
    LOST,
    LOST_FIGURE,
    RECEIVED,
    SLICES,
    Matrix,
    slice_waits,
)
from .limits import INFINITE
from .program import Program
from .rounding import IDLE, Rounding, Standing
from .tables import Numbers, UnitTable

CLOSE = 1e-3
"""The share of the objective within which the program is solved."""
ROUNDS = 12
TOGETHER = 3
"""Rows of each track that enter at a time."""
CHEAPEST = 3
"""Policies of each unit and state that are taken for their price."""
KEPT = [*ENTRY, RECEIVED]
Row = tuple[int, int, int]
"""(track, unit, a later unit whose slice it may have to wait for, or -1), or (-1, total, -1)."""


class Line(NamedTuple):
    """One policy of a unit in a state: the option's number."""

    unit: int
    state: int
    number: int


class Pair(NamedTuple):
    """The states at both ends of an edge."""

    edge: int
    source: int
    target: int


class Equations:
    """Equations that are put together entry by entry."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.right: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], right: float) -> None:
        """One equation: Σ coefficient · variable = right."""
        row = len(self.right)
        self.entries += [(row, variable, value) for variable, value in terms]
        self.right.append(right)

    def table(self, variables: int) -> tuple[csr_array, Vector]:
        """All of them, and their right sides."""
        rows, columns, data = zip(*self.entries, strict=True)
        table = coo_array((data, (rows, columns)), shape=(len(self.right), variables))
        return csr_array(table), np.array(self.right)


class Finish:
    """The program for one plan; ``others`` are the plans that states and policies are taken from,
    ``prices`` [unit, figure] those at which more are chosen."""

    def __init__(
        self,
        rounding: Rounding,
        plan: Standing,
        others: Sequence[Standing],
        prices: Matrix | None = None,
    ) -> None:
        self.rounding, self.plan = rounding, plan
        sheet = rounding.sheet
        self.lines = self._lines([plan, *others], prices)
        self.states: dict[tuple[int, int], list[int]] = {}
        for i, line in enumerate(self.lines):
            self.states.setdefault((line.unit, line.state), []).append(i)
        self.pairs = self._pairs()
        ends = [sheet.edges[p.edge].target for p in self.pairs]
        self.unit_of = np.array([*(line.unit for line in self.lines), *ends])
        self.figures = np.zeros((len(self.unit_of), plan.figures.shape[1]))
        for i, line in enumerate(self.lines):
            self.figures[i] = sheet.unit_figures(line.unit, line.number)
        for i, pair in enumerate(self.pairs, len(self.lines)):
            cost = sheet.edges[pair.edge].figures[:, pair.source, pair.target]
            self.figures[i, KEPT] = cost
        self.rows: list[Row] = []

    def _lines(self, plans: Sequence[Standing], prices: Matrix | None) -> list[Line]:
        lines = []
        for k, unit in enumerate(self.rounding.sheet.units):
            seen = {int(p.numbers[k]) for p in plans}
            for state in sorted({unit.split(n)[0] for n in seen}):
                mine = {n for n in seen if unit.split(n)[0] == state}
                if prices is not None:
                    mine |= set(_cheap(unit, state, prices[k]))
                lines += [Line(k, state, n) for n in sorted(mine)]
        return lines

    def _pairs(self) -> list[Pair]:
        may: dict[int, list[int]] = {}
        for unit, state in self.states:
            may.setdefault(unit, []).append(state)
        return [
            Pair(e, a, b)
            for e, edge in enumerate(self.rounding.sheet.edges)
            for a in may[edge.source]
            for b in may[edge.target]
        ]

    def run(self, seconds: float, enough: float = 0.0) -> Standing:
        """The better of the plan and what the program found; ends early with an objective of
        ``enough``."""
        best = trial = self.plan
        deadline = time.perf_counter() + seconds
        for _ in range(ROUNDS):
            left = deadline - time.perf_counter()
            if not self._take_in(trial) or left <= 0:
                break
            numbers = self._solve(left, enough)
            if numbers is None:
                break
            trial = self.rounding.stand(numbers)
            best = trial if trial.score.beats(best.score) else best
            if not best.score.over and best.score.objective <= enough:
                break
        return best

    def _take_in(self, plan: Standing) -> bool:
        """Adds the rows in which a plan is largest; says whether one of them is new."""
        tracks, known = plan.rows.tracks.copy(), len(self.rows)
        waits = slice_waits(plan.figures)
        tracks[: len(waits)] += waits
        for t, track in enumerate(tracks):
            for j in (*np.argsort(-track)[:TOGETHER], len(track) - 1):
                unit = int(j)
                self._add((t, unit, _longest(plan.figures, t, unit) if t < len(waits) else -1))
        for total in range(len(plan.rows.totals)):
            self._add((-1, total, -1))
        return len(self.rows) > known

    def _add(self, row: Row) -> None:
        if row not in self.rows:
            self.rows.append(row)

    def _coefficients(self, row: Row) -> Vector:
        """What each policy and each pair adds to a row."""
        track, j, slower = row
        rows, units, figures = self.rounding.rows, self.unit_of, self.figures
        if track < 0:
            total: Vector = figures @ rows.totals[j]
            return total
        parts = [figures @ m[track] for m in (rows.before, rows.at, rows.after)]
        found: Vector = np.select([units < j, units == j], parts[:2], parts[2])
        for overlap in self.rounding.sheet.memory.overlaps:
            if weight := rows.at[track][AT[overlap.point]]:
                here = np.zeros(len(self.plan.figures))
                here[j] = 1.0
                times = overlap.priced(here)
                found = found + weight * times[units] * figures[:, AT[overlap.field]]
        return found if slower < 0 else found + (units == slower) * figures[:, SLICES[track]]

    def _limits(self, scale: float) -> tuple[Matrix, Vector]:
        """The rows, over (policies, pairs, T), and what each may be at most."""
        limits, timed = self.rounding.limits, self.rounding.rows.timed
        lines, upper = [], []
        for row in self.rows:
            line = self._coefficients(row)
            if row[0] in range(timed) or row[:2] == (-1, ALWAYS):
                lines.append(np.append(line / scale, -1.0))
                upper.append(0.0)
                continue
            limit = limits.lost if row[:2] == (-1, LOST) else limits.memory_bytes
            if limit <= 0 and not line.any():
                continue
            lines.append(np.append(line, 0.0) / max(limit, 1e-12))
            upper.append(1.0 if limit > 0 else 0.0)
        if limits.gpu_s < INFINITE:
            lines.append(np.append(self._idle(scale), 1.0))
            upper.append(limits.gpu_s / (limits.devices * scale))
        return np.array(lines), np.array(upper)

    def _idle(self, scale: float) -> Vector:
        """Device-seconds that each choice leaves free, as they count against T."""
        idle: Vector = -self.figures[:, IDLE] / (self.rounding.limits.devices * scale)
        return idle

    def _choices(self) -> tuple[csr_array, Vector]:
        """One policy of each unit; pairs of states as the units at both ends have them."""
        made = Equations()
        units: dict[int, list[int]] = {}
        for i, line in enumerate(self.lines):
            units.setdefault(line.unit, []).append(i)
        for members in units.values():
            made.add([(i, 1.0) for i in members], 1.0)
        sides: dict[tuple[int, int, int], list[int]] = {}
        for i, pair in enumerate(self.pairs, len(self.lines)):
            edge = self.rounding.sheet.edges[pair.edge]
            sides.setdefault((pair.edge, edge.source, pair.source), []).append(i)
            sides.setdefault((pair.edge, edge.target, pair.target), []).append(i)
        for (_, unit, state), pairs in sides.items():
            policies = [(i, 1.0) for i in self.states[unit, state]]
            made.add([*policies, *((i, -1.0) for i in pairs)], 0.0)
        self._tie(made)
        return made.table(len(self.unit_of) + 1)

    def _tie(self, made: Equations) -> None:
        """Tied units: the states of one that agree with the same states of the other are taken
        together or not at all."""
        for tie in self.rounding.sheet.ties:
            mine = [s for u, s in self.states if u == tie.source]
            theirs = [s for u, s in self.states if u == tie.target]
            for state in mine:
                fits = [s for s in theirs if tie.agree[state, s]]
                others = [s for s in mine if s != state and any(tie.agree[s, f] for f in fits)]
                left = [i for s in (state, *others) for i in self.states[tie.source, s]]
                right = [i for s in fits for i in self.states[tie.target, s]]
                made.add([*((i, 1.0) for i in left), *((i, -1.0) for i in right)], 0.0)

    def _solve(self, seconds: float, enough: float) -> Numbers | None:
        limits = self.rounding.limits
        scale = max(self.plan.score.objective, 1e-12)
        if limits.economical:
            scale /= limits.devices
        count, policies = len(self.unit_of), len(self.lines)
        lines, upper = self._limits(scale)
        equations, right = self._choices()
        program = Program(
            cost=np.append(self._idle(scale) if limits.economical else np.zeros(count), 1.0),
            table=vstack([csr_array(lines), equations], format="csr"),
            lower=np.append(np.full(len(upper), -np.inf), right),
            upper=np.append(upper, right),
            top=np.append(np.ones(count), limits.step_s / scale),
            whole=policies,
        )
        # T stands for the step here, or for it and idle devices: both are counted in ``scale``
        found = program.solve(max(seconds, 0.01), CLOSE, enough / self.plan.score.objective)
        if found is None:
            return None
        numbers = self.plan.numbers.copy()
        for i in np.flatnonzero(found[:policies] > 0.5):
            numbers[self.lines[i].unit] = self.lines[i].number
        return numbers


def _longest(figures: Matrix, track: int, j: int) -> int:
    """The unit after ``j`` with the longest slice on a link, -1 where none has any."""
    later = figures[j + 1 :, SLICES[track]]
    return j + 1 + int(later.argmax()) if later.any() else -1


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
