"""How much a redistribution moves, counted for all positions at once.

The pieces are those of ``ownership.transfers``, the one statement of what must move; listing them
one by one takes too long for a thousand positions, so the same overlaps are counted here as arrays.
Property tests hold the two together, position by position.

Elements are samples × features. A backward redistribution moves the same pieces the other way
(what was copied to several members comes back from each and is summed), so its busiest position
moves as much as forward's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schema.cluster import LevelName
from ..schema.layout import Layout
from .collectives import Fabric, Positions, all_to_all_s
from .ownership import TensorPlacement, feature_bounds, group_bounds

Counts = Sequence[int]
Reals = npt.NDArray[np.float64]


class Moved(NamedTuple):
    """What a redistribution moves, in elements, and over which level.

    ``sent`` is what the busiest position sends, ``intra`` what the busiest position sends or
    receives inside its node, ``inter`` what the busiest network interface carries one way.
    ``pair_s`` is the seconds that the busiest position needs per byte of an element by measured
    pairs. ``partners`` is the largest number of others that a position exchanges with.
    """

    level: LevelName
    sent: float
    received: float
    intra: float
    inter: float
    pair_s: float
    partners: int


NOTHING = Moved("intra", 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def boxes(counts: Counts, held: TensorPlacement, features: int) -> Positions:
    """Rows lo, hi, left, right for each position: ``ownership.box`` for all of them."""
    layout = held.layout
    table = np.zeros((4, len(counts)), dtype=np.int64)
    used = slice(layout.first, layout.first + layout.size)
    bounds = np.array(group_bounds(counts, layout), dtype=np.int64)
    low, high = (np.repeat(b, layout.degree) for b in (bounds[:-1], bounds[1:]))
    member = np.tile(np.arange(layout.degree), layout.groups)
    left, right = np.zeros_like(low), np.full_like(low, features)
    if held.form == "samples":
        low, high = _sample_bounds(counts, layout, low, high, member)
    elif held.form == "features":
        cuts = [feature_bounds(features, layout.degree, m) for m in range(layout.degree)]
        left, right = np.array(cuts, dtype=np.int64)[member].T
    table[:, used] = low, high, left, right
    return table


def _sample_bounds(
    counts: Counts, layout: Layout, low: Positions, high: Positions, member: Positions
) -> tuple[Positions, Positions]:
    if layout.first == 0 and layout.size == len(counts):
        ends = np.cumsum(np.array(counts, dtype=np.int64))
        return ends - np.array(counts, dtype=np.int64), ends
    size = high - low
    return low + size * member // layout.degree, low + size * (member + 1) // layout.degree


def overlaps(
    counts: Counts, source: TensorPlacement, target: TensorPlacement, features: int
) -> tuple[Positions, int]:
    """(elements moved [block, target, source], block size): positions are cut into blocks that
    exchange nothing with each other.

    Where both layouts use all positions, groups of either lie inside blocks of the least common
    multiple of their degrees; else everything is one block.
    """
    if source.form == "whole":
        raise ValueError("a tensor held whole has several owners: nothing says which one sends")
    world = len(counts)
    full = all(h.layout.size == world and h.layout.first == 0 for h in (source, target))
    size = lcm(source.layout.degree, target.layout.degree) if full else world
    owned = boxes(counts, source, features).reshape(4, -1, 1, size)
    needed = boxes(counts, target, features).reshape(4, -1, size, 1)
    samples = np.minimum(owned[1], needed[1]) - np.maximum(owned[0], needed[0])
    columns = np.minimum(owned[3], needed[3]) - np.maximum(owned[2], needed[2])
    moved: Positions = np.maximum(samples, 0) * np.maximum(columns, 0)
    own = np.arange(size)
    moved[:, own, own] = 0
    return moved, size


def moved(
    fabric: Fabric, counts: Counts, source: TensorPlacement, target: TensorPlacement, features: int
) -> Moved:
    """What ``transfers(counts, source, target, features)`` moves, as loads of links."""
    pieces, size = overlaps(counts, source, target, features)
    if not pieces.any():
        return NOTHING
    nodes = fabric.node_of.reshape(-1, size)
    crossing = (nodes[:, :, None] != nodes[:, None, :]) * pieces
    inside = pieces - crossing
    partners = (pieces > 0).sum(axis=1).max(), (pieces > 0).sum(axis=2).max()
    count = len(fabric.cluster.nodes)
    out = np.bincount(nodes.ravel(), crossing.sum(axis=1).ravel(), count)
    into = np.bincount(nodes.ravel(), crossing.sum(axis=2).ravel(), count)
    return Moved(
        level="inter" if crossing.any() else "intra",
        sent=float(pieces.sum(axis=1).max()),
        received=float(pieces.sum(axis=2).max()),
        intra=float(max(inside.sum(axis=1).max(), inside.sum(axis=2).max())),
        inter=float(max(out.max(), into.max())),
        pair_s=_pair_s(fabric, pieces, size),
        partners=int(max(partners)),
    )


def _pair_s(fabric: Fabric, pieces: Positions, size: int) -> float:
    if fabric.pair_bytes_per_s is None:
        return 0.0
    blocks = pieces.shape[0]
    positions = np.arange(blocks * size).reshape(blocks, size)
    # rates[b, target, source]: from source to target
    rates = fabric.pair_bytes_per_s[positions[:, None, :], positions[:, :, None]]
    seconds: Reals = pieces / rates
    return float(max(seconds.sum(axis=1).max(), seconds.sum(axis=2).max()))


def moved_s(fabric: Fabric, move: Moved, element_bytes: float) -> float:
    """Seconds of the redistribution; ``element_bytes`` is the size of one sample's one feature.

    Traffic inside nodes and between nodes flows at the same time: the slower one counts.
    """
    if not move.partners or element_bytes <= 0:
        return 0.0
    seconds = move.pair_s * element_bytes
    if move.intra:
        level = fabric.level("intra")
        seconds = max(seconds, all_to_all_s(level, move.partners, move.intra * element_bytes))
    if move.inter:
        level = fabric.level("inter")
        seconds = max(seconds, all_to_all_s(level, move.partners, move.inter * element_bytes))
    return seconds
