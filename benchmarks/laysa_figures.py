"""The arithmetic of ``laysa.py``: the largest batch that keeps a budget, and gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SINGLES = ("memory only", "sparse only")
OURS = "collaborative"
TRIES = 3
"""So often the largest batch is guessed anew from what the last one took."""


class Held(NamedTuple):
    """What a plan was predicted to take at most, and what it took."""

    predicted_bytes: int
    measured_bytes: int


class Settled(NamedTuple):
    """The largest batch that kept the budget (0: none did), and the peak measured there."""

    batch: int
    peak_bytes: int


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, 0 where not even 1 does; what is larger than one
    that does not fit is taken not to fit."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def settled(
    predicted: Callable[[int], float],
    run: Callable[[int, float], Held],
    budget_bytes: int,
    most: int,
) -> Settled:
    """The largest batch that was run within the budget.

    Guessed by bisection over ``predicted(batch)`` bytes, and run: ``run(batch, limit_bytes)`` makes
    a plan within a limit. Where it took more or less than predicted, the next guess expects that
    share of error. Where no guess kept the budget, batches are lowered one by one until one does.
    """
    limit, peaks = float(budget_bytes), dict[int, int]()
    for _ in range(TRIES):
        batch = largest(lambda b: predicted(b) <= limit, most)  # noqa: B023  # called at once
        if batch == 0 or batch in peaks:
            break
        held = run(batch, limit)
        peaks[batch] = held.measured_bytes
        limit = budget_bytes * held.predicted_bytes / held.measured_bytes
    lowest = min(peaks, default=1)
    while lowest > 1 and min(peaks.values()) > budget_bytes:
        lowest -= 1
        peaks[lowest] = run(lowest, limit).measured_bytes
    good = [b for b, peak in peaks.items() if peak <= budget_bytes]
    return Settled(max(good), peaks[max(good)]) if good else Settled(0, 0)


class Gains(NamedTuple):
    """Of the collaborative plan, one model: peak memory below each peer at equal batch, its time
    there over dense's (with least memory, and as the quickest that keeps the budget), and its
    throughput at its largest batch over peers'."""

    cut: dict[str, float]
    slowdown: float
    quick_slowdown: float
    over_best: float
    over_worst: float
    over_dense: float


def gains(rows: Sequence[Mapping[str, Any]]) -> Gains:
    """The gains from a model's rows, one of each variant. A peer that cannot train at all within
    the budget makes no samples."""
    of = {row["variant"]: row for row in rows}
    ours, dense = of[OURS], of["dense"]
    rates = [of[name]["samples_per_s"] for name in SINGLES]
    return Gains(
        cut={n: 1 - ours["peak_bytes"] / r["peak_bytes"] for n, r in of.items() if n != OURS},
        slowdown=ours["step_s"] / dense["step_s"],
        quick_slowdown=ours["quick"]["step_s"] / dense["step_s"],
        over_best=ours["samples_per_s"] / max(rates),
        over_worst=ours["samples_per_s"] / min(rates) if min(rates) else float("inf"),
        over_dense=ours["samples_per_s"] / dense["samples_per_s"],
    )
