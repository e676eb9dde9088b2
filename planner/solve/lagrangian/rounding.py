"""Judges plans by numbers of options, and improves them unit by unit."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ...memory.rows import (
    AT,
    BESIDE,
    ENTRY,
    RECEIVED,
    Matrix,
    Rows,
    Values,
    changes,
    slice_waits,
    values,
    write_beside,
)
from ..option_table import OptionTable
from ..unit_figures import Numbers
from .limits import Limits, Score, score

IDLE = AT["idle"]
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


class Rounding:
    """Judges and improves plans."""

    def __init__(self, table: OptionTable, rows: Rows, limits: Limits) -> None:
        self.table, self.rows, self.limits = table, rows, limits
        count = len(table.units)
        self.into: list[list[int]] = [[] for _ in range(count)]
        for e, edge in enumerate(table.edges):
            self.into[edge.target].append(e)

    def judge(self, numbers: Numbers) -> JudgedPlan:
        """A plan with everything known of it."""
        figures = self.table.plan_figures(numbers)
        return self._judged(numbers, figures, values(self.rows, figures))

    def _judged(self, numbers: Numbers, figures: Matrix, rows: Values) -> JudgedPlan:
        step = rows.step_s(slice_waits(figures))
        idle = float(figures[:, IDLE].sum())
        found = score(self.limits, rows, step, idle, self.rows.timed)
        return JudgedPlan(
            numbers, figures, rows, found._replace(over=found.over + self._loose(numbers))
        )

    def _loose(self, numbers: Numbers) -> int:
        """How many ties a plan does not keep."""
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
                for number in numbers if len(numbers) > 1 else ():
                    if time.perf_counter() > deadline:
                        return plan
                    trial = self._given(plan, k, number)
                    if trial is not None and trial.score.beats(plan.score):
                        plan = trial
        return plan

    def _given(self, plan: JudgedPlan, k: int, number: int) -> JudgedPlan | None:
        """The plan with one unit's option, tied units following in layout; None if they cannot."""
        if plan.numbers[k] == number:
            return None
        units, numbers, block = self.table.units, plan.numbers.copy(), [k]
        numbers[k] = number
        state = units[k].split(number)[0]
        first = self.table.model.ties[k][0]
        for other in self.table.model.ties[k] if len(self.table.model.ties[k]) > 1 else ():
            if other != k:
                agreeing = self.table.agreeing(first, k, state, other)
                if not agreeing:
                    return None
                _, memory, exchange = units[other].split(int(numbers[other]))
                there = [s for s in agreeing if units[other].may(s, memory, exchange)]
                if not there:
                    return None
                numbers[other] = units[other].number(there[0], memory, exchange)
                block.append(other)
        return self._changed(plan, numbers, block)

    def _changed(self, plan: JudgedPlan, numbers: Numbers, block: list[int]) -> JudgedPlan:
        """The plan with other options for the units of a block."""
        figures = plan.figures.copy()
        touched = set(block)
        for k in block:
            figures[k] = self.table.unit_figures(k, int(numbers[k]))
            touched.update(self.table.model.entered_after[k])
        for k in touched:
            self._write_entry(figures, numbers, k)
        write_beside(figures, self.table.model.besides)
        beside = list(BESIDE)
        moved = (figures[:, beside] != plan.figures[:, beside]).any(axis=1)
        changed = sorted(touched | {int(k) for k in np.flatnonzero(moved)})
        gained = changes(self.rows, changed, figures[changed] - plan.figures[changed], len(numbers))
        return self._judged(numbers, figures, plan.rows.plus(gained))

    def _write_entry(self, figures: Matrix, numbers: Numbers, k: int) -> None:
        """Writes the redistribution at the entry of unit ``k``."""
        units = self.table.units
        here = units[k].split(numbers[k])[0]
        figures[k, ENTRY[0] : ENTRY[-1] + 1] = 0.0
        figures[k, RECEIVED] = 0.0
        for e in self.into[k]:
            edge = self.table.edges[e]
            cost = edge.figures[:, units[edge.source].split(numbers[edge.source])[0], here]
            if cost.any() and self.table.shared.brought(
                e, lambda u: units[u].split(int(numbers[u]))[0]
            ):
                continue
            figures[k, ENTRY[0] : ENTRY[-1] + 1] += cost[:-1]
            figures[k, RECEIVED] = max(figures[k, RECEIVED], cost[-1])
