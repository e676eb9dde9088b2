"""Who owns which samples and features of a tensor.

This is the one statement of ownership: the cost model, the memory model and the executor read it.

Samples are numbered over the whole batch in the order of positions: position 0 feeds the first
``counts[0]`` samples, position 1 the next ``counts[1]``, and so on. Features are numbered along
one dimension of the tensor (output features of a linear unit, channels of a convolution).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..schema.layout import Layout, Style, data_parallel

Form = Literal["batch_shard", "feature_shard", "replicate"]
"""How a layout's positions hold a tensor.

``batch_shard``    each position its own samples, with all features.
``feature_shard``  each position all samples of its group, with its slice of the features.
``replicate``      each position all samples of its group, with all features (a unit's input, or
                   partial sums before they are reduced; never a unit's output).
"""

INPUT_FORM: dict[Style, Form] = {
    "none": "batch_shard",
    "column": "replicate",
    "pair": "replicate",
    "row": "feature_shard",
}
"""What a unit needs of its input."""

Boxes = npt.NDArray[np.int64]
"""Rows lo, hi, left, right: samples ``[lo, hi)`` and features ``[left, right)`` of a tensor."""


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


def data_parallel_placement(world_size: int) -> TensorPlacement:
    """How the model's input and output are held: every position its own samples."""
    return TensorPlacement(data_parallel(world_size), "batch_shard")


def input_placement(layout: Layout, style: Style) -> TensorPlacement:
    """What a unit needs of its input."""
    return TensorPlacement(layout, INPUT_FORM[style])


def output_placement(layout: Layout, style: Style) -> TensorPlacement:
    """How a unit leaves its output (after its own reduction, for ``row`` and ``pair``)."""
    return TensorPlacement(layout, "feature_shard" if style == "column" else "batch_shard")


def feature_bounds(features: int, degree: int, member: int) -> tuple[int, int]:
    """The slice ``[left, right)`` of a member; the last members may get less or nothing."""
    # Ceiling-sized chunks, as ``torch.chunk`` and DTensor's ``Shard`` cut them.
    size = -(-features // degree)
    return min(member * size, features), min((member + 1) * size, features)


def largest_share(size: int, parts: int, degree: int) -> int:
    """Of ``size`` bytes or elements in ``parts`` that members divide, those of the first member,
    which has most, rounded up."""
    _, most = feature_bounds(parts, degree, 0)
    return -(-size * most // max(parts, 1))


def group_bounds(counts: Sequence[int], layout: Layout) -> list[int]:
    """Where each group's samples begin, and at the end the batch size."""
    starts = [0, *accumulate(counts)]
    if layout.first == 0 and layout.size == len(counts):
        # All take part: a group has what its members feed, so that samples move only inside it.
        return starts[:: layout.degree]
    return [starts[-1] * g // layout.groups for g in range(layout.groups + 1)]


def boxes(counts: Sequence[int], placement: TensorPlacement, features: int) -> Boxes:
    """[4, position] what each position holds of a tensor with ``features`` features. Idle positions
    have no samples of all features.
    """
    layout = placement.layout
    table = np.zeros((4, len(counts)), dtype=np.int64)
    table[3] = features
    bounds = np.array(group_bounds(counts, layout), dtype=np.int64)
    low, high = (np.repeat(b, layout.degree) for b in (bounds[:-1], bounds[1:]))
    member = np.tile(np.arange(layout.degree), layout.groups)
    left, right = np.zeros_like(low), np.full_like(low, features)
    if placement.form == "feature_shard":
        slices = [feature_bounds(features, layout.degree, m) for m in range(layout.degree)]
        left, right = np.array(slices, dtype=np.int64)[member].T
    elif placement.form == "batch_shard" and layout.size == len(counts):
        # Every position keeps the samples that it feeds, however uneven the group.
        high = np.cumsum(counts, dtype=np.int64)
        low = high - np.array(counts, dtype=np.int64)
    elif placement.form == "batch_shard":
        size = high - low
        low, high = (low + size * m // layout.degree for m in (member, member + 1))
    table[:, layout.first : layout.first + layout.size] = low, high, left, right
    return table


def box(counts: Sequence[int], placement: TensorPlacement, features: int, position: int) -> Box:
    """What one position holds: its row of ``boxes``."""
    return Box(*boxes(counts, placement, features)[:, position].tolist())


class PositionClass(NamedTuple):
    """Positions that take equal parts in all layouts in use, with the ``samples`` of their group
    under each of these."""

    positions: tuple[int, ...]
    samples: dict[Layout, int | None]


def group_samples(counts: tuple[int, ...], layout: Layout) -> list[int | None]:
    """For each position the samples of its group, None where it takes no part."""
    found: list[int | None] = [None] * len(counts)
    for g, (start, stop) in enumerate(pairwise(group_bounds(counts, layout))):
        for position in layout.group(g):
            found[position] = stop - start
    return found


def position_classes(counts: tuple[int, ...], layouts: Sequence[Layout]) -> list[PositionClass]:
    """The positions, those together that take equal parts in all of the layouts."""
    different = list(dict.fromkeys(layouts))
    columns = [group_samples(counts, layout) for layout in different]
    classes: dict[tuple[int | None, ...], list[int]] = {}
    for position, key in enumerate(zip(*columns, strict=True)):
        classes.setdefault(key, []).append(position)
    return [
        PositionClass(tuple(positions), dict(zip(different, key, strict=True)))
        for key, positions in classes.items()
    ]
