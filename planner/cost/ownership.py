"""Who owns which samples and features of a tensor, and what must move to change that.

This is the one statement of ownership: the cost model counts the bytes of ``transfers`` and the
executor's redistribution moves exactly those pieces.

Samples are numbered over the whole batch in the order of positions: position 0 feeds the first
``counts[0]`` samples, position 1 the next ``counts[1]``, and so on. Features are numbered along
one dimension of the tensor (output features of a linear unit, channels of a convolution).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from ..schema.layout import Layout, Style, data_parallel

Form = Literal["samples", "features", "whole"]
"""How a layout's positions hold a tensor.

``samples``   each position its own samples, with all features.
``features``  each position all samples of its group, with its slice of the features.
``whole``     each position all samples of its group, with all features (needed at entry, or
              partial sums at exit; never what is left standing between units).
"""


class TensorPlacement(NamedTuple):
    """A layout together with the form in which its positions hold a tensor."""

    layout: Layout
    form: Form


class Box(NamedTuple):
    """Samples ``[lo, hi)`` and features ``[left, right)`` of a tensor."""

    lo: int
    hi: int
    left: int
    right: int

    @property
    def empty(self) -> bool:
        return self.lo >= self.hi or self.left >= self.right

    @property
    def area(self) -> int:
        """Samples times features."""
        return 0 if self.empty else (self.hi - self.lo) * (self.right - self.left)

    def meet(self, other: Box) -> Box:
        """What both boxes contain."""
        return Box(
            max(self.lo, other.lo),
            min(self.hi, other.hi),
            max(self.left, other.left),
            min(self.right, other.right),
        )


class Transfer(NamedTuple):
    """One piece that position ``target`` needs and position ``source`` owns."""

    source: int
    target: int
    box: Box


def home(world_size: int) -> TensorPlacement:
    """How the model's input and output are held: every position its own samples."""
    return TensorPlacement(data_parallel(world_size), "samples")


def input_placement(layout: Layout, style: Style) -> TensorPlacement:
    """What a unit needs of its input."""
    form: Form = {"none": "samples", "column": "whole", "pair": "whole", "row": "features"}[style]  # type: ignore[assignment]
    return TensorPlacement(layout, form)


def output_placement(layout: Layout, style: Style) -> TensorPlacement:
    """How a unit leaves its output (after its own reduction, for ``row`` and ``pair``)."""
    return TensorPlacement(layout, "features" if style == "column" else "samples")


def feature_bounds(features: int, degree: int, member: int) -> tuple[int, int]:
    """The slice ``[left, right)`` of a member: ceiling-sized chunks, as ``torch.chunk`` and
    DTensor's ``Shard`` cut them; the last members may get less or nothing.
    """
    size = -(-features // degree)
    return min(member * size, features), min((member + 1) * size, features)


def group_bounds(counts: Sequence[int], layout: Layout) -> list[int]:
    """Where each group's samples begin, and at the end the batch size.

    Where all positions take part, a group has the samples that its members feed, so that they
    move only inside the group. Else the batch is cut evenly.
    """
    starts = [0, *accumulate(counts)]
    if layout.first == 0 and layout.size == len(counts):
        return starts[:: layout.degree]
    return [starts[-1] * g // layout.groups for g in range(layout.groups + 1)]


def sample_bounds(counts: Sequence[int], layout: Layout, position: int) -> tuple[int, int]:
    """The samples ``[lo, hi)`` that a position holds in form ``samples``."""
    place = layout.place(position)
    if place is None:
        return 0, 0
    if layout.first == 0 and layout.size == len(counts):
        start = sum(counts[:position])
        return start, start + counts[position]
    group, member = place
    bounds = group_bounds(counts, layout)
    lo, size = bounds[group], bounds[group + 1] - bounds[group]
    return lo + size * member // layout.degree, lo + size * (member + 1) // layout.degree


def box(counts: Sequence[int], held: TensorPlacement, features: int, position: int) -> Box:
    """What a position holds of a tensor with ``features`` features."""
    place = held.layout.place(position)
    if place is None:
        return Box(0, 0, 0, 0)
    if held.form == "samples":
        return Box(*sample_bounds(counts, held.layout, position), 0, features)
    group, member = place
    bounds = group_bounds(counts, held.layout)
    lo, hi = bounds[group], bounds[group + 1]
    if held.form == "whole":
        return Box(lo, hi, 0, features)
    return Box(lo, hi, *feature_bounds(features, held.layout.degree, member))


def transfers(
    counts: Sequence[int],
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
    *,
    local: bool = False,
) -> list[Transfer]:
    """The pieces that each position needs under ``target`` and does not own under ``source``.

    ``source`` must not be ``whole``, so that every piece has one owner. With ``local`` the pieces
    that a position needs and owns itself are listed too (source equal to target). In order of
    target, then source.
    """
    if source.form == "whole":
        raise ValueError("a tensor held whole has several owners: nothing says which one sends")
    owned = [box(counts, source, features, p) for p in source.layout.positions]
    # Owners that hold samples are sorted by where these begin, so only few need a look.
    starts = [b.lo for b in owned]
    first = source.layout.first
    found = []
    for position in target.layout.positions:
        need = box(counts, target, features, position)
        if need.empty:
            continue
        end = bisect_right(starts, need.hi - 1)
        for index in range(_begin(starts, need.lo, source), end):
            piece = owned[index].meet(need)
            if not piece.empty and (local or first + index != position):
                found.append(Transfer(first + index, position, piece))
    return found


def _begin(starts: list[int], lo: int, source: TensorPlacement) -> int:
    """The first owner that can hold sample ``lo``: the owners of one group start alike."""
    index = bisect_right(starts, lo) - 1
    while index > 0 and starts[index - 1] >= starts[index]:
        index -= 1
    return max(index, 0)


def traffic(moves: Sequence[Transfer], positions: int) -> tuple[list[int], list[int]]:
    """(sent, received) samples × features of each position; pieces kept in place count nothing."""
    sent, received = [0] * positions, [0] * positions
    for move in moves:
        if move.source != move.target:
            sent[move.source] += move.box.area
            received[move.target] += move.box.area
    return sent, received
