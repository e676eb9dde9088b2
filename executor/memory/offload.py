"""Offload: what a region saves goes to the host while forward goes on, and comes back before its
backward.

Whole storages are copied: several saved views of one (queries, keys and values cut from one tensor)
are copied once, and come back with the strides that they had, so that kernels run as they would
have.

[Note: Copies in flight]
A host that runs ahead of its device would have copies of all regions on their way before the first
is over, and all their memory with them. So no more are than of ``COPIES_AHEAD`` units: as the unit
after these is left, the device's computing waits for the oldest copies, and their memory goes back
to the stream that computes. To free it earlier and tell the allocator who else uses it
(``record_stream``) would not do: it looks for what is over only when it allocates, and the host is
ahead by then (CUDACachingAllocator.cpp, ``process_events``). Backward calls back what was offloaded
in the ``COPIES_AHEAD`` units before the one it is at, no earlier ones. The plan counts the same
(``offloaded`` in planner/memory/prefetch_overlap.py). The host itself never waits.

[Note: Pinned memory is used again]
torch's allocator gives pinned memory out again when the copies that used it are over. A host that
runs ahead would find none, and pin as much again for the next step, for good, as what is freed
stays pinned. All copies run on one stream: so a block is free for the next copy as soon as its own
copy back has been started there, and no more is ever pinned than is away at once, as the plan
counts it (planner/memory/pinned.py).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...planner.memory import prefetch_overlap
from ..redistribution.lazy import check_version, version_of
from .regions import Region

# What is smaller stays: a copy of it would take little but its latency.
LEAST_BYTES = 4096


class HostCopy(Protocol):
    """The bytes of one storage, on their way to the host, there, or back."""

    def leave(self) -> None:
        """Frees the memory on the device, once the copy to the host is over; nothing where that has
        happened."""

    def prefetch(self) -> None:
        """Starts the copy back to the device; nothing where that has happened, or where the bytes
        have not left."""

    def wait(self) -> Tensor:
        """The bytes on the device: what comes later on its stream finds them there."""


class Host(Protocol):
    """Where storages of a device wait."""

    device: torch.device

    def send(self, flat: Tensor) -> HostCopy:
        """Starts a copy of ``flat``, all bytes of a storage, which stay until they ``leave``."""


class PinnedHost:
    """Pinned memory, so that copies run beside the device's computing. One stream makes all copies,
    in the order in which they are started. See [Note: Pinned memory is used again]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: dict[int, list[Tensor]] = {}
        """Blocks that a copy which is started now may use, by their size."""

    def send(self, flat: Tensor) -> HostCopy:
        return _PinnedCopy(flat, self)

    def block_for(self, size_bytes: int) -> Tensor:
        """Pinned memory for so many bytes, and what is more than that."""
        # The sizes that torch's own allocator has, so that blocks fit tensors of other sizes too.
        rounded = 1 << (size_bytes - 1).bit_length()
        free = self._free.get(rounded)
        return free.pop() if free else pinned_block(rounded)

    def give_back(self, block: Tensor) -> None:
        """From now on the block is the next copy's: all that use it have been started."""
        self._free.setdefault(len(block), []).append(block)


class _PinnedCopy:
    """``_over`` is the end of the copy that is under way, which the computing stream has not waited
    for."""

    def __init__(self, flat: Tensor, host: PinnedHost) -> None:
        self._host, self._device, self._stream = host, host.device, host.stream
        self._over: torch.cuda.Event | None = None
        self._size = len(flat)
        self._on_device: Tensor | None = flat
        self._block: Tensor | None = None
        self._block = host.block_for(self._size)
        self._copy(self._block[: self._size], flat)

    def _copy(self, into: Tensor, source: Tensor) -> None:
        # The kernel that made what is copied, or used the memory before, may still run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            self._over = self._stream.record_event()

    def _wait(self) -> None:
        if self._over is not None:
            torch.cuda.current_stream(self._device).wait_event(self._over)
            self._over = None

    def leave(self) -> None:
        if self._block is not None and self._on_device is not None:
            self._wait()
            self._on_device = None

    def prefetch(self) -> None:
        if self._on_device is None:
            assert self._block is not None
            # The memory is the computing stream's, which frees it.
            there = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._copy(there, self._block[: self._size])
            self._on_device = there
            self._give_back()

    def _give_back(self) -> None:
        if self._block is not None:
            self._host.give_back(self._block)
            self._block = None

    def wait(self) -> Tensor:
        self.prefetch()
        assert self._on_device is not None
        # What has not left is read by its copy and by whoever asks, at once.
        if self._block is None:
            self._wait()
        return self._on_device

    def __del__(self) -> None:
        # Freed memory is the computing stream's at once, and a copy may still read or write it.
        self._wait()
        self._give_back()


def pinned_block(size_bytes: int) -> Tensor:
    """Pinned memory of the host."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def host_of(device: torch.device) -> Host | None:
    """The host behind a device; None where the device's memory is the host's."""
    return PinnedHost(device) if device.type == "cuda" else None


class View:
    """Stands for one saved tensor, a view of a storage that is on the host or stays."""

    def __init__(self, tensor: Tensor, copy: HostCopy | None) -> None:
        self.copy = copy
        # Detached: were it the node's own output, it would keep its node alive for ever.
        self.stays = tensor.detach() if copy is None else None
        self._version = version_of(tensor)
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def there(self) -> Tensor:
        """The tensor, which has stayed."""
        assert self.stays is not None
        check_version(self.stays, self._version)
        return self.stays

    def of(self, flat: Tensor) -> Tensor:
        """The view of the bytes that have come back."""
        typed = torch.empty(0, dtype=self._dtype, device=flat.device)
        return typed.set_(flat.untyped_storage(), self._offset, self._size, self._stride)


class Offloaded:
    """One forward through a region whose saved tensors wait on the host, all but the ``lasting``
    ones. ``before`` are those of the same forward that come back with it."""

    def __init__(
        self, lasting: Iterable[Tensor], host: Host, before: Iterable[Offloaded] = ()
    ) -> None:
        self._host = host
        self._before = [weakref.ref(one) for one in before]
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
            return view.there()
        self.prefetch()
        for reference in self._before:
            before = reference()
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

    def free(self) -> None:
        """Frees what has been copied on the device, as soon as that is over."""
        for reference in self._order:
            copy = reference()
            if copy is not None:
                copy.leave()


class _Entered(NamedTuple):
    """A forward through a region, in which ``forward``, and how many units that had left before."""

    saver: weakref.ref[Offloaded]
    forward: object
    left: int


class Offload:
    """The offloaded regions of one model. ``current_forward()`` is the forward that runs. See
    [Note: Copies in flight]."""

    def __init__(self, host: Host, current_forward: Callable[[], object]) -> None:
        self._host, self._current_forward = host, current_forward
        self._left = 0
        self._in_flight: deque[_Entered] = deque()

    def start(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offloaded:
        """Begins a forward through a region."""
        lasting = [t for m in region.modules for t in (*m.parameters(), *m.buffers())]
        forward = self._current_forward()
        # What was entered in another forward is another graph's: its backward comes at another
        # time.
        near = [one.saver() for one in self._in_flight if one.forward is forward]
        saver = Offloaded(lasting, self._host, [one for one in near if one is not None])
        self._in_flight.append(_Entered(weakref.ref(saver), forward, self._left))
        return saver

    def unit_left(self) -> None:
        """A forward has left a unit, whatever becomes of its feature maps."""
        self._left += 1
        while self._in_flight and self._in_flight[0].left < self._left - _ahead():
            saver = self._in_flight.popleft().saver()
            if saver is not None:
                saver.free()


def _ahead() -> int:
    return prefetch_overlap.COPIES_AHEAD


def _nothing() -> None:
    """A reference to nothing."""
