"""How many more nodes of the same kind would make a plan possible."""

from __future__ import annotations

import time
from collections.abc import Callable

from .problem import Enlargement, Problem
from .resize import resized_problem

MOST_RANKS = 1024
"""Larger clusters are not tried."""


def more_ranks(
    problem: Problem, fits: Callable[[Problem], bool], end: float = float("inf")
) -> Enlargement | None:
    """The fewest whole nodes like the first with which a plan keeps all limits, while one node
    fewer has none: by doubling, then by halving what lies between. None where none was found before
    ``end`` (of ``time.perf_counter``), or the cluster says nothing of links between nodes."""
    cluster = problem.cluster
    if cluster.level("inter") is None:
        return None
    node = cluster.nodes[0]
    each = len(node.devices)

    def enough(nodes: int) -> bool:
        return fits(resized_problem(problem, nodes * each))

    low = max(cluster.world_size // each, 1)
    most = min(MOST_RANKS, problem.goal.batch) // each
    high = 2 * low
    while high <= most and time.perf_counter() < end and not enough(high):
        low, high = high, 2 * high
    if high > most or time.perf_counter() > end:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
        if time.perf_counter() > end:
            return None
    sentence = f"use {high * each} ranks ({high} nodes like {node.name!r})"
    return Enlargement(high * each, high, sentence)
