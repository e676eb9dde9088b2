"""What more would buy: bandwidth, memory, devices. Every answer comes from planning again.

Each question changes one thing of the cluster or the goal and asks the solver anew, so that the
decisions may change with it; nothing is extrapolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from .cluster import Cluster, CollectiveCurve, Level, LevelName, Node
from .curve import Curve
from .errors import InputError
from .noun import Count, Noun, Seconds
from .solver import Problem, Result, solve

GBIT_BYTES = 125_000_000
GIB = 2**30


class Gain(Noun, frozen=True, kw_only=True):
    """What one change would buy: the step (or the objective asked for) before and with it, and how
    that is known."""

    change: str
    before_s: Seconds
    after_s: Seconds
    method: str = "planned again"

    @property
    def saved_s(self) -> float:
        """Seconds less; a solver that proves no optimum may find a little more."""
        return self.before_s - self.after_s


class Size(Noun, frozen=True, kw_only=True):
    """A plan for one cluster size. Without a plan that fits the figures are None."""

    ranks: Count
    objective_s: Seconds | None
    step_s: Seconds | None
    samples_per_s: float | None
    gpu_seconds: Seconds | None
    gap: float | None
    solver: str


def gains(
    problem: Problem, result: Result, solver: str = "auto", time_limit_s: float | None = None
) -> tuple[Gain, ...]:
    """What one more Gbit/s on each level, one more GiB per device and twice the devices would buy
    over ``result``; changes under which nothing fits are left out."""
    before = result.objective_s
    if before is None:
        raise InputError("nothing was planned to compare with: make the problem feasible first")
    found = []
    for change, asked in _changes(problem):
        after = solve(asked, solver, time_limit_s).objective_s
        if after is not None:
            found.append(Gain(change=change, before_s=before, after_s=after))
    return tuple(found)


def _changes(problem: Problem) -> list[tuple[str, Problem]]:
    cluster = problem.cluster
    found = []
    for level in cluster.levels:
        wider = replace(problem, cluster=with_bandwidth(cluster, level.name, GBIT_BYTES))
        found.append((f"one more Gbit/s on {level.name} links", wider))
    found.append(("one more GiB of memory on every device", _with_memory(problem, GIB)))
    twice = 2 * cluster.world_size
    found.append((f"{twice} devices for {cluster.world_size}", resized_problem(problem, twice)))
    return found


def sizes(
    problem: Problem,
    ranks: Sequence[int],
    solver: str = "auto",
    time_limit_s: float | None = None,
) -> tuple[Size, ...]:
    """Plans for clusters of so many ranks, built of the same nodes; the global batch stays."""
    return tuple(_size(problem, count, solver, time_limit_s) for count in ranks)


def _size(problem: Problem, ranks: int, solver: str, time_limit_s: float | None) -> Size:
    result = solve(resized_problem(problem, ranks), solver, time_limit_s)
    prediction = result.plan.prediction if result.plan else None
    return Size(
        ranks=ranks,
        objective_s=result.objective_s,
        step_s=prediction.step_s if prediction else None,
        samples_per_s=prediction.samples_per_s if prediction else None,
        gpu_seconds=prediction.gpu_seconds if prediction else None,
        gap=result.gap,
        solver=result.solver,
    )


def resized_problem(problem: Problem, ranks: int) -> Problem:
    """The problem on a cluster of ``ranks`` ranks, its placement left open."""
    return replace(problem, cluster=resized(problem.cluster, ranks), placement=None)


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster of so many ranks made of the first node's like: part of one, or whole ones.

    Bandwidths measured pair by pair say nothing of ranks that are not there, and are left out.
    """
    node = cluster.nodes[0]
    each = len(node.devices)
    if ranks < 1 or (ranks > each and ranks % each):
        raise InputError(
            f"{ranks} ranks are no whole number of nodes with {each} devices: ask for a multiple "
            f"of {each}, or for fewer than {each}"
        )
    count = max(ranks // each, 1)
    if count > 1 and cluster.level("inter") is None:
        raise InputError(
            f"{ranks} ranks need {count} nodes and the cluster states no links between nodes: "
            "add the inter level"
        )
    nodes = tuple(
        Node(name=f"{node.name}-{i}", devices=node.devices[: min(ranks, each)])
        for i in range(count)
    )
    return msgspec.structs.replace(
        cluster, name=f"{cluster.name} as {ranks} ranks", nodes=nodes, pair_bytes_per_s=()
    )


def with_bandwidth(cluster: Cluster, name: LevelName, more_bytes_per_s: float) -> Cluster:
    """The cluster with faster links of one level; measured curves shrink above their latency as the
    line does, measured pairs on that level gain as much."""
    levels = tuple(
        _faster(level, more_bytes_per_s) if level.name == name else level
        for level in cluster.levels
    )
    node = cluster.node_of_rank
    pairs = tuple(
        tuple(
            rate + more_bytes_per_s
            if i != j and (node[i] == node[j]) == (name == "intra")
            else rate
            for j, rate in enumerate(row)
        )
        for i, row in enumerate(cluster.pair_bytes_per_s)
    )
    return msgspec.structs.replace(cluster, levels=levels, pair_bytes_per_s=pairs)


def _faster(level: Level, more_bytes_per_s: float) -> Level:
    rate = level.bytes_per_s + more_bytes_per_s
    share = level.bytes_per_s / rate
    curves = tuple(_shrunk(curve, share) for curve in level.curves)
    return msgspec.structs.replace(level, bytes_per_s=rate, curves=curves)


def _shrunk(curve: CollectiveCurve, share: float) -> CollectiveCurve:
    start = curve.latency_s
    seconds = tuple(min(y, start) + max(y - start, 0.0) * share for y in curve.seconds.y)
    return msgspec.structs.replace(
        curve,
        seconds=Curve(x=curve.seconds.x, y=seconds),
        bytes_per_s=curve.bytes_per_s / share,
    )


def _with_memory(problem: Problem, more_bytes: int) -> Problem:
    limit = problem.goal.memory_limit_bytes
    if limit is not None:
        goal = msgspec.structs.replace(problem.goal, memory_limit_bytes=limit + more_bytes)
        return replace(problem, goal=goal)
    nodes = tuple(
        msgspec.structs.replace(
            node,
            devices=tuple(
                msgspec.structs.replace(d, memory_bytes=d.memory_bytes + more_bytes)
                for d in node.devices
            ),
        )
        for node in problem.cluster.nodes
    )
    return replace(problem, cluster=msgspec.structs.replace(problem.cluster, nodes=nodes))
