"""Measuring on this machine: in this process, on ranks started for it, or from the catalogue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..executor.launch.processes import Ranks
from ..executor.launch.progress import Step
from ..executor.launch.start import device_name, local_device, start_process_group, under_torchrun
from ..executor.launch.tasks import Task, run_task
from ..models.target import try_out, workload
from ..models.workload import Workload
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError
from ..planner.schema.goal import Goal
from ..planner.schema.profile import ModelProfile
from .catalogue import datasheet
from .catalogue import names as catalogued
from .estimate import estimate
from .model import profile as profile_model
from .sessions import batches_for, cluster_of_ranks, room_bytes, single_rank


def profile(
    target: str | Workload,
    batches: Sequence[int] | None,
    device: str | None,
    ranks: int,
    progress: Step | None,
) -> ModelProfile:
    """See ``api.profile``."""
    if device is not None and device.split(":")[0] not in ("cpu", "cuda"):
        datasheet(device)  # an unknown device is told before any work
        return estimate(_dry_workload(target), device, batches=batches)
    chosen = workload(target)
    try_out(chosen)
    if ranks > 1:
        return _on_ranks(target, batches, ranks, refresh=True)
    return profile_model(chosen, batches=batches, device=device_of(device), progress=progress)


def _dry_workload(target: str | Workload) -> Workload:
    """The workload without memory for its parameters, as it may not fit here; with it where it
    cannot be built otherwise (its factory loads weights, say)."""
    try:
        with torch.device("meta"):
            return workload(target)
    except InputError:
        return workload(target)


def device_of(name: str | None) -> torch.device:
    """A device by name, or this machine's best; ``InputError`` where there is none such."""
    if name is None:
        return local_device()
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(
            f"device {name!r} is not here: torch sees no GPU on this machine (with one, install a "
            "torch that is built for CUDA); measure on 'cpu', or name a catalogued device that is "
            "not here, such as 'h100-sxm', to estimate"
        )
    return torch.device(name)


def _on_ranks(
    target: str | Workload, batches: Sequence[int] | None, ranks: int, refresh: bool
) -> ModelProfile:
    if isinstance(target, Workload):
        raise InputError(
            f"workload {target.name!r} cannot be sent to {ranks} processes: name it as "
            "file.py:factory"
        )
    task = Task(name="profile", target=target, batches=tuple(batches or ()), refresh=refresh)
    found = run_task(task, Ranks(nproc=ranks), ModelProfile)
    assert found is not None
    return found


def probe(ranks: int | None, progress: Step | None) -> Cluster:
    """See ``api.probe``."""
    if dist.is_initialized() or under_torchrun():
        return cluster_of_ranks(start_process_group(), progress, refresh=True)
    count = ranks if ranks is not None else max(torch.cuda.device_count(), 2)
    if count < 1:
        raise InputError(f"{count} ranks cannot be probed: name 1 (no links to measure) or more")
    if count == 1:
        return single_rank(local_device())
    found = run_task(Task(name="probe"), Ranks(nproc=count), Cluster)
    assert found is not None
    return found


def profile_for(
    target: str | Workload, cluster: Cluster, goal: Goal, progress: Step | None
) -> ModelProfile:
    """A profile of ``target`` on the cluster's devices: measured where they are this machine's,
    else estimated where they are catalogued."""
    names = {device.name for device in cluster.devices}
    name = min(names)
    here = device_name(local_device())
    if names == {here}:
        batches = batches_for(goal, cluster.world_size)
        ranks = max(len(node.devices) for node in cluster.nodes)
        chosen, where = workload(target), local_device()
        try_out(chosen)
        if ranks > 1 and where.type == "cpu" and isinstance(target, str):
            return _on_ranks(target, batches, ranks, refresh=False)
        return profile_model(
            chosen, batches=batches, device=where, progress=progress, room_bytes=room_bytes(where)
        )
    if len(names) > 1:
        raise InputError(
            f"the cluster has devices of several kinds ({', '.join(sorted(names))}): profile the "
            "model on the slowest and plan from that profile"
        )
    if name not in catalogued():
        raise InputError(
            f"the cluster's device {name!r} is neither this machine's ({here!r}) nor catalogued: "
            "run 'meshwright profile' there and plan from that profile"
        )
    return profile(target, None, name, 1, progress)
