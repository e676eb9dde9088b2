"""The arithmetic of ``laysa.py``: the largest batch that keeps a budget, gains and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SINGLES = ("memory only", "sparse only")
OURS = "collaborative"
TRIES = 3
"""So often the largest batch is guessed anew from what the last one took."""
CUT, FASTER, SLOWDOWN = 0.805, 2.5, 1.1
"""LaySA's claims (Zhao et al., IEEE Access 2021): peak memory cut by up to 80.5%, throughput up by
more than 150%; and what is asked of the time at equal batch."""


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


def table(columns: Mapping[str, Callable[[Mapping[str, Any]], object]], rows: Any) -> str:
    """The rows as Markdown; a column has a heading, and what it shows of a row."""
    lines = ["| " + " | ".join(columns) + " |", "| --- " + "| --: " * (len(columns) - 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(str(show(row)) for show in columns.values()) + " |")
    return "\n".join(lines)


def mb(count: float) -> str:
    """Bytes in millions."""
    return f"{count / 1e6:.1f}"


MAIN = {
    "variant": lambda r: r["variant"],
    "what": lambda r: r["what"],
    "peak MB": lambda r: mb(r["peak_bytes"]),
    "predicted": lambda r: mb(r["predicted_bytes"]),
    "step s": lambda r: f"{r['step_s']:.3f}",
    "largest batch": lambda r: r["max_batch"],
    "peak MB there": lambda r: mb(r["max_peak_bytes"]),
    "step s there": lambda r: f"{r['max_step_s']:.3f}",
    "samples/s": lambda r: f"{r['samples_per_s']:.2f}",
}
OWN = {
    "variant": lambda r: r["variant"],
    "micro-batches": lambda r: r["micro_batches"],
    "batch": lambda r: r["max_batch"],
    "peak MB": lambda r: mb(r["max_peak_bytes"]),
    "samples/s": lambda r: f"{r['samples_per_s']:.2f}",
}


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The targets beside the figures of one model."""
    found = gains(rows)
    cuts = ", ".join(f"{100 * cut:.1f}% below {name}" for name, cut in found.cut.items())
    return "\n".join(
        [
            f"- Peak memory of the collaborative plan at equal batch: {cuts} (the claim: up to "
            f"{CUT:.1%} below a single strategy).",
            f"- Its step there takes {found.slowdown:.2f} times dense's; {found.quick_slowdown:.2f} "
            f"times as the quickest plan within the budget (at most {SLOWDOWN}).",
            f"- Its throughput at its largest batch: {found.over_best:.2f} times the best single "
            f"strategy's, {found.over_worst:.2f} times the worst's, {found.over_dense:.2f} times "
            f"dense's (the claim: up to {FASTER}).",
        ]
    )
