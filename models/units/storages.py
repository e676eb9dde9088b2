"""The storages of tensors that are alive, as operators make them and Python lets them go.

Counts what a piece of work holds on any device without asking its allocator, on the meta device
too, where nothing is allocated: a storage there is as large as it would be.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..trees import leaves_of


class OverBudgetError(MemoryError):
    """Tensors took more than they may: ``needed_bytes`` of ``limit_bytes``, while ``label`` was at
    work."""

    def __init__(self, needed_bytes: int, limit_bytes: int, label: str) -> None:
        where = f" at {label!r}" if label else ""
        super().__init__(
            f"tensors take {needed_bytes:,} bytes{where} and {limit_bytes:,} are allowed: plan "
            "with that as the memory limit"
        )
        self.needed_bytes, self.limit_bytes, self.label = needed_bytes, limit_bytes, label


class Scratch(Protocol):
    """Tells what one operator takes besides what it is given and leaves."""

    def begin(self) -> None:
        """An operator begins."""

    def end(self) -> int:
        """It is over: the most bytes that it had and has given back."""


class AllocatedScratch:
    """On a GPU, by its allocator: convolutions take as much as feature maps there, where they
    change the order of channels."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def end(self) -> int:
        most = torch.cuda.max_memory_allocated(self._device)
        after = torch.cuda.memory_allocated(self._device)
        return max(most - max(self._before, after), 0)


def scratch_of(device: torch.device) -> Scratch | None:
    """What tells of operators' scratch memory on a device; None where nobody can."""
    return AllocatedScratch(device) if device.type == "cuda" else None


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that are alive: those of all tensors that operators return in threads
    that are within the context, and what was given to ``add``. ``label()`` names what is at work;
    ``seen(self)`` is called whenever a storage was added, and at operators' own scratch memory, for
    that moment, where ``scratch`` tells of it. With ``limit_bytes`` the operator after which more
    are alive raises ``OverBudgetError``.
    """

    def __init__(
        self,
        label: Callable[[], str] = lambda: "",
        seen: Callable[[LiveStorages], None] = lambda live: None,
        limit_bytes: int | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.limit_bytes = limit_bytes
        self._label, self._seen, self._scratch = label, seen, scratch
        # Storages are freed in any thread, in the midst of anything: in ``add`` of this one, too.
        self._lock = threading.RLock()
        self._known: dict[int, tuple[weakref.ref[Any], int, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._scratch is not None:
            self._scratch.begin()
        result = func(*args, **(kwargs or {}))
        # FSDP2 and the executor free a parameter's storage by resizing it to nothing and back: the
        # storage object stays, so no weak reference would tell.
        if func is torch.ops.inductor.resize_storage_bytes_.default:
            self._forget(_key(args[0]))
            self.add(args[:1])
        self.add(tensors_in(result))
        if self._scratch is not None and (size := self._scratch.end()):
            self._add_for_a_moment(size)
        return result

    def _add_for_a_moment(self, size: int) -> None:
        with self._lock:
            self.now += size
            self.peak = max(self.peak, self.now)
            self._seen(self)
            self.now -= size

    def add(self, tensors: Iterable[Tensor], label: str | None = None) -> None:
        """Counts the storages of ``tensors`` until they are freed, each once."""
        for tensor in tensors:
            if storage_of(tensor) is None:
                continue
            with self._lock:
                size = self._note(tensor, self._label() if label is None else label)
                self.now += size
                self.peak = max(self.peak, self.now)
            if size:
                self._seen(self)
                if self.limit_bytes is not None and self.now > self.limit_bytes:
                    raise OverBudgetError(self.now, self.limit_bytes, self._label())

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never counts the storages of ``tensors``, which somebody else holds."""
        for tensor in tensors:
            if storage_of(tensor) is not None and _key(tensor) not in self._known:
                # Noted with no bytes, so that a later ``add`` finds it known.
                self._know(tensor.untyped_storage(), 0, "")

    def bytes_by_label(self) -> dict[str, int]:
        """Bytes alive now, by what was at work when they were made."""
        found: Counter[str] = Counter()
        for label, size in self._alive():
            found[label] += size
        return dict(found)

    def count_by_label(self, least_bytes: int) -> dict[str, int]:
        """How many storages of at least so many bytes are alive now, likewise."""
        return dict(Counter(label for label, size in self._alive() if size >= least_bytes))

    def _alive(self) -> list[tuple[str, int]]:
        # A copy: one may be freed meanwhile.
        return [(label, size) for _, size, label in list(self._known.values())]

    def _note(self, tensor: Tensor, label: str) -> int:
        """The bytes of a storage that was not known, else 0."""
        storage = tensor.untyped_storage()
        size = 0 if _key(tensor) in self._known else storage.nbytes()
        if size:
            self._know(storage, size, label)
        return size

    def _know(self, storage: torch.UntypedStorage, size: int, label: str) -> None:
        key = int(storage._cdata)
        # Told when it is freed: the number may then be another storage's.
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._known[key] = (reference, size, label)

    def _forget(self, key: int) -> None:
        with self._lock:
            _, size, _ = self._known.pop(key, (None, 0, ""))
            self.now -= size


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None of one that has none of its own (a sparse one, or what stands
    for one of many inside ``torch.vmap``)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def peak_bytes(
    work: Callable[[], object],
    lasting: Iterable[Tensor],
    device: torch.device,
    excluded: Iterable[Tensor] = (),
) -> int:
    """The most memory that tensors take during ``work()``, in bytes: with the ``lasting`` tensors
    that live throughout and without the ``excluded`` ones, which are there for the measurement
    only.

    On CUDA what the allocator gave out, but for ``release_workspaces``: what is done should be so
    twice, so that they are there in all of the second time. Elsewhere what ``LiveStorages`` counts.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        most_bytes = int(torch.cuda.max_memory_allocated(device))
        return most_bytes - release_workspaces(device)
    live = LiveStorages()
    with live:
        live.ignore(excluded)
        live.add(lasting)
        work()
    return live.peak


def release_workspaces(device: torch.device) -> int:
    """Gives back what cuBLAS keeps of a GPU's allocator, a workspace for each thread and stream
    that has made a product, and returns its bytes: they are no tensors, and a plan has them in the
    device's reserve."""
    torch.cuda.synchronize(device)
    allocated = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return int(allocated - torch.cuda.memory_allocated(device))
