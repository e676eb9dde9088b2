"""What is to be least, and which limits a plan keeps: the judgement that all solvers share.

The value of a plan is that of the formulas of ``cost.step_time``, which are what is proved about;
the simulation of the schedule as it is run tells what the Plan predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ..cost.budget import energy_budget, gpu_seconds, gpu_seconds_limit, lost_energy
from ..cost.cost import CostModel
from ..cost.ownership import position_classes
from ..cost.step_time import barrier_step, priority_step
from ..memory.timeline import peak_bytes
from ..schema.options import Option
from ..simulate.schedule import ScheduleName
from .evaluate import limits_bytes, memory_of

ROUNDING = 1 + 1e-9
"""Limits may be overdrawn by this much: sums of floats differ by their order."""


class Value(NamedTuple):
    """A plan's figures: seconds of a step by formula, device-seconds, bytes over the limit on the
    fullest rank (negative: free), the share of gradient energy left for later steps."""

    step_s: float
    gpu_seconds: float
    over_bytes: int
    lost: float

    def objective_s(self, model: CostModel) -> float:
        """What the goal wants least."""
        return self.step_s if model.goal.objective == "time" else self.gpu_seconds

    def feasible(self, model: CostModel) -> bool:
        """Whether all limits are kept."""
        most_s = model.goal.undisturbed_limit_s
        return (
            self.over_bytes <= 0
            and self.gpu_seconds <= gpu_seconds_limit(model) * ROUNDING
            and self.lost <= energy_budget(model) + 1e-12
            and (most_s is None or self.step_s <= most_s * ROUNDING)
        )


def value(model: CostModel, decisions: Sequence[Option], schedule: ScheduleName) -> Value:
    """The figures of those decisions."""
    formula = barrier_step if schedule == "barrier" else priority_step
    step_s = formula(model.chain(decisions), model.micro_batches)
    lost = sum(lost_energy(model, k, option) for k, option in enumerate(decisions))
    return Value(step_s, gpu_seconds(model, decisions, step_s), over_bytes(model, decisions), lost)


def over_bytes(model: CostModel, decisions: Sequence[Option]) -> int:
    """By how much the fullest rank is over its limit, negative where all fit."""
    memory = memory_of(model)
    limits = limits_bytes(model.cluster, model.goal, model.placement)
    most = -(10**18)
    for group in position_classes(model.counts, [o.layout for o in decisions]):
        peak = ceil(peak_bytes(memory.position(decisions, group.samples))[0])
        most = max(most, peak - min(limits[p] for p in group.positions))
    return most
