"""The yardstick by which a plan's training equals that of a single process (docs/executor.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...planner.schema.record import Count, Record

DtypeName = Literal["float64", "float32"]


class Yardstick(NamedTuple):
    """|Δ| may be up to ``relative`` · |reference| + ``absolute``."""

    relative: float
    absolute: float

    def share(self, found: Tensor, reference: Tensor) -> float:
        """The largest |Δ| of any element in parts of what it may be; at most 1 is equal. What is
        not a number, or of another shape, is as far off as can be."""
        if found.shape != reference.shape:
            return sys.float_info.max
        if reference.numel() == 0:
            return 0.0
        allowed = self.relative * reference.abs() + self.absolute
        share = ((found - reference).abs() / allowed).max()
        return float(share) if bool(share.isfinite()) else sys.float_info.max


STATE: dict[DtypeName, Yardstick] = {
    "float64": Yardstick(1e-9, 1e-10),
    "float32": Yardstick(1e-5, 1e-6),
}
"""For every element of parameters and buffers after SGD."""
LOSS: dict[DtypeName, Yardstick] = {
    "float64": Yardstick(1e-9, 1e-10),
    "float32": Yardstick(1e-5, 1e-8),
}
"""For the loss of a step."""


class Deviation(Record, frozen=True, kw_only=True):
    """How far a class of tensors is from the single process: the largest |Δ|, and the largest
    |Δ| in parts of what the yardstick allows that element (``of_allowed`` ≤ 1 is equal) with the
    name of the tensor that has it."""

    what: str
    tensors: Count
    largest: float
    of_allowed: float
    worst: str

    @property
    def passed(self) -> bool:
        """Whether all of them are equal by the yardstick."""
        return self.of_allowed <= 1


def deviations(
    found: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    yardstick: Yardstick,
    kind_of: Callable[[str], str],
) -> tuple[Deviation, ...]:
    """One ``Deviation`` for each kind of tensor, in the order in which kinds first occur.

    Tensors are paired by name. One that is missing on either side is as far off as can be.
    """
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys([*reference, *found]):
        kinds.setdefault(kind_of(name), []).append(name)
    return tuple(
        _deviation(kind, names, found, reference, yardstick) for kind, names in kinds.items()
    )


def _deviation(
    kind: str,
    names: Iterable[str],
    found: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    yardstick: Yardstick,
) -> Deviation:
    far = (sys.float_info.max, sys.float_info.max)
    measured = {
        name: _distance(found[name], reference[name], yardstick)
        if name in found and name in reference
        else far
        for name in names
    }
    worst = max(measured, key=lambda name: measured[name][1])
    return Deviation(
        what=kind,
        tensors=len(measured),
        largest=max(largest for largest, _ in measured.values()),
        of_allowed=measured[worst][1],
        worst=worst,
    )


def _distance(found: Tensor, reference: Tensor, yardstick: Yardstick) -> tuple[float, float]:
    """(largest |Δ|, in parts of what is allowed). Whole numbers must be equal."""
    a, b = (t.detach().to("cpu", torch.float64) for t in (found, reference))
    share = yardstick.share(a, b)
    if share >= sys.float_info.max or b.numel() == 0:
        return (share, share)
    largest = float((a - b).abs().max())
    if not reference.is_floating_point() and largest > 0:
        return (largest, sys.float_info.max)
    return (largest, share)
