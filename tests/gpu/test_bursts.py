"""Random plans whose units take a part of the ranks, on streams: right, and in one order."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from burst_search import EXAMPLE_S, search
from burst_trials import Trial
from bursts import check
from streams import Issued, check_one_order, on_streams, recorded

QUICK, MANY = 4, 150
"""Plans for each number of ranks."""


def issued(rank: int, text: str) -> Issued:
    """What a rank issues in a trial, which trains as one process does."""
    with on_streams() as device, recorded() as told:
        check(rank, text, device)
    return told


def attempt(ranks, dense: bool, trial: Trial) -> None:
    if dense:
        units = tuple(msgspec.structs.replace(u, exchange="dense") for u in trial.plan.units)
        plan = msgspec.structs.replace(trial.plan, units=units)
        trial = msgspec.structs.replace(trial, plan=plan)
    rows = ranks(trial.plan.world_size)(issued, trial.tell(), limit_s=EXAMPLE_S)
    check_one_order(rows)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "dense"),
    [
        pytest.param(2, False, id="2-as drawn"),
        pytest.param(3, True, id="3-dense"),
        pytest.param(2, True, marks=pytest.mark.slow, id="2-dense"),
        pytest.param(3, False, marks=pytest.mark.slow, id="3-as drawn"),
        pytest.param(4, False, marks=pytest.mark.slow, id="4-as drawn"),
        pytest.param(4, True, marks=pytest.mark.slow, id="4-dense"),
    ],
)
def test_all_ranks_issue_in_one_order(ranks, world, dense):
    """Gradients that are all-reduced leave in backward, on ranks with different parts of it."""
    search(world, QUICK, 5, partial(attempt, ranks, dense))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dense", [False, True], ids=["as drawn", "dense"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_plans_issue_in_one_order(ranks, world, dense):
    search(world, MANY, 6, partial(attempt, ranks, dense))
