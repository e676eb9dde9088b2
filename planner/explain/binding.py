"""What holds a plan back: the term that its step is equal to, and the limits that it uses up."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.budget import (
    energy_budget,
    gpu_seconds,
    gpu_seconds_limit,
    lost_energy,
    unit_amplification,
)
from ..cost.cost import CostModel
from ..cost.step_time import LINKS, binding_term
from ..schema.options import Option
from ..schema.plan import ScheduleName
from ..schema.record import Record
from ..solve.evaluate import Evaluation, excess

ROUNDING = 1 + 1e-9
MEMORY, GPU_SECONDS, UNIT, STEP, FIDELITY, PINS = (
    "memory_limit_bytes",
    "amplification_limit",
    "unit_amplification_limit",
    "time_limit_s",
    "min_fidelity",
    "pins",
)


class LimitUse(Record, frozen=True, kw_only=True):
    """One limit (the goal's field, memory's also where it is the device's own): how much of it a
    plan uses, both in the limit's unit (bytes, device-seconds, seconds, times one device's time,
    share of the gradient's energy that is not sent)."""

    limit: str
    used: float
    available: float

    @property
    def kept(self) -> bool:
        """Whether the plan keeps it."""
        return self.used <= self.available * ROUNDING + 1e-12


class BindingTerm(Record, frozen=True, kw_only=True):
    """The term that the step's formula is equal to: the gradients of all units up to ``unit`` on
    ``link``, sent while backward comes down to it (by priority: before forward comes up to it).
    Both are None where it is what the rank itself computes and waits for."""

    link: str | None = None
    unit: str | None = None


def term_of(done: Evaluation, schedule: ScheduleName) -> BindingTerm | None:
    """The term that binds a plan's step; None where units begin at other positions than the first
    (branches side by side), for which there is no formula."""
    if any(option.layout.first for option in done.decisions):
        return None
    found = binding_term(done.chain, priority=schedule == "priority")
    if found is None:
        return BindingTerm()
    link, k = found
    return BindingTerm(link=LINKS[link], unit=done.model.profile.units[k].name)


def limit_uses(done: Evaluation) -> tuple[LimitUse, ...]:
    """The limits that there are, and what the plan uses of each as it is predicted (solvers keep
    them by the formula)."""
    model, decisions, goal = done.model, done.decisions, done.model.goal
    tight = excess(model, done.memory)
    found = [_use(MEMORY, tight.needed_bytes, tight.available_bytes)]
    step_s = done.prediction.step_s
    if goal.amplification_limit is not None:
        used = gpu_seconds(model, decisions, step_s)
        found.append(_use(GPU_SECONDS, used, gpu_seconds_limit(model)))
    if goal.unit_amplification_limit is not None:
        most = max(unit_amplification(model, k, o) for k, o in enumerate(decisions))
        found.append(_use(UNIT, most, goal.unit_amplification_limit))
    if goal.time_limit_s is not None:
        found.append(_use(STEP, step_s * goal.slowdown, goal.time_limit_s))
    if goal.allow_lossy:
        lost = sum(lost_energy(model, k, o) for k, o in enumerate(decisions))
        found.append(_use(FIDELITY, lost, energy_budget(model)))
    return tuple(found)


def _use(limit: str, used: float, available: float) -> LimitUse:
    return LimitUse(limit=limit, used=float(used), available=float(available))


def broken(done: Evaluation) -> tuple[str, ...]:
    """The limits that a plan does not keep, pins among them."""
    over = [use.limit for use in limit_uses(done) if not use.kept]
    return (*over, PINS) if _unpinned(done.model, done.decisions) else tuple(over)


def _unpinned(model: CostModel, decisions: Sequence[Option]) -> bool:
    units = zip(model.profile.units, decisions, strict=True)
    return not all(model.goal.permits(u.name, o.layout, o.style) for u, o in units)
