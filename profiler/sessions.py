"""Measuring a model and its links on all ranks together, once: what was measured is kept on disk.

A profile is found again by the model's structure (its modules, parameters and batch), the sizes
measured, the device, how many ranks share its host and the software; a cluster by its hosts,
devices and software. ``refresh`` measures anew.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..executor.comm.agreement import rank_zero_decides, together
from ..executor.launch.progress import Step
from ..executor.launch.start import device_name, memory_bytes, software
from ..executor.launch.tasks import Task, rank_zero_bar
from ..models import target as targets
from ..models.workload import Workload
from ..planner.schema import cache
from ..planner.schema.cache import DocumentT
from ..planner.schema.cluster import Cluster, Device, Node
from ..planner.schema.goal import Goal
from ..planner.schema.profile import ModelProfile
from .model import FEW
from .model import profile as profile_model
from .overhead import measure_overhead, measure_priority_overhead
from .probe import probe as probe_ranks

ROOM = 0.6
"""Of a device's memory, what measuring may take: others may be on the machine."""


def batches_for(goal: Goal, world_size: int) -> tuple[int, ...]:
    """Batch sizes worth measuring for a goal: around what one rank gets in a micro-batch."""
    share = max(goal.batch // (world_size * min(goal.micro_batches)), FEW)
    return tuple(sorted({max(share // 4, FEW), max(share // 2, FEW), share, 2 * share}))


def profile_on_ranks(
    workload: Workload,
    batches: Sequence[int] | None,
    device: torch.device,
    progress: Step | None = None,
    *,
    refresh: bool = False,
) -> ModelProfile:
    """Rank 0's profile, on every rank; collective.

    On the CPU all ranks measure at once: they share caches and memory bandwidth in the run that is
    to be predicted, so they do here. On a GPU, which each rank has to itself, rank 0 measures.
    Unless ``refresh`` asks for these ``batches``, they are taken as far as they fit.
    """

    def measure() -> ModelProfile:
        step = progress if dist.get_rank() == 0 else None
        room = None if refresh else room_bytes(device)
        return profile_model(
            workload, batches=batches, device=device, progress=step, room_bytes=room
        )

    def measure_together() -> ModelProfile:
        if device.type != "cpu" or dist.get_world_size() == 1:
            return rank_zero_decides(measure)
        mine = together(measure)
        return rank_zero_decides(lambda: mine)

    mark = profile_mark(workload, batches, device, local_ranks())
    return _once(ModelProfile, mark, measure_together, refresh)


def cluster_of_ranks(
    device: torch.device, progress: Step | None = None, *, refresh: bool = False
) -> Cluster:
    """What the links among all ranks do; collective, and the same on every rank."""
    if dist.get_world_size() == 1:
        return single_rank(device)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (socket.gethostname(), device_name(device)))
    shown = progress if dist.get_rank() == 0 else None
    return _once(
        Cluster,
        _digest("cluster", places, software(), os.environ.get("OMP_NUM_THREADS")),
        lambda: _probe(device, shown),
        refresh,
    )


def _probe(device: torch.device, progress: Step | None) -> Cluster:
    """The links, and what the executor itself adds to a step. Collective."""
    cluster = probe_ranks(device=device, progress=progress)
    if device.type != "cpu":
        return cluster
    overhead = measure_overhead()
    return msgspec.structs.replace(
        cluster, overhead=overhead, priority_overhead=measure_priority_overhead(overhead)
    )


def single_rank(device: torch.device) -> Cluster:
    """The cluster of one rank, which has no links."""
    alone = Device(name=device_name(device), memory_bytes=memory_bytes(device))
    name = socket.gethostname()
    return Cluster(name=name, nodes=(Node(name=name, devices=(alone,)),), levels=())


def room_bytes(device: torch.device) -> float:
    """What measuring may take of the device's memory."""
    return ROOM * memory_bytes(device, local_ranks())


def local_ranks() -> int:
    """Ranks on this host, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _once(
    cls: type[DocumentT], mark: str, make: Callable[[], DocumentT], refresh: bool
) -> DocumentT:
    """The document that rank 0 remembers, else made by all ranks and remembered. Collective."""
    known = None if refresh else rank_zero_decides(lambda: cache.get(cls, mark))
    if known is not None:
        return known
    made = make()
    if dist.get_rank() == 0:
        cache.put(made, mark)
    return made


def profile_mark(
    workload: Workload, batches: Sequence[int] | None, device: torch.device, sharing: int
) -> str:
    """What a profile is remembered by."""
    model = workload.model
    with torch.random.fork_rng():
        batch = workload.make_batch(1)
    inputs = [
        (tuple(leaf.shape), str(leaf.dtype))
        for leaf in pytree.tree_leaves((batch.args, dict(batch.kwargs), batch.target))
        if isinstance(leaf, Tensor)
    ]
    parameters = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    where = (device_name(device), sharing, torch.get_num_threads(), software())
    return _digest("profile", workload.name, repr(model), parameters, inputs, batches, where)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def probe_task(task: Task, folder: Path, device: torch.device) -> Cluster:
    """The task ``probe`` on this rank."""
    with rank_zero_bar("probing") as step:
        return cluster_of_ranks(device, step, refresh=task.refresh)


def profile_task(task: Task, folder: Path, device: torch.device) -> ModelProfile:
    """The task ``profile`` on this rank."""
    with rank_zero_bar(f"profiling {task.target}") as step:
        return profile_on_ranks(
            targets.workload(task.target), task.batches or None, device, step, refresh=task.refresh
        )
