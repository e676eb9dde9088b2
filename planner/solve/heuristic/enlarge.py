"""How many more nodes of the same kind would make a plan possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..problem import Enlargement, Problem
from .resize import resized_problem
from .splits import feasible

MOST_RANKS = 1024
"""Larger clusters are not tried."""
EFFORT_S = 6.0
"""Seconds after which no further size is tried."""


def more_ranks(
    problem: Problem, fits: Callable[[Problem], bool] | None = None, end: float = float("inf")
) -> Enlargement | None:
    """The fewest whole nodes like the first with which a plan keeps all limits, while with one node
    fewer there is none: a number that is enough for the heuristic by doubling, then by halving what
    lies between, where ``fits`` judges (the heuristic too if not told). None where none was found
    before ``end`` (of ``time.perf_counter``), or the cluster says nothing of links between nodes.
    """
    end = min(end, time.perf_counter() + EFFORT_S)
    cluster = problem.cluster
    if cluster.level("inter") is None:
        return None
    node = cluster.nodes[0]
    each = len(node.devices)

    def asked(nodes: int) -> Problem:
        return replace(resized_problem(problem, nodes * each), progress=None).placed()

    low = max(cluster.world_size // each, 1)
    most = min(MOST_RANKS, problem.goal.batch) // each
    high = 2 * low
    while high <= most and not feasible(asked(high)):
        high = 2 * high if time.perf_counter() < end else most + 1
    if high > most:
        return None
    while high - low > 1:
        if time.perf_counter() > end:
            return None
        middle = (low + high) // 2
        enough = feasible(asked(middle)) or (fits is not None and fits(asked(middle)))
        low, high = (low, middle) if enough else (middle, high)
    sentence = f"use {high * each} ranks ({high} nodes like {node.name!r})"
    return Enlargement(high * each, high, sentence)
