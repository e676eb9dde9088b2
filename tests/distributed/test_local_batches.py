"""Planned shares of the batch: training equals that of one process, whatever each rank gets."""

from __future__ import annotations

import warnings

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.launch.train import share_of, take_step
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.models.workload import Batch, Workload
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from reference import assert_equal, optimizer_of, train_alone, twin
from torch import nn
from torch.nn import functional as F

BATCH = 12
STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def batch(size: int) -> Batch:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        return Batch((inputs,), torch.randint(3, (size,), generator=generator))

    # The last one is not as large as the plan says: it is shared out in proportion.
    return [*(batch(BATCH) for _ in range(STEPS - 1)), batch(BATCH - 5)]


def sized(made: Plan, sizes: tuple[int, ...]) -> Plan:
    goal = msgspec.structs.replace(made.goal, batch=sum(sizes))
    return msgspec.structs.replace(made, goal=goal, local_batch_sizes=sizes)


def trained(rank: int, made: Plan, optimizer: str) -> list[int]:
    """Trains as ``launch`` does, and compares; the samples that this rank was given."""
    whole = model()
    expected = train_alone(twin(whole), optimizer, batches(), F.cross_entropy)
    mine = optimizer_of(optimizer, whole.parameters())
    apply(whole, mine, made, timeout_s=20)
    workload = Workload("test", whole, lambda size: batches()[0], F.cross_entropy)
    losses, given = [], []
    for batch in batches():
        given.append(share_of(batch, run_of(whole)).size)
        part = take_step(workload, made, batch, mine).spent().loss
        total = torch.tensor(part, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        losses.append(total.item())
    assert_equal((losses, full_state_dict(whole)), expected)
    return given


EXCHANGES = ("barrier", "priority", "sharded", "fully_sharded")


def data_parallel(
    rank: int, sizes: tuple[int, ...], exchange: str, times: int, placement: tuple[int, ...]
) -> list[int]:
    world = len(sizes)
    units = [unit(str(i), 1, "none", world) for i in range(5)]
    with scheduled("barrier" if exchange == "barrier" else "priority"):
        made = plan(world, units, message_bytes=300, micro_batches=times, placement=placement)
    if exchange.endswith("sharded"):
        made = with_exchange(made, exchange)  # type: ignore[arg-type]
    return trained(rank, sized(made, sizes), "adamw" if exchange == "priority" else "sgd")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_ranks_equal_one_process(ranks, exchange):
    first, second = ranks(2)(data_parallel, (8, 4), exchange, 1, (0, 1))
    # Seven samples are 4 2/3 and 2 1/3: the first gets more.
    assert (first, second) == ([8, 8, 8, 5], [4, 4, 4, 2])


@pytest.mark.parametrize("exchange", ["barrier", "priority"])
def test_three_ranks_in_micro_batches_equal_one_process(ranks, exchange):
    """Position 0, which has most, is rank 2."""
    given = ranks(3)(data_parallel, (7, 3, 2), exchange, 2, (2, 0, 1))
    assert [each[0] for each in given] == [3, 2, 7]


def divided(rank: int, sizes: tuple[int, ...]) -> list[int]:
    """A unit whose parameters are divided has the samples of its members."""
    world = len(sizes)
    units = [unit(str(i), 1, "none", world) for i in range(5)]
    units[0], units[2] = unit("0", world, "column", world), unit("2", world, "row", world)
    return trained(rank, sized(plan(world, units), sizes), "sgd")


def test_divided_units_equal_one_process(ranks):
    assert [each[0] for each in ranks(2)(divided, (9, 3))] == [9, 3]


def fed_evenly(rank: int) -> list[str]:
    """A user's loop that does not know of the shares."""
    whole = model()
    optimizer = optimizer_of("sgd", whole.parameters())
    apply(whole, optimizer, sized(plan(2), (8, 4)), timeout_s=20)
    inputs = batches()[0].args[0][:6]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            whole(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole.eval()
        with torch.no_grad():
            whole(batches()[0].args[0])
    return [str(w.message) for w in caught if "samples" in str(w.message)]


def test_a_rank_that_is_fed_more_than_planned_is_told_once(ranks):
    first, second = ranks(2)(fed_evenly)
    assert first == []
    (sentence,) = second
    assert sentence.startswith("rank 1 was fed 6 samples and the plan, made for ranks of unequal")
    assert "has 4 for it" in sentence
    assert "plan.local_batch_size(rank)" in sentence
