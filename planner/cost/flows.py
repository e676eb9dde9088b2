"""What the redistributions between many layouts move, all pairs at once.

``movement.moved`` lists the overlaps of every two positions, which is exact for any placement and
takes too long for the thousands of pairs of layouts of a large lattice. Where each node's positions
are neighbours, the same figures follow from areas: every element of a tensor has one owner, so that
a position receives what it needs less what it owns of it, and from its own node what it needs of
the node's boxes together, which are at most three: the end of one group, whole groups, the begin of
another. A property test holds both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schema.cluster import Level
from .collectives import Fabric, Positions, all_to_all_s
from .movement import NOTHING, Moved, boxes, moved
from .ownership import TensorPlacement
from .step_time import LINKS

Reals = npt.NDArray[np.float64]
_Sides = Positions | Sequence[Positions]
CHUNK = 4_000_000
"""Elements of the largest temporary array: [sources, targets of a chunk, positions]."""


class Flows(NamedTuple):
    """``movement.Moved`` for each pair [source, target]; ``level`` is an index (0 intra, 1 inter),
    ``pair_s`` as there."""

    level: Positions
    sent: Reals
    received: Reals
    intra: Reals
    inter: Reals
    pair_s: Reals
    partners: Positions


class _Side(NamedTuple):
    """Held tensors of one side of the pairs.

    ``boxes`` [held, 4, position]; ``united`` [held, node, piece, 4] and ``weight`` [held, node,
    piece] are the boxes of a node's positions together (a held whole tensor has its groups' boxes
    as often as there are members); ``copies`` [held] is how often each element is held.
    """

    boxes: Positions
    united: Positions
    weight: Positions
    copies: Positions


class _Runs(NamedTuple):
    """The positions of each node in order: ``start`` [node], and the node's number [position]."""

    start: Positions
    of: Positions


def flows(
    fabric: Fabric,
    counts: Sequence[int],
    sources: Sequence[TensorPlacement],
    targets: Sequence[TensorPlacement],
    features: int,
) -> Flows:
    """What ``moved`` says of each pair of a source and a target."""
    runs = _runs(fabric)
    if runs is None or fabric.pair_bytes_per_s is not None:
        return _one_by_one(fabric, counts, sources, targets, features)
    owned = _side(counts, sources, features, runs)
    step = max(CHUNK // max(len(sources) * len(counts), 1), 1)
    parts = [
        _chunk(owned, _side(counts, targets[i : i + step], features, runs), runs, features)
        for i in range(0, len(targets), step)
    ]
    return Flows(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))


def moved_by_areas(
    fabric: Fabric,
    counts: Sequence[int],
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
) -> Moved:
    """What ``moved`` says of one pair, in a time that grows with the positions, not their pairs."""
    pair = flows(fabric, counts, (source,), (target,), features)
    partners = int(pair.partners[0, 0])
    if not partners:
        return NOTHING
    return Moved(
        level=LINKS[int(pair.level[0, 0])],
        sent=float(pair.sent[0, 0]),
        received=float(pair.received[0, 0]),
        intra=float(pair.intra[0, 0]),
        inter=float(pair.inter[0, 0]),
        pair_s=float(pair.pair_s[0, 0]),
        partners=partners,
    )


def _runs(fabric: Fabric) -> _Runs | None:
    """The nodes' positions, or None where those of a node are not neighbours."""
    node = fabric.node_of
    begins = np.flatnonzero(np.diff(node, prepend=-1))
    if len(begins) != len(set(node[begins].tolist())):
        return None
    of = np.cumsum(np.isin(np.arange(len(node)), begins)) - 1
    return _Runs(begins, of)


def _one_by_one(
    fabric: Fabric,
    counts: Sequence[int],
    sources: Sequence[TensorPlacement],
    targets: Sequence[TensorPlacement],
    features: int,
) -> Flows:
    rows = [[moved(fabric, counts, s, t, features) for t in targets] for s in sources]

    def column(name: str) -> Reals:
        return np.array([[getattr(m, name) for m in row] for row in rows], dtype=np.float64)

    return Flows(
        level=np.array([[m.level == "inter" for m in row] for row in rows]).astype(np.int64),
        sent=column("sent"),
        received=column("received"),
        intra=column("intra"),
        inter=column("inter"),
        pair_s=column("pair_s"),
        partners=column("partners").astype(np.int64),
    )


def _side(
    counts: Sequence[int], helds: Sequence[TensorPlacement], features: int, runs: _Runs
) -> _Side:
    tables = [boxes(counts, held, features) for held in helds]
    pieces = [
        _united(held, table, runs, features) for held, table in zip(helds, tables, strict=True)
    ]
    copies = [held.layout.degree if held.form == "whole" else 1 for held in helds]
    return _Side(
        np.stack(tables),
        np.stack([p for p, _ in pieces]),
        np.stack([w for _, w in pieces]),
        np.array(copies),
    )


def _united(
    held: TensorPlacement, table: Positions, runs: _Runs, features: int
) -> tuple[Positions, Positions]:
    """The boxes of each node together, and how often each of them is held."""
    nodes, layout, degree = len(runs.start), held.layout, held.layout.degree
    end = np.append(runs.start[1:], table.shape[1])
    a = np.maximum(runs.start, layout.first)
    b = np.minimum(end, layout.first + layout.size)
    used = b > a
    a, last = np.where(used, a, layout.first), np.where(used, b, layout.first + 1) - 1
    pieces = np.zeros((nodes, 3, 4), dtype=np.int64)
    weight = np.zeros((nodes, 3), dtype=np.int64)
    if held.form == "samples" or degree == 1:
        pieces[:, 0] = np.stack([table[0, a], table[1, last], table[2, a], table[3, a]], axis=1)
        weight[:, 0] = used
        return pieces, weight
    head, tail = (a - layout.first) // degree, (last - layout.first) // degree
    one = head == tail
    low = layout.first + np.minimum(head + 1, layout.groups - 1) * degree
    high = layout.first + np.maximum(tail - 1, 0) * degree
    middle = used & (tail - head > 1)
    if held.form == "whole":
        full = np.full(nodes, features)
        zero = np.zeros(nodes, dtype=np.int64)
        spans = [(a, a, zero, full), (low, high, zero, full), (last, last, zero, full)]
        first = np.where(one, last - a + 1, (head + 1) * degree + layout.first - a)
        times = [first, np.full(nodes, degree), last - layout.first - tail * degree + 1]
    else:
        full = np.full(nodes, features)
        zero = np.zeros(nodes, dtype=np.int64)
        right = np.where(one, table[3, last], full)
        spans = [(a, a, table[2, a], right), (low, high, zero, full),
                 (last, last, zero, table[3, last])]  # fmt: skip
        times = [np.ones(nodes, dtype=np.int64)] * 3
    for i, (begin, finish, left, edge) in enumerate(spans):
        pieces[:, i] = np.stack([table[0, begin], table[1, finish], left, edge], axis=1)
        weight[:, i] = times[i] * (used, middle, used & ~one)[i]
    return pieces, weight


def _meet(a: _Sides, b: _Sides) -> Positions:
    """Areas of the overlaps of boxes, each given as its four arrays."""
    samples = np.minimum(a[1], b[1]) - np.maximum(a[0], b[0])
    columns = np.minimum(a[3], b[3]) - np.maximum(a[2], b[2])
    area: Positions = np.maximum(samples, 0) * np.maximum(columns, 0)
    return area


def _areas(boxes_: Positions) -> Positions:
    """[held, position] from [held, 4, position]."""
    area: Positions = (boxes_[:, 1] - boxes_[:, 0]) * (boxes_[:, 3] - boxes_[:, 2])
    return area


def _chunk(owned: _Side, needed: _Side, runs: _Runs, features: int) -> Flows:
    own_boxes = np.moveaxis(owned.boxes, 1, 0)[:, :, None]
    need_boxes = np.moveaxis(needed.boxes, 1, 0)[:, None]
    kept = _meet(own_boxes, need_boxes)
    received = _areas(needed.boxes)[None] - kept
    sent = needed.copies[None, :, None] * _areas(owned.boxes)[:, None] - kept
    received_in = _inside(need_boxes, owned, runs, 0) - kept
    sent_in = _inside(own_boxes, needed, runs, 1) - kept
    out = np.add.reduceat(sent - sent_in, runs.start, axis=2)
    into = np.add.reduceat(received - received_in, runs.start, axis=2)
    partners = np.maximum(
        (_partners(owned, needed, 0) - (kept > 0)).max(axis=2),
        (_partners(needed, owned, 1) - (kept > 0)).max(axis=2),
    )
    inter = np.maximum(out.max(axis=2), into.max(axis=2))
    real = np.float64
    return Flows(
        level=(inter > 0).astype(np.int64),
        sent=sent.max(axis=2).astype(real),
        received=received.max(axis=2).astype(real),
        intra=np.maximum(sent_in.max(axis=2), received_in.max(axis=2)).astype(real),
        inter=inter.astype(real),
        pair_s=np.zeros(inter.shape),
        partners=partners,
    )


def _inside(one: Positions, other: _Side, runs: _Runs, axis: int) -> Positions:
    """Elements of each box of ``one`` that its own node holds under ``other``: [source, target,
    position]; ``other`` varies along ``axis``."""

    def spread(values: Positions) -> Positions:
        return values[:, None] if axis == 0 else values[None]

    total = np.zeros((1, 1, 1), dtype=np.int64)
    for piece in range(other.weight.shape[2]):
        if other.weight[:, :, piece].any():
            united = [spread(other.united[:, runs.of, piece, side]) for side in range(4)]
            total = total + _meet(one, united) * spread(other.weight[:, runs.of, piece])
    return total


def _partners(others: _Side, mine: _Side, axis: int) -> Positions:
    """How many positions of ``others`` hold part of each box of ``mine``: [source, target,
    position]; ``others`` varies along ``axis``.

    Sample intervals of one held tensor are equal or apart, and so are its feature slices: the
    overlapping ones are those that begin before the box's end less those that end by its begin.
    """
    count: Positions = others.copies[:, None, None]
    for low in (0, 2):
        edges = [side.boxes[:, low : low + 2].ravel() for side in (others, mine)]
        cuts = np.unique(np.concatenate(edges))
        begun, ended = _tallies(others, low, cuts)
        top = np.searchsorted(cuts, mine.boxes[:, low + 1])
        bottom = np.searchsorted(cuts, mine.boxes[:, low])
        count = count * (begun[:, top] - ended[:, bottom])
    count = count * (_areas(mine.boxes) > 0)[None]
    return count if axis == 0 else np.moveaxis(count, 0, 1)


def _tallies(side: _Side, low: int, cuts: Positions) -> tuple[Positions, Positions]:
    """For each held tensor and cut, how many of its different intervals begin below the cut, and
    how many end at it or below."""
    begun = np.zeros((len(side.boxes), len(cuts)), dtype=np.int64)
    ended = np.zeros_like(begun)
    for h, table in enumerate(side.boxes):
        spans = np.unique(table[low : low + 2, _filled(table)], axis=1)
        begun[h] = np.searchsorted(spans[0], cuts, side="left")
        ended[h] = np.searchsorted(spans[1], cuts, side="right")
    return begun, ended


def _filled(table: Positions) -> npt.NDArray[np.bool_]:
    filled: npt.NDArray[np.bool_] = (table[1] > table[0]) & (table[3] > table[2])
    return filled


def flow_seconds(fabric: Fabric, flow: Flows, element_bytes: float) -> Reals:
    """``movement.moved_s`` for each pair; ``element_bytes`` is one sample's one feature."""
    seconds = flow.pair_s * element_bytes
    for name, volume in (("intra", flow.intra), ("inter", flow.inter)):
        if element_bytes > 0 and volume.any():
            level = fabric.level(name)  # type: ignore[arg-type]
            seconds = np.maximum(seconds, _exchange_s(level, flow.partners, volume * element_bytes))
    return seconds


def _exchange_s(level: Level, partners: Positions, volume: Reals) -> Reals:
    """``all_to_all_s`` for each pair."""
    busy = (partners > 0) & (volume > 0)
    if not any(curve.collective == "all_to_all" for curve in level.curves):
        return np.where(busy, partners * level.latency_s + volume / level.bytes_per_s, 0.0)
    keys, back = np.unique(
        np.stack([partners.ravel() * busy.ravel(), volume.ravel() * busy.ravel()]),
        axis=1,
        return_inverse=True,
    )
    each = [all_to_all_s(level, int(n), float(v)) for n, v in keys.T]
    return np.array(each)[back.ravel()].reshape(volume.shape)
