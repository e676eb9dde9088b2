"""The most memory that tensors take during a piece of work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(work: Callable[[], object], standing: Iterable[Tensor], device: torch.device) -> int:
    """Bytes at the highest point of ``work()``, with the ``standing`` tensors that live throughout.

    On CUDA what the allocator gave out; elsewhere the storages of all tensors that operators return
    in this thread (operators' own scratch memory is not seen).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_allocated(device))
    live = _LiveStorages()
    with live:
        live.add(standing)
        work()
    return live.peak


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.inductor.resize_storage_bytes_.default:
            self._forget(args[0].untyped_storage()._cdata)
            self.add(args[:1])
        self.add(t for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        return result

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of ``tensors`` until they are freed, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known or not storage.nbytes():
                continue
            self._known[key] = (weakref.ref(storage, self._freed(key)), storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._forget(key)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key, (None, 0))[1]
