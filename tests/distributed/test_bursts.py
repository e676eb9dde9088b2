"""Units that take a part of the ranks train as one process does (docs/executor.md)."""

from __future__ import annotations

import copy
import io
import os
import time
from pathlib import Path

import msgspec
import pytest
import torch
from bursts import check_many
from meshwright.executor.apply import apply
from meshwright.executor.layout.shards import LocalShard
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.planner.errors import InputError
from meshwright.planner.layout import Layout
from meshwright.planner.plan import UnitPlan
from plans import plan, scheduled
from reference import twin
from torch import Tensor, nn

QUICK, SLOW = 6, 30
"""Plans for each number of ranks."""
SLEEP_S = 0.15


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_plans(ranks, world, tmp_path):
    _run(ranks, world, range(QUICK), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_more_random_plans(ranks, world, tmp_path):
    _run(ranks, world, range(QUICK, SLOW), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_random_plans(ranks, world, tmp_path):
    """A third of them each; MESHWRIGHT_BURST_SEEDS=100:200 runs those seeds alone."""
    start, stop = map(int, os.environ.get("MESHWRIGHT_BURST_SEEDS", "0:334").split(":"))
    _run(ranks, world, range(start, stop), tmp_path)


def _run(ranks, world: int, seeds: range, path: Path) -> None:
    """All of them on ranks that stay up; what hangs is told by what was begun last."""
    log = path / "begun"
    try:
        ranks(world)(check_many, seeds, world, str(log), limit_s=60 + 3 * len(seeds))
    except AssertionError as error:
        begun = log.read_text() if log.exists() else "nothing"
        raise AssertionError(f"{error}\nlast begun: {begun}") from error


def _part(name: str, layout: Layout, **options) -> UnitPlan:
    return UnitPlan(
        name=name, kind="other", modules=(name,), batched_inputs=(0,), layout=layout, **options
    )


# -- branches side by side ---------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return gradient


class Slow(nn.Module):
    """Takes its time, which no other rank's share makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return _Sleep.apply(self.linear(x).view(x.shape[0], -1))


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.left, self.right = Slow(), Slow()

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.left(y) + self.right(y)


def overlaps(rank: int) -> None:
    torch.manual_seed(3)
    model = TwoWays()
    alone = twin(model)
    units = [_part("left", Layout(groups=1)), _part("right", Layout(groups=1, first=1))]
    apply(model, None, plan(2, units), timeout_s=20)
    x = torch.randn(2, 3)
    for _ in range(2):  # the first one sees who takes what
        start = time.perf_counter()
        output = model(x)
        middle = time.perf_counter()
        output.sum().backward()
        took = middle - start, time.perf_counter() - middle
    assert max(took) < 1.7 * SLEEP_S, took
    mine, other = (model.left, model.right) if rank == 0 else (model.right, model.left)
    assert mine.calls == 2
    assert other.calls == 0
    assert other.linear.weight.numel() == 0
    torch.testing.assert_close(output, alone(x))


def test_branches_on_different_ranks_overlap(ranks):
    ranks(2)(overlaps)


# -- what is on idle ranks ---------------------------------------------------------------------


def _little(rank: int, memory: str = "keep", drop: float = 0.0, schedule: str = "barrier"):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(drop), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    narrow = UnitPlan(
        name="0",
        kind="linear",
        modules=("0", "1"),
        batched_inputs=(0,),
        layout=Layout(groups=1, first=1),
        memory=memory,
    )
    with scheduled(schedule):
        apply(model, optimizer, plan(2, [narrow]), timeout_s=20)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        model(torch.randn(2, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saves_and_loads(rank: int, schedule: str) -> None:
    model, optimizer = _little(rank, schedule=schedule)
    _train(model, optimizer)
    own = model.state_dict()
    assert isinstance(own["0.weight"], LocalShard) == (rank == 0)
    torch.save(own, io.BytesIO())
    whole = {k: v.clone() for k, v in full_state_dict(model).items()}
    assert whole["0.weight"].shape == (4, 3)
    assert bool(full_state_dict(model, rank0_only=True)) == (rank == 0)
    again, other = _little(rank, schedule=schedule)
    again.load_state_dict(whole)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict(own)
    _train(model, optimizer)
    _train(again, other)
    for ours, theirs in zip(
        full_state_dict(model).values(), full_state_dict(again).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_state_is_saved_and_loaded(ranks, schedule):
    ranks(2)(saves_and_loads, schedule)


def other_ways_through(rank: int) -> None:
    """Evaluation, gradients that add up, and gradients that no parameter accumulates."""
    model, _ = _little(rank)
    alone = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    alone.load_state_dict(full_state_dict(model))
    x = torch.arange(6.0).view(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(x), alone(x))
    with model.no_sync():
        model(x).sum().backward()
    model(2 * x).sum().backward()
    alone(x).sum().backward()
    alone(2 * x).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None, name
        if mine.numel():
            torch.testing.assert_close(mine.grad.as_subclass(Tensor), theirs.grad)
    wanted = model(x)
    (found,) = torch.autograd.grad(wanted.sum(), [model[2].weight])
    (there,) = torch.autograd.grad(alone(x).sum(), [alone[2].weight])
    torch.testing.assert_close(found, there)


def test_other_ways_through(ranks):
    ranks(2)(other_ways_through)


def draws(rank: int) -> list[Tensor]:
    states = []
    for memory in ("keep", "recompute"):
        model, optimizer = _little(rank, memory, drop=0.5)
        torch.manual_seed(11)
        before = torch.get_rng_state()
        _train(model, optimizer)
        assert torch.equal(before, torch.get_rng_state()) == (rank == 0)
        states.append(full_state_dict(model)["0.weight"])
    assert torch.equal(*states)
    return states


def test_idle_ranks_draw_nothing(ranks):
    """The masks are those of the ranks that run the unit, the same when it runs again."""
    first, second = ranks(2)(draws)
    assert torch.equal(first[0], second[0])


# -- refusals ----------------------------------------------------------------------------------


def refuses(rank: int) -> None:
    narrow = _part("1", Layout(groups=1), memory="recompute")
    cases = [
        (nn.BatchNorm1d(3), narrow, "local", "batch_statistics 'global'"),
        (nn.Linear(3, 3), msgspec.structs.replace(narrow, segment=("1",)), "global", "segment"),
        (nn.Linear(3, 3), msgspec.structs.replace(narrow, batched_inputs=()), "global", "batch"),
        (nn.Linear(3, 3), msgspec.structs.replace(narrow, exchange="topk"), "global", "topk"),
        (nn.Linear(3, 3), msgspec.structs.replace(narrow, early_release=True), "global", "early"),
    ]
    for module, unit, statistics, words in cases:
        model = nn.Sequential(nn.Linear(3, 3), module)
        with scheduled("priority"), pytest.raises(InputError, match=words):
            apply(model, None, plan(2, [unit], statistics=statistics), timeout_s=20)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(InputError, match=r"'1.weight' whole in layout \(1,1\)"):
        apply(tied, None, plan(2, [narrow]), timeout_s=20)


def test_refusals(ranks):
    ranks(2)(refuses)


def says_what_is_wrong(rank: int) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    model = nn.Sequential(nn.Linear(3, 3), Sum())
    apply(model, None, plan(2, [_part("1", Layout(groups=1))]), timeout_s=3)
    model(torch.zeros(2, 3))


def test_an_output_without_samples_is_refused(ranks):
    outcomes = ranks(2).outcomes(says_what_is_wrong)
    assert "only tensors with the samples in dim 0" in outcomes[0].error
    assert outcomes[1].kind == "RunError"


def compares(rank: int) -> int:
    os.environ["MESHWRIGHT_DEBUG"] = "1"
    try:
        model, optimizer = _little(rank, schedule="priority")
        _train(model, optimizer)
        return run_of(model).meter.moves
    finally:
        del os.environ["MESHWRIGHT_DEBUG"]


def test_debug_mode_sees_the_same_on_all_ranks(ranks):
    assert min(ranks(2)(compares)) > 0
