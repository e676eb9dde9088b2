"""What a plan of numbered options must keep to, how good it is, and what single units improve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import networkx as nx
import numpy as np

from ...memory.rows import (
    AT,
    LOST,
    NEIGHBOURS,
    RETURNED,
    Matrix,
    Rows,
    Values,
    changes,
    slice_waits,
    values,
)
from ..figures import Numbers
from ..option_table import OptionTable

INFINITE = float("inf")
# Limits may be overdrawn by this share: sums of floats differ by their order.
ROUNDING = 5e-10
IDLE = AT["idle"]
# Blocks, and parts of them, of one other plan that are tried, the larger first: each costs a
# judgement.
MOST_PARTS = 400
# Options of all units up to which each is tried one by one.
MOST_OPTIONS = 4000


class Limits(NamedTuple):
    """Limits on bytes of the position judged, on the share of gradient energy lost, on
    device-seconds and on seconds of a step; ``devices`` is the world size and ``objective`` what is
    made small."""

    memory_bytes: float
    lost: float = 0.0
    gpu_s: float = INFINITE
    step_s: float = INFINITE
    devices: int = 1
    economical: bool = False

    def objective(self, step_s: float, idle_s: float) -> float:
        """Seconds of the step, or with ``economical`` its device-seconds."""
        return self.devices * step_s - idle_s if self.economical else step_s


class PlanScore(NamedTuple):
    """How far a plan is over its limits, as shares of them added up, then its objective."""

    over: float
    objective: float

    def beats(self, other: PlanScore) -> bool:
        """Whether this is better by more than rounding."""
        if abs(self.over - other.over) > 1e-12:
            return self.over < other.over
        return self.objective < other.objective - 1e-9 * abs(other.objective)


def _over(value: float, limit: float) -> float:
    return max(value - limit * (1 + ROUNDING), 0.0) / max(limit, 1e-12) if limit < INFINITE else 0.0


class JudgedPlan(NamedTuple):
    """A plan by numbers of options, its figures, its rows, its score."""

    numbers: Numbers
    figures: Matrix
    rows: Values
    score: PlanScore

    @property
    def idle_s(self) -> float:
        """Device-seconds that it leaves free."""
        return float(self.figures[:, IDLE].sum())


class PlanJudge:
    """Judges plans of one option table, and improves them."""

    def __init__(self, table: OptionTable, rows: Rows, limits: Limits) -> None:
        self.table, self.rows, self.limits = table, rows, limits
        self.neighbours = nx.Graph((e.source, e.target) for e in table.edges)
        self.neighbours.add_edges_from((t.source, t.target) for t in table.ties)
        self.neighbours.add_nodes_from(range(len(table.units)))

    def judged(self, numbers: Numbers) -> JudgedPlan:
        figures = self.table.plan_figures(numbers)
        return self._scored(numbers, figures, values(self.rows, figures))

    def _scored(self, numbers: Numbers, figures: Matrix, rows: Values) -> JudgedPlan:
        limits, units = self.limits, self.table.units
        step = rows.step_s(slice_waits(figures))
        idle = float(figures[:, IDLE].sum())
        over = _over(rows.peak_bytes(self.rows.timed), limits.memory_bytes)
        over += _over(float(rows.totals[LOST]), limits.lost)
        over += _over(limits.devices * step - idle, limits.gpu_s) + _over(step, limits.step_s)
        # A broken tie counts as much as going over a limit by all of it.
        over += sum(
            not tie.agree[tuple(units[k].state(numbers[k]) for k in (tie.source, tie.target))]
            for tie in self.table.ties
        )
        return JudgedPlan(numbers, figures, rows, PlanScore(over, limits.objective(step, idle)))

    def take_over(
        self, plan: JudgedPlan, other: Numbers, deadline: float, enough: float = 0.0
    ) -> JudgedPlan:
        """The plan after taking over from ``other`` each block of units that helps, until its
        objective is ``enough``."""
        for block in islice(self._parts_of_blocks(plan.numbers, other), MOST_PARTS):
            good = not plan.score.over and plan.score.objective <= enough
            if good or time.perf_counter() > deadline:
                break
            numbers = plan.numbers.copy()
            numbers[block] = other[block]
            if not np.array_equal(numbers, plan.numbers):
                trial = self._changed(plan, numbers, block)
                plan = trial if trial.score.beats(plan.score) else plan
        return plan

    def polish(self, plan: JudgedPlan, deadline: float) -> JudgedPlan:
        """The plan after giving single units (with those tied to them) whatever option helps, until
        none does."""
        # With many options that takes long: only a plan that is over a limit is worth it.
        count = sum(u.memory.allowed.size * u.exchange.allowed.shape[1] for u in self.table.units)
        if count > MOST_OPTIONS and not plan.score.over:
            return plan
        every = [u.numbers() for u in self.table.units]
        before: JudgedPlan | None = None
        while plan is not before:
            before = plan
            for k, numbers in enumerate(every):
                if len(numbers) == 1:
                    continue
                for number in numbers:
                    if time.perf_counter() > deadline:
                        return plan
                    trial = self._with_option(plan, k, number)
                    if trial is not None and trial.score.beats(plan.score):
                        plan = trial
        return plan

    def _with_option(self, plan: JudgedPlan, k: int, number: int) -> JudgedPlan | None:
        """The plan with one unit's option, tied units following in layout; None if they cannot."""
        if plan.numbers[k] == number:
            return None
        units, numbers, block = self.table.units, plan.numbers.copy(), [k]
        numbers[k] = number
        state, tied = units[k].state(number), self.table.model.ties[k]
        for other in tied:
            if other == k:
                continue
            _, memory, exchange = units[other].split(int(numbers[other]))
            agreeing = self.table.agreeing(tied[0], k, state, other)
            there = [s for s in agreeing if units[other].may(s, memory, exchange)]
            if not there:
                return None
            numbers[other] = units[other].number(there[0], memory, exchange)
            block.append(other)
        return self._changed(plan, numbers, block)

    def _parts_of_blocks(self, one: Numbers, other: Numbers) -> Iterator[list[int]]:
        """Every block, then the larger parts of each before the smaller."""
        blocks = self._blocks(one, other)
        yield from blocks
        size = max((len(block) for block in blocks), default=0)
        while size > 1:
            size = -(-size // 2)
            for block in blocks:
                if len(block) > size:
                    step = max(size // 2, 1)
                    yield from (block[i : i + size] for i in range(0, len(block), step))

    def _blocks(self, one: Numbers, other: Numbers) -> list[list[int]]:
        """Units that differ, those together whose states differ along edges and ties."""
        units = self.table.units
        differ = [int(k) for k in np.flatnonzero(one != other)]
        moved = [k for k in differ if units[k].state(one[k]) != units[k].state(other[k])]
        # Half of a stretch of units that moved together would redistribute in its middle.
        together = self.neighbours.subgraph(moved)
        blocks = sorted(sorted(block) for block in nx.connected_components(together))
        return [*blocks, *([k] for k in differ if k not in together)]

    def _changed(self, plan: JudgedPlan, numbers: Numbers, block: list[int]) -> JudgedPlan:
        figures = plan.figures.copy()
        touched = set(block)
        for k in block:
            figures[k] = self.table.units[k].figures(numbers[k])
            touched.update(self.table.model.entered_after[k])
        self.table.write_moves(figures, numbers, touched)
        # What others have at a unit's points may change far from the block.
        others = [*NEIGHBOURS, RETURNED]
        moved = (figures[:, others] != plan.figures[:, others]).any(axis=1)
        changed = sorted(touched | {int(k) for k in np.flatnonzero(moved)})
        gained = changes(self.rows, changed, figures[changed] - plan.figures[changed], len(numbers))
        return self._scored(numbers, figures, plan.rows.plus(gained))
