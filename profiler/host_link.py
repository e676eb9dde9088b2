"""The link between a device and its host's memory: what offloaded feature maps travel over.

Bytes go out and come back through pinned memory, as the executor moves them. What counts is the
slower direction, since the planner has one rate for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

SIZE_BYTES = 1 << 28
"""Large enough that starting a copy (some 10 µs) is less than a hundredth of it at 100 GB/s."""
ROUNDS = 5


def host_bytes_per_s(device: torch.device) -> float | None:
    """What the slower direction between a device and pinned memory of its host carries; None for a
    CPU, whose memory is the host's.

    Where several ranks call it at once, each has what the others leave of a link that they share,
    as in a run.
    """
    if device.type == "cpu":
        return None
    return copy_rate(device)


def copy_rate(
    device: torch.device,
    size_bytes: int = SIZE_BYTES,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes per second of the slower direction: in each the median of ``rounds`` copies, after one
    that does not count. Pinned memory where the device has another than the host's."""
    here = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    slower = max(
        _copy_s(into, from_, device, rounds, clock)
        for into, from_ in ((there, here), (here, there))
    )
    return size_bytes / max(slower, 1e-9)


def _copy_s(
    into: Tensor, from_: Tensor, device: torch.device, rounds: int, clock: Callable[[], float]
) -> float:
    taken = []
    for _ in range(rounds + 1):
        start = clock()
        into.copy_(from_, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(clock() - start)
    return median(taken[1:])
