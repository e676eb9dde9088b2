"""From the plans that a mixture is made of to one good plan.

Two plans differ in some units and agree in others. Units that differ in state and are neighbours
form a *block*; taking over a block from the other plan changes nothing outside it but what its own
units add to the rows. So every block can be judged by itself, and a plan is improved by taking over
the blocks that help, from every plan of the mixture, until none does.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from .rows import ENTRY, RECEIVED, Matrix, Rows, Values, values
from .sheet import Numbers, Sheet

BETTER = 1 - 1e-9


class Standing(NamedTuple):
    """A plan by numbers of options, its figures and its rows."""

    numbers: Numbers
    figures: Matrix
    rows: Values


class Rounding:
    """Judges and improves plans against a memory limit."""

    def __init__(self, sheet: Sheet, rows: Rows, limit_bytes: float) -> None:
        self.sheet, self.rows, self.limit_bytes = sheet, rows, limit_bytes
        count = len(sheet.units)
        self.into: list[list[int]] = [[] for _ in range(count)]
        self.after: list[list[int]] = [[] for _ in range(count)]
        for e, edge in enumerate(sheet.edges):
            self.into[edge.target].append(e)
            self.after[edge.source].append(edge.target)

    def stand(self, numbers: Numbers) -> Standing:
        """A plan with everything known of it."""
        figures = self.sheet.plan_figures(numbers)
        return Standing(numbers, figures, values(self.rows, figures))

    def score(self, plan: Values) -> tuple[float, float]:
        """(bytes over the limit, seconds of a step)."""
        timed = self.rows.timed
        return max(plan.peak_bytes(timed) - self.limit_bytes, 0.0), plan.step_s(timed)

    def beats(self, one: tuple[float, float], other: tuple[float, float]) -> bool:
        """Whether a score is better by more than rounding."""
        if abs(one[0] - other[0]) > 0.5:
            return one[0] < other[0]
        return one[1] < other[1] * BETTER

    def improve(self, plan: Standing, other: Numbers, deadline: float) -> Standing:
        """The plan after taking over each block of ``other`` that helps."""
        score = self.score(plan.rows)
        for block in self._blocks(plan.numbers, other):
            if time.perf_counter() > deadline:
                break
            numbers = plan.numbers.copy()
            numbers[block] = other[block]
            trial = self._changed(plan, numbers, block)
            found = self.score(trial.rows)
            if self.beats(found, score):
                plan, score = trial, found
        return plan

    def _blocks(self, one: Numbers, other: Numbers) -> list[list[int]]:
        """Units that differ, those together whose states differ along edges."""
        units = self.sheet.units
        differ = np.flatnonzero(one != other)
        moved = {int(k) for k in differ if units[k].state_of[one[k]] != units[k].state_of[other[k]]}
        root = {k: k for k in moved}

        def find(k: int) -> int:
            while root[k] != k:
                root[k] = root[root[k]]
                k = root[k]
            return k

        for edge in self.sheet.edges:
            if edge.source in moved and edge.target in moved:
                a, b = find(edge.source), find(edge.target)
                root[max(a, b)] = min(a, b)
        blocks: dict[int, list[int]] = {}
        for k in sorted(moved):
            blocks.setdefault(find(k), []).append(k)
        return [*blocks.values(), *([int(k)] for k in differ if int(k) not in moved)]

    def _changed(self, plan: Standing, numbers: Numbers, block: list[int]) -> Standing:
        """The plan with other options for the units of a block."""
        figures = plan.figures.copy()
        touched = set(block)
        for k in block:
            figures[k, : len(self.sheet.units[k].figures[0])] = self.sheet.units[k].figures[
                numbers[k]
            ]
            touched.update(self.after[k])
        for k in touched:
            self._entry(figures, numbers, k)
        return Standing(numbers, figures, values(self.rows, figures))

    def _entry(self, figures: Matrix, numbers: Numbers, k: int) -> None:
        """Writes the redistribution at the entry of unit ``k``."""
        units = self.sheet.units
        figures[k, list(ENTRY)] = 0.0
        figures[k, RECEIVED] = 0.0
        for e in self.into[k]:
            edge = self.sheet.edges[e]
            a = units[edge.source].state_of[numbers[edge.source]]
            cost = edge.figures[:, a, units[k].state_of[numbers[k]]]
            figures[k, list(ENTRY)] += cost[:-1]
            figures[k, RECEIVED] = max(figures[k, RECEIVED], cost[-1])
