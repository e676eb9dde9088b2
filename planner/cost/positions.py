"""Which positions hold the same: those that take equal parts in all layouts in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..schema.layout import Layout
from .ownership import group_bounds


class PositionClass(NamedTuple):
    """Positions that hold the same; ``samples`` of their group under each layout in use."""

    positions: tuple[int, ...]
    samples: dict[Layout, int | None]


def group_samples(counts: tuple[int, ...], layout: Layout) -> list[int | None]:
    """For each position the samples of its group, None where it takes no part."""
    bounds = group_bounds(counts, layout)
    found: list[int | None] = [None] * len(counts)
    for g in range(layout.groups):
        for position in layout.group(g):
            found[position] = bounds[g + 1] - bounds[g]
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
