"""The best plan among the states and policies of the plans found: a restricted integer program.

What is left to decide is a small integer program: a binary x for each policy of a unit, in each
state that it had in one of the plans, taken from these plans or for its price at the weights that
prove most; and a share w of each pair of states along an edge, which is 0 or 1 where the x are:

    Σ_{o in s} x(k, o) = Σ_{s'} w(e, s, s') for each edge e out of k, and likewise into k
    Σ_o x(k, o) = 1;  every row of the step ≤ T;  every row of a limit ≤ 1

What the gradient of a unit's output takes as it comes back, beyond the unit's own backward, is a
g(k) ≥ 0 in the rows of memory (``timeline.returned_bytes``; R are bytes on an edge):

    g(k) ≥ Σ_{s,s'} R(e, s, s')·w(e, s, s') - Σ_o own(k, o)·x(k, o) for each edge e out of k

Only the few rows that matter are in it: those with the largest weights, as the bound rests on them,
and those in which its plans are largest. Rows that turn out to be violated are added. It is solved
to a share of a percent, and the plan is judged like any other. Redistributions that units share
(``figures.SharedEdges``) count for each of them here.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import coo_array, csr_array, vstack

from ...cost.step_time import Vector
from ...memory.rows import (
    AT,
    LOST,
    OWN_BACKWARD,
    RETURNED,
    RETURNING,
    SLICES,
    Matrix,
    seconds_of,
    slice_waits,
)
from ..figures import EDGE_FIGURES, Numbers
from ..highs import ArrayProgram
from ..option_table import UnitTable
from .judging import IDLE, INFINITE, JudgedPlan, PlanJudge

# The share of the objective within which the program is solved.
CLOSE = 1e-3
ROUNDS = 12
# Rows of each track that enter at a time.
TOGETHER = 3
# Policies of each unit and state that are taken for their price.
CHEAPEST = 3
Row = tuple[int, int, int]
"""(track, unit, a later unit whose slice it may have to wait for, or -1), or (-1, total, -1)."""
Equation = tuple[list[int], list[int], float]
"""Σ of some variables - Σ of others = a number."""


class RestrictedProgram:
    """The program for one plan; ``others`` are the plans that states and policies are taken from,
    ``prices`` [unit, figure] those at which more are chosen, and ``weights`` [track, unit] those of
    the rows.

    Its variables are the ``policies`` (unit, number of an option), then the ``pairs`` (edge, its
    source's state, its target's), then of some units what is ``returned`` to them, as a share of
    the memory limit, then T."""

    def __init__(
        self,
        judge: PlanJudge,
        plan: JudgedPlan,
        others: Sequence[JudgedPlan],
        prices: Matrix,
        weights: Matrix,
    ) -> None:
        self.judge, self.plan = judge, plan
        table = judge.table
        self.policies: list[tuple[int, int]] = []
        self.states: dict[tuple[int, int], list[int]] = {}  # (unit, state): its policies
        self.states_of: dict[int, list[int]] = {}
        for k, unit in enumerate(table.units):
            seen = {int(p.numbers[k]) for p in (plan, *others)}
            for state in sorted({unit.state(n) for n in seen}):
                mine = {n for n in seen if unit.state(n) == state}
                mine |= set(_cheap(unit, state, prices[k]))
                self.states_of.setdefault(k, []).append(state)
                first = len(self.policies)
                self.policies += [(k, n) for n in sorted(mine)]
                self.states[k, state] = list(range(first, len(self.policies)))
        self.pairs = [
            (e, a, b)
            for e, edge in enumerate(table.edges)
            for a in self.states_of[edge.source]
            for b in self.states_of[edge.target]
        ]
        # An edge's figures are its target's.
        ends = [table.edges[e].target for e, _, _ in self.pairs]
        units = [*(k for k, _ in self.policies), *ends]
        self.figures = np.zeros((len(units), plan.figures.shape[1]))
        for i, (k, number) in enumerate(self.policies):
            self.figures[i] = table.units[k].figures(number)
        for i, (e, a, b) in enumerate(self.pairs, len(self.policies)):
            self.figures[i, EDGE_FIGURES] = table.edges[e].figures[:, a, b]
        self.own_backward = self.figures[: len(self.policies)] @ OWN_BACKWARD
        self.returning = self._returning()
        self.returned = sorted({table.edges[e].source for e in self.returning})
        self.unit_of = np.array([*units, *self.returned])
        shares = np.zeros((len(self.returned), plan.figures.shape[1]))
        shares[:, RETURNED] = self.limit_bytes
        self.figures = np.concatenate([self.figures, shares])
        self.rows = [
            _row(plan.figures, t, int(j))
            for t, track in enumerate(weights)
            for j in np.argsort(-track)[:TOGETHER]
            if track[j] > 0
        ]

    @property
    def limit_bytes(self) -> float:
        """What bytes are counted in."""
        return max(self.judge.limits.memory_bytes, 1.0)

    def _returning(self) -> dict[int, list[int]]:
        """By edge its pairs in which the gradient, as it comes back, may take more than its
        source's own backward has."""
        least = {state: self.own_backward[mine].min() for state, mine in self.states.items()}
        found: dict[int, list[int]] = {}
        for i, (e, a, _) in enumerate(self.pairs, len(self.policies)):
            if self.figures[i, RETURNING] > least[self.judge.table.edges[e].source, a]:
                found.setdefault(e, []).append(i)
        return found

    def run(self, seconds: float, enough: float = 0.0) -> JudgedPlan:
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
            trial = self.judge.judged(numbers)
            best = trial if trial.score.beats(best.score) else best
            if not best.score.over and best.score.objective <= enough:
                break
        return best

    def _take_in(self, plan: JudgedPlan) -> bool:
        """Adds the rows in which a plan is largest; says whether one of them is new."""
        tracks, known, rows = plan.rows.tracks.copy(), len(self.rows), list(self.rows)
        waits = slice_waits(plan.figures)
        tracks[: len(waits)] += waits
        for t, track in enumerate(tracks):
            largest = (*np.argsort(-track)[:TOGETHER], len(track) - 1)
            rows += [_row(plan.figures, t, int(j)) for j in largest]
        rows += [(-1, total, -1) for total in range(len(plan.rows.totals))]
        self.rows = list(dict.fromkeys(rows))
        return len(self.rows) > known

    def _coefficients(self, row: Row) -> Vector:
        """What each policy and each pair adds to a row."""
        track, j, slower = row
        rows, units, figures = self.judge.rows, self.unit_of, self.figures
        if track < 0:
            total: Vector = figures @ rows.totals[j]
            return total
        parts = [figures @ m[track] for m in (rows.before, rows.at, rows.after)]
        found: Vector = np.select([units < j, units == j], parts[:2], parts[2])
        for overlap in self.judge.table.memory.overlaps:
            if weight := rows.at[track][AT[overlap.point]]:
                here = np.zeros(len(self.plan.figures))
                here[j] = 1.0
                times = overlap.priced(here)
                found = found + weight * times[units] * figures[:, AT[overlap.field]]
        return found if slower < 0 else found + (units == slower) * figures[:, SLICES[track]]

    def _limits(self, scale: float) -> tuple[Matrix, Vector]:
        """The rows, over (policies, pairs, T), and what each may be at most."""
        limits, timed = self.judge.limits, self.judge.rows.timed
        serial = seconds_of(self.judge.rows.totals)
        lines, upper = [], []
        for row in self.rows:
            line = self._coefficients(row)
            if row[0] in range(timed) or (row[0] < 0 and row[1] in serial):
                lines.append(np.append(line / scale, -1.0))
                upper.append(0.0)
                continue
            limit = limits.lost if row[:2] == (-1, LOST) else limits.memory_bytes
            # Where nothing may be lost and nothing is, the row says nothing.
            if limit <= 0 and not line.any():
                continue
            lines.append(np.append(line, 0.0) / max(limit, 1e-12))
            upper.append(1.0 if limit > 0 else 0.0)
        for line in self._returned():
            lines.append(np.append(line, 0.0))
            upper.append(0.0)
        if limits.gpu_s < INFINITE:
            lines.append(np.append(self._idle(scale), 1.0))
            upper.append(limits.gpu_s / (limits.devices * scale))
        return np.array(lines), np.array(upper)

    def _returned(self) -> Iterator[Vector]:
        """What holds up the variables of what is returned to units whose backward is among the
        rows: one row for each edge."""
        first = len(self.policies) + len(self.pairs)
        backward = self.judge.rows.memory_track("backward")
        there = {unit for track, unit, _ in self.rows if track == backward}
        for e, pairs in self.returning.items():
            k, line = self.judge.table.edges[e].source, np.zeros(len(self.unit_of))
            if k not in there:
                continue
            line[pairs] = self.figures[pairs, RETURNING]
            mine = [i for state in self.states_of[k] for i in self.states[k, state]]
            line[mine] = -self.own_backward[mine]
            line /= self.limit_bytes
            line[first + self.returned.index(k)] = -1.0
            yield line

    def _idle(self, scale: float) -> Vector:
        """Device-seconds that each choice leaves free, as they count against T."""
        idle: Vector = -self.figures[:, IDLE] / (self.judge.limits.devices * scale)
        return idle

    def _choices(self) -> tuple[csr_array, Vector]:
        """One policy of each unit; pairs of states as the units at both ends have them; tied units
        in states that agree."""
        found: list[Equation] = []
        units: dict[int, list[int]] = {}
        for i, (k, _) in enumerate(self.policies):
            units.setdefault(k, []).append(i)
        found += [(members, [], 1.0) for members in units.values()]
        sides: dict[tuple[int, int, int], list[int]] = {}
        for i, (e, a, b) in enumerate(self.pairs, len(self.policies)):
            edge = self.judge.table.edges[e]
            sides.setdefault((e, edge.source, a), []).append(i)
            sides.setdefault((e, edge.target, b), []).append(i)
        found += [(self.states[k, state], pairs, 0.0) for (_, k, state), pairs in sides.items()]
        found += self._ties()
        entries = [
            (row, i, sign)
            for row, (plus, minus, _) in enumerate(found)
            for sign, members in ((1.0, plus), (-1.0, minus))
            for i in members
        ]
        rows, columns, data = zip(*entries, strict=True)
        table = coo_array((data, (rows, columns)), shape=(len(found), len(self.unit_of) + 1))
        return csr_array(table), np.array([right for _, _, right in found])

    def _ties(self) -> Iterator[Equation]:
        """The states of a unit that agree with the same states of the unit tied to it are taken
        together or not at all."""
        for tie in self.judge.table.ties:
            mine, theirs = self.states_of[tie.source], self.states_of[tie.target]
            for state in mine:
                fits = [s for s in theirs if tie.agree[state, s]]
                others = [s for s in mine if s != state and any(tie.agree[s, f] for f in fits)]
                left = [i for s in (state, *others) for i in self.states[tie.source, s]]
                yield left, [i for s in fits for i in self.states[tie.target, s]], 0.0

    def _solve(self, seconds: float, enough: float) -> Numbers | None:
        limits = self.judge.limits
        scale = max(self.plan.score.objective, 1e-12)
        if limits.economical:
            scale /= limits.devices
        count, policies = len(self.unit_of), len(self.policies)
        lines, upper = self._limits(scale)
        equations, right = self._choices()
        program = ArrayProgram(
            cost=np.append(self._idle(scale) if limits.economical else np.zeros(count), 1.0),
            table=vstack([csr_array(lines), equations], format="csr"),
            lower=np.append(np.full(len(upper), -np.inf), right),
            upper=np.append(upper, right),
            top=np.append(np.ones(count), limits.step_s / scale),
            whole=policies,
        )
        # T stands for the step here, or for it and idle devices: both are counted in ``scale``.
        found = program.solve(max(seconds, 0.01), CLOSE, enough / self.plan.score.objective)
        if found is None:
            return None
        numbers = self.plan.numbers.copy()
        for i in np.flatnonzero(found[:policies] > 0.5):
            k, number = self.policies[i]
            numbers[k] = number
        return numbers


def _row(figures: Matrix, track: int, j: int) -> Row:
    """A track's row of a unit, on a link with the unit after it that has the longest slice."""
    if track >= len(SLICES):
        return track, j, -1
    later = figures[j + 1 :, SLICES[track]]
    return track, j, j + 1 + int(later.argmax()) if later.any() else -1


def _cheap(unit: UnitTable, state: int, price: Vector) -> list[int]:
    """The numbers of the cheapest policies of a unit in a state."""
    memory, exchange = unit.memory.priced(price, state), unit.exchange.priced(price, state)
    both = memory[:, None] + exchange[None]
    best = np.argsort(both, axis=None)[:CHEAPEST]
    pairs = zip(*np.unravel_index(best, both.shape), strict=True)
    return [unit.number(state, int(m), int(x)) for m, x in pairs if both[m, x] < np.inf]
