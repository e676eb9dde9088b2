"""Debug mode: what is right passes, and a wrong order is caught with both operations' names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import test_equality
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


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_what_users_do_passes(ranks: Any, schedule: str) -> None:
    ranks(2)(passes, schedule, limit_s=90)


CASES = [
    test_equality.Case("gpt-tiny", 4, 2, test_equality.BLOCKS, (3, 0, 2, 1)),  # tied
    test_equality.Case("cnn-digits", 4, 2),
]


def equals_one_process(rank: int, case: test_equality.Case, schedule: str) -> None:
    with debugging(), scheduled("priority" if schedule == "priority" else "barrier"):
        test_equality.equals_one_process(rank, case, "sgd", "float64")


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hybrid_plans_pass(ranks: Any, case: test_equality.Case, schedule: str) -> None:
    ranks(4)(equals_one_process, case, schedule, limit_s=120)


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
    ledger = model._meshwright_run.watch._ledger
    found = {key[0]: sequence.compared for key, sequence in ledger._sequences.items()}
    torch.distributed.barrier()
    place = f"meshwright/debug/{ledger._run}/control/0"
    return found, sum(ledger._store.check([f"{place}/{n}"]) for n in range(found["control"]))


def test_every_kind_is_compared_and_old_names_are_removed(ranks: Any) -> None:
    for found, held in ranks(4)(kinds):
        assert set(found) == {
            "control",
            "exchange",
            "exchange 2",
            "redistribution 2",
            "statistics",
        }
        assert all(found.values())
        assert found["control"] >= 60  # a header and a vote in each step
        assert held < 10


def undisturbed(rank: int) -> None:
    model = nn.Linear(2, 2)
    apply(model, None, plan(2))
    assert model._meshwright_run.watch._ledger is None


def test_without_it_nothing_is_kept(ranks: Any) -> None:
    ranks(2)(undisturbed)


# -- what is wrong ---------------------------------------------------------------------------------


def trained(divided: bool, world: int, schedule: str, disturb: Callable[[nn.Module], None]) -> None:
    """Steps of a model whose units are too large to travel together; ``disturb`` after one."""
    torch.manual_seed(7)
    layers = nn.Linear(128, 96), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 128)
    model = nn.Sequential(*layers).double()
    inside = [unit(("1", "2"), 2, "column", world), unit("3", 2, "row", world)]
    plain = [unit(str(i), 1, "none", world) for i in (1, 2, 3)]
    ends = [unit(i, 1, "none", world) for i in ("0", "4")]
    with debugging(), scheduled("priority" if schedule == "priority" else "barrier"):
        units = [ends[0], *(inside if divided else plain), ends[1]]
        apply(model, None, plan(world, units, bucket_bytes=30_000), timeout_s=4)
    inputs = torch.ones(3, 128, dtype=torch.float64)
    model(inputs).sum().backward()
    disturb(model)
    for _ in range(3):
        model(inputs).sum().backward()


def swap_turns(model: nn.Module) -> None:
    """Two turns of different units, which all ranks exchange, change places."""
    exchange = model._meshwright_run._priority
    turns = exchange._orders.turns
    everybody = [
        i
        for i, turn in enumerate(turns)
        if exchange.parcels[turn.load].entries[0].group.label == "exchange"
    ]
    one, other = next((i, j) for i, j in pairwise(everybody) if turns[i].load != turns[j].load)
    turns[one], turns[other] = turns[other], turns[one]


def wrong_order(rank: int, world: int, divided: bool) -> None:
    trained(divided, world, "priority", swap_turns if rank == 1 else lambda model: None)


@pytest.mark.parametrize(("world", "divided"), [(2, False), (4, True)])
def test_a_wrong_order_is_caught_on_every_rank(ranks: Any, world: int, divided: bool) -> None:
    outcomes = ranks(world).outcomes(wrong_order, world, divided)
    sentence = (
        r"rank (\d) issues (slice \d+ of '[^']+') as its (\d+)(st|nd|rd|th) collective in group "
        r"'(exchange.*)' while rank (\d) issues (slice \d+ of '[^']+')"
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
            "rank 0 issues bucket 0 as its 9th collective in group 'exchange' while rank 1 issues "
            "something that rank 0 has not issued"
        ) in outcome.error


def falls_silent(rank: int) -> None:
    def disturb(model: nn.Module) -> None:
        if rank == 1:
            time.sleep(8)
            raise KeyError("has left the loop")

    trained(False, 2, "barrier", disturb)


def test_a_rank_that_issues_nothing_more_is_named_in_time(ranks: Any) -> None:
    start = time.monotonic()
    first, _ = ranks(2).outcomes(falls_silent)
    assert first.kind == "RunError"
    assert re.search(
        r"\(the \w+ of .*, its \d\w\w collective in group 'control', where rank 1 issues nothing",
        first.error,
    ), first.error
    assert time.monotonic() - start < 60
