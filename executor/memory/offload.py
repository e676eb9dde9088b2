"""Offload: what a region saves goes to the host while forward goes on, and comes back before its
backward.

Whole storages travel: several saved views of one (queries, keys and values cut from one tensor)
travel once, and come back with the strides that they had, so that kernels run as they would have.
When backward reaches a region, the one before it in forward is called back too: its copies run
under that backward, and its feature maps are there a unit's backward early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .host import Host, Parked
from .regions import Body

LEAST_BYTES = 4096
"""What is smaller stays: a copy of it would take little but its latency."""


class View:
    """Stands for one saved tensor, a view of a storage that is on the host or stays."""

    def __init__(self, saver: Offloaded, tensor: Tensor, parked: Parked | None) -> None:
        self.saver, self.parked = saver, parked
        # Detached: were it the node's own output, it would keep its node alive for ever.
        self.stays = tensor.detach() if parked is None else None
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def of(self, flat: Tensor) -> Tensor:
        """The view of the bytes that have come back."""
        typed = torch.empty(0, dtype=self._dtype, device=flat.device)
        return typed.set_(flat.untyped_storage(), self._offset, self._size, self._stride)


class Offloaded:
    """One forward through a region whose saved tensors wait on the host. ``before`` is the one
    that was entered before it in the same forward."""

    def __init__(
        self, parameters: list[nn.Parameter], buffers: list[Tensor], host: Host,
        before: Offloaded | None,
    ) -> None:  # fmt: skip
        self._host = host
        self._before = weakref.ref(before) if before is not None else _nobody
        self._standing = {t.untyped_storage()._cdata for t in (*parameters, *buffers)}
        self._sent: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Parked]]] = {}
        self._order: list[weakref.ref[Parked]] = []

    def pack(self, tensor: Tensor) -> View:
        """Sends the tensor's storage to the host, unless it lives on anyway."""
        return View(self, tensor, self._park(tensor) if self._travels(tensor) else None)

    def _travels(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.device.type != self._host.device.type:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage._cdata not in self._standing

    def _park(self, tensor: Tensor) -> Parked:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        owner, known = self._sent.get(key, (_nobody, _nobody))
        parked = known()
        if owner() is None or parked is None:  # a storage that is gone may have left its number
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parked = self._host.send(flat)
            self._sent[key] = weakref.ref(storage), weakref.ref(parked)
            self._order.append(weakref.ref(parked))
        return parked

    def leave(self) -> None:
        """Nothing more is saved."""
        self._sent.clear()

    def unpack(self, view: View) -> Tensor:
        """The tensor, once its storage has come back."""
        if view.parked is None:
            assert view.stays is not None
            return view.stays
        self.call_back()
        before = self._before()
        if before is not None:
            before.call_back()
        return view.of(view.parked.home())

    def call_back(self) -> None:
        """Starts the copies home, in the order in which backward asks for them."""
        for reference in reversed(self._order):
            parked = reference()
            if parked is not None:
                parked.call_back()
        self._order = []


class Offload:
    """The offloaded regions of one model. ``turn()`` is the forward that runs."""

    def __init__(self, host: Host, turn: Callable[[], object]) -> None:
        self._host, self._turn = host, turn
        self._last: weakref.ref[Offloaded] | Callable[[], None] = _nobody
        self._last_turn: object = None

    def start(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offloaded:
        """Begins a forward through a region."""
        modules = body.inner()
        parameters = [p for m in modules for p in m.parameters(recurse=False)]
        buffers = [b for m in modules for b in m.buffers(recurse=False)]
        before = self._last() if self._turn() is self._last_turn else None
        saver = Offloaded(parameters, buffers, self._host, before)
        self._last, self._last_turn = weakref.ref(saver), self._turn()
        return saver


def _nobody() -> None:
    """A reference to nothing."""
