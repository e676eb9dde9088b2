"""The most memory that tensors take during a piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...models.units.storages import LiveStorages


def peak_bytes(
    work: Callable[[], object],
    standing: Iterable[Tensor],
    device: torch.device,
    apart: Iterable[Tensor] = (),
) -> int:
    """Bytes at the highest point of ``work()``, with the ``standing`` tensors that live throughout
    and without those kept ``apart``, which are there for the measurement only.

    On CUDA what the allocator gave out; elsewhere the storages of all tensors that operators return
    in this thread (operators' own scratch memory is not seen).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_allocated(device))
    live = LiveStorages()
    with live:
        live.ignore(apart)
        live.add(standing)
        work()
    return live.peak


@contextmanager
def budget(
    limit_bytes: int, standing: Iterable[Tensor], apart: Iterable[Tensor] = ()
) -> Iterator[LiveStorages]:
    """Within it tensors may take ``limit_bytes``, the ``standing`` ones included and those kept
    ``apart`` not; the operator that passes the limit raises ``OverBudgetError``. Any device."""
    live = LiveStorages(limit_bytes=limit_bytes)
    with live:
        live.ignore(apart)
        live.add(standing)
        yield live
