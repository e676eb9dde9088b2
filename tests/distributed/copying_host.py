"""A host that feature maps are offloaded to, where there is no device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CopyingHost:
    """Copies storages to memory that is not torch's, so that the way is tested without a device."""

    def __init__(self) -> None:
        self.device, self.sent_bytes = torch.device("cpu"), 0

    def send(self, flat: Tensor) -> Any:
        self.sent_bytes += flat.numel()
        return Copied(flat)


class Copied:
    """Bytes of which one copy is there, or two while they are under way."""

    def __init__(self, flat: Tensor) -> None:
        self.here: Tensor | None = flat
        self.there: Any = flat.numpy().copy()

    def leave(self) -> None:
        if self.there is not None:
            self.here = None

    def prefetch(self) -> None:
        if self.here is None:
            self.here = torch.empty(len(self.there), dtype=torch.uint8)
            self.here.copy_(torch.from_numpy(self.there))
            self.there = None

    def wait(self) -> Tensor:
        self.prefetch()
        assert self.here is not None
        return self.here
