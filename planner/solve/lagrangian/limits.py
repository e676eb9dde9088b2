"""What a plan must keep to and what it is judged by, as the searches over many units see it."""

from __future__ import annotations

from typing import NamedTuple

from ...memory.rows import LOST, Values

INFINITE = float("inf")
ROUNDING = 5e-10
"""Limits may be overdrawn by this share: sums of floats differ by their order."""


class Limits(NamedTuple):
    """Limits on bytes of the position judged, on the share of gradient energy lost, on
    device-seconds and on seconds of a step; ``devices`` is the world size and ``objective`` what is
    made small."""

    memory_bytes: float
    lost: float = 0.0
    gpu_s: float = INFINITE
    step_s: float = INFINITE
    devices: int = 1
    economical: bool = False

    def objective(self, step_s: float, idle_s: float) -> float:
        """Seconds of the step, or with ``economical`` its device-seconds."""
        return self.devices * step_s - idle_s if self.economical else step_s


class Score(NamedTuple):
    """How far a plan is over its limits, as shares of them added up, then its objective."""

    over: float
    objective: float

    def beats(self, other: Score) -> bool:
        """Whether this is better by more than rounding."""
        if abs(self.over - other.over) > 1e-12:
            return self.over < other.over
        return self.objective < other.objective - 1e-9 * abs(other.objective)


def score(limits: Limits, plan: Values, step_s: float, idle_s: float, timed: int) -> Score:
    """The score of a plan with those rows, seconds and idle device-seconds."""
    over = _over(plan.peak_bytes(timed), limits.memory_bytes)
    over += _over(float(plan.totals[LOST]), limits.lost)
    over += _over(limits.devices * step_s - idle_s, limits.gpu_s) + _over(step_s, limits.step_s)
    return Score(over, limits.objective(step_s, idle_s))


def _over(value: float, limit: float) -> float:
    return max(value - limit * (1 + ROUNDING), 0.0) / max(limit, 1e-12) if limit < INFINITE else 0.0
