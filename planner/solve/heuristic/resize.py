"""The same kind of cluster with more or fewer ranks: nodes like its first, or part of one node."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ...cost.device_kinds import of_node
from ...schema.cluster import Cluster, Node, check_ranks
from ...schema.errors import InputError
from ...schema.profile import ModelProfile
from ..problem import Problem


class NoLinksError(InputError):
    """A size that takes several nodes of a cluster that states no links between nodes."""


def resized_problem(problem: Problem, ranks: int) -> Problem:
    """The problem on a cluster of ``ranks`` ranks, its placement left open."""
    profile, cluster = resized_with(problem.profile, problem.cluster, ranks)
    return replace(problem, profile=profile, cluster=cluster, placement=None)


def resized_with(
    profile: ModelProfile, cluster: Cluster, ranks: int
) -> tuple[ModelProfile, Cluster]:
    """The profile on a cluster of ``ranks`` ranks, and that: its nodes are like the first, and so
    are their times, where the profile has some of that node."""
    there = resized(cluster, ranks)
    return (profile if there is cluster else of_node(profile, cluster.nodes[0].name)), there


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster of so many ranks made of the first node's like: part of one, or whole ones; the
    cluster itself where it has as many."""
    if ranks == cluster.world_size:
        return cluster
    check_ranks(ranks)
    node = cluster.nodes[0]
    each = len(node.devices)
    if ranks < 1 or (ranks > each and ranks % each):
        raise InputError(
            f"{ranks} ranks are no whole number of nodes with {each} devices: ask for a multiple "
            f"of {each}, or for fewer than {each}"
        )
    count = max(ranks // each, 1)
    if count > 1 and cluster.level("inter") is None:
        raise NoLinksError(
            f"{ranks} ranks need {count} nodes and the cluster states no links between nodes: "
            "add the inter level"
        )
    nodes = tuple(
        Node(
            name=f"{node.name}-{i}",
            devices=node.devices[: min(ranks, each)],
            host_memory_bytes=node.host_memory_bytes,
        )
        for i in range(count)
    )
    # Bandwidths measured pair by pair say nothing of ranks that are not there.
    return msgspec.structs.replace(
        cluster, name=f"{cluster.name} as {ranks} ranks", nodes=nodes, pair_bytes_per_s=()
    )


def cluster_of_nodes(cluster: Cluster, kept: Sequence[int]) -> Cluster:
    """The cluster with those of its nodes alone, by their numbers and in that order."""
    if list(kept) == list(range(len(cluster.nodes))):
        return cluster
    nodes = tuple(cluster.nodes[number] for number in kept)
    ranks = [r for number in kept for r, node in enumerate(cluster.node_of_rank) if node == number]
    rates = cluster.pair_bytes_per_s
    return msgspec.structs.replace(
        cluster,
        name=f"{cluster.name}, {len(nodes)} of its {len(cluster.nodes)} nodes",
        nodes=nodes,
        pair_bytes_per_s=tuple(tuple(rates[a][b] for b in ranks) for a in ranks) if rates else (),
    )


def how_resized(cluster: Cluster) -> str:
    """How ``resized`` makes clusters of other sizes of this one, in words."""
    node = cluster.nodes[0]
    each, devices = len(node.devices), node.devices[0].name
    one = f"{each} x {devices}" if each > 1 else devices
    words = f"other sizes are whole nodes like {node.name!r} ({one})"
    words += f", or part of one below {each} ranks" if each > 1 else ""
    words += ", joined by the same links"
    if cluster.pair_bytes_per_s:
        words += " (bandwidths measured pair by pair are left out)"
    return words
