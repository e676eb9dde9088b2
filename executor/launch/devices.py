"""Which device a rank has: a GPU of its own, or like all other ranks the CPU."""

import os
import socket
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...planner.schema.errors import InputError
from ..comm.setups import device_identity

# What starts ranks tells each its number on its host in one of these: torchrun, Slurm, Open MPI,
# Intel MPI.
LOCAL_NUMBERS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# With this NCCL lets several ranks work on one GPU (from version 2.30 on).
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING_SINCE = 2, 30


def may_share() -> bool:
    """Whether ranks that see the same one GPU may all work on it."""
    asked = os.environ.get(SHARING) == "1"
    # An older library ends with "Duplicate GPU detected".
    return asked and (not torch.cuda.is_available() or _nccl_version() >= SHARING_SINCE)


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def gpus_here() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_gpus(ranks: int) -> bool:
    """Whether so many ranks that start on this host compute on its GPUs, as ``local_device`` and
    ``agreed_device`` choose."""
    return gpus_here() >= ranks or (gpus_here() > 0 and may_share())


class Agreed(NamedTuple):
    """The device that the ranks have agreed on, and how many of them compute on this one; of a CPU
    that is not counted."""

    device: torch.device
    ranks: int


_agreed: list[Agreed] = []
"""What the ranks have agreed on, once they have."""


def ranks_on(device: torch.device) -> int:
    """How many ranks share a GPU, as far as they have agreed on it."""
    return next((one.ranks for one in _agreed if one.device == device), 1)


def local_device() -> torch.device:
    """The GPU that this rank may have to itself: of several that it sees that of its number on its
    host, or the only one. Without a GPU for each rank of a host the CPU, or where ranks may share
    GPUs the one whose turn it is.

    A GPU that a rank sees alone may be seen by others too: ``agreed_device`` tells. Raises
    ``InputError`` where there are several and the rank's number is not known.
    """
    if _agreed:
        return _agreed[0].device
    gpus = gpus_here()
    if not gpus:
        return torch.device("cpu")
    number = _local_number(gpus)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus == 1:
        number = 0
    elif gpus < max(ranks, number + 1):
        if not may_share():
            return torch.device("cpu")
        number %= gpus
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _local_number(gpus: int) -> int:
    told = next((os.environ[name] for name in LOCAL_NUMBERS if name in os.environ), None)
    if told is not None:
        return int(told)
    if gpus > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"this rank sees {gpus} GPUs and LOCAL_RANK is not set, so all ranks of a host would "
            "take the first: set it to the rank's number on its host, as torchrun does, or show "
            "each rank one GPU (CUDA_VISIBLE_DEVICES)"
        )
    return 0


class RankDevice(NamedTuple):
    """Where a rank would compute: its host, and the GPU's identity (empty: the CPU)."""

    host: str
    gpu: str


def agreed_device(own: torch.device) -> torch.device:
    """``own``, or the CPU where not every rank has a GPU to itself; rank 0 then warns. Collective
    in a process group that carries tensors on the CPU."""
    if dist.get_world_size() == 1:
        return own
    found: list[RankDevice] = [RankDevice("", "")] * dist.get_world_size()
    dist.all_gather_object(found, RankDevice(socket.gethostname(), device_identity(own)))
    reason = why_on_cpu(found, sharing=may_share())
    if reason is not None and dist.get_rank() == 0:
        warnings.warn(reason, stacklevel=3)
    alone = Agreed(torch.device("cpu"), 1)
    _agreed[:] = [alone if reason else Agreed(own, found.count(found[dist.get_rank()]))]
    return _agreed[0].device


def why_on_cpu(devices: Sequence[RankDevice], *, sharing: bool) -> str | None:
    """Why ranks that see GPUs cannot compute on them, in a sentence with the remedy. None where
    each has its own, or may share one, or where there are none."""
    if not any(d.gpu for d in devices):
        return None
    remedy = (
        "all compute on the CPU; start as many ranks on each host as it has GPUs, or show each "
        "rank its own (CUDA_VISIBLE_DEVICES)"
    )
    without = next((rank for rank, d in enumerate(devices) if not d.gpu), None)
    if without is not None:
        other = next(rank for rank, d in enumerate(devices) if d.gpu)
        return f"rank {other} sees a GPU and rank {without} has none for it: {remedy}"
    (device, count), *_ = Counter(devices).most_common(1)
    if count == 1 or sharing:
        return None
    return f"{count} ranks of host {device.host} see the same one GPU: {remedy}"
