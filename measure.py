"""Measuring the model and the links where several ranks take part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .executor.agreement import rank_zero_decides, together
from .planner.cluster import Cluster
from .planner.goal import Goal
from .planner.profile import ModelProfile
from .profiler.model import profile as profile_model
from .profiler.probe import probe as probe_ranks
from .screen import Step
from .units.workload import Workload


def batches_for(goal: Goal, world_size: int) -> tuple[int, ...]:
    """Batch sizes worth measuring for a goal: around what one rank gets in a micro-batch."""
    share = max(goal.batch // (world_size * min(goal.micro_batches)), 1)
    return tuple(sorted({max(share // 4, 1), max(share // 2, 1), share, 2 * share}))


def profile_on_ranks(
    workload: Workload,
    batches: Sequence[int] | None,
    device: torch.device,
    progress: Step | None = None,
) -> ModelProfile:
    """Rank 0's profile, on every rank; collective.

    On the CPU all ranks measure at once: they share caches and memory bandwidth in the run that is
    to be predicted, so they do here. On a GPU, which each rank has to itself, rank 0 measures.
    """

    def measure() -> ModelProfile:
        step = progress if dist.get_rank() == 0 else None
        return profile_model(workload, batches=batches, device=device, progress=step)

    if device.type != "cpu" or dist.get_world_size() == 1:
        return rank_zero_decides(measure)
    mine = together(measure)
    return rank_zero_decides(lambda: mine)


def cluster_of_ranks(device: torch.device, progress: Step | None = None) -> Cluster:
    """What the links among all ranks do; collective, and the same on every rank."""
    return probe_ranks(device=device, progress=progress if dist.get_rank() == 0 else None)
