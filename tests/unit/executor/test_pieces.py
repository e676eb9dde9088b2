"""Parts of the executor that need no other rank."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch
from meshwright.executor.comm.control import RankRow, check_rows
from meshwright.executor.comm.watchdog import DEFAULT_TIMEOUT_S, time_limit
from meshwright.executor.forward import Forward, Weight, samples_of, scale_output
from meshwright.executor.micro import _emptied
from meshwright.executor.redistribution.lazy import LazyRedistributed, materialize
from meshwright.executor.redistribution.shard_gradient import ShardGradient
from meshwright.models.units.storages import peak_bytes
from meshwright.models.workload import Batch
from meshwright.planner.cost.ownership import TensorPlacement
from meshwright.planner.schema.errors import InputError, RunError
from meshwright.planner.schema.layout import Layout


class Weighted(Forward):
    """A forward whose factor is known."""

    def __init__(self, factor: float) -> None:
        self.known = factor

    def factor(self) -> float:
        return self.known


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    inner: dict
    note: str = "kept"


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("mine", "counts", "factor"),
    [(2, [2, 2], 1.0), (3, [3, 3, 3], 1.0), (3, [3, 1], 1.5), (0, [0, 4], 0.0), (0, [0, 0], 0.0)],
)
def test_weights(mine, counts, factor):
    assert Weight(mine, lambda: counts).factor() == factor


def test_a_share_of_a_known_total():
    assert Weight(1, lambda: [8, 0, 0, 0]).factor() == 0.5


@pytest.mark.parametrize("factor", [0.5, 0.0, 1.0])
def test_every_tensor_of_an_output_is_scaled_once(factor):
    x = torch.ones(3, requires_grad=True)
    began = []
    plain = torch.arange(3)
    output = Output(x * 1, {"a": [x * 1, None, plain], "b": Pair(x * 1, 7)})
    scaled = scale_output(output, Weighted(factor), began.append)
    assert isinstance(scaled, Output)
    assert isinstance(scaled.inner["b"], Pair)
    assert scaled.inner["a"][2] is plain
    assert (scaled.note, scaled.inner["b"].second) == ("kept", 7)
    (scaled.logits + scaled.inner["a"][0] + scaled.inner["b"].first).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3 * factor))
    assert len(began) == 3


def test_nothing_is_left_of_a_mean_over_nothing():
    x = torch.ones(0, requires_grad=True)
    weight = torch.ones(1, requires_grad=True)
    (scaled,) = scale_output([(x * weight).mean()], Weighted(0.0), lambda forward: None)
    assert scaled.isnan()
    scaled.backward()
    assert weight.grad == 0


ROW = RankRow(number=3, samples=2, shapes=5, mode=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"number": 4}, "rank 0 is in forward 3 while rank 1 is in forward 4"),
        ({"mode": 1}, "different modes"),
        ({"shapes": 6}, "pad them to one shape"),
    ],
)
def test_headers_that_do_not_fit(change, sentence):
    with pytest.raises(RunError, match=sentence):
        check_rows([ROW, ROW._replace(**change)], strict=True)


def test_without_divided_units_modes_and_shapes_may_differ():
    check_rows([ROW, ROW._replace(mode=1, shapes=6, samples=9)], strict=False)


def test_samples_are_dim_0_of_the_first_tensor():
    assert samples_of((None, torch.zeros(()), {"x": torch.zeros(5, 2)}), {}, {}) == 5
    assert samples_of((torch.zeros(4, 5),), {"x": torch.zeros(5, 2)}, {0: 1, 1: 0}) == 5
    # An argument that was there in planning is left out.
    assert samples_of((None,), {"x": torch.zeros(5, 2)}, {0: 1, 1: 0}) == 5
    with pytest.raises(InputError, match="has its samples in dim 1"):
        samples_of((torch.zeros(4),), {}, {0: 1})
    with pytest.raises(InputError, match="without a tensor that has a batch dim"):
        samples_of((3,), {}, {})


def test_a_lazy_tensor_is_materialized_once_when_it_is_used():
    calls = []
    local = torch.ones(4, 2, requires_grad=True)

    def redistribute() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return local.sum(1, keepdim=True).expand(4, 5) * 1

    source = TensorPlacement(Layout(groups=1, degree=2), "feature_shard")
    lazy = LazyRedistributed.of(local, torch.Size([4, 5]), 1, None, redistribute, source)
    assert not lazy.changes
    assert (lazy.shape, lazy.size(1), lazy.ndim, lazy.dtype) == ((4, 5), 5, 2, torch.float32)
    assert not calls
    with torch.no_grad():
        assert torch.equal(lazy + 0, torch.full((4, 5), 2.0))
    (torch.relu(lazy).sum() + lazy.detach().sum() + (lazy[0] * 2).sum()).backward()
    assert calls == [True]
    assert torch.equal(local.grad, torch.tensor([[15.0], [5.0], [5.0], [5.0]]).expand(4, 2))
    assert materialize({"a": [lazy]})["a"][0] is lazy.materialize()
    assert not lazy.changes
    with torch.no_grad():
        lazy.zero_()
    assert lazy.changes == 1


def test_a_shard_is_a_plain_tensor_but_for_its_norm():
    class Members:
        """A group where the other member holds the same."""

        group, counted = object(), True

        def reduce(self, values, op):
            return values.mul_(2) if op == torch.distributed.ReduceOp.SUM else values

    shard = ShardGradient.of(torch.tensor([3.0, 4.0]), Members())
    assert shard.norm() == pytest.approx(50**0.5)
    assert torch.linalg.vector_norm(shard, 1) == 14
    assert torch.linalg.vector_norm(shard, float("inf")) == 4
    assert torch.linalg.norm(shard) == pytest.approx(50**0.5)
    assert [n.item() for n in torch._foreach_norm([shard, torch.ones(4)])] == pytest.approx(
        [50**0.5, 2]
    )
    assert shard.detach().clone().norm() == pytest.approx(50**0.5)
    shard *= 2
    assert isinstance(shard, ShardGradient)
    assert type(shard + 1) is torch.Tensor
    assert (shard + 1).norm() == pytest.approx((49 + 81) ** 0.5)
    assert torch.linalg.vector_norm(ShardGradient.of(torch.ones(0), Members())) == 0


def test_the_time_limit(monkeypatch):
    monkeypatch.delenv("MESHWRIGHT_TIMEOUT_S", raising=False)
    assert time_limit(None) == DEFAULT_TIMEOUT_S
    assert time_limit(3) == 3
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", "7.5")
    assert time_limit(None) == 7.5
    assert time_limit(3) == 3
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", wrong)
        with pytest.raises(InputError, match=f"{wrong}.*600"):
            time_limit(None)
    with pytest.raises(InputError, match="0"):
        time_limit(0)


def test_peak_memory_is_that_of_live_tensors():
    standing = torch.zeros(1000)

    def work() -> None:
        a = torch.zeros(2000)
        b = a + 1
        del a
        torch.zeros(500).view(2, 250).add_(b.sum())

    assert peak_bytes(work, [standing], torch.device("cpu")) == 4 * (1000 + 2000 + 2000)


def test_an_empty_batch_keeps_what_is_shared():
    shared = torch.zeros(1, 7)
    x, rest = _emptied((torch.zeros(3, 2), {"y": torch.zeros(3), "shared": shared}))
    assert x.shape == (0, 2)
    assert rest["y"].shape == (0,)
    assert rest["shared"] is shared
    assert _emptied(Batch((torch.zeros(3, 2),), torch.zeros(3))).size == 0
    step, y = _emptied((torch.tensor(7), torch.zeros(3)))  # a number is no batch of anything
    assert (step.item(), y.shape) == (7, (0,))
