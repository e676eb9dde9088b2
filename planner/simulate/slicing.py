"""Which gradients travel together, and how they are cut into slices: each is one collective.

Large parameters are cut into equal slices, which are sent from where they are. Small ones are
packed together, as each message has its latency: copying them costs less.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

PACKED_BYTES = 128 * 1024
"""Below this a gradient is copied into a pack: a copy of that size and back takes about 20 µs,
a message of its own some 200 µs (gloo, two cores, torch 2.13)."""


class SliceSpec(NamedTuple):
    """One slice: part ``part`` of ``parts`` equal ones of a parameter, or several small parameters
    whole. ``parameters`` are indices."""

    parameters: tuple[int, ...]
    part: int = 0
    parts: int = 1


def cut(sizes_bytes: Sequence[int], limit_bytes: int) -> tuple[SliceSpec, ...]:
    """The slices of a unit whose parameters have those sizes, none above ``limit_bytes``; packs
    first. Sizes of zero are left out."""
    packs: list[list[int]] = []
    room = 0
    whole: list[SliceSpec] = []
    for i, size in enumerate(sizes_bytes):
        if size <= 0:
            continue
        if not packed(size, limit_bytes):
            parts = ceil(size / limit_bytes)
            whole += [SliceSpec((i,), part, parts) for part in range(parts)]
            continue
        if not packs or size > room:
            packs.append([])
            room = limit_bytes
        packs[-1].append(i)
        room -= size
    return (*(SliceSpec(tuple(pack)) for pack in packs), *whole)


def packed(size_bytes: int, limit_bytes: int) -> bool:
    """Whether a gradient is copied into a pack, not sent from where it lies."""
    return size_bytes < min(PACKED_BYTES, limit_bytes)


def grouped(gradients: Iterable[tuple[Hashable, int, int]]) -> list[list[int]]:
    """Which gradients leave together: the numbers of each parcel's, in the order given, which is
    that of backward. Each is (what those have in common that can, unit, bytes).

    Those of one unit do; units that follow each other and are small together share a parcel, as
    each message has its latency.
    """
    found: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int, int]] = {}  # its numbers, bytes, last unit
    for number, (kind, unit, size) in enumerate(gradients):
        mine, there, last = open_.get(kind, ([], 0, -1))
        if not mine or not (unit == last or fits_together(there, size)):
            mine, there = [], 0
            found.append(mine)
        mine.append(number)
        open_[kind] = mine, there + size, unit
    return found


def fits_together(there_bytes: int, more_bytes: int) -> bool:
    """Whether the gradients of units that follow each other are small enough to share a message."""
    return there_bytes + more_bytes <= PACKED_BYTES
