"""Memory on the host that a checkpoint's tensors are copied to, while the training waits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...planner.memory.pinned import PINNED_ROUNDING
from ..headroom import pins
from ..memory.offload import pinned_block
from .boxes import TensorBox
from .holdings import StateTensor

PINNED_BYTES = 2**32
"""So much of its host's memory a rank pins for checkpoints at most, as others cannot have it any
more. What is more is copied at the rate of ordinary memory."""


class Staging:
    """It is kept for the next checkpoint: to get and give back so much each time takes as long as
    to copy."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, TensorBox], Tensor] = {}
        self._pinned_bytes = 0

    def copies(self, tensors: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
        """Copies of ``tensors``, which stand there when it returns. Those before are gone."""
        kept, self._kept = self._kept, {}
        copied, devices = {}, set[torch.device]()
        for name, tensor in tensors.items():
            boxes = []
            for box, view in tensor.boxes:
                host = kept.get((name, box))
                if host is None or host.dtype != view.dtype:
                    host = self._memory_for(view)
                with torch.no_grad():
                    host.copy_(view, non_blocking=True)
                if pins(view.device):
                    devices.add(view.device)
                self._kept[name, box] = host
                boxes.append((box, host))
            copied[name] = StateTensor(tensor.shape, tensor.dtype, tuple(boxes))
        # Once for all copies: between two of them a device that waited for its host would be idle.
        for device in devices:
            _wait(device)
        return copied

    def _memory_for(self, view: Tensor) -> Tensor:
        needed = PINNED_ROUNDING * view.nbytes
        if not pins(view.device) or not needed or self._pinned_bytes + needed > PINNED_BYTES:
            return torch.empty(view.shape, dtype=view.dtype)
        # Counted for good: torch keeps pinned what is freed.
        self._pinned_bytes += needed
        try:
            return pinned_block(view.nbytes).view(view.dtype).view(view.shape)
        except RuntimeError:  # its driver has no more
            self._pinned_bytes = PINNED_BYTES
            return torch.empty(view.shape, dtype=view.dtype)


def _wait(device: torch.device) -> None:
    """Waits until what was launched on the stream that computes is done."""
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
