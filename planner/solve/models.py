"""The cost models of one problem."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost.cost import CostModel
from .problem import Problem


def models(problem: Problem) -> Iterator[CostModel]:
    """A cost model for each number of micro-batches and each slice size."""
    batch, world = problem.goal.batch, problem.cluster.world_size
    for times in sorted(set(problem.goal.micro_batches)):
        if times > 1 and (batch < times * world or not problem.capability.micro_batches):
            continue
        for size in problem.slice_bytes:
            yield CostModel(
                problem.profile,
                problem.cluster,
                problem.goal,
                times,
                problem.placement,
                size,
                problem.schedule == "priority",
            )
