"""The programs of one problem: one for each number of micro-batches and slice size, each with the
positions whose memory may bind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...cost.cost import CostModel
from ...cost.ownership import group_samples
from ...memory.rows import AT, OWN_BYTES
from ...schema.layout import Layout
from ..answer import choice
from ..evaluate import limits_bytes
from ..option_table import OptionTable
from ..problem import Problem
from .integer import Program
from .timeline import MemoryClass

SCALE = 100.0
"""The step of plain data parallelism is so many units of time."""


class Case(NamedTuple):
    """One number of micro-batches and slice size: its model, options and unit of time."""

    model: CostModel
    table: OptionTable
    time_unit_s: float

    def program(
        self, problem: Problem, *, excess: bool = False, limits_of: CostModel | None = None
    ) -> Program:
        """The integer program; with ``excess`` memory may be exceeded, by a variable share, and
        the limits are those of another model's goal."""
        classes = memory_classes(self.table, limits_of or self.model)
        return Program(self.table, classes, problem.schedule, self.time_unit_s, excess=excess)


def case(problem: Problem, model: CostModel) -> Case:
    """A model with the options that its units may have."""
    step_s = choice(model, model.baseline, problem.schedule).step_s
    return Case(model, OptionTable(model, problem.capability), max(step_s, 1e-9) / SCALE)


def memory_classes(table: OptionTable, model: CostModel) -> list[MemoryClass]:
    """The positions whose memory may bind, in order; limits are those of the model's goal."""
    # Position 0 takes part in every layout, with the largest shards. But where the batch does not
    # divide, another position's group may have a sample more, and devices may differ in memory. A
    # position is left out where another has figures at least as large for every option, and no
    # more memory.
    limits = limits_bytes(model)
    layouts = sorted({layout for states in table.states for layout, _ in states})
    samples = {layout: group_samples(table.model.counts, layout) for layout in layouts}
    found: list[MemoryClass] = []
    seen: set[tuple[float, tuple[int | None, ...]]] = set()
    for position, limit in enumerate(limits):
        there = {layout: samples[layout][position] for layout in layouts}
        key = float(limit), tuple(there.values())
        if key in seen:
            continue
        seen.add(key)
        each = _class(table, position, limit, there)
        if not any(_covers(other, each) for other in found):
            found = [other for other in found if not _covers(each, other)] + [each]
    return [each for each in found if not _always_fits(table, each)]


def _class(
    table: OptionTable, position: int, limit: int, samples: dict[Layout, int | None]
) -> MemoryClass:
    part = tuple(
        np.array([float(samples[layout] is not None) for layout, _ in unit.states])
        for unit in table.listed
    )
    figures = tuple(table.bytes_at(k, samples) for k in range(len(table.options)))
    return MemoryClass(position, float(max(limit, 1)), figures, part)


def _covers(more: MemoryClass, less: MemoryClass) -> bool:
    return (
        more.limit_bytes <= less.limit_bytes
        and all((a >= b).all() for a, b in zip(more.takes_part, less.takes_part, strict=True))
        and all(
            (a[:, OWN_BYTES] >= b[:, OWN_BYTES]).all()
            for a, b in zip(more.figures, less.figures, strict=True)
        )
    )


def _always_fits(table: OptionTable, each: MemoryClass) -> bool:
    """Whether even the largest of everything together stays under the limit."""
    most = sum(float(f[:, OWN_BYTES].max(axis=0).sum() + f[:, AT["gradients"]].max()
                     + f[:, AT["gradients_sent"]].max())
               for f in each.figures)  # fmt: skip
    received = [e.figures[-1].max(initial=0.0) for e in table.edges]
    return most + max(received, default=0.0) <= each.limit_bytes
