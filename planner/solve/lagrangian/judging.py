"""What a plan of numbered options must keep to, how good it is, and what single units improve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from ...memory.rows import (
    AT,
    LOST,
    NEIGHBOURS,
    Matrix,
    Rows,
    Values,
    changes,
    slice_waits,
    values,
    write_neighbours,
)
from ..option_table import OptionTable
from ..unit_figures import Numbers

INFINITE = float("inf")
ROUNDING = 5e-10
"""Limits may be overdrawn by this share: sums of floats differ by their order."""


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


class Score(NamedTuple):
    """How far a plan is over its limits, as shares of them added up, then its objective."""

    over: float
    objective: float

    def beats(self, other: Score) -> bool:
        """Whether this is better by more than rounding."""
        if abs(self.over - other.over) > 1e-12:
            return self.over < other.over
        return self.objective < other.objective - 1e-9 * abs(other.objective)


def score(limits: Limits, plan: Values, step_s: float, idle_s: float, timed: int) -> Score:
    """The score of a plan with those rows, seconds and idle device-seconds."""
    over = _over(plan.peak_bytes(timed), limits.memory_bytes)
    over += _over(float(plan.totals[LOST]), limits.lost)
    over += _over(limits.devices * step_s - idle_s, limits.gpu_s) + _over(step_s, limits.step_s)
    return Score(over, limits.objective(step_s, idle_s))


def _over(value: float, limit: float) -> float:
    return max(value - limit * (1 + ROUNDING), 0.0) / max(limit, 1e-12) if limit < INFINITE else 0.0


IDLE = AT["idle"]
MOST_WINDOWS = 400
"""Blocks and windows of one other plan that are tried, the larger first."""
MOST_OPTIONS = 4000
"""Options of all units up to which each is tried one by one."""


class JudgedPlan(NamedTuple):
    """A plan by numbers of options, its figures, its rows, the state of each unit, its score."""

    numbers: Numbers
    figures: Matrix
    rows: Values
    score: Score

    @property
    def idle_s(self) -> float:
        """Device-seconds that it leaves free."""
        return float(self.figures[:, IDLE].sum())


class PlanJudge:
    """Judges plans of one option table, and improves them."""

    def __init__(self, table: OptionTable, rows: Rows, limits: Limits) -> None:
        self.table, self.rows, self.limits = table, rows, limits
        self.neighbours = [(e.source, e.target) for e in table.edges]
        self.neighbours += [(t.source, t.target) for t in table.ties]

    def judged(self, numbers: Numbers) -> JudgedPlan:
        """A plan with everything known of it."""
        figures = self.table.plan_figures(numbers)
        return self._scored(numbers, figures, values(self.rows, figures))

    def _scored(self, numbers: Numbers, figures: Matrix, rows: Values) -> JudgedPlan:
        step = rows.step_s(slice_waits(figures))
        idle = float(figures[:, IDLE].sum())
        found = score(self.limits, rows, step, idle, self.rows.timed)
        return JudgedPlan(
            numbers, figures, rows, found._replace(over=found.over + self._broken_ties(numbers))
        )

    def _broken_ties(self, numbers: Numbers) -> int:
        """How many ties a plan breaks."""
        if not self.table.ties:
            return 0
        units = self.table.units
        return sum(
            not t.agree[
                units[t.source].split(numbers[t.source])[0],
                units[t.target].split(numbers[t.target])[0],
            ]
            for t in self.table.ties
        )

    def take_over(
        self, plan: JudgedPlan, other: Numbers, deadline: float, enough: float = 0.0
    ) -> JudgedPlan:
        """The plan after taking over from ``other`` each block of units that helps, until its
        objective is ``enough``."""
        for block in islice(self._windows(plan.numbers, other), MOST_WINDOWS):
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
        none does; not where there are many options and the plan keeps all limits."""
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
        state, tied = units[k].split(number)[0], self.table.model.ties[k]
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

    def _windows(self, one: Numbers, other: Numbers) -> Iterator[list[int]]:
        """Every block, then the larger windows of each before the smaller."""
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
        moved = {k for k in differ if units[k].split(one[k])[0] != units[k].split(other[k])[0]}
        root = {k: k for k in moved}

        def find(k: int) -> int:
            while root[k] != k:
                root[k] = root[root[k]]
                k = root[k]
            return k

        for source, target in self.neighbours:
            if source in moved and target in moved:
                a, b = find(source), find(target)
                root[max(a, b)] = min(a, b)
        blocks: dict[int, list[int]] = {}
        for k in sorted(moved):
            blocks.setdefault(find(k), []).append(k)
        return [*blocks.values(), *([k] for k in differ if k not in moved)]

    def _changed(self, plan: JudgedPlan, numbers: Numbers, block: list[int]) -> JudgedPlan:
        """The plan with other options for the units of a block."""
        figures = plan.figures.copy()
        touched = set(block)
        for k in block:
            figures[k] = self.table.unit_figures(k, int(numbers[k]))
            touched.update(self.table.model.entered_after[k])
        for k in touched:
            self.table.write_entry(figures, numbers, k)
        write_neighbours(figures, self.table.memory.overlaps)
        others = list(NEIGHBOURS)
        moved = (figures[:, others] != plan.figures[:, others]).any(axis=1)
        changed = sorted(touched | {int(k) for k in np.flatnonzero(moved)})
        gained = changes(self.rows, changed, figures[changed] - plan.figures[changed], len(numbers))
        return self._scored(numbers, figures, plan.rows.plus(gained))
