"""Offload: what a region saves goes to the host while forward goes on, and comes back before its
backward.

Whole storages are copied: several saved views of one (queries, keys and values cut from one tensor)
are copied once, and come back with the strides that they had, so that kernels run as they would
have. When backward reaches a region, the one before it in forward is prefetched too: its copies run
under that backward, and its feature maps are there a unit's backward early (``offloaded`` in
[Note: The memory timeline] in planner/memory/timeline.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from .regions import Region

# What is smaller stays: a copy of it would take little but its latency.
LEAST_BYTES = 4096


class HostCopy(Protocol):
    """The bytes of one storage on the host."""

    def prefetch(self) -> None:
        """Starts the copy back to the device; nothing where that has happened."""

    def wait(self) -> Tensor:
        """The bytes on the device, in a storage of their own that holds just them. Waits."""


class Host(Protocol):
    """Where storages of a device wait."""

    device: torch.device

    def send(self, flat: Tensor) -> HostCopy:
        """Takes a copy of ``flat``, all bytes of a storage, which may be freed at once."""


class PinnedHost:
    """Pinned memory, so that copies run beside the device's computing. One stream makes all copies,
    in the order in which they are started."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, flat: Tensor) -> HostCopy:
        pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        # The kernel that made the storage may still run.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(flat, non_blocking=True)
        # The caller frees ``flat`` now: the allocator must not reuse it before the copy is over.
        flat.record_stream(self._stream)
        return _PinnedCopy(pinned, self.device, self._stream)


class _PinnedCopy:
    def __init__(self, pinned: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._pinned: Tensor | None = pinned
        self._device, self._stream = device, stream
        self._on_device: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def prefetch(self) -> None:
        if self._pinned is None:
            return
        # The memory is the computing stream's, which frees it: made there, and what was done with
        # it before is waited for.
        there = torch.empty(self._pinned.shape, dtype=self._pinned.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            there.copy_(self._pinned, non_blocking=True)
            self._arrival = self._stream.record_event()
        # Until the copy is over the allocator keeps the pinned memory, and this stream ``there``.
        there.record_stream(self._stream)
        self._on_device, self._pinned = there, None

    def wait(self) -> Tensor:
        self.prefetch()
        assert self._on_device is not None
        assert self._arrival is not None
        torch.cuda.current_stream(self._device).wait_event(self._arrival)
        return self._on_device


def host_of(device: torch.device) -> Host | None:
    """The host behind a device; None where the device's memory is the host's."""
    return PinnedHost(device) if device.type == "cuda" else None


class View:
    """Stands for one saved tensor, a view of a storage that is on the host or stays."""

    def __init__(self, tensor: Tensor, copy: HostCopy | None) -> None:
        self.copy = copy
        # Detached: were it the node's own output, it would keep its node alive for ever.
        self.stays = tensor.detach() if copy is None else None
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def of(self, flat: Tensor) -> Tensor:
        """The view of the bytes that have come back."""
        typed = torch.empty(0, dtype=self._dtype, device=flat.device)
        return typed.set_(flat.untyped_storage(), self._offset, self._size, self._stride)


class Offloaded:
    """One forward through a region whose saved tensors wait on the host, all but the ``lasting``
    ones. ``before`` is the one that was entered before it in the same forward."""

    def __init__(self, lasting: Iterable[Tensor], host: Host, before: Offloaded | None) -> None:
        self._host = host
        self._before = weakref.ref(before) if before is not None else _nothing
        self._lasting = {t.untyped_storage()._cdata for t in lasting}
        # Weak references throughout: only autograd's own reference to a View keeps a copy alive, so
        # that it goes as soon as backward has used it.
        self._sent: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[HostCopy]]] = {}
        self._order: list[weakref.ref[HostCopy]] = []

    def pack(self, tensor: Tensor) -> View:
        """Sends the tensor's storage to the host, unless it lives on anyway."""
        return View(tensor, self._copy_of(tensor) if self._can_go(tensor) else None)

    def _can_go(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.device.type != self._host.device.type:
            return False
        storage = tensor.untyped_storage()
        # Parameters and buffers are on the device anyway: a copy of them would free nothing.
        return storage.nbytes() >= LEAST_BYTES and storage._cdata not in self._lasting

    def _copy_of(self, tensor: Tensor) -> HostCopy:
        storage = tensor.untyped_storage()
        # What is changed in place between two savings has another version, and is copied again.
        key = storage._cdata, tensor._version
        owner, known = self._sent.get(key, (_nothing, _nothing))
        copy = known()
        if owner() is None or copy is None:  # a storage that is gone may have left its number
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = self._host.send(flat)
            self._sent[key] = weakref.ref(storage), weakref.ref(copy)
            self._order.append(weakref.ref(copy))
        return copy

    def leave(self) -> None:
        """Nothing more is saved, so no further tensor can share a copy."""
        self._sent.clear()

    def unpack(self, view: View) -> Tensor:
        """The tensor, once its storage has come back."""
        if view.copy is None:
            assert view.stays is not None
            return view.stays
        self.prefetch()
        before = self._before()
        if before is not None:
            before.prefetch()
        return view.of(view.copy.wait())

    def prefetch(self) -> None:
        """Starts the copies back."""
        # Backward asks first for what forward saved last.
        for reference in reversed(self._order):
            copy = reference()
            if copy is not None:
                copy.prefetch()
        self._order = []


class Offload:
    """The offloaded regions of one model. ``current_forward()`` is the forward that runs."""

    def __init__(self, host: Host, current_forward: Callable[[], object]) -> None:
        self._host, self._current_forward = host, current_forward
        self._last: weakref.ref[Offloaded] | Callable[[], None] = _nothing
        self._last_forward: object = None

    def start(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offloaded:
        """Begins a forward through a region."""
        lasting = [t for m in region.modules for t in (*m.parameters(), *m.buffers())]
        forward = self._current_forward()
        # What was entered last in another forward is another graph's: its backward comes at another
        # time.
        before = self._last() if forward is self._last_forward else None
        saver = Offloaded(lasting, self._host, before)
        self._last, self._last_forward = weakref.ref(saver), forward
        return saver


def _nothing() -> None:
    """A reference to nothing."""
