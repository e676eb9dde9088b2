"""A ``Goal`` from what users say: checked, with a sentence for what cannot be."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import get_args

from .errors import InputError
from .goal import BACKGROUND_LIMIT, OPTIMIZERS, BatchStatistics, Goal, Pin

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}i": 1024**n for n, u in enumerate("kmgt", start=1)}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
MOST = 2**53
"""Times are predicted in floating point, which holds every count up to here."""
OBJECTIVES = {"step": "time", "gpu-seconds": "gpu_seconds"}
"""What users call what shall be least, and what ``Goal`` calls it."""


def make_goal(
    batch: int,
    *,
    memory_limit_bytes: int | None = None,
    optimizer: str = "sgd",
    micro_batches: Sequence[int] = (1,),
    batch_statistics: str = "local",
    objective: str = "step",
    step_limit_s: float | None = None,
    amplification_limit: float | None = None,
    unit_amplification_limit: float | None = None,
    background_limit: float | None = None,
    min_fidelity: float | None = None,
    allow_lossy: bool = False,
    slice_bytes: Sequence[int] = (),
    pins: Sequence[Pin] = (),
    all_layouts: bool = False,
) -> Goal:
    """The goal of those values, each checked; raises ``InputError``. With a ``background_limit``
    another job may run beside the plan and slow it by so much."""
    _at_least_one("batch", batch)
    if memory_limit_bytes is not None:
        _at_least_one("memory limit", memory_limit_bytes)
    if not micro_batches:
        raise InputError("no counts of micro-batches: name at least one, such as 1")
    for count in micro_batches:
        _at_least_one("number of micro-batches", count)
    _one_of("optimizer", optimizer, OPTIMIZERS)
    _one_of("batch statistics", batch_statistics, get_args(BatchStatistics))
    _one_of("objective", objective, OBJECTIVES)
    _above_zero("step limit", step_limit_s)
    _above_zero("amplification limit", amplification_limit)
    _above_zero("unit amplification limit", unit_amplification_limit)
    if background_limit is not None and not 1 < background_limit < math.inf:
        raise InputError(
            f"a background limit of {background_limit:g} cannot be held: give more than 1, such as "
            f"{BACKGROUND_LIMIT:g} for a step that takes up to a tenth longer"
        )
    return Goal(
        batch=batch,
        memory_limit_bytes=memory_limit_bytes,
        optimizer=optimizer,  # type: ignore[arg-type]
        micro_batches=tuple(dict.fromkeys(micro_batches)),
        batch_statistics=batch_statistics,  # type: ignore[arg-type]
        objective=OBJECTIVES[objective],  # type: ignore[arg-type]
        time_limit_s=step_limit_s,
        amplification_limit=amplification_limit,
        unit_amplification_limit=unit_amplification_limit,
        background=background_limit is not None,
        background_limit=BACKGROUND_LIMIT if background_limit is None else background_limit,
        allow_lossy=allow_lossy,
        min_fidelity=_fidelity(min_fidelity, allow_lossy),
        slice_bytes=tuple(dict.fromkeys(slice_bytes)),
        pins=tuple(pins),
        all_layouts=all_layouts,
    )


def _fidelity(least: float | None, allow_lossy: bool) -> float:
    """The share of the gradient's energy that must be sent at once."""
    if not allow_lossy:
        if least is not None:
            raise InputError(
                f"a least fidelity of {least:g} bounds a lossy exchange, which is not allowed: "
                "add --allow-lossy (allow_lossy=True, lossy=True of auto_parallelize)"
            )
        return 1.0
    if least is None or least == 1:
        raise InputError(
            "a lossy exchange that keeps the whole gradient saves nothing: say how much of its "
            "energy must be sent, with --min-fidelity 0.9 (min_fidelity=0.9)"
        )
    if not 0 <= least < 1:
        raise InputError(f"a least fidelity of {least:g} is no share: give 0 to 1, such as 0.9")
    return least


def _above_zero(what: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"a {what} of {value:g} cannot be: give more than 0")


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise InputError(f"a {what} of {value} cannot be: give at least 1")
    if value > MOST:
        raise InputError(f"a {what} of {value} cannot be: give at most {MOST}")


def _one_of(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise InputError(f"unknown {what} {value!r}: choose from {', '.join(known)}")


def parse_bytes(text: str) -> int:
    """Bytes from ``8GiB``, ``500 MB``, ``1.5g`` or a plain number; raises ``InputError``."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        count = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (ValueError, KeyError):
        count = math.nan
    if not 1 <= count < 2**62:
        raise InputError(f"{text!r} is not an amount of memory: write it like 8GiB or 500MB")
    return round(count)


def parse_seconds(text: str) -> float:
    """Seconds from ``0.25``, ``1.5s``, ``250ms`` or ``80us``; raises ``InputError``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs)?\s*", text.lower())
    try:
        value = float(match[1]) * _SECONDS[match[2] or ""] if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{text!r} is not a time above 0: write it like 250ms or 1.5s")
    return value


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers from ``1,2,4``; raises ``InputError``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is not a list of counts: write it like 1,2,4") from None


def shares_note(batch: int, world_size: int) -> str | None:
    """What happens to a batch that does not divide over the ranks; None where it does."""
    least, more = divmod(batch, world_size)
    if not more:
        return None
    return (
        f"a batch of {batch} does not divide over {world_size} ranks: {more} of them take "
        f"{least + 1} samples and the others {least}, and every sample counts alike"
    )
