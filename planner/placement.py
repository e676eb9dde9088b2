"""Which rank takes which position, given unequal links.

Members of a group are neighbours and exchange among themselves; those that hold the same shard are
a group's length apart and exchange gradients. An order is judged by the seconds per byte of the
slowest ring, summed over the layouts in question: groups of neighbours, and rings over their peers.

Worker allocation is one of the three decisions of GHP (Joo & Youn, IEEE Access 9:52601, 2021); how
they search is not in the abstract, what stands here is ours. Exact for few ranks; above, hosts stay
together and the better of several orders is improved by swaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from .cluster import Cluster
from .collectives import Fabric, groups_of, peers_of, rings
from .layout import Layout, lattice

EXACT_RANKS = 6
"""Up to here every order is tried (6! = 720)."""
EXACT_NODES = 6
"""Up to here every order of whole nodes is tried, their ranks kept together."""
SWAP_NODES = 32
"""Up to here the best order is improved by swapping whole nodes."""
SWAP_ROUNDS = 4
"""How often the whole order is gone through for a swap that helps."""
SWAP_RANKS = 16
"""Above, swaps are not tried: each costs a look at every ring."""
WORTH_IT = 0.99
"""An order must save a hundredth, else noise in measured pairs would shuffle the ranks."""


def order_cost(cluster: Cluster, order: Sequence[int], layouts: Sequence[Layout]) -> float:
    """Seconds per byte of the slowest rings that the layouts' groups and peers form, summed."""
    fabric = Fabric(cluster, tuple(order))
    cost = 0.0
    for layout in layouts:
        for rows in (groups_of(layout), peers_of(layout)):
            if rows.shape[1] > 1:
                cost += 1.0 / rings(fabric, rows).bytes_per_s
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
    best, cost = hosts, order_cost(cluster, hosts, layouts)
    for order in _candidates(cluster):
        found = order_cost(cluster, order, layouts)
        if found < cost * (1 - 1e-9):
            best, cost = order, found
    if EXACT_NODES < len(cluster.nodes) <= SWAP_NODES:
        best, cost = _swapped_nodes(cluster, best, cost, layouts)
    if EXACT_RANKS < cluster.world_size <= SWAP_RANKS:
        best, cost = _swapped(cluster, best, cost, layouts)
    return best if cost < WORTH_IT * order_cost(cluster, hosts, layouts) else hosts


def needs_placing(cluster: Cluster) -> bool:
    """Whether another order than that of the hosts could be better: links were measured pair by
    pair, or hosts differ in their number of devices."""
    sizes = {len(node.devices) for node in cluster.nodes}
    return bool(cluster.pair_bytes_per_s) or len(sizes) > 1


def _candidates(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Every order for few ranks, else larger hosts first and chains of nearest neighbours."""
    world = cluster.world_size
    if world <= EXACT_RANKS:
        yield from permutations(range(world))
        return
    blocks = _blocks(cluster)
    yield tuple(r for block in sorted(blocks, key=len, reverse=True) for r in block)
    if cluster.pair_bytes_per_s and len(blocks) <= EXACT_NODES:
        for order in permutations(blocks):
            yield tuple(r for block in order for r in block)
    if cluster.pair_bytes_per_s:
        for start in range(min(world, 8)):
            yield _nearest_chain(cluster, start * world // min(world, 8))


def _blocks(cluster: Cluster) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.node_of_rank):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


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


def _swapped_nodes(
    cluster: Cluster, order: tuple[int, ...], cost: float, layouts: Sequence[Layout]
) -> tuple[tuple[int, ...], float]:
    """The order and its cost after swaps of whole nodes, as long as they help; nothing where the
    order does not keep nodes together."""
    node = cluster.node_of_rank
    blocks: list[list[int]] = []
    for rank in order:
        if not blocks or node[blocks[-1][-1]] != node[rank]:
            blocks.append([])
        blocks[-1].append(rank)
    if len(blocks) != len(cluster.nodes):
        return order, cost
    for _ in range(SWAP_ROUNDS):
        before = cost
        for a in range(len(blocks)):
            for b in range(a + 1, len(blocks)):
                blocks[a], blocks[b] = blocks[b], blocks[a]
                found = order_cost(cluster, [r for block in blocks for r in block], layouts)
                if found < cost * (1 - 1e-9):
                    cost = found
                else:
                    blocks[a], blocks[b] = blocks[b], blocks[a]
        if cost >= before:
            break
    return tuple(r for block in blocks for r in block), cost


def _swapped(
    cluster: Cluster, order: tuple[int, ...], cost: float, layouts: Sequence[Layout]
) -> tuple[tuple[int, ...], float]:
    """The order and its cost after swaps of two positions, as long as they help."""
    current = list(order)
    for _ in range(SWAP_ROUNDS):
        before = cost
        for a in range(len(current)):
            for b in range(a + 1, len(current)):
                current[a], current[b] = current[b], current[a]
                found = order_cost(cluster, current, layouts)
                if found < cost * (1 - 1e-9):
                    cost = found
                else:
                    current[a], current[b] = current[b], current[a]
        if cost >= before:
            break
    return tuple(current), cost
