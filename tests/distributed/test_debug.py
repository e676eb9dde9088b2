"""Debug mode: what is right passes, and a wrong order is caught with both operations' names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import lossy
import pytest
import test_dropped
import test_equality
import test_sharded
import test_user
import torch
from meshwright.executor.apply import apply
from plans import plan, scheduled, unit
from torch import nn


@contextmanager
def debugging() -> Iterator[None]:
    os.environ["MESHWRIGHT_DEBUG"] = "1"
    try:
        yield
    finally:
        del os.environ["MESHWRIGHT_DEBUG"]


SCHEDULES = [pytest.param("barrier", marks=pytest.mark.slow), "priority"]


# -- what is right ---------------------------------------------------------------------------------

ORDINARY = [
    "accumulates_without_sync",
    "no_sync_keeps_gradients_local",
    "two_backwards",
    "parameters_unused",
    "frozen_and_thawed",
    "batches_of_changing_size",
    "ends_together",
    "clips_as_one_process",
    "evaluates_between_steps",
    "saves_on_rank_zero_alone",
]


def passes(rank: int, schedule: str) -> None:
    with debugging():
        for check in ORDINARY:
            test_user.under(rank, check, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_users_do_passes(ranks: Any, schedule: str) -> None:
    ranks(2)(passes, schedule, limit_s=90)


CASES = [
    test_equality.Case("gpt-tiny", 4, 2, test_equality.BLOCKS, (3, 0, 2, 1)),  # tied
    test_equality.Case("cnn-digits", 4, 2),
]


def equals_one_process(rank: int, case: test_equality.Case, schedule: str) -> None:
    with debugging():
        test_equality.equals_one_process(rank, case, "sgd", "float64", (schedule,))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hybrid_plans_pass(ranks: Any, case: test_equality.Case, schedule: str) -> None:
    ranks(4)(equals_one_process, case, schedule, limit_s=120)


def passes_exchanges(rank: int) -> set[str]:
    """Every exchange policy, and what users do with shared gradients; the groups compared."""
    groups = set()
    with debugging():
        for exchange in ("dropped", "topk"):
            training = lossy.Training(lossy.lossy_plan(exchange, 0.3), test_dropped.momentum)
            for parameters in training.steps(range(4)):
                lossy.assert_equal_on_all_ranks(parameters)
            groups |= {key[0] for key in training.run.watch._log._sequences}
        test_sharded.clips_by_norm(rank, 2)
        model = test_sharded.net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apply(model, optimizer, test_sharded.shards(2))
        test_sharded.loss_of(model, test_sharded.part(rank, [2, 2])).backward()
        next(model.parameters()).grad.add_(0)  # puts a gradient together
        optimizer.step()
        model.state_dict()
        groups |= {key[0] for key in model._meshwright_run.watch._log._sequences}
    return groups


@pytest.mark.slow
def test_exchanges_that_share_or_send_a_part_pass(ranks: Any) -> None:
    for groups in ranks(2)(passes_exchanges, limit_s=90):
        assert groups >= {"control", "exchange", "updated chunks 1", "full gradients 1"}


def kinds(rank: int) -> tuple[dict[str, int], int]:
    """How many collectives were compared in each group, and what the store still holds."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    model.register_buffer("offset", torch.zeros(2))
    chosen = plan(4, [unit("2", 2, "column", 4), unit("4", 2, "row", 4)])
    with debugging(), scheduled("priority"):
        apply(model, None, chosen, timeout_s=20)
    for _ in range(30):
        model(torch.ones(3, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    log = model._meshwright_run.watch._log
    found = {key[0]: sequence.compared for key, sequence in log._sequences.items()}
    torch.distributed.barrier()
    place = f"meshwright/debug/{log._run}/control/0"
    return found, sum(log._store.check([f"{place}/{n}"]) for n in range(found["control"]))


def test_every_kind_is_compared_and_old_names_are_removed(ranks: Any) -> None:
    groups = {"control", "exchange", "exchange 2", "redistribution 2", "statistics"}
    for found, held in ranks(4)(kinds):
        assert set(found) == groups
        assert all(found.values())
        assert found["control"] >= 60  # a header and a vote in each step
        assert held < 10


def undisturbed(rank: int) -> None:
    model = nn.Linear(2, 2)
    apply(model, None, plan(2))
    assert model._meshwright_run.watch._log is None


def test_without_it_nothing_is_kept(ranks: Any) -> None:
    ranks(2)(undisturbed)


# -- what is wrong ---------------------------------------------------------------------------------


def trained(divided: bool, world: int, schedule: str, disturb: Callable[[nn.Module], None]) -> None:
    """Steps of a model whose first and last unit are too large to share a group (the planner's
    ``PACKED_BYTES``), so that all ranks have two to mix up; ``disturb`` after one step."""
    torch.manual_seed(7)
    layers = nn.Linear(256, 96), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 256)
    model = nn.Sequential(*layers).double()
    inside = [unit(("1", "2"), 2, "column", world), unit("3", 2, "row", world)]
    plain = [unit(str(i), 1, "none", world) for i in (1, 2, 3)]
    ends = [unit(i, 1, "none", world) for i in ("0", "4")]
    with debugging(), scheduled("priority" if schedule == "priority" else "barrier"):
        units = [ends[0], *(inside if divided else plain), ends[1]]
        apply(model, None, plan(world, units, message_bytes=30_000), timeout_s=4)
    inputs = torch.ones(3, 256, dtype=torch.float64)
    model(inputs).sum().backward()
    disturb(model)
    for _ in range(3):
        model(inputs).sum().backward()


def swap_turns(model: nn.Module) -> None:
    """Two turns of different units, which all ranks exchange, change places."""
    exchange = model._meshwright_run.priority
    turns = exchange._orders.slots
    everybody = [
        i
        for i, slot in enumerate(turns)
        if exchange.grad_groups[slot.group].params[0].group.label == "exchange"
    ]
    one, other = next((i, j) for i, j in pairwise(everybody) if turns[i].group != turns[j].group)
    turns[one], turns[other] = turns[other], turns[one]


def swap_buckets(model: nn.Module) -> None:
    """The same of two buckets."""
    buckets = model._meshwright_run._gradients._exchange.buckets
    one, other = [i for i, b in enumerate(buckets) if b.group.label == "exchange"][:2]
    buckets[one], buckets[other] = buckets[other], buckets[one]


def wrong_order(rank: int, world: int, divided: bool, schedule: str) -> None:
    swap = swap_turns if schedule == "priority" else swap_buckets
    trained(divided, world, schedule, swap if rank == 1 else lambda model: None)


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
@pytest.mark.parametrize(
    ("world", "divided"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_a_wrong_order_is_caught_on_every_rank(
    ranks: Any, world: int, divided: bool, schedule: str
) -> None:
    outcomes = ranks(world).outcomes(wrong_order, world, divided, schedule)
    what = r"((?:slice \d+ of|bucket \d+ from) '[^']+')"
    sentence = (
        rf"rank (\d) issues {what} as its (\d+)(st|nd|rd|th) collective in group "
        rf"'(exchange.*)' while rank (\d) issues {what}"
    )
    assert [o.kind for o in outcomes] == ["RunError"] * world, outcomes
    for outcome in outcomes:
        found = re.search(sentence, outcome.error)
        assert found, outcome.error
        assert "1" in (found[1], found[6])
        assert found[2] != found[7]


def another_path(rank: int) -> None:
    def disturb(model: nn.Module) -> None:
        if rank == 1:
            model._meshwright_run.issued("something that rank 0 has not issued")

    trained(False, 2, "barrier", disturb)


def test_a_collective_too_many_is_named(ranks: Any) -> None:
    for outcome in ranks(2).outcomes(another_path):
        assert outcome.kind == "RunError"
        assert (
            "rank 0 issues bucket 0 from '4.bias' as its 9th collective in group 'exchange' while "
            "rank 1 issues something that rank 0 has not issued"
        ) in outcome.error


def reads_in_another_order(rank: int) -> None:
    with debugging():
        test_sharded.read_in_another_order(rank)


def test_sharded_gradients_read_in_another_order_are_named(ranks: Any) -> None:
    for outcome in ranks(2).outcomes(reads_in_another_order):
        assert outcome.kind == "RunError"
        assert re.search(
            r"rank 0 issues putting '(.*?)' together.* in group 'full gradients 1' while "
            r"rank 1 issues putting '(?!\1)",
            outcome.error,
        ), outcome.error


def falls_silent(rank: int) -> None:
    def disturb(model: nn.Module) -> None:
        if rank == 1:
            time.sleep(8)
            raise KeyError("has left the loop")

    trained(False, 2, "barrier", disturb)


@pytest.mark.slow
def test_a_rank_that_issues_nothing_more_is_named_in_time(ranks: Any) -> None:
    start = time.monotonic()
    first, _ = ranks(2).outcomes(falls_silent)
    assert first.kind == "RunError"
    assert re.search(
        r"\(what ranks tell for .*, its \d\w\w collective in group 'control', where rank 1 issues "
        r"nothing",
        first.error,
    ), first.error
    assert time.monotonic() - start < 60
