"""What a redistribution moves, and how long that takes.

A position needs its box of a tensor under the target placement and owns its box under the source
placement: what moves to it is the ``overlap`` of the needed box with every other position's owned
box. This is the one statement of what moves. ``position_transfers`` lists the overlaps of one
position, which the executor sends and receives; ``traffic`` adds up the overlaps of all positions,
which the cost model charges for.

Elements are samples × features. A backward redistribution moves the same boxes the other way (what
was copied to several members comes back from each and is summed), so its busiest position moves as
much as forward's.
"""

from collections.abc import Hashable, Sequence
from math import lcm
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ..schema.cluster import Level
from ..schema.profile import EdgeProfile
from .collectives import Fabric, Positions, all_to_all_s
from .ownership import Box, Boxes, TensorPlacement, boxes, group_bounds
from .step_time import LINKS

Reals = npt.NDArray[np.float64]
Sides = Boxes | Sequence[Boxes]
"""The arrays lo, hi, left and right of boxes, of any common shape."""

# Elements of the largest temporary array of ``traffic``: 4 MiB of int64, which a processor's cache
# holds.
MOST_ELEMENTS = 2**19
# Positions from which one pair of placements is counted node by node too: pair by pair, a thousand
# positions take a tenth of a second for each.
NODE_BY_NODE = 128


def overlap(owned: Sides, needed: Sides) -> tuple[Boxes, Boxes, Boxes, Boxes]:
    """The boxes that lie in both, of equal begin and end where nothing does. Shapes broadcast."""
    lo, left = np.maximum(owned[0], needed[0]), np.maximum(owned[2], needed[2])
    hi = np.maximum(np.minimum(owned[1], needed[1]), lo)
    right = np.maximum(np.minimum(owned[3], needed[3]), left)
    return lo, hi, left, right


def volume(sides: Sides) -> Positions:
    """Samples times features of each box."""
    # Of narrow integers, too, in which sides are and their product may not be.
    product: Positions = np.multiply(sides[1] - sides[0], sides[3] - sides[2], dtype=np.int64)
    return product


def _ends(
    counts: Sequence[int], source: TensorPlacement, target: TensorPlacement, features: int
) -> tuple[Boxes, Boxes]:
    """(owned, needed) boxes [4, position]."""
    if source.form == "replicate":
        raise ValueError("a replicated tensor has several owners: nothing says which one sends")
    return boxes(counts, source, features), boxes(counts, target, features)


# -- one position --------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """What goes to, or comes from, the position ``peer``."""

    peer: int
    box: Box


class PositionTransfers(NamedTuple):
    """One position's part in a redistribution: the box that it has and the one that it needs, and
    in the order of peers what it sends and receives (from itself: what it keeps). ``quiet`` says
    that nothing moves between any positions."""

    have: Box
    need: Box
    send: tuple[Transfer, ...]
    receive: tuple[Transfer, ...]
    quiet: bool


def position_transfers(
    counts: Sequence[int],
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
    position: int,
) -> PositionTransfers:
    """The part of ``position`` in the redistribution from ``source`` to ``target``."""
    owned, needed = _ends(counts, source, target, features)
    have, need = owned[:, position], needed[:, position]
    kept = volume(overlap(owned, needed))
    return PositionTransfers(
        Box(*have.tolist()),
        Box(*need.tolist()),
        _transfers(overlap(have[:, None], needed)),
        _transfers(overlap(owned, need[:, None])),
        # Every needed element has one owner: all stay where they are if as many are kept.
        bool(kept.sum() == volume(needed).sum()),
    )


def _transfers(sides: tuple[Boxes, Boxes, Boxes, Boxes]) -> tuple[Transfer, ...]:
    peers = np.flatnonzero(volume(sides))
    rows = np.stack(sides)[:, peers].T.tolist()
    return tuple(Transfer(p, Box(*row)) for p, row in zip(peers.tolist(), rows, strict=True))


# -- all positions -------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """What redistributions move, in elements; every array is [source, target].

    ``level`` is an index in ``LINKS``: whether any traffic leaves a node. ``sent`` and ``received``
    are the busiest position's, ``intra`` what the busiest position sends or receives inside its
    node, ``inter`` what the busiest network interface carries one way, ``inter_back`` where
    everything goes the other way. Where pairs of ranks were measured, these three are what takes as
    long at the bandwidth of their level. ``partners`` is the largest number of others that a
    position exchanges with. ``needed`` is the largest box of those that need something (none where
    nothing moves), and ``returning`` what stands side by side where everything goes the other way:
    what a position has, what comes for it, and what it makes of that.
    """

    level: Positions
    sent: Reals
    received: Reals
    intra: Reals
    inter: Reals
    inter_back: Reals
    partners: Positions
    needed: Reals
    returning: Reals


def traffic(
    fabric: Fabric,
    counts: Sequence[int],
    sources: Sequence[TensorPlacement],
    targets: Sequence[TensorPlacement],
    features: int,
) -> Traffic:
    """What the redistribution of each pair of a source and a target moves."""
    single = len(sources) == len(targets) == 1 and len(counts) < NODE_BY_NODE
    starts = np.flatnonzero(np.diff(fabric.node_of, prepend=-1))  # the first position of each node
    scattered = len(starts) != len(np.unique(fabric.node_of))
    if single or scattered or fabric.pair_bytes_per_s is not None:
        pairs = [pair_traffic(fabric, counts, s, t, features) for s in sources for t in targets]
        shape = len(sources), len(targets)
        return Traffic(*(np.array(column).reshape(shape) for column in zip(*pairs, strict=True)))
    owned, needed = (_side(counts, ends, features, starts) for ends in (sources, targets))
    step = max(MOST_ELEMENTS // max(len(sources) * len(counts), 1), 1)
    parts = [
        _node_traffic(owned, needed.part(slice(i, i + step)), starts)
        for i in range(0, len(targets), step)
    ]
    return Traffic(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))


def redistribution_s(
    fabric: Fabric, moved: Traffic, element_bytes: float, *, backward: bool = False
) -> Reals:
    """[source, target] seconds of each redistribution; ``element_bytes`` is the size of one
    sample's one feature."""
    seconds = np.zeros(moved.inter.shape)
    inter = moved.inter_back if backward else moved.inter
    for name, elements in zip(LINKS, (moved.intra, inter), strict=True):
        if element_bytes > 0 and elements.any():
            level = fabric.level(name)
            exchange_s = _exchange_s(level, moved.partners, elements * element_bytes)
            # Traffic inside nodes and between nodes flows at the same time: the slower one counts.
            seconds = np.maximum(seconds, exchange_s)
    return seconds


def _exchange_s(level: Level, partners: Positions, busiest_bytes: Reals) -> Reals:
    """``all_to_all_s`` of each pair."""
    busy = (partners > 0) & (busiest_bytes > 0)
    if not any(curve.collective == "all_to_all" for curve in level.curves):
        return np.where(busy, partners * level.latency_s + busiest_bytes / level.bytes_per_s, 0.0)
    # Reading a measured curve is slow, and many pairs of a lattice move the same.
    keys, back = np.unique(
        np.stack([partners.ravel() * busy.ravel(), busiest_bytes.ravel() * busy.ravel()]),
        axis=1,
        return_inverse=True,
    )
    each = [all_to_all_s(level, int(n), float(size)) for n, size in keys.T]
    return np.array(each)[back.ravel()].reshape(busiest_bytes.shape)


# -- pair of positions by pair: exact for any placement of ranks ----------------------------------


def pair_overlaps(
    counts: Sequence[int], source: TensorPlacement, target: TensorPlacement, features: int
) -> tuple[Positions, int]:
    """(elements moved [block, target, source], block size): positions are cut into blocks that
    exchange nothing with each other.

    Where both layouts use all positions, groups of either lie inside blocks of the least common
    multiple of their degrees; else everything is one block.
    """
    world = len(counts)
    full = all(p.layout.size == world for p in (source, target))
    size = lcm(source.layout.degree, target.layout.degree) if full else world
    owned, needed = _ends(counts, source, target, features)
    elements = volume(overlap(owned.reshape(4, -1, 1, size), needed.reshape(4, -1, size, 1)))
    own = np.arange(size)
    elements[:, own, own] = 0
    return elements, size


def pair_traffic(
    fabric: Fabric,
    counts: Sequence[int],
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
) -> tuple[float, ...]:
    """The fields of ``Traffic`` for one source and one target."""
    elements, size = pair_overlaps(counts, source, target, features)
    ends = _ends(counts, source, target, features)
    nodes = fabric.node_of.reshape(-1, size)
    crossing = (nodes[:, :, None] != nodes[:, None, :]) * elements
    inside = elements - crossing
    partners = max((elements > 0).sum(axis=1).max(), (elements > 0).sum(axis=2).max())
    if fabric.pair_bytes_per_s is not None and inside.any():
        positions = np.arange(len(counts)).reshape(-1, size)
        inside = inside * (fabric.level("intra").bytes_per_s / _pair_rates(fabric, positions))
    inter, inter_back = _both_ways(fabric, crossing)
    return (
        int(crossing.any()),
        float(elements.sum(axis=1).max()),
        float(elements.sum(axis=2).max()),
        float(max(inside.sum(axis=1).max(), inside.sum(axis=2).max())),
        inter,
        inter_back,
        int(partners),
        float(volume(ends[1]).max() * elements.any()),
        float(_side_by_side(volume(ends[0]), volume(ends[1]), elements.sum(axis=1).ravel())),
    )


def all_to_all_load(fabric: Fabric, sets: Positions) -> float:
    """What the busiest interface carries, at the bandwidth between nodes, while in each of the
    ``sets`` (one a row, of positions on several nodes) every position sends the others one byte in
    all."""
    world = len(fabric.node_of)
    sent = np.zeros((1, world, world))
    for row in sets:
        sent[0, row[:, None], row] = 1.0 / (len(row) - 1)
    nodes = fabric.node_of
    return max(_both_ways(fabric, sent * (nodes[:, None] != nodes)))


def _both_ways(fabric: Fabric, crossing: Positions | Reals) -> tuple[float, float]:
    """What takes as long on the busiest interface as elements [block, target, source] that cross
    between nodes, and those of the way back."""
    nodes = fabric.node_of.reshape(len(crossing), -1)
    if fabric.pair_bytes_per_s is None:
        count = len(fabric.cluster.nodes)
        out = np.bincount(nodes.ravel(), crossing.sum(axis=1).ravel(), count)
        into = np.bincount(nodes.ravel(), crossing.sum(axis=2).ravel(), count)
        busiest = float(max(out.max(), into.max()))
        return busiest, busiest
    positions = np.arange(nodes.size).reshape(nodes.shape)
    rates = _pair_rates(fabric, positions)
    back = crossing.transpose(0, 2, 1)
    return (
        _interface_elements(fabric, crossing, rates, nodes),
        _interface_elements(fabric, back, rates, nodes),
    )


def _pair_rates(fabric: Fabric, positions: Positions) -> Reals:
    """[block, target, source] the measured rates from source to target."""
    assert fabric.pair_bytes_per_s is not None
    return fabric.pair_bytes_per_s[positions[:, None, :], positions[:, :, None]]


def _side_by_side(owned: Positions, needed: Positions, sent: Positions) -> Reals:
    """[...] the most that any position has at once where what was [..., position] sent comes back:
    the gradient that it has, what comes, and the gradient that it makes of both."""
    most: Reals = (owned + needed + sent).max(axis=-1) * (sent.max(axis=-1) > 0.0)
    return most


def _interface_elements(
    fabric: Fabric, elements: Positions | Reals, rates: Reals, nodes: Positions
) -> float:
    """What takes as long at the bandwidth between nodes as ``elements`` [block, target, source] do
    by measured pairs: an interface carries them at the rate of its fastest pair, and two nodes
    theirs at the pair's own."""
    block, target, source = np.nonzero(elements)
    if not len(block):
        return 0.0
    moved, rate = elements[block, target, source], rates[block, target, source]
    to, of, count = nodes[block, target], nodes[block, source], len(fabric.cluster.nodes)
    sent, received = fabric.interfaces
    slowest_s = max(
        np.bincount(of * count + to, moved / rate).max(),
        (np.bincount(of, moved, count) / sent).max(),
        (np.bincount(to, moved, count) / received).max(),
    )
    return float(slowest_s) * fabric.level("inter").bytes_per_s


# -- node by node: in a time that grows with the positions, not with their pairs -------------------
#
# Where the positions of every node are neighbours, nobody has to look at pairs. Every element has
# one owner, so a position receives what it needs less what it owns of it, and from its own node
# what it needs of the boxes of that node's positions together. These are what the positions before
# the node's end hold, less what those before its start hold, and the positions before any one hold
# two boxes: whole groups, and the first members of one more group.


class _Intervals(NamedTuple):
    """The different intervals of each placement's boxes along samples, or along features.

    ``cuts`` are all of their ends, and one above all. ``begun`` [placement, n] is how many
    intervals begin below ``cuts[n]``, ``ended`` how many end below it.
    """

    cuts: Positions
    begun: Positions
    ended: Positions


class _Side(NamedTuple):
    """The placements of one side of the pairs.

    ``boxes`` are the sides [placement, position], [1, 1] where all are equal (of features, most
    often); ``copies`` [placement] is how often each element is held. What the positions before each
    node's start (and before the last one's end) hold together are the samples below ``whole``
    [placement, end], of whole groups, as often as each element is held, and the box ``partial``
    (its sides [placement, end]) of one more group ``times`` [placement, end] (0 where there is
    nothing in it). ``samples`` and ``features`` are the intervals of the boxes.
    """

    boxes: tuple[Boxes, ...]
    copies: Positions
    whole: Positions
    partial: tuple[Boxes, ...]
    times: Positions
    samples: _Intervals
    features: _Intervals

    def part(self, which: slice) -> Self:
        """Those placements."""
        samples, features = (
            each._replace(begun=each.begun[which], ended=each.ended[which])
            for each in (self.samples, self.features)
        )
        return self._replace(
            boxes=_rows(self.boxes, which), copies=self.copies[which], whole=self.whole[which],
            partial=_rows(self.partial, which), times=self.times[which], samples=samples,
            features=features,
        )  # fmt: skip


def _rows(sides: Sequence[Boxes], which: slice | Positions) -> tuple[Boxes, ...]:
    """Those rows of each array, of which [1, 1] is all."""
    return tuple(side if side.size == 1 else side[which] for side in sides)


def _side(
    counts: Sequence[int], placements: Sequence[TensorPlacement], features: int, starts: Positions
) -> _Side:
    tables = [boxes(counts, placement, features) for placement in placements]
    ends = np.append(starts, len(counts))
    before = [
        _boxes_before(counts, placement, features, table, ends)
        for placement, table in zip(placements, tables, strict=True)
    ]
    # Numbers of half the size are compared in half the time.
    width: Any = np.int32 if max(sum(counts), features) < np.iinfo(np.int32).max else np.int64
    whole, partial, times = (np.stack(c).astype(width) for c in zip(*before, strict=True))
    held = _by_side(partial)
    return _Side(
        _by_side(np.stack(tables).astype(width)),
        np.array([p.layout.degree if p.form == "replicate" else 1 for p in placements]),
        whole,
        held,
        times * (volume(held) > 0),
        _intervals(tables, 0),
        _intervals(tables, 2),
    )


def _by_side(sides: Boxes) -> tuple[Boxes, ...]:
    """The four arrays [placement, n] of [placement, 4, n]; of features, one element in place of
    equal ones, which stands for all of them where shapes broadcast."""
    lo, hi, *features = np.moveaxis(sides, 1, 0)
    return lo, hi, *(f[:1, :1] if (f == f[:1, :1]).all() else f for f in features)


def _intervals(tables: Sequence[Boxes], low: int) -> _Intervals:
    filled = [table[low : low + 2, volume(table) > 0] for table in tables]
    different = [np.unique(each, axis=1) for each in filled]
    above = np.iinfo(np.int64).max
    cuts = np.unique(np.concatenate([*(each.ravel() for each in different), [above]]))
    begun, ended = (
        np.array([np.searchsorted(each[end], cuts) for each in different]) for end in (0, 1)
    )
    return _Intervals(cuts, begun, ended)


def _boxes_before(
    counts: Sequence[int],
    placement: TensorPlacement,
    features: int,
    table: Boxes,
    ends: Positions,
) -> tuple[Positions, Boxes, Positions]:
    """What the positions before each end hold together: [end] the samples of whole groups end
    there, [4, end] the box of the first members of the next group, [end] how often it is held."""
    layout, form = placement
    bounds = np.array(group_bounds(counts, layout), dtype=np.int64)
    offset = np.clip(ends - layout.first, 0, layout.size)
    group, member = np.divmod(offset, layout.degree)
    start, stop = bounds[group], bounds[np.minimum(group + 1, layout.groups)]
    # The box of the position at an end begins where those before it in its group end. Where no
    # member of the group comes before the end, there is nothing of that group.
    position = layout.first + np.minimum(offset, layout.size - 1)
    left, right = np.zeros_like(start), np.full_like(start, features)
    times = np.ones_like(start)
    if form == "batch_shard":
        stop = np.where(member > 0, table[0, position], start)
    elif form == "feature_shard":
        right = np.where(member > 0, table[2, position], 0)
    else:
        times = member
    return start, np.stack([start, stop, left, right]), times


def _node_traffic(owned: _Side, needed: _Side, starts: Positions) -> Traffic:
    own_boxes = [side[:, None] for side in owned.boxes]
    need_boxes = [side[None] for side in needed.boxes]
    kept = volume(overlap(own_boxes, need_boxes))
    received = volume(need_boxes) - kept
    sent = needed.copies[None, :, None] * volume(own_boxes) - kept
    received_inside = _owned_by_node(need_boxes, owned, starts, 0) - kept
    sent_inside = _owned_by_node(own_boxes, needed, starts, 1) - kept
    out = np.add.reduceat(sent - sent_inside, starts, axis=2)
    into = np.add.reduceat(received - received_inside, starts, axis=2)
    inter = np.maximum(out.max(axis=2), into.max(axis=2))
    partners = np.maximum(
        (_partners(owned, needed, 0) - (kept > 0)).max(axis=2),
        (_partners(needed, owned, 1) - (kept > 0)).max(axis=2),
    )
    return Traffic(
        level=(inter > 0).astype(np.int64),
        sent=sent.max(axis=2).astype(np.float64),
        received=received.max(axis=2).astype(np.float64),
        intra=np.maximum(sent_inside.max(axis=2), received_inside.max(axis=2)).astype(np.float64),
        inter=inter.astype(np.float64),
        inter_back=inter.astype(np.float64),
        partners=partners,
        needed=volume(need_boxes).max(axis=2) * (sent.max(axis=2) > 0.0),
        returning=_side_by_side(volume(own_boxes), volume(need_boxes), sent),
    )


def _owned_by_node(one: Sides, other: _Side, starts: Positions, axis: int) -> Positions:
    """Elements of each box of ``one`` that its own node holds under ``other``: [source, target,
    position]; ``other`` varies along ``axis``."""
    node = np.searchsorted(starts, np.arange(other.boxes[0].shape[1]), side="right") - 1

    def spread(values: Positions) -> Positions:
        return values[:, None] if axis == 0 else values[None]

    groups = spread(other.whole[:, node]), spread(other.whole[:, node + 1]), one[2], one[3]
    total: Positions = volume(overlap(groups, one)) * spread(other.copies[:, None])
    # Where groups end with nodes there are no others.
    partly = np.flatnonzero(other.times.any(axis=1))
    if len(partly):
        where = (partly,) if axis == 0 else (slice(None), partly)
        for sign, at in ((1, node + 1), (-1, node)):
            sides = [
                spread(side if side.size == 1 else side[:, at])
                for side in _rows(other.partial, partly)
            ]
            times = spread(other.times[partly][:, at])
            total[where] += sign * volume(overlap(one, sides)) * times
    return total


def _partners(others: _Side, mine: _Side, axis: int) -> Positions:
    """How many positions of ``others`` hold part of each box of ``mine``: [source, target,
    position]; ``others`` varies along ``axis``.

    Sample intervals of one placement are equal or apart, and so are its feature slices: the
    overlapping ones are those that begin before the box's end less those that end by its begin.
    """
    count: Positions = others.copies[:, None, None]
    for low, each in ((0, others.samples), (2, others.features)):
        begun = np.searchsorted(each.cuts, mine.boxes[low + 1], side="left")
        ended = np.searchsorted(each.cuts, mine.boxes[low], side="right")
        count = count * (each.begun[:, begun] - each.ended[:, ended])
    filled = volume(mine.boxes) > 0
    count = count * filled[None]
    return count if axis == 0 else np.moveaxis(count, 0, 1)


# [Note: Shared redistributions]
#
# Edges of one source that carry the same tensors (``EdgeProfile.tensors``) to units that need them
# in one placement are one redistribution. Forward, the first of these units waits for it and the
# others follow; backward, the gradients of all of them have come together when the first one's
# backward is over, and go back once. So an edge costs nothing where an earlier one has moved the
# same. ``shared_redistribution`` is the one statement of what is the same: solvers compare its
# values between edges, and the executor's cache (executor/redistribution/cache.py) finds what has
# moved under them.


class SharedRedistribution(NamedTuple):
    """A tensor, where it is needed, and the length and dim of what is sliced at one end of its way
    (1 and None: nothing is). What is equal moves once."""

    tensor: Hashable
    target: TensorPlacement
    features: int
    dim: int | None = None


def shared_redistribution(
    tensor: Hashable,
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
    dim: int | None = None,
) -> SharedRedistribution:
    """The redistribution of ``tensor``, by whatever tells it from others: ``edge_tensors`` in a
    plan. Profiles do not say which ``dim`` is sliced; the executor knows it."""
    if "feature_shard" in (source.form, target.form):
        return SharedRedistribution(tensor, target, features, dim)
    return SharedRedistribution(tensor, target, 1)


def edge_tensors(edge: EdgeProfile) -> tuple[str, int, float, float]:
    """What tells the tensors of an edge from those of others: source, set, and sizes."""
    return edge.source, edge.tensors, edge.bytes_per_sample, edge.gradient_bytes_per_sample


def edge_redistribution(
    edge: EdgeProfile, source: TensorPlacement, target: TensorPlacement
) -> SharedRedistribution:
    """The redistribution of an edge's tensors from where its source leaves them to where its
    target needs them."""
    return shared_redistribution(edge_tensors(edge), source, target, edge.features)
