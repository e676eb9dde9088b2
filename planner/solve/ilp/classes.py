"""Which positions' memory may bind: those that no other position holds more than, whatever is
decided.

Position 0 takes part in every layout, with the largest shards; where the batch does not divide,
another position's group may have a sample more, and devices may differ in memory. A position is
left out where another has figures at least as large for every option, and no more memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...cost.cost import CostModel
from ...cost.ownership import group_samples
from ...cost.step_time import Vector
from ...memory.rows import AT, OWN_BYTES, Matrix
from ...schema.layout import Layout
from ..evaluate import limits_bytes
from .ledger import Ledger


class MemoryClass(NamedTuple):
    """A position, its memory, figures [option, figure] of each unit there, and for each unit's
    states whether it takes part."""

    position: int
    limit_bytes: float
    figures: tuple[Matrix, ...]
    takes_part: tuple[Vector, ...]


def memory_classes(ledger: Ledger, model: CostModel) -> list[MemoryClass]:
    """The positions that may bind, in order; limits are of the model's goal."""
    limits = limits_bytes(model.cluster, model.goal, model.placement)
    layouts = sorted({s[0] for u in ledger.units for s in u.states})
    samples = {layout: group_samples(ledger.model.counts, layout) for layout in layouts}
    found: list[MemoryClass] = []
    seen: set[tuple[float, tuple[int | None, ...]]] = set()
    for position, limit in enumerate(limits):
        there = {layout: samples[layout][position] for layout in layouts}
        key = float(limit), tuple(there.values())
        if key in seen:
            continue
        seen.add(key)
        each = _class(ledger, position, limit, there)
        if not any(_covers(other, each) for other in found):
            found = [other for other in found if not _covers(each, other)] + [each]
    return [each for each in found if not _always_fits(ledger, each)]


def _class(
    ledger: Ledger, position: int, limit: int, samples: dict[Layout, int | None]
) -> MemoryClass:
    part = tuple(
        np.array([float(samples[layout] is not None) for layout, _ in unit.states])
        for unit in ledger.units
    )
    figures = tuple(ledger.bytes_at(k, samples) for k in range(len(ledger.units)))
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


def _always_fits(ledger: Ledger, each: MemoryClass) -> bool:
    """Whether even the largest of everything together stays under the limit."""
    most = sum(float(f[:, OWN_BYTES].max(axis=0).sum() + f[:, AT["gradients"]].max()
                     + f[:, AT["gradients_sent"]].max())
               for f in each.figures)  # fmt: skip
    received = [e.figures[-1].max(initial=0.0) for e in ledger.edges]
    return most + max(received, default=0.0) <= each.limit_bytes
