"""The most memory that tensors take during a piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...models.units.storages import LiveStorages


def peak_bytes(
    work: Callable[[], object],
    lasting: Iterable[Tensor],
    device: torch.device,
    excluded: Iterable[Tensor] = (),
) -> int:
    """Bytes at the highest point of ``work()``, with the ``lasting`` tensors that live throughout
    and without the ``excluded`` ones, which are there for the measurement only.

    On CUDA what the allocator gave out; elsewhere the storages of all tensors that operators return
    in this thread (operators' own scratch memory is not seen).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_allocated(device))
    live = LiveStorages()
    with live:
        live.ignore(excluded)
        live.add(lasting)
        work()
    return live.peak
