"""Which rank takes which position, given unequal links.

Members of a group are neighbours and exchange among themselves; those that hold the same shard are
a group's length apart and exchange gradients. An order is judged by the seconds per byte of the
slowest ring, summed over the layouts in question: groups of neighbours, and rings over their peers.

Worker allocation is one of the three decisions of GHP (Joo & Youn, IEEE Access 9:52601, 2021); how
they search is not in the abstract, what stands here is ours. Exact where there are few orders; else
hosts stay together and the best of several orders is improved by swaps.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, groupby, permutations, zip_longest
from math import factorial
from random import Random

from ..schema.cluster import Cluster
from ..schema.layout import Layout, lattice
from .collectives import Fabric, groups_of, peers_of, rings

# Every order is tried where there are no more. Ranks of a host are alike unless pairs were
# measured: two hosts of five and three devices make 56 orders, six ranks measured in pairs 720.
EXACT_ORDERS = 1000
# Up to here every order of whole nodes is tried, their ranks kept together.
EXACT_NODES = 6
# Pairs that are swapped in each round; of more (above 63 nodes) a drawn sample.
SWAPS = 2000
# What is moved inside a group is waited for, the exchange of gradients can hide.
GROUP_WEIGHT = 3.0
# How many of the best orders are improved by swapping ranks.
SWAP_STARTS = 6
# How often the whole order is gone through for a swap that helps.
SWAP_ROUNDS = 4
# Above, ranks are not swapped: each swap costs a look at every ring.
SWAP_RANKS = 16
# An order must save a hundredth, else noise in measured pairs would shuffle the ranks.
WORTH_IT = 0.99


def order_cost(cluster: Cluster, order: Sequence[int], layouts: Sequence[Layout]) -> float:
    """Seconds per byte of the slowest rings that the layouts' groups and peers form, summed."""
    fabric = Fabric(cluster, tuple(order))
    cost = 0.0
    for layout in layouts:
        for rows, weight in ((groups_of(layout), GROUP_WEIGHT), (peers_of(layout), 1.0)):
            if rows.shape[1] > 1:
                cost += weight / rings(fabric, rows).bytes_per_s
    return cost


def place(cluster: Cluster, layouts: Sequence[Layout] | None = None) -> tuple[int, ...]:
    """The order of ranks; ``layouts`` are those in use (all that fill the world if not told).

    Ranks in the order of their hosts, unless another order is better. Never worse than it.
    """
    hosts = tuple(range(cluster.world_size))
    if not needs_placing(cluster):
        return hosts
    if layouts is None:
        layouts = list(lattice(cluster.world_size, bursts=False))
    found = list(dict.fromkeys((hosts, *_candidates(cluster))))

    def cost(order: tuple[int, ...]) -> float:
        return order_cost(cluster, order, layouts)

    if orders(cluster) > EXACT_ORDERS:
        found.sort(key=cost)
        blocks = _blocks(cluster, found[0])
        if len(cluster.nodes) > EXACT_NODES and len(blocks) == len(cluster.nodes):
            found.insert(0, _swapped(cluster, blocks, layouts))
        if cluster.world_size <= SWAP_RANKS:
            starts = [[[rank] for rank in order] for order in found[:SWAP_STARTS]]
            found += [_swapped(cluster, ranks, layouts) for ranks in starts]
    best = min(found, key=cost)
    return best if cost(best) < WORTH_IT * cost(hosts) else hosts


def needs_placing(cluster: Cluster) -> bool:
    """Whether another order than that of the hosts could be better: links were measured pair by
    pair, hosts differ in their number of devices, or links inside hosts are the slower ones."""
    if cluster.pair_bytes_per_s or len({len(node.devices) for node in cluster.nodes}) > 1:
        return True
    intra, inter = cluster.level("intra"), cluster.level("inter")
    several = len(cluster.nodes) > 1 and len(cluster.nodes[0].devices) > 1
    return bool(several and intra and inter and intra.bytes_per_s < inter.bytes_per_s)


def orders(cluster: Cluster) -> int:
    """How many orders of ranks differ in what they cost."""
    count = factorial(cluster.world_size)
    if not cluster.pair_bytes_per_s:
        for node in cluster.nodes:
            count //= factorial(len(node.devices))
    return count


def _candidates(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Every order where these are few, else larger hosts first, hosts in turn, and
    chains of nearest neighbours."""
    world = cluster.world_size
    blocks = _blocks(cluster, range(world))
    if orders(cluster) <= EXACT_ORDERS:
        yield from permutations(range(world)) if cluster.pair_bytes_per_s else _mixed(blocks)
        return
    yield tuple(chain(*sorted(blocks, key=len, reverse=True)))
    yield tuple(r for row in zip_longest(*blocks) for r in row if r is not None)
    if cluster.pair_bytes_per_s and len(blocks) <= EXACT_NODES:
        for order in permutations(blocks):
            yield tuple(chain(*order))
    if cluster.pair_bytes_per_s:
        for start in range(min(world, 4)):
            yield _nearest_chain(cluster, start * world // min(world, 4))


def _mixed(blocks: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """All ways to mix the blocks' ranks, each block's in their order."""
    if not any(blocks):
        yield ()
    for i, block in enumerate(blocks):
        if block:
            rest = [b[1:] if i == k else b for k, b in enumerate(blocks)]
            yield from ((block[0], *order) for order in _mixed(rest))


def _blocks(cluster: Cluster, order: Iterable[int]) -> list[list[int]]:
    """An order cut where the next rank is on another node."""
    return [list(ranks) for _, ranks in groupby(order, cluster.node_of_rank.__getitem__)]


def _nearest_chain(cluster: Cluster, start: int) -> tuple[int, ...]:
    """From a rank on, always the nearest rank that is left, by the slower of both directions."""
    pairs = cluster.pair_bytes_per_s
    order, left = [start], set(range(cluster.world_size)) - {start}
    while left:
        here = order[-1]
        best = max(sorted(left), key=lambda r: min(pairs[here][r], pairs[r][here]))
        order.append(best)
        left.remove(best)
    return tuple(order)


def _swapped(
    cluster: Cluster, blocks: list[list[int]], layouts: Sequence[Layout]
) -> tuple[int, ...]:
    """The order of blocks of ranks (whole nodes, or one rank each) after swaps of two, as long as
    they help."""
    pairs = list(combinations(range(len(blocks)), 2))
    if len(pairs) > SWAPS:  # the same sample in every run
        pairs = sorted(Random(0).sample(pairs, SWAPS))
    cost = order_cost(cluster, tuple(chain(*blocks)), layouts)
    for _ in range(SWAP_ROUNDS):
        before = cost
        for a, b in pairs:
            blocks[a], blocks[b] = blocks[b], blocks[a]
            found = order_cost(cluster, tuple(chain(*blocks)), layouts)
            # Rounding must not look like a gain: orders of one cost would swap to and fro.
            if found < cost * (1 - 1e-9):
                cost = found
            else:
                blocks[a], blocks[b] = blocks[b], blocks[a]
        if cost >= before:
            break
    return tuple(chain(*blocks))
