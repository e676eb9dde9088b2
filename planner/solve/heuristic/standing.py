"""What stands in memory through a whole step, whatever is decided: a quick proof that nothing fits.

Parameters, optimizer state and what a lossy exchange has not sent are there at every point of a
step, and what a unit's option has of them depends on no other unit. So the sum of the units' least,
over all positions, is no more than any plan holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...cost.compute import busiest_samples
from ...cost.cost import CostModel
from ...memory.unit_memory import MemoryModel
from ...schema.options import Option
from ..evaluate import limits_bytes

ROUNDING = 1e-9


def never_fits(model: CostModel, options: Sequence[Sequence[Option]]) -> bool:
    """Whether the least that all positions together hold at every moment is over all their limits,
    where units choose from ``options``. Not where a unit has none at all: then it is not memory
    that is missing."""
    least = least_standing(model, options)
    limits = limits_bytes(model.cluster, model.goal, model.placement)
    return least is not None and least > sum(limits) * (1 + ROUNDING)


def least_standing(model: CostModel, options: Sequence[Sequence[Option]]) -> float | None:
    """The least bytes that all positions together hold at every moment; None where a unit has no
    option at all."""
    memory = MemoryModel(model)

    def standing(k: int, option: Option) -> float:
        samples = busiest_samples(model.counts, option.layout)
        return option.layout.size * memory.unit(k, option, samples).figures[0]

    if not all(options):
        return None
    return sum(min(standing(k, option) for option in row) for k, row in enumerate(options))
