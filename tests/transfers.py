"""What a redistribution moves, stated once more, position by position: brute force."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from meshwright.planner.cost.ownership import feature_bounds, group_bounds


class Box(NamedTuple):
    lo: int
    hi: int
    left: int
    right: int

    @property
    def area(self):
        return max(self.hi - self.lo, 0) * max(self.right - self.left, 0)

    def meet(self, other):
        lo, left = max(self.lo, other.lo), max(self.left, other.left)
        return Box(lo, min(self.hi, other.hi), left, min(self.right, other.right))


class Transfer(NamedTuple):
    source: int
    target: int
    box: Box


def sample_bounds(counts, layout, position):
    """The samples that a position holds in a batch shard."""
    group, member = layout.place(position)
    if layout.size == len(counts):
        start = sum(counts[:position])
        return start, start + counts[position]
    lo, hi = group_bounds(counts, layout)[group : group + 2]
    cuts = [lo + (hi - lo) * m // layout.degree for m in (member, member + 1)]
    return cuts[0], cuts[1]


def box(counts, placement, features, position):
    """What a position holds of a tensor: no samples where it is idle."""
    layout, form = placement
    place = layout.place(position)
    if place is None:
        return Box(0, 0, 0, features)
    if form == "batch_shard":
        return Box(*sample_bounds(counts, layout, position), 0, features)
    group, member = place
    lo, hi = group_bounds(counts, layout)[group : group + 2]
    if form == "replicate":
        return Box(lo, hi, 0, features)
    return Box(lo, hi, *feature_bounds(features, layout.degree, member))


def transfers(counts, source, target, features):
    """What every position needs under ``target`` and another owns under ``source``."""
    assert source.form != "replicate"
    owned, needed = (
        [box(counts, placement, features, p) for p in range(len(counts))]
        for placement in (source, target)
    )
    pairs = product(range(len(counts)), repeat=2)
    moves = [Transfer(a, b, owned[a].meet(needed[b])) for b, a in pairs if a != b]
    return [move for move in moves if move.box.area]


def traffic(moves, positions):
    """(sent, received) elements of each position."""
    sent, received = [0] * positions, [0] * positions
    for move in moves:
        sent[move.source] += move.box.area
        received[move.target] += move.box.area
    return sent, received
