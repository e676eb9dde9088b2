"""Rank 0's tensors to all ranks, several in one message."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import _utils as torch_utils
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm

from .groups import Group
from .watchdog import Watchdog

MESSAGE_BYTES = 25 * 2**20


def broadcast(
    tensors: Iterable[Tensor], group: Group, watch: Watchdog, doing: str, source: int | None = None
) -> None:
    """Overwrites ``tensors`` with those of rank ``source``, by default the group's lowest.
    Collective."""
    if group.handle is None:
        return
    source = min(group.ranks) if source is None else source
    packing: Any = torch_utils  # has no types: tensors of one type up to a size, as DDP packs them
    for batch in packing._take_tensors([t.detach() for t in tensors if t.numel()], MESSAGE_BYTES):
        flat = torch.cat([t.reshape(-1) for t in batch])
        wire = flat.view(torch.uint8)  # bytes travel, whatever the type
        watch.issued(doing, group)
        work = dist.broadcast(wire, src=source, group=group.handle, async_op=True)
        watch.wait(work, group, doing)
        if dist.get_rank() != source:
            # Version counters stay as they are: a buffer that an earlier forward saved for its
            # backward may be refreshed before that backward runs, as under DDP.
            with _unsafe_preserve_version_counter(tuple(batch)):
                torch._foreach_copy_(batch, packing._unflatten_dense_tensors(flat, batch))


class BufferPlace(NamedTuple):
    """Where a module has a buffer: a forward may put another tensor there."""

    buffers: dict[str, Tensor | None]
    name: str


def tensors_at(places: Iterable[BufferPlace]) -> list[Tensor]:
    """The buffers that are there now."""
    found = (place.buffers.get(place.name) for place in places)
    return [buffer for buffer in found if buffer is not None]


def changing_buffers(model: nn.Module, *, statistics: bool) -> list[BufferPlace]:
    """The buffers that training may change; ``statistics`` tells whether those of batch
    normalisation are included."""
    found: dict[int, BufferPlace] = {}
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not statistics:
            continue
        for name, buffer in module._buffers.items():
            # What is not saved with the model (masks, tables of angles) can be computed anew, by
            # definition, and so is the same on all ranks anyway.
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[id(buffer)] = BufferPlace(module._buffers, name)
    return list(found.values())
