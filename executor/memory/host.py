"""The host's memory as a place where a device's storages wait, on a stream of their own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Parked(Protocol):
    """The bytes of one storage on the host."""

    def call_back(self) -> None:
        """Starts the copy home; nothing where that has happened."""

    def home(self) -> Tensor:
        """The bytes on the device, in a storage of their own that holds just them. Waits."""


class Host(Protocol):
    """Where storages of a device wait."""

    device: torch.device

    def send(self, flat: Tensor) -> Parked:
        """Takes a copy of ``flat``, all bytes of a storage, which may be freed at once."""


class PinnedHost:
    """Pinned memory, so that copies run beside the device's computing, on one stream: they are
    carried in the order in which they are started."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, flat: Tensor) -> Parked:
        """Starts the copy; the allocator keeps ``flat``'s memory until it is over."""
        there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)
        return _Pinned(there, self.device, self._stream)


class _Pinned:
    def __init__(self, there: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._there: Tensor | None = there
        self._device, self._stream = device, stream
        self._here: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def call_back(self) -> None:
        if self._there is None:
            return
        # The memory is the computing stream's, which frees it: made there, and what was done with
        # it before is waited for.
        here = torch.empty(self._there.shape, dtype=self._there.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            here.copy_(self._there, non_blocking=True)
            self._arrival = self._stream.record_event()
        # Until the copy is over the allocator keeps the pinned memory, and this stream ``here``.
        here.record_stream(self._stream)
        self._here, self._there = here, None

    def home(self) -> Tensor:
        self.call_back()
        assert self._here is not None
        assert self._arrival is not None
        torch.cuda.current_stream(self._device).wait_event(self._arrival)
        return self._here


def host_of(device: torch.device) -> Host | None:
    """The host behind a device; None where the device's memory is the host's."""
    return PinnedHost(device) if device.type == "cuda" else None
