"""Which options a plan can need where nothing but memory is limited: few of all, exactly.

The memory timeline is a sum over units, and what units do to each other depends on their layouts
and styles alone, but for what an option's own backward hides of a gradient that comes back, the
buckets that it fills, and what of it stands beside other units. So where an option has no less of
any of these than another one of the same layout and style, every plan with it stays a plan with the
other in its place, and holds no more.
"""

from collections.abc import Sequence
from math import inf
from typing import get_args

import numpy as np

from ...cost.budget import gpu_seconds_limit, lost_energy
from ...cost.cost import CostModel
from ...memory.prefetch_overlap import NeighbourField
from ...memory.rows import AT, MEMORY_POINTS, OWN_BACKWARD, OWN_BYTES, UPDATE, Matrix, rows
from ...schema.options import Option
from ..option_table import OptionTable
from ..problem import Problem
from .memory_rows import memory_classes

COUNTED_APART = [AT["bucketed"], *(AT[name] for name in get_args(NeighbourField))]
"""Bytes that others' points may have, and those that fill buckets."""


def only_memory(model: CostModel) -> bool:
    """Whether the goal limits nothing that takes seconds."""
    return gpu_seconds_limit(model) == inf and model.goal.undisturbed_limit_s is None


def least_options(problem: Problem, table: OptionTable, limits_of: CostModel) -> OptionTable:
    """The table without the options that another one makes needless. ``limits_of`` has the limits
    that programs are given."""
    model = table.model
    together = table.memory.updates_together
    family = rows(model.micro_batches, problem.schedule, together=together)
    tracks = slice(family.timed, None)  # those of bytes
    backward = family.at[tracks][MEMORY_POINTS.index("backward")]
    # A gradient that comes back counts beyond what the unit's own backward has: the larger of two.
    weights = np.vstack(
        [
            family.before[tracks], family.at[tracks], family.after[tracks],
            family.totals[UPDATE], backward - OWN_BACKWARD,
        ]
    )[:, OWN_BYTES]  # fmt: skip
    classes = memory_classes(table, limits_of)
    kept = []
    for k, options in enumerate(table.options):
        columns = [_besides(model, k, options)]
        for each in classes:
            own = each.figures[k]
            columns += [own[:, OWN_BYTES] @ weights.T, own[:, COUNTED_APART]]
        kept.append(_undominated(options, np.hstack(columns)))
    return OptionTable(model, table.capability, options=kept)


def _besides(model: CostModel, k: int, options: Sequence[Option]) -> Matrix:
    """[option, 2] what an option loses of the gradient, and whether it leaves a bucket open."""
    return np.array(
        [[lost_energy(model, k, o), -float(model.closes_bucket(k, o))] for o in options]
    )


def _undominated(options: Sequence[Option], columns: Matrix) -> tuple[Option, ...]:
    """The options of which no other one of the same state has as little in every column; of equal
    ones the first."""
    by_state: dict[object, list[int]] = {}
    for number, option in enumerate(options):
        by_state.setdefault((option.layout, option.style), []).append(number)
    found: list[int] = []
    for numbers in by_state.values():
        here = columns[numbers]
        # [i, j] whether j has no more than i.
        less = (here[None, :, :] <= here[:, None, :]).all(axis=2)
        ahead = less & ~(less.T & np.triu(np.ones_like(less)))
        found += [numbers[i] for i in np.flatnonzero(~ahead.any(axis=1))]
    return tuple(options[n] for n in sorted(found))
