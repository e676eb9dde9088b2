"""Seconds of collectives, from measured curves where there are some, else from a formula.

The formula is that of ring algorithms: ``steps·latency + share·bytes / bandwidth`` with

    collective       size                              steps      share
    p2p              the message                       1          1
    all_reduce       the full tensor                   2(n-1)     2(n-1)/n
    all_gather       the gathered tensor               n-1        (n-1)/n
    reduce_scatter   the tensor before scattering      n-1        (n-1)/n
    all_to_all       what the busiest rank sends       n-1        1

Links have two levels. A ring over neighbours leaves each node once and enters it once, over the
node's network interface, which the devices of the node share: rings that run at the same time
divide it. A collective that leaves a node occupies the link between nodes for all of its time,
whichever of its parts is the slowest, so that no faster link can ever make it compete with more.

Where pairs of ranks were measured, a ring is as fast as its slowest hop. Curves hold at the
bandwidth of their level; other rings read them at the size that takes as long there.

Time never rises with bandwidth and never falls with bytes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schema.cluster import Cluster, Collective, CollectiveCurve, Level, LevelName
from ..schema.curve import Curve
from ..schema.layout import Layout

Positions = npt.NDArray[np.int64]
"""Positions, one group a row."""
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Fabric:
    """The links as positions see them: a cluster and which rank stands at which position."""

    cluster: Cluster
    placement: tuple[int, ...]

    @cached_property
    def node_of(self) -> Positions:
        """The node's index of each position."""
        return np.array(self.cluster.node_of_rank, dtype=np.int64)[list(self.placement)]

    @cached_property
    def pair_bytes_per_s(self) -> Matrix | None:
        """Measured bandwidths between positions, infinite on the diagonal, or None."""
        if not self.cluster.pair_bytes_per_s:
            return None
        pairs = np.array(self.cluster.pair_bytes_per_s, dtype=np.float64)
        order = np.array(self.placement)
        placed: Matrix = pairs[np.ix_(order, order)]
        np.fill_diagonal(placed, np.inf)
        return placed

    @cached_property
    def interfaces(self) -> tuple[Matrix, Matrix]:
        """Bytes per second that each node sends, and receives, at most by the measured pairs."""
        pairs = self.pair_bytes_per_s
        assert pairs is not None, "asked for only where pairs were measured"
        crossing = np.where(self.node_of[:, None] != self.node_of, pairs, 0.0)
        sent, received = np.zeros((2, len(self.cluster.nodes)))
        np.maximum.at(sent, self.node_of, crossing.max(axis=1))
        np.maximum.at(received, self.node_of, crossing.max(axis=0))
        return sent, received

    def level(self, name: LevelName) -> Level:
        """The level of that name; asked for only where the cluster has such links."""
        level = self.cluster.level(name)
        assert level is not None, f"the cluster has no {name} links and something uses them"
        return level


class Rings(NamedTuple):
    """Groups of one size that communicate at the same time, each as a ring over neighbours.

    ``load`` is how many of the rings share the busiest network interface, ``bytes_per_s`` the rate
    of the slowest hop with that sharing. ``scale`` is how many times as many bytes take as long on
    a ring alone at the level's own bandwidth.
    """

    ranks: int
    level: LevelName
    load: int
    bytes_per_s: float
    scale: float


def groups_of(layout: Layout) -> Positions:
    """The groups of a layout, one a row: those inside which features are exchanged."""
    flat = np.arange(layout.size, dtype=np.int64) + layout.first
    return flat.reshape(layout.groups, layout.degree)


def peers_of(layout: Layout) -> Positions:
    """The positions that hold the same shard, one set a row: those that exchange gradients."""
    return np.ascontiguousarray(groups_of(layout).T)


def rings(fabric: Fabric, groups: Positions) -> Rings:
    """How the rings over all ``groups`` at once load the links."""
    ranks = groups.shape[1]
    if ranks < 2:
        return Rings(ranks, "intra", 1, float("inf"), 1.0)
    source, target = groups.ravel(), np.roll(groups, -1, axis=1).ravel()
    from_node, to_node = fabric.node_of[source], fabric.node_of[target]
    crossing = from_node != to_node
    level: LevelName = "inter" if crossing.any() else "intra"
    nodes = len(fabric.cluster.nodes)
    out = np.bincount(from_node[crossing], minlength=nodes)
    into = np.bincount(to_node[crossing], minlength=nodes)
    sharing = np.where(crossing, np.maximum(out[from_node], into[to_node]), 1)
    rates = np.empty(len(source))  # of each hop on its own
    if fabric.pair_bytes_per_s is not None:
        rates = fabric.pair_bytes_per_s[source, target]
    else:
        hops: tuple[tuple[LevelName, npt.NDArray[np.bool_]], ...]
        hops = ("inter", crossing), ("intra", ~crossing)
        for name, mask in hops:
            if mask.any():
                rates[mask] = fabric.level(name).bytes_per_s
    load, slowest = int(sharing.max()), float((rates / sharing).min())
    paired = fabric.pair_bytes_per_s is not None
    scale = fabric.level(level).bytes_per_s / slowest if paired else float(load)
    return Rings(ranks, level, load, slowest, scale)


def run_on_host(fabric: Fabric, groups: Positions) -> int:
    """The length of the runs of neighbours on one host of which all ``groups`` consist, the hosts
    of a group's runs being different ones; 1 where there are no such runs, or one run only."""
    nodes = fabric.node_of[groups]
    first = nodes[0]
    length = int((first != first[0]).argmax())  # 0 where all are on one host
    if length < 2 or nodes.shape[1] % length:
        return 1
    runs = nodes.reshape(len(nodes), -1, length)
    alike = bool((runs == runs[:, :, :1]).all())
    apart = all(len(set(row)) == len(row) for row in runs[:, :, 0].tolist())
    return length if alike and apart else 1


def _steps_and_share(collective: Collective, ranks: int) -> tuple[int, float]:
    """The last two columns of the table at the top."""
    if collective == "p2p":
        return 1, 1.0
    if collective == "all_to_all":
        return ranks - 1, 1.0
    steps = ring_steps(collective, ranks)
    return steps, steps / ranks


def ring_steps(collective: Collective, ranks: int) -> int:
    """Steps of an all-reduce, all-gather or reduce-scatter over a ring, in each of which a rank
    sends one of ``ranks`` equal parts of the tensor."""
    return (2 if collective == "all_reduce" else 1) * (ranks - 1)


def ring_bytes(collective: Collective, ranks: int, size_bytes: int) -> int:
    """Bytes that each rank of a ring sends, with ``size_bytes`` as in the table at the top."""
    return ring_steps(collective, ranks) * size_bytes // ranks


def collective_s(fabric: Fabric, ring: Rings, collective: Collective, size_bytes: float) -> float:
    """Seconds of a collective over a ring, with ``size_bytes`` as in the table at the top."""
    if ring.ranks < 2 or size_bytes <= 0:
        return 0.0
    level = fabric.level(ring.level)
    steps, share = _steps_and_share(collective, ring.ranks)
    # Rings that share an interface take as long as one of them with the bytes of all.
    measured = measured_s(level, collective, ring.ranks, size_bytes * ring.scale)
    if measured is None:
        return steps * level.latency_s + share * size_bytes / ring.bytes_per_s
    return measured


def all_to_all_s(level: Level, partners: int, busiest_bytes: float) -> float:
    """Seconds in which the busiest end of a link of ``level`` moves ``busiest_bytes`` one way.

    An exchange in which each rank has at most ``partners`` partners takes the time of an
    all-to-all among one rank more than these.
    """
    if partners < 1 or busiest_bytes <= 0:
        return 0.0
    measured = measured_s(level, "all_to_all", partners + 1, busiest_bytes)
    if measured is not None:
        return measured
    return partners * level.latency_s + busiest_bytes / level.bytes_per_s


def measured_s(level: Level, collective: Collective, ranks: int, size_bytes: float) -> float | None:
    """Seconds read from the level's curves, or None if it has none for this collective.

    Between two measured rank counts the seconds are interpolated linearly in the rank count.
    Outside them the nearest curve is read at the size that puts as many bytes on the wire by the
    ring's share, and the latency of the steps more or fewer is added or taken away.
    """
    curves = _curves_of(level, collective)
    if not curves:
        return None
    for curve in curves:
        if curve.ranks == ranks:
            return _rising(curve.seconds)(size_bytes)
    for lower, upper in pairwise(curves):
        if lower.ranks < ranks < upper.ranks:
            part = (ranks - lower.ranks) / (upper.ranks - lower.ranks)
            low, high = _rising(lower.seconds)(size_bytes), _rising(upper.seconds)(size_bytes)
            return low + part * (high - low)
    curve = curves[0] if ranks < curves[0].ranks else curves[-1]
    steps, share = _steps_and_share(collective, ranks)
    known_steps, known_share = _steps_and_share(collective, curve.ranks)
    size_bytes *= share / max(known_share, 1e-12)
    extra = steps / max(known_steps, 1) - 1.0
    seconds = _rising(curve.seconds)(size_bytes) + extra * curve.latency_s
    # Taking latency away for fewer ranks must not leave less than the wire takes.
    return max(seconds, size_bytes / curve.bytes_per_s)


@lru_cache(maxsize=256)
def _curves_of(level: Level, collective: Collective) -> tuple[CollectiveCurve, ...]:
    found = [c for c in level.curves if c.collective == collective]
    return tuple(sorted(found, key=lambda c: c.ranks))


@lru_cache(maxsize=1024)
def _rising(curve: Curve) -> Curve:
    """The curve with no value above one of a larger size."""
    # What disturbs a measurement makes it longer: where more bytes took less, the fewer had been
    # disturbed. Left as they are, a search would be rewarded for sending more.
    return Curve(x=curve.x, y=tuple(accumulate(curve.y[::-1], min))[::-1])
