"""How far two trainings are apart, and how far they may be."""

import sys
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...planner.schema.record import Count, Record


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
        share = (difference(found, reference) / allowed).max()
        return float(share) if bool(share.isfinite()) else sys.float_info.max


def difference(found: Tensor, reference: Tensor) -> Tensor:
    """|Δ| of each element; none where both are the same infinity."""
    return torch.where(found == reference, 0.0, (found - reference).abs())


# For every element of parameters and buffers after SGD, by the precision of the model or of the
# coarsest of its modules.
STATE = {
    torch.float64: Yardstick(1e-9, 1e-10),
    torch.float32: Yardstick(1e-5, 1e-6),
    torch.float16: Yardstick(5e-3, 1e-4),
    torch.bfloat16: Yardstick(4e-2, 1e-3),
}
# For the loss of a step.
LOSS = {
    torch.float64: Yardstick(1e-9, 1e-10),
    torch.float32: Yardstick(1e-5, 1e-8),
    torch.float16: Yardstick(5e-3, 1e-4),
    torch.bfloat16: Yardstick(4e-2, 1e-3),
}


class Deviation(Record, frozen=True, kw_only=True):
    """How far a class of tensors is from the single process: the largest |Δ|, and the largest
    |Δ| in parts of what the yardstick allows that element (``of_allowed`` ≤ 1 is equal) with the
    name of the tensor that has it."""

    # Doubles may differ by less than anybody measures, and what is infinitely far off is the most.
    _reals: ClassVar[tuple[float, float]] = 0.0, sys.float_info.max

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
    kinds: dict[str, dict[str, tuple[float, float]]] = {}
    for name in dict.fromkeys([*reference, *found]):
        away = (sys.float_info.max, sys.float_info.max)
        if name in found and name in reference:
            away = _distance(found[name], reference[name], yardstick)
        kinds.setdefault(kind_of(name), {})[name] = away
    made = []
    for kind, measured in kinds.items():
        worst = max(measured, key=lambda name: measured[name][1])
        largest, share = max(away for away, _ in measured.values()), measured[worst][1]
        made.append(
            Deviation(
                what=kind, tensors=len(measured), largest=largest, of_allowed=share, worst=worst
            )
        )
    return tuple(made)


def _distance(found: Tensor, reference: Tensor, yardstick: Yardstick) -> tuple[float, float]:
    """(largest |Δ|, in parts of what is allowed). Whole numbers must be equal."""
    # In double precision, or the subtraction would round as well.
    a, b = (t.detach().to("cpu", torch.float64) for t in (found, reference))
    share = yardstick.share(a, b)
    if share >= sys.float_info.max or b.numel() == 0:
        return (share, share)
    largest = float(difference(a, b).max())
    if not reference.is_floating_point() and largest > 0:
        return (largest, sys.float_info.max)
    return (largest, share)
