"""The tables of docs/results/memory.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Protocol

from page import table

WITHIN, BEYOND = 0.02, 0.05
"""The targets: of the median error, and of the worst."""
LARGEST = 10


class Row(Protocol):
    """A row of ``benchmarks/memory.py``."""

    @property
    def model(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def predicted_bytes(self) -> int: ...
    @property
    def measured_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def error(self) -> float: ...


def page_of(rows: Sequence[Row], models: Sequence[str]) -> str:
    """What all rows say, by model, by policy, and the worst of them."""
    there = [m for m in models if any(r.model == m for r in rows)]
    return "\n\n".join(
        [
            summary(rows),
            by_model(rows, there),
            "The largest error of each policy (a mirror takes SGD only), in %:",
            by_policy(rows, there),
            f"The {min(LARGEST, len(rows))} largest errors:",
            largest(rows),
        ]
    )


def summary(rows: Sequence[Row]) -> str:
    """The targets beside the figures."""
    errors = [abs(r.error) for r in rows]
    resident = [r.resident_bytes // 2**20 for r in rows]
    return (
        f"**{len(rows)} rows: median error {median(errors):.2%}, worst {max(errors):.1%}** "
        f"(targets: {WITHIN:.0%} and {BEYOND:.0%}); {sum(e <= WITHIN for e in errors)} rows are "
        f"within {WITHIN:.0%}, {sum(e > BEYOND for e in errors)} beyond {BEYOND:.0%}. Resident "
        f"sets: {min(resident)} to {max(resident)} MiB."
    )


def by_model(rows: Sequence[Row], models: Sequence[str]) -> str:
    """A line for each model."""
    lines = []
    for model in models:
        mine = [r for r in rows if r.model == model]
        megabytes = [r.measured_bytes / 1e6 for r in mine]
        typical = median(abs(r.error) for r in mine)
        lines.append(
            (model, len(mine), f"{min(megabytes):.1f} to {max(megabytes):.1f}", f"{typical:.2%}",
             f"{worst(mine):+.1%}")
        )  # fmt: skip
    return table(("model", "rows", "measured MB", "median error", "worst"), lines)


def by_policy(rows: Sequence[Row], models: Sequence[str]) -> str:
    """The worst error of each policy and model."""
    lines = []
    for policy in dict.fromkeys(r.policy for r in rows):
        found = [[r for r in rows if (r.model, r.policy) == (m, policy)] for m in models]
        lines.append((policy, *(f"{100 * worst(mine):+.1f}" if mine else "" for mine in found)))
    return table(("policy", *models), lines)


def largest(rows: Sequence[Row]) -> str:
    """The rows whose error is largest."""
    return table(
        ("model", "policy", "batch", "optimizer", "predicted MB", "measured MB", "error"),
        [
            (r.model, r.policy, r.batch, r.optimizer, f"{r.predicted_bytes / 1e6:.2f}",
             f"{r.measured_bytes / 1e6:.2f}", f"{r.error:+.1%}")
            for r in sorted(rows, key=lambda r: -abs(r.error))[:LARGEST]
        ],
    )  # fmt: skip


def worst(rows: Iterable[Row]) -> float:
    """The error that is furthest from nothing, with its sign."""
    return max((r.error for r in rows), key=abs)
