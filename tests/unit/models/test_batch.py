"""Cutting and moving batches."""

from typing import NamedTuple

import pytest
import torch
from meshwright.models.workload import Batch


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def nested() -> Batch:
    return Batch(
        args=(torch.arange(12.0).view(4, 3), [Pair(torch.arange(4), torch.arange(8).view(4, 2))]),
        target={"labels": torch.arange(4) * 10},
        kwargs={
            "mask": torch.ones(4, 5, dtype=torch.bool),
            "scale": torch.tensor(2.0),
            "mode": "a",
        },
    )


def test_size_is_dim_0_of_the_first_tensor_that_has_one():
    assert nested().size == 4
    assert Batch((torch.tensor(1.0),), None, {"x": torch.zeros(7, 2)}).size == 7
    assert Batch((), torch.zeros(3)).size == 3


def test_a_batch_without_tensors_has_no_size():
    with pytest.raises(ValueError, match="needs a tensor"):
        _ = Batch((1, "a"), torch.tensor(0)).size


def test_slice_cuts_every_nested_tensor():
    part = nested().slice(1, 3)
    assert part.size == 2
    assert part.args[0].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert isinstance(part.args[1][0], Pair)
    assert part.args[1][0].left.tolist() == [1, 2]
    assert part.args[1][0].right.tolist() == [[2, 3], [4, 5]]
    assert part.target["labels"].tolist() == [10, 20]
    assert part.kwargs["mask"].shape == (2, 5)


def test_slice_leaves_what_all_samples_share():
    shared = torch.zeros(1, 9)
    part = Batch((torch.zeros(4, 2), shared), torch.zeros(4)).slice(0, 2)
    assert part.args[1] is shared
    assert nested().slice(0, 1).kwargs["scale"].item() == 2.0
    assert nested().slice(0, 1).kwargs["mode"] == "a"


@pytest.mark.parametrize("at", [0, 2, 4])
def test_an_empty_slice_keeps_trailing_shapes(at: int):
    empty = nested().slice(at, at)
    assert empty.size == 0
    assert empty.args[0].shape == (0, 3)
    assert empty.kwargs["mask"].shape == (0, 5)
    assert empty.slice(0, 0).size == 0


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2), (0, 5)])
def test_slices_outside_the_batch_are_refused(lo: int, hi: int):
    with pytest.raises(ValueError, match=f"{lo}\\.\\.{hi} out of a batch of 4"):
        nested().slice(lo, hi)


def test_slices_are_views_and_put_together_the_whole():
    batch = nested()
    parts = [batch.slice(0, 1), batch.slice(1, 4)]
    assert torch.cat([part.args[0] for part in parts]).equal(batch.args[0])
    assert parts[0].args[0].data_ptr() == batch.args[0].data_ptr()


def test_take_picks_samples_in_the_order_asked_for():
    taken = nested().take(torch.tensor([3, 0, 3]))
    assert taken.size == 3
    assert taken.target["labels"].tolist() == [30, 0, 30]
    assert taken.kwargs["scale"].item() == 2.0


def test_to_changes_floating_tensors_only():
    moved = nested().to(dtype=torch.float64)
    assert moved.args[0].dtype == torch.float64
    assert moved.kwargs["scale"].dtype == torch.float64
    assert moved.args[1][0].left.dtype == torch.int64
    assert moved.kwargs["mask"].dtype == torch.bool
    assert moved.target["labels"].dtype == torch.int64


def test_to_moves_every_tensor():
    moved = nested().to("meta")
    assert {moved.args[0].device.type, moved.target["labels"].device.type} == {"meta"}
    assert moved.args[0].dtype == torch.float32


def test_the_host_does_not_wait_for_a_copy_to_a_gpu(monkeypatch):
    """Pinned, and queued behind what the device has to do."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, **how: asked.append(how) or self)
    x = torch.zeros(2)
    Batch((x,), x).to("cuda:0")
    one = {"device": "cuda:0", "dtype": None, "non_blocking": True}
    assert asked == ["pinned", one, "pinned", one]
    asked.clear()
    Batch((x,), x).to("cpu", torch.float64)
    assert asked == [{"device": "cpu", "dtype": torch.float64, "non_blocking": False}] * 2
