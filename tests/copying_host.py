"""A host that feature maps are offloaded to, where there is no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class CopyingHost:
    """Copies storages to memory that is not torch's, so that the way is tested without a device. It
    counts the bytes that are sent, what is on the device while it is under way, and has the size of
    each storage that has come back."""

    def __init__(self) -> None:
        self.device, self.sent_bytes, self.staying = torch.device("cpu"), 0, 0
        self.told: list[int] = []

    def send(self, flat: Tensor) -> Any:
        self.sent_bytes += flat.numel()
        self.staying += 1
        return Copied(flat, self)


class Copied:
    """Bytes of which one copy is there, or two while they are under way."""

    def __init__(self, flat: Tensor, host: CopyingHost) -> None:
        self.here: Tensor | None = flat
        # Not by ``numpy()``, which waits for a device, as tests count.
        self.there: Any = np.from_dlpack(flat).copy()
        self.host = host

    def leave(self) -> None:
        if self.here is not None and self.there is not None:
            self.here, self.host.staying = None, self.host.staying - 1

    def prefetch(self) -> None:
        if self.here is None:
            self.host.told.append(len(self.there))
            self.here = torch.empty(len(self.there), dtype=torch.uint8)
            self.here.copy_(torch.from_numpy(self.there))
            self.there = None

    def wait(self) -> Tensor:
        self.prefetch()
        assert self.here is not None
        return self.here
