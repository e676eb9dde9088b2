"""A checkpoint's copies on the host, of a device that ours stands for: copies are made when it is
waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshwright.executor.checkpoint import staging
from meshwright.executor.checkpoint.boxes import TensorBox
from meshwright.executor.checkpoint.holdings import StateTensor
from meshwright.executor.checkpoint.staging import Staging
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KIB = 2**10


class Device(TorchDispatchMode):
    """Copies that need not be waited for are late."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], Any]] = []
        self.pinned: list[int] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            self.late.append(lambda: args[0].numpy().__setitem__(..., args[1].numpy()))
            return args[0]
        return func(*args, **(kwargs or {}))

    def wait(self, device: torch.device) -> None:
        self.waits += 1
        while self.late:
            self.late.pop(0)()

    def pinned_block(self, size: int) -> Tensor:
        self.pinned.append(size)
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(staging, "pins", lambda device: True)
    monkeypatch.setattr(staging, "pinned_block", found.pinned_block)
    monkeypatch.setattr(staging, "_wait", found.wait)
    return found


def stored(*tensors: Tensor) -> dict[str, StateTensor]:
    return {
        str(i): StateTensor(
            tuple(t.shape), t.dtype, ((TensorBox((0,) * t.ndim, tuple(t.shape)), t),)
        )
        for i, t in enumerate(tensors)
    }


def values(copied: dict[str, StateTensor]) -> list[Tensor]:
    return [host for one in copied.values() for _, host in one.boxes]


def test_copies_are_waited_for_once_and_their_memory_is_kept(device: Device) -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.ones(0), torch.ones(2) > 0]
    kept = Staging()
    with device:
        first = values(kept.copies(stored(*tensors)))
    assert (device.waits, device.pinned) == (1, [24, 8, 2])
    assert all(map(torch.equal, first, tensors))
    changed = [t + 1 if t.dtype != torch.bool else ~t for t in tensors]
    with device:
        second = values(kept.copies(stored(*changed)))
    assert (device.waits, device.pinned) == (2, [24, 8, 2])
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    assert all(map(torch.equal, second, changed))


def test_no_more_is_pinned_than_may_be(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte counts twice, as torch rounds up; what does not fit is copied all the same."""
    monkeypatch.setattr(staging, "PINNED_BYTES", 8 * KIB)
    tensors = [torch.full((n * KIB,), n, dtype=torch.uint8) for n in (3, 2, 1)]
    kept = Staging()
    with device:
        copied = values(kept.copies(stored(*tensors)))
    assert device.pinned == [3 * KIB, KIB]
    assert all(map(torch.equal, copied, tensors))
    # Other tensors, as after parameters were unfrozen: what was freed stays pinned.
    with device:
        copied = values(kept.copies(stored(torch.ones(KIB))))
    assert device.pinned == [3 * KIB, KIB]
    assert torch.equal(copied[0], torch.ones(KIB))


def test_where_no_more_can_be_pinned_memory_is_as_usual(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may have less than the host: WSL does."""

    def refused(size_bytes: int) -> Tensor:
        device.pinned.append(size_bytes)
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(staging, "pinned_block", refused)
    kept = Staging()
    with device:
        copied = values(kept.copies(stored(torch.ones(8), torch.ones(4))))
    assert device.pinned == [32]  # it is not asked again
    assert all(map(torch.equal, copied, [torch.ones(8), torch.ones(4)]))


def test_what_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            told.append(stream)

        def synchronize(self) -> None:
            told.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    staging._wait(torch.device("cuda", 1))
    assert told == [torch.device("cuda", 1), "waited"]


def test_on_a_cpu_nothing_is_pinned_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pinned_block", "_wait"):
        monkeypatch.setattr(staging, name, None)
    copied = values(Staging().copies(stored(torch.ones(3, 2))))
    assert torch.equal(copied[0], torch.ones(3, 2))
