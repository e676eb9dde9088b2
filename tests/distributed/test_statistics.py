"""Batch normalisation: over the whole batch as one process would, or local as under DDP."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_state_dict
from meshwright.planner.schema.errors import InputError
from plans import SCHEDULES, plan, scheduled, unit
from reference import shares, twin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class NormAct(nn.BatchNorm2d):
    """A subclass whose own forward does more than normalise, like timm's ``BatchNormAct2d``."""

    def forward(self, x: Tensor) -> Tensor:
        factor = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if factor is None else factor
        by_batch = self.training or self.running_mean is None
        kept = (self.running_mean, self.running_var)
        given = (self.weight, self.bias, by_batch, factor or 0.0, self.eps)
        return F.silu(F.batch_norm(x, *kept, *given))


class OwnNorm(nn.BatchNorm2d):
    """A subclass that normalises without torch's ``batch_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


SHAPES = {
    nn.BatchNorm1d: (4,),
    nn.BatchNorm2d: (4, 3, 2),
    nn.BatchNorm3d: (4, 2, 2, 3),
    NormAct: (4, 3, 2),
}


def share(rank: int, counts: list[int], shape: tuple[int, ...], seed: int, dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(counts), *shape, generator=generator, dtype=torch.float64) * 3 + 50
    bounds = shares(sum(counts), len(counts), counts)
    return whole[bounds[rank] : bounds[rank + 1]].to(dtype) if rank >= 0 else whole.to(dtype)


def whole_batch(rank: int, counts: list[int], schedule: str) -> None:
    options = itertools.product(SHAPES, (True, False), (0.1, None), (True, False))
    for norm, affine, momentum, track in options:
        usual = affine and track and momentum
        for dtype, near in ((torch.float64, 1e-9), (torch.float32, 2e-5))[: 2 if usual else 1]:
            shape = SHAPES[norm]
            model = nn.Sequential(
                norm(4, affine=affine, momentum=momentum, track_running_stats=track),
                nn.Flatten(),
                nn.LazyLinear(2),
            ).to(dtype)
            model(torch.zeros(2, *shape, dtype=dtype))
            model[0].reset_parameters()
            if affine:
                nn.init.normal_(model[0].weight)
            alone = twin(model)
            with scheduled(schedule):
                apply(model, None, plan(len(counts)))
            for step in range(2):
                mine = share(rank, counts, shape, step, dtype).requires_grad_()
                whole = share(-1, counts, shape, step, dtype).requires_grad_()
                for m, x in ((model, mine), (alone, whole)):
                    m.zero_grad()
                    m(x).square().mean().backward()
                bounds = shares(sum(counts), len(counts), counts)
                into = whole.grad[bounds[rank] : bounds[rank + 1]] * len(counts)
                close(mine.grad, into, near * 10)
                for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                    close(p.grad, q.grad, near * 10, name)
                for (name, b), c in zip(model.named_buffers(), alone.buffers(), strict=True):
                    close(b, c, near, name)
            model.eval()
            alone.eval()
            close(model(mine), alone(whole)[bounds[rank] : bounds[rank + 1]], near)


def close(found: Tensor, expected: Tensor, near: float, name: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=near, atol=near, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize(
    ("counts", "schedule"),
    [
        ([4, 4], "barrier"),
        pytest.param([5, 2], "barrier", marks=pytest.mark.slow),
        ([6, 0], "barrier"),
        ([5, 2], "priority"),
    ],
)
def test_whole_batch_as_one_process(ranks, counts, schedule):
    ranks(2)(whole_batch, counts, schedule)


class Branches(nn.Module):
    """A feature map that a convolution and a normalisation take alike."""

    def __init__(self, norm: type[nn.BatchNorm2d]) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm, self.head = norm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head((self.conv(h) + self.norm(h)).mean((2, 3)))


def beside_divided_units(rank: int, norm: type[nn.BatchNorm2d]) -> None:
    torch.manual_seed(0)
    model = Branches(norm).double()
    alone = twin(model)
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    alone(x).square().mean().backward()
    divided = [unit(name, 2, "column", 2) for name in ("stem", "conv")]
    apply(model, None, plan(2, divided))
    model(x[3 * rank : 3 * rank + 3]).square().mean().backward()
    mine = slice(2 * rank, 2 * rank + 2)
    close(model.stem.weight.grad, alone.stem.weight.grad[mine], 1e-9)
    close(model.norm.weight.grad, alone.norm.weight.grad, 1e-9)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, NormAct])
def test_what_enters_from_a_divided_unit_gets_its_gradient(ranks, norm):
    ranks(2)(beside_divided_units, norm)


def synchronised_by_torch(rank: int) -> None:
    model = nn.Sequential(nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(24, 2)).double()
    alone = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(24, 2)).double()
    alone.load_state_dict(model.state_dict())
    apply(model, None, plan(2))
    x = torch.randn(6, 4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(x[3 * rank : 3 * rank + 3])
    alone(x)
    for (name, found), expected in zip(model.named_buffers(), alone.buffers(), strict=True):
        close(found, expected, 1e-9, name)


def test_torchs_synchronised_norm_is_over_the_whole_batch_on_cpus(ranks):
    ranks(2)(synchronised_by_torch)


def in_a_way_of_its_own(rank: int) -> None:
    model = nn.Sequential(OwnNorm(4), nn.Flatten(), nn.Linear(24, 2))
    apply(model, None, plan(2))
    with pytest.raises(InputError, match=r"'0' \(OwnNorm\) normalises in a way of its own"):
        model(torch.randn(3, 4, 3, 2))


def test_a_norm_that_computes_statistics_itself_is_refused(ranks):
    ranks(2)(in_a_way_of_its_own)


def local_as_ddp(rank: int, schedule: str) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )
    ddp = DistributedDataParallel(twin(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, ddp)]
    with scheduled(schedule):
        apply(model, optimizers[0], plan(2, statistics="local"))
    for step in range(3):
        x = share(rank, [4, 4], (3, 4, 4), step, torch.float32)
        for m, optimizer in zip((model, ddp), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    theirs = ddp.module.state_dict()
    for name, value in model.state_dict().items():
        close(value, theirs[name], 1e-6, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_local_as_under_ddp(ranks, schedule):
    ranks(2)(local_as_ddp, schedule)


def local_without_samples(rank: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    apply(model, None, plan(2, statistics="local"))
    before = model[0].running_mean.clone()
    model(share(rank, [0, 4], (4,), 0, torch.float64)).square().mean().backward()
    assert model[0].running_mean.isfinite().all()
    assert torch.equal(model[0].running_mean, before) == (rank == 0)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_local_statistics_survive_an_empty_batch(ranks):
    ranks(2)(local_without_samples)


def local_in_divided_unit(rank: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    apply(model, None, plan(2, [unit(("0", "1"), 2, "column", 2)], statistics="local"))


def test_local_statistics_refuse_a_divided_unit(ranks):
    for outcome in ranks(2).outcomes(local_in_divided_unit):
        assert outcome.kind == "InputError"
        assert "batch_statistics 'global'" in outcome.error


def one_value(rank: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    apply(model, None, plan(2))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(share(rank, [1, 0], (4,), 0, torch.float64))
    assert full_state_dict(model)["0.num_batches_tracked"] == 0


def test_one_value_has_no_variance(ranks):
    ranks(2)(one_value)
