"""Rank 0's tensors to all ranks, several in one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm

from .groups import Group
from .watchdog import Watchdog

MESSAGE_BYTES = 25 * 2**20


def broadcast(tensors: Iterable[Tensor], group: Group, watch: Watchdog, doing: str) -> None:
    """Overwrites ``tensors`` with those of the group's lowest rank. Collective.

    Version counters stay as they are: a buffer that an earlier forward saved for its backward may
    be refreshed before that backward runs, as under DDP.
    """
    if group.handle is None:
        return
    source = min(group.ranks)
    for batch in _messages([t.detach() for t in tensors if t.numel()]):
        flat = torch.cat([t.reshape(-1) for t in batch])
        wire = flat.view(torch.uint8)  # bytes travel, whatever the type
        watch.issued(doing, group)
        work = dist.broadcast(wire, src=source, group=group.handle, async_op=True)
        watch.wait(work, group, doing)
        if dist.get_rank() != source:
            _unpack(flat, batch)


def _unpack(flat: Tensor, batch: list[Tensor]) -> None:
    start = 0
    with _unsafe_preserve_version_counter(tuple(batch)):
        for tensor in batch:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def _messages(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, up to ``MESSAGE_BYTES`` together."""
    kinds: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        batch: list[Tensor] = []
        for tensor in same:
            batch.append(tensor)
            if sum(t.numel() * t.element_size() for t in batch) >= MESSAGE_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch


def changing_buffers(model: nn.Module, *, statistics: bool) -> list[Tensor]:
    """The buffers that training may change: those that are saved with the model.

    Others (masks, tables of angles) can be computed anew by definition and are the same anyway.
    ``statistics`` tells whether those of batch normalisation are included.
    """
    found: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not statistics:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())
