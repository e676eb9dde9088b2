"""Offload: what a region makes and autograd saves goes to the host while forward goes on, and comes
back before its backward.

Whole storages are copied: several saved views of one (queries, keys and values cut from one tensor)
are copied once, and come back with the strides that they had, so that kernels run as they would
have.

[Note: A feature map is its maker's]
A feature map may be saved by the unit that made it, by each unit that it enters, and by code
between units. Were it the affair of those, it would be copied by every one that is offloaded, and
would stay on the device where a single one is not. So its maker's policy decides: what an offloaded
unit has made leaves the device whoever saves it, in one copy; what enters it and others have made
stays, unless it comes of a redistribution, which is made for that unit. So whatever is saved in a
forward is looked at, not only in offloaded units. The plan counts a feature map to its maker, too
(``measure_footprint`` in profiler/memory.py), so that both agree, byte by byte. A unit that is
recomputed holds what enters it until its second forward: where it saves that as well, it holds the
copy. What nobody saves stays where it is.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...models.opened import tensors_in
from ...models.units.storages import storage_of
from ...planner.memory import prefetch_overlap
from ...planner.schema.errors import InputError
from ...planner.schema.pins import forbidding
from ..redistribution.lazy import LazyRedistributed, check_version, version_of
from .regions import Region, hooked

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
    """``_over`` is the end of the copy that was started last, for which the streams ``_waiting``
    wait."""

    def __init__(self, flat: Tensor, host: PinnedHost) -> None:
        self._host, self._device, self._stream = host, host.device, host.stream
        self._over: torch.cuda.Event | None = None
        self._waiting: list[torch.cuda.Stream] = []
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
            self._over, self._waiting = self._stream.record_event(), []

    def _wait(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        # A model may have streams of its own, each of which asks for what it reads.
        if self._over is not None and stream not in self._waiting:
            stream.wait_event(self._over)
            self._waiting.append(stream)

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
    """Stands for one saved tensor, a view of a storage whose bytes go to the host."""

    def __init__(self, tensor: Tensor, copy: HostCopy) -> None:
        self.copy = copy
        self._version = version_of(tensor)
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        # Without its memory: what tells of changes in place. The copy has the values that were
        # saved, or later ones where the tensor was changed before it had left.
        self.changes = tensor.detach()
        self.changes.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def back(self) -> Tensor:
        """The tensor, once its storage has come back."""
        check_version(self.changes, self._version)
        flat = self.copy.wait()
        typed = torch.empty(0, dtype=self._dtype, device=flat.device)
        return typed.set_(flat.untyped_storage(), self._offset, self._size, self._stride)


# What stands for a saved tensor: a view of what goes, or itself with its version.
Packed = View | tuple[Tensor, int]


def packed(tensor: Tensor, copy: HostCopy | None) -> Packed:
    """Stands for a saved tensor whose bytes are in ``copy``, or stay."""
    if copy is not None:
        return View(tensor, copy)
    # Detached: were it the node's own output, it would keep its node alive for ever.
    return (tensor if tensor.is_leaf else tensor.detach()), version_of(tensor)


def unpacked(one: Packed) -> Tensor:
    """The tensor again."""
    if isinstance(one, View):
        return one.back()
    tensor, version = one
    check_version(tensor, version)
    return tensor


class Offloaded:
    """One forward through a region: what is made there leaves the device, but for the ``lasting``
    tensors and what ``entered`` it. ``before`` are those of the same forward that come back with
    it, ``left`` how many units had been left as it began."""

    def __init__(
        self,
        offload: Offload,
        *,
        lasting: Iterable[Tensor] = (),
        entered: Iterable[Tensor] = (),
        before: Iterable[Offloaded] = (),
        left: int = 0,
    ) -> None:
        self._offload, self._host, self._left = offload, offload.host, left
        self._before = [weakref.ref(one) for one in before]
        # Parameters and buffers are on the device anyway: a copy of them would free nothing.
        entered = (t for t in entered if not isinstance(t, LazyRedistributed))
        storages = map(storage_of, (*lasting, *entered))
        self._not_own = {s._cdata: weakref.ref(s) for s in storages if s is not None}
        # Weak references throughout: only autograd's own reference to a View keeps a copy alive, so
        # that it goes as soon as backward has used it.
        self._sent: dict[tuple[int, ...], tuple[weakref.ref[Any], weakref.ref[HostCopy]]] = {}
        self._order: list[weakref.ref[HostCopy]] = []

    def pack(self, tensor: Tensor) -> Packed:
        """Sends the tensor's storage to the host, if it is of those that leave."""
        return packed(tensor, (self._offload.maker_of(tensor) or self).copy_of(tensor))

    def makes(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory may leave: this forward has made it, and not for good."""
        if not _is_plain(tensor) or tensor.layout is not torch.strided:
            return False
        # Bytes do not say what is to be conjugated or negated as it is read.
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type != self._host.device.type:
            return False
        storage = storage_of(tensor)
        if storage is None:
            return False
        # A storage that is gone may have left its number to another one, here and below.
        other = self._not_own.get(storage._cdata, _nothing)
        return storage.nbytes() >= LEAST_BYTES and other() is None

    def copy_of(self, tensor: Tensor) -> HostCopy | None:
        """The copy on the host of the tensor's storage, as it is now; None where it stays."""
        if not self.makes(tensor):
            return None
        copy = self.known_copy_of(tensor)
        if copy is None:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = self._host.send(flat)
            self._sent[_key(tensor)] = weakref.ref(storage), weakref.ref(copy)
            self._order.append(weakref.ref(copy))
            self._offload.note_sent(self._order[-1], self._left)
        return copy

    def known_copy_of(self, tensor: Tensor) -> HostCopy | None:
        """The copy of the tensor's storage, as it is now, if it has been sent."""
        owner, copy = self._sent.get(_key(tensor), (_nothing, _nothing))
        return copy() if owner() is not None else None

    def leave(self, output: Any) -> None:
        """The forward has left the region with ``output``."""
        self._offload.note_made(self, tensors_in(output))

    def unpack(self, one: Packed) -> Tensor:
        """The tensor, once its storage has come back, and with it all that was made here."""
        if isinstance(one, View):
            self.prefetch()
            for reference in self._before:
                before = reference()
                if before is not None:
                    before.prefetch()
        return unpacked(one)

    def prefetch(self) -> None:
        """Starts the copies back."""
        # Backward asks first for what forward saved last.
        for reference in reversed(self._order):
            copy = reference()
            if copy is not None:
                copy.prefetch()
        self._order = []


def _is_plain(tensor: Tensor) -> bool:
    # Others stand for memory that a look at them may have to make first (redistributed ones).
    return type(tensor) is Tensor


def _key(tensor: Tensor) -> tuple[int, ...]:
    # What is changed in place between two savings has another version, and is copied again.
    storage = tensor.untyped_storage()
    base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    if tensor._version == 0 or base.nbytes == storage.nbytes():
        return storage._cdata, tensor._version
    # Parts that are no views of each other (``unsafe_split``) each count their own changes.
    return storage._cdata, tensor._version, int(base.storage_offset()), base.numel()


class _Entered(NamedTuple):
    """A forward through a region, in which ``forward``, and how many units that had left before."""

    saver: weakref.ref[Offloaded]
    forward: object
    left: int


class _Made(NamedTuple):
    """A storage that an offloaded region has left, and that forward through it."""

    storage: weakref.ref[Any]
    maker: Offloaded


class Offload:
    """The offloaded regions of one model. ``current_forward()`` is the forward that runs. See
    [Note: A feature map is its maker's] and [Note: Copies in flight]."""

    def __init__(self, host: Host, current_forward: Callable[[], object]) -> None:
        self.host, self._current_forward = host, current_forward
        self._left = 0
        self._near: deque[_Entered] = deque()
        self._in_flight: list[tuple[int, weakref.ref[HostCopy]]] = []
        """Each copy to the host, with how many units had been left as its maker was entered."""
        self._made: dict[int, _Made] = {}
        """By the number of the storage; of the forward that runs."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """A forward of the whole model, in which code that nobody offloads saves tensors, too."""
        before, self._made = self._made, {}
        try:
            with hooked(self._pack, unpacked):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise InputError(
                "the model's forward calls what cannot be together with offload (torch.func's "
                f"transforms, say): plan with {forbidding('offload')}"
            ) from error
        finally:
            self._made = before

    def _pack(self, tensor: Tensor) -> Packed:
        return packed(tensor, self.copy_of(tensor))

    def maker_of(self, tensor: Tensor) -> Offloaded | None:
        """The offloaded unit that has made the tensor's storage in the forward that runs."""
        storage = storage_of(tensor) if self._made and _is_plain(tensor) else None
        found = None if storage is None else self._made.get(storage._cdata)
        return found.maker if found is not None and found.storage() is not None else None

    def copy_of(self, tensor: Tensor) -> HostCopy | None:
        """The copy on the host of a tensor that is saved; None where no offloaded unit has made
        it, or it stays."""
        maker = self.maker_of(tensor)
        return None if maker is None else maker.copy_of(tensor)

    def known_copy_of(self, tensor: Tensor) -> HostCopy | None:
        """The same where it has been sent already."""
        maker = self.maker_of(tensor)
        return None if maker is None else maker.known_copy_of(tensor)

    def start(
        self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool
    ) -> Offloaded:
        """Begins a forward through a region. What enters it and nobody is known to have made is its
        own unless the region is ``whole``: a redistribution has made it."""
        forward, left = self._current_forward(), self._left
        # What was entered in another forward is another graph's: its backward comes at another
        # time.
        near = [one.saver() for one in self._near if one.forward is forward]
        entered = tensors_in((args, kwargs))
        saver = Offloaded(
            self,
            lasting=[t for m in region.modules for t in (*m.parameters(), *m.buffers())],
            entered=entered if whole else (),
            before=[one for one in near if one is not None],
            left=left,
        )
        if not whole:
            self.note_made(saver, entered)
        self._near.append(_Entered(weakref.ref(saver), forward, left))
        return saver

    def note_sent(self, copy: weakref.ref[HostCopy], left: int) -> None:
        """A copy is under way, whose maker began as so many units had been left."""
        self._in_flight.append((left, copy))

    def note_made(self, maker: Offloaded, tensors: Iterable[Tensor]) -> None:
        """Those of the tensors that ``maker`` has made are known from now on as its own."""
        for tensor in tensors:
            if self.maker_of(tensor) is None and maker.makes(tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = _Made(weakref.ref(storage), maker)

    def unit_left(self) -> None:
        """A forward has left a unit, whatever becomes of its feature maps."""
        self._left += 1
        over = self._left - _ahead()
        while self._near and self._near[0].left < over:
            self._near.popleft()
        waited_for = [copy() for left, copy in self._in_flight if left < over]
        self._in_flight = [one for one in self._in_flight if one[0] >= over]
        for copy in waited_for:
            if copy is not None:
                copy.leave()


def _ahead() -> int:
    return prefetch_overlap.COPIES_AHEAD


def _nothing() -> None:
    """A reference to nothing."""
