"""What one member of a group holds and does: shares of the batch and of a unit's measurements."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil

from ..schema.curve import Curve
from ..schema.errors import InputError
from ..schema.layout import Layout, Style
from ..schema.local_batches import local_batches
from ..schema.profile import ParameterProfile, ShareProfile, UnitProfile
from .ownership import group_bounds, group_samples, largest_share

Quantity = Callable[[ShareProfile], Curve]


def batch_counts(
    batch: int, world_size: int, micro_batches: int = 1, planned: Sequence[int] = ()
) -> tuple[int, ...]:
    """Samples of each position in its largest micro-batch, of ``local_batches``; the first
    micro-batches get one more where these do not divide.
    """
    if micro_batches > 1 and batch < world_size * micro_batches:
        raise InputError(
            f"{micro_batches} micro-batches of a batch of {batch} on {world_size} ranks would "
            f"leave some without a sample: use at most {max(batch // world_size, 1)}"
        )
    return tuple(ceil(n / micro_batches) for n in local_batches(batch, world_size, planned))


def busiest_samples(
    counts: tuple[int, ...], layout: Layout, positions: Sequence[int] | None = None
) -> int:
    """Samples of the group that has most; of those with a member at the ``positions``, where some
    are given (none has one: zero)."""
    if positions is not None:
        found = group_samples(counts, layout)
        return max((found[p] or 0 for p in positions), default=0)
    bounds = group_bounds(counts, layout)
    return max(b - a for a, b in pairwise(bounds))


def share_of(
    unit: UnitProfile,
    style: Style,
    degree: int,
    quantity: Quantity,
    samples: float,
    *,
    divides: bool = True,
) -> float:
    """A measured quantity of a member's share, for ``samples`` samples of its group.

    Between measured degrees it is linear in 1/m (a fixed part and one that is divided), and beyond
    the largest it follows the same line. Where no share was measured, division is taken to be
    perfect, or without ``divides`` not to happen at all.
    """
    known = [s for s in unit.shares if s.style == style and s.degree > 1]
    shares = [unit.whole, *sorted(known, key=lambda share: share.degree)]
    for share in shares:
        if share.degree == degree:
            return quantity(share)(samples)
    values = [(1.0 / share.degree, quantity(share)(samples)) for share in shares]
    inverse = 1.0 / degree
    for (x0, y0), (x1, y1) in pairwise(values):
        if x1 <= inverse <= x0:
            return y0 + (y1 - y0) * (inverse - x0) / (x1 - x0)
    x1, y1 = values[-1]
    perfect = y1 * inverse / x1
    if len(values) == 1:
        return perfect if divides else y1
    # Where shares divided better than perfectly, the line would fall below perfect division.
    x0, y0 = values[-2]
    return max(y1 + (y1 - y0) * (inverse - x1) / (x1 - x0), perfect)


def forward_s(unit: UnitProfile, style: Style, degree: int, samples: float) -> float:
    """Seconds of the forward pass of a member's share."""
    return share_of(unit, style, degree, lambda s: s.forward, samples)


def backward_s(unit: UnitProfile, style: Style, degree: int, samples: float) -> float:
    """Seconds of the backward pass of a member's share."""
    return share_of(unit, style, degree, lambda s: s.backward, samples)


def saved_bytes(unit: UnitProfile, style: Style, degree: int, samples: float) -> float:
    """Bytes of feature maps that a member's share saves for backward."""
    return share_of(unit, style, degree, lambda s: s.saved, samples, divides=False)


def shard_bytes(
    unit: UnitProfile, style: Style, degree: int, parameters: tuple[ParameterProfile, ...]
) -> int:
    """Bytes of the largest member's shard of those parameters."""
    split = unit.split(style) if degree > 1 else None
    if split is None:
        return sum(p.bytes for p in parameters)
    divided = {name for name, _ in split.sharded}
    return sum(
        largest_share(p.bytes, split.parts, degree) if p.shared in divided else p.bytes
        for p in parameters
    )
