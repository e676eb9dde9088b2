"""Units that take a part of the ranks train as one process does (docs/executor.md)."""

from __future__ import annotations

import copy
import io
import os
import time
from functools import partial

import msgspec
import pytest
import torch
from between import Between, Softmax
from burst_search import EXAMPLE_S, search
from burst_trials import Trial
from bursts import check
from meshwright.executor.apply import apply
from meshwright.executor.gradients.order import FIRST
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.executor.redistribution.shards import LocalShard
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import UnitPlan
from plans import plan, scheduled
from reference import twin, whole_gradients
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction

from tests.sampling import sampled

QUICK, SLOW, MANY = 6, 24, 334
"""Plans for each number of ranks."""
SLEEP_S = 0.15
TRIES = 6


@pytest.mark.timeout(600)  # hypothesis may take five minutes to make a failing plan small
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_plans(ranks, world):
    search(world, QUICK, 0, partial(_try, ranks))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", sampled([2, 3, 4], 1))
def test_more_random_plans(ranks, world):
    search(world, SLOW, 1, partial(_try, ranks))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_random_plans(ranks, world):
    """A third of them each; MESHWRIGHT_BURST_SEED draws others, MESHWRIGHT_BURST_PLANS as many, and
    MESHWRIGHT_BURST_TRIAL runs that one alone, as a failure has printed it."""
    told = os.environ.get("MESHWRIGHT_BURST_TRIAL")
    if told is not None and Trial.read(told).plan.world_size == world:
        _try(ranks, Trial.read(told))
    elif told is None:
        count = int(os.environ.get("MESHWRIGHT_BURST_PLANS", MANY))
        start = int(os.environ.get("MESHWRIGHT_BURST_SEED", "2"))
        search(world, count, start, partial(_try, ranks))


def _try(ranks, trial: Trial) -> None:
    """On ranks that stay up from one trial to the next; where one hangs they are started anew."""
    text = trial.tell()
    try:
        ranks(trial.plan.world_size)(check, text, limit_s=EXAMPLE_S)
    except AssertionError as error:
        told = f"{trial}: {error}\nagain: MESHWRIGHT_BURST_TRIAL='{text}'"
        raise AssertionError(told) from error


def test_a_failing_plan_is_made_small():
    """What the search is for: of plans that fail, the smallest is told."""
    tried: list[Trial] = []

    def fails(trial: Trial) -> None:
        tried.append(trial)
        assert not any(unit.layout.first for unit in trial.plan.units), "placed elsewhere"

    with pytest.raises(AssertionError, match="placed elsewhere"):
        search(3, 30, 0, fails)
    last = tried[-1]
    assert sum(unit.layout.first > 0 for unit in last.plan.units) == 1
    assert (last.parts, last.decays, last.plan.schedule) == (1, False, "barrier")
    assert Trial.read(last.tell()) == last


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
    took = []
    for _ in range(TRIES):  # the first one sees who takes what
        start = time.perf_counter()
        output = model(x)
        middle = time.perf_counter()
        output.sum().backward()
        took.append((middle - start, time.perf_counter() - middle))
    # Other work on this machine makes a branch longer, never two of them shorter.
    assert all(min(phase) < 1.7 * SLEEP_S for phase in zip(*took[1:], strict=True)), took
    mine, other = (model.left, model.right) if rank == 0 else (model.right, model.left)
    assert mine.calls == TRIES
    assert other.calls == 0
    assert other.linear.weight.numel() == 0
    torch.testing.assert_close(output, alone(x))


@pytest.mark.alone
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


def has_fewer_samples_than_ranks(rank: int) -> None:
    """The first of a unit's two ranks has no sample, and nothing to do with what comes next."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    alone = twin(model)
    units = [_part("0", Layout(groups=2)), _part("1", Layout(groups=1, first=1))]
    apply(model, None, plan(3, units), timeout_s=5)
    x = torch.randn(1, 3)
    model(x if rank == 0 else x[:0]).square().mean().backward()
    alone(x).square().mean().backward()
    found = whole_gradients(model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad)


def test_a_batch_smaller_than_a_unit_has_ranks(ranks):
    ranks(3)(has_fewer_samples_than_ranks)


def one_rank_has_all_samples(rank: int) -> None:
    """Nothing moves on from the unit in the middle, whose gradients its ranks await in backward;
    the other rank must not go on to the first unit, whose gradient comes after that."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    alone = twin(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    units = [
        _part("0", Layout(groups=1)),
        _part("1", Layout(groups=2), early_release=True),
        _part("2", Layout(groups=1, first=1)),
    ]
    with scheduled("priority"):
        apply(model, optimizer, plan(2, units), timeout_s=5)
    x = torch.randn(2, 3)
    model(x if rank == 1 else x[:0]).square().mean().backward()
    alone(x).square().mean().backward()
    optimizer.step()
    other.step()
    for name, tensor in full_state_dict(model).items():
        torch.testing.assert_close(tensor, alone.state_dict()[name])


def test_a_rank_without_samples_has_gradients_that_others_wait_for(ranks):
    ranks(2)(one_rank_has_all_samples)


def has_a_function_between_units(rank: int, first: Layout, second: Layout) -> None:
    """What such a function is applied to has not moved yet, and the unit before has its gradient
    all the same."""
    torch.manual_seed(3)
    model = Between(Softmax.apply).double()
    alone = twin(model)
    apply(model, None, plan(2, [_part("first", first), _part("second", second)]), timeout_s=20)
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    assert "apply" not in vars(_SingleLevelFunction)  # torch is as it was
    alone(x).square().mean().backward()
    found = whole_gradients(model)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Layout(groups=1), Layout(groups=1, first=1)),
        (Layout(groups=1, first=1), Layout(groups=1, first=1)),
        (Layout(groups=1), Layout(groups=2)),
    ],
    ids=str,
)
def test_a_function_of_the_models_own_between_units(ranks, first, second):
    ranks(2)(has_a_function_between_units, first, second)


# -- beside units that wait in backward --------------------------------------------------------


def one_rank_is_late(rank: int) -> None:
    """Fully sharded units wait in backward for gradients of others. Their slices must not stand
    behind those of a narrow unit, which gets ready later where it is at all: as the rank that
    has it begins its backward last, it is the quickest by its own clock."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 256), *(nn.Linear(256, 256) for _ in range(3)))
    alone = twin(model)
    whole = [
        _part(str(i), Layout(groups=2), exchange="fully_sharded") for i in range(1, len(model))
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with scheduled("priority"):
        units = [_part("0", Layout(groups=1)), *whole]
        apply(model, optimizer, plan(2, units), timeout_s=5)
    other = torch.optim.SGD(alone.parameters(), lr=1e-3)
    x = torch.randn(4, 3)
    for _ in range(FIRST[1] + 1):  # after some of these the order follows from what was measured
        loss = model(x[2 * rank : 2 * rank + 2]).square().mean()
        if rank == 0:
            time.sleep(SLEEP_S)
        loss.backward()
        alone(x).square().mean().backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    for name, tensor in full_state_dict(model).items():
        torch.testing.assert_close(tensor, alone.state_dict()[name])


def test_a_late_rank_does_not_hold_up_units_that_wait_in_backward(ranks):
    ranks(2)(one_rank_is_late)


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
    apply(model, None, plan(2, [_part("1", Layout(groups=1))]), timeout_s=2)
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
