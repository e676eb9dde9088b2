"""The message of top-k: some elements of one parameter, with their numbers, gathered from all."""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm
from ..comm.watchdog import Watchdog
from .buckets import GradParam
from .residual import flat_of
from .slices import Slice
from .sparse import SparseGradient


class TopkSlice(Slice):
    """One collective: some elements of one parameter, with their numbers."""

    def __init__(self, entry: GradParam) -> None:
        super().__init__([entry], SliceSpec((0,)))
        self._parts: list[Tensor] = []
        self._share, self._message_bytes = 0.0, 0

    @property
    def sent_bytes(self) -> int:
        """What a ring sends for it: each rank's message passes every other rank."""
        return (self.entries[0].group.size - 1) * self._message_bytes

    @property
    def bytes(self) -> int:
        """Those of a gradient whose sum would take a ring as long."""
        return self.entries[0].group.size * self._message_bytes // 2

    @property
    def shared_bytes(self) -> int:
        """What every rank takes it to have, as if members had equally much."""
        (entry,) = self.entries
        width = entry.parameter.element_size()
        count = ceil(self._share * (entry.shared_bytes // width))
        return entry.group.size * count * (width + torch.int32.itemsize) // 2

    def expect(self, share: float) -> None:
        """Says which share of the elements it will carry."""
        parameter = self.entries[0].parameter
        size = parameter.element_size() + torch.int32.itemsize
        self._share, self._message_bytes = share, topk_elements(parameter.numel(), share) * size

    def send_picked(self, values: Tensor, index: Tensor) -> None:
        """Starts to show these elements to all peers. Collective, in the order of all slices."""
        self._settled = False
        group = self.entries[0].group
        # One message of both: half the latency of two.
        message = torch.cat([values.view(torch.uint8), index.int().view(torch.uint8)])
        wire = message.new_empty(group.size * message.numel())
        self._wire, self._parts = message, list(wire.chunk(group.size)) if len(values) else []
        if len(values):
            *parts, mine = self._carried = [alias_for_comm(t) for t in (*self._parts, message)]
            self.work = dist.all_gather(parts, mine, group=group.handle, async_op=True)

    def settle(self, gradients: dict[GradParam, Tensor], watch: Watchdog, doing: str) -> float:
        """Waits, and makes the dense average. Returns the seconds waited."""
        if self._settled:
            return 0.0
        (entry,) = self.entries
        waited = watch.wait(self.work, entry.group, doing)
        gradient = gradients[entry]
        parts = [_unpacked(part, gradient.dtype) for part in self._parts]
        if isinstance(gradient, SparseGradient):
            gradient.average.fill(parts)
        else:
            average = flat_of(gradient).zero_()
            for values, index in parts:
                average.index_add_(0, index, values)
            average.div_(entry.group.size)
        self._parts = []
        self._settle()
        return waited


def topk_elements(numel: int, share: float) -> int:
    """How many of so many elements are a share of them: at least one."""
    return min(numel, ceil(share * numel))


def _unpacked(part: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and the numbers of a message."""
    count = part.numel() // (dtype.itemsize + torch.int32.itemsize)
    # Copies, as messages of other ranks begin at bytes that no multiple of the type's size need be.
    values = part[: count * dtype.itemsize].clone().view(dtype)
    return values, part[count * dtype.itemsize :].clone().view(torch.int32)
