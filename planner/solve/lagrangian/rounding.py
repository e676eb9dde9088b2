"""From the plans that a mixture is made of to one good plan.

Two plans differ in some units and agree in others. Units that differ in state and are neighbours
form a *block*; taking over a block from the other plan changes nothing outside it but what its own
units add to the rows. A plan is improved by taking over the blocks that help, and where a whole
block does not, windows of it (halves, quarters, down to single units), from every plan of the
mixture, until none does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from ...memory.rows import (
    AT,
    ENTRY,
    NEIGHBOURS,
    RECEIVED,
    Matrix,
    Rows,
    Values,
    changes,
    slice_waits,
    values,
    write_neighbours,
)
from .limits import Limits, Score, score
from .option_table import OptionTable
from .tables import Numbers

IDLE = AT["idle"]
MOST_WINDOWS = 400
"""Blocks and windows of one other plan that are tried, the larger first."""
MOST_OPTIONS = 4000
"""Options of all units up to which each is tried one by one."""


class Standing(NamedTuple):
    """A plan by numbers of options, its figures, its rows, the state of each unit, its score."""

    numbers: Numbers
    figures: Matrix
    rows: Values
    score: Score

    @property
    def idle_s(self) -> float:
        """Device-seconds that it leaves free."""
        return float(self.figures[:, IDLE].sum())


class Rounding:
    """Judges and improves plans."""

    def __init__(self, sheet: OptionTable, rows: Rows, limits: Limits) -> None:
        self.sheet, self.rows, self.limits = sheet, rows, limits
        count = len(sheet.units)
        self.into: list[list[int]] = [[] for _ in range(count)]
        for e, edge in enumerate(sheet.edges):
            self.into[edge.target].append(e)
        self.together = [(e.source, e.target) for e in sheet.edges]
        self.together += [(t.source, t.target) for t in sheet.ties]

    def stand(self, numbers: Numbers) -> Standing:
        """A plan with everything known of it."""
        figures = self.sheet.plan_figures(numbers)
        return self._standing(numbers, figures, values(self.rows, figures))

    def _standing(self, numbers: Numbers, figures: Matrix, rows: Values) -> Standing:
        step = rows.step_s(slice_waits(figures))
        idle = float(figures[:, IDLE].sum())
        found = score(self.limits, rows, step, idle, self.rows.timed)
        return Standing(
            numbers, figures, rows, found._replace(over=found.over + self._loose(numbers))
        )

    def _loose(self, numbers: Numbers) -> int:
        """How many ties a plan does not keep."""
        if not self.sheet.ties:
            return 0
        units = self.sheet.units
        return sum(
            not t.agree[
                units[t.source].split(numbers[t.source])[0],
                units[t.target].split(numbers[t.target])[0],
            ]
            for t in self.sheet.ties
        )

    def improve(
        self, plan: Standing, other: Numbers, deadline: float, enough: float = 0.0
    ) -> Standing:
        """The plan after taking over each block of ``other`` that helps, until its objective is
        ``enough``."""
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

    def polish(self, plan: Standing, deadline: float) -> Standing:
        """The plan after giving single units (with those tied to them) whatever option helps, until
        none does; not where there are many options and the plan keeps all limits."""
        count = sum(u.memory.allowed.size * u.exchange.allowed.shape[1] for u in self.sheet.units)
        if count > MOST_OPTIONS and not plan.score.over:
            return plan
        every = [u.numbers() for u in self.sheet.units]
        before: Standing | None = None
        while plan is not before:
            before = plan
            for k, numbers in enumerate(every):
                for number in numbers if len(numbers) > 1 else ():
                    if time.perf_counter() > deadline:
                        return plan
                    trial = self._given(plan, k, number)
                    if trial is not None and trial.score.beats(plan.score):
                        plan = trial
        return plan

    def _given(self, plan: Standing, k: int, number: int) -> Standing | None:
        """The plan with one unit's option, tied units following in layout; None if they cannot."""
        if plan.numbers[k] == number:
            return None
        units, numbers, block = self.sheet.units, plan.numbers.copy(), [k]
        numbers[k] = number
        state = units[k].split(number)[0]
        first = self.sheet.model.ties[k][0]
        for other in self.sheet.model.ties[k] if len(self.sheet.model.ties[k]) > 1 else ():
            if other != k:
                agreeing = self.sheet.agreeing(first, k, state, other)
                if not agreeing:
                    return None
                _, memory, exchange = units[other].split(int(numbers[other]))
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
        units = self.sheet.units
        differ = [int(k) for k in np.flatnonzero(one != other)]
        moved = {k for k in differ if units[k].split(one[k])[0] != units[k].split(other[k])[0]}
        root = {k: k for k in moved}

        def find(k: int) -> int:
            while root[k] != k:
                root[k] = root[root[k]]
                k = root[k]
            return k

        for source, target in self.together:
            if source in moved and target in moved:
                a, b = find(source), find(target)
                root[max(a, b)] = min(a, b)
        blocks: dict[int, list[int]] = {}
        for k in sorted(moved):
            blocks.setdefault(find(k), []).append(k)
        return [*blocks.values(), *([k] for k in differ if k not in moved)]

    def _changed(self, plan: Standing, numbers: Numbers, block: list[int]) -> Standing:
        """The plan with other options for the units of a block."""
        figures = plan.figures.copy()
        touched = set(block)
        for k in block:
            figures[k] = self.sheet.unit_figures(k, int(numbers[k]))
            touched.update(self.sheet.model.entered_after[k])
        for k in touched:
            self.write_entry(figures, numbers, k)
        write_neighbours(figures, self.sheet.memory.overlaps)
        others = list(NEIGHBOURS)
        moved = (figures[:, others] != plan.figures[:, others]).any(axis=1)
        changed = sorted(touched | {int(k) for k in np.flatnonzero(moved)})
        gained = changes(self.rows, changed, figures[changed] - plan.figures[changed], len(numbers))
        return self._standing(numbers, figures, plan.rows.plus(gained))

    def write_entry(self, figures: Matrix, numbers: Numbers, k: int) -> None:
        """Writes the redistribution at the entry of unit ``k``."""
        units = self.sheet.units
        here = units[k].split(numbers[k])[0]
        figures[k, ENTRY[0] : ENTRY[-1] + 1] = 0.0
        figures[k, RECEIVED] = 0.0
        for e in self.into[k]:
            edge = self.sheet.edges[e]
            cost = edge.figures[:, units[edge.source].split(numbers[edge.source])[0], here]
            if cost.any() and self.sheet.moves.brought(
                e, lambda u: units[u].split(int(numbers[u]))[0]
            ):
                continue
            figures[k, ENTRY[0] : ENTRY[-1] + 1] += cost[:-1]
            figures[k, RECEIVED] = max(figures[k, RECEIVED], cost[-1])
