"""A choice: what has been decided of all units under one cost model, with the figures by which
solvers compare it and the limits that it has to keep."""

from math import ceil
from typing import NamedTuple

from ..cost.budget import energy_budget, gpu_seconds, gpu_seconds_limit, lost_energy
from ..cost.cost import CostModel
from ..cost.ownership import position_classes
from ..cost.step_time import barrier_step, priority_step
from ..memory.timeline import peak_bytes
from ..memory.unit_memory import memory_of
from ..schema.layout import Layout
from ..schema.options import Decisions
from ..simulate.schedule import ScheduleName
from .evaluate import limits_bytes

ROUNDING = 1 + 1e-9
"""Limits may be overdrawn by this much: sums of floats differ by their order."""


class Choice(NamedTuple):
    """Decisions under one model (micro-batches and slice size), and their figures: seconds of a
    step by formula, device-seconds, bytes over the limit on the fullest rank (negative: free), the
    share of gradient energy left for later steps."""

    model: CostModel
    decisions: Decisions
    step_s: float
    gpu_seconds: float
    over_bytes: int
    lost: float

    @property
    def objective_s(self) -> float:
        """What the goal wants least."""
        return self.step_s if self.model.goal.objective == "time" else self.gpu_seconds

    @property
    def feasible(self) -> bool:
        """Whether all limits are kept."""
        most_s = self.model.goal.undisturbed_limit_s
        return (
            self.over_bytes <= 0
            and self.gpu_seconds <= gpu_seconds_limit(self.model) * ROUNDING
            and self.lost <= energy_budget(self.model) + 1e-12
            and (most_s is None or self.step_s <= most_s * ROUNDING)
        )


def choice(model: CostModel, decisions: Decisions, schedule: ScheduleName) -> Choice:
    """The decisions with their figures."""
    formula = barrier_step if schedule == "barrier" else priority_step
    step_s = formula(model.chain(decisions), model.micro_batches)
    used = gpu_seconds(model, decisions, step_s)
    lost = sum(lost_energy(model, k, option) for k, option in enumerate(decisions))
    return Choice(model, decisions, step_s, used, over_bytes(model, decisions), lost)


class Fullest(NamedTuple):
    """The rank that has least memory left: by how many bytes it is over its limit (negative: free),
    and its samples by layout (None where it takes no part)."""

    over_bytes: int
    samples: dict[Layout, int | None]


def fullest(model: CostModel, decisions: Decisions) -> Fullest:
    """The fullest rank of a plan."""
    memory, limits = memory_of(model), limits_bytes(model)
    groups = position_classes(model.counts, [o.layout for o in decisions])
    ranks = (
        Fullest(
            ceil(peak_bytes(memory.position(decisions, group.samples))[0])
            - min(limits[p] for p in group.positions),
            group.samples,
        )
        for group in groups
    )
    return max(ranks, key=lambda rank: rank.over_bytes)


def over_bytes(model: CostModel, decisions: Decisions) -> int:
    """By how much the fullest rank is over its limit, negative where all fit."""
    return fullest(model, decisions).over_bytes
