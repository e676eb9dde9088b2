"""Gradients that are added up on each host before hosts exchange the sums."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.gradients.by_host import HostGradGroup
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.planner.explain.compare import with_wire
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from reference import twin
from test_debug import debugging
from test_sharded import NAMES, OPTIMIZERS, close, data, loss_of, net, part, same_everywhere
from torch import nn

PLACEMENTS = {"in order": (0, 1, 2, 3), "mixed": (2, 0, 3, 1)}


def by_host(*, hybrid: bool = False, message_bytes: int = 300, **options: Any) -> Plan:
    """A plan for two hosts of two ranks; ``hybrid`` divides two units, which are exchanged flat."""
    with scheduled("priority"):
        styles = {"wide": "column", "back": "row"} if hybrid else {}
        units = [
            msgspec.structs.replace(
                unit(name, 2 if name in styles else 1, styles.get(name, "none"), 4),
                peers_per_host=1 if name in styles else 2,
            )
            for name in NAMES
        ]
        return plan(4, units, message_bytes=message_bytes, **options)


def trains_as_one_process(rank: int, chosen: Plan, most: float) -> None:
    """20 steps with clipping, the shares of ranks changing: parameters are alike bit for bit on all
    ranks, and those of one process but for ``most``."""
    place = chosen.placement.index(rank)
    model = net()
    alone = twin(model)
    optimizer, other = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, alone))
    apply(model, optimizer, chosen, timeout_s=20)
    for seed in range(20):
        counts = [[2, 1, 3, 1], [1, 2, 2, 0], [2, 2, 2, 2]][seed % 3]
        pairs = (
            (model, optimizer, part(place, counts, seed)),
            (alone, other, data(sum(counts), seed)),
        )
        for one, steps, batch in pairs:
            loss_of(one, batch).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            steps.step()
            steps.zero_grad()
    groups = run_of(model).priority.grad_groups
    assert any(isinstance(group, HostGradGroup) for group in groups)
    same_everywhere(model)
    found, expected = full_state_dict(model), alone.state_dict()
    if not most:
        close(found, expected)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= most * tensor.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("order", "hybrid", "message_bytes"),
    [
        # Each value beside each of the others, in half of all that can be.
        pytest.param(*case, marks=[] if i.bit_count() % 2 else [pytest.mark.slow])
        for i, case in enumerate(itertools.product(PLACEMENTS, (False, True), (300, 2**20)))
    ],
)
def test_training_equals_one_process(ranks, order, hybrid, message_bytes):
    chosen = by_host(hybrid=hybrid, message_bytes=message_bytes, placement=PLACEMENTS[order])
    ranks(4)(trains_as_one_process, chosen, 0.0)


def test_rounded_between_hosts(ranks):
    ranks(4)(trains_as_one_process, with_wire(by_host(), "bf16"), 0.02)


# -- what travels ----------------------------------------------------------------------------------


def sends(rank: int, chosen: Plan) -> tuple[int, bool]:
    """The bytes that this rank sends in a step, and whether its gradients are the average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    alone = twin(model)
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen, timeout_s=20)
    given = torch.randn(8, 64)
    model(given[2 * rank : 2 * rank + 2]).square().mean().backward()
    alone(given).square().mean().backward()
    equal = all(
        torch.allclose(p.grad * 1, q.grad, rtol=1e-2, atol=1e-4)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
    return run_of(model).meter.exchanged_bytes, equal


@pytest.mark.parametrize(("wire", "crossing"), [("exact", 1.0), ("bf16", 0.5)])
def test_a_rank_sends_its_part_across(ranks, wire, crossing):
    with scheduled("priority"):
        units = [
            msgspec.structs.replace(unit(name, 1, "none", 4), peers_per_host=2)
            for name in ("0", "1")
        ]
        chosen = with_wire(plan(4, units), wire)
    size = 4 * 2 * (64 * 64 + 64)
    # Half of a gradient to the host's other rank and back, and of the half that it owns half twice
    # to the other host.
    assert ranks(4)(sends, chosen) == [(size + int(crossing * size / 2), True)] * 4


def accumulates(rank: int, chosen: Plan) -> None:
    """A second backward adds to what the first has left, as in one process."""
    model = net()
    alone = twin(model)
    apply(model, OPTIMIZERS["sgd"](model.parameters()), chosen, timeout_s=20)
    for seed in range(2):
        loss_of(model, part(rank, [2, 2, 2, 2], seed)).backward()
        loss_of(alone, data(8, seed)).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad * 1, q.grad, msg=name)


def test_gradients_accumulate(ranks):
    ranks(4)(accumulates, by_host())


def is_compared(rank: int, chosen: Plan) -> list[int]:
    """How many collectives that debug mode has not compared are left after each step."""
    model = net()
    with debugging():
        apply(model, OPTIMIZERS["sgd"](model.parameters()), chosen, timeout_s=20)
    run, left = run_of(model), []
    for seed in range(3):
        loss_of(model, part(rank, [2, 2, 2, 2], seed)).backward()
        run.finish_steps()
        left.append(sum(len(one.open) for one in run.watch._log._sequences.values()))
        model.zero_grad()
    return left


def test_debug_mode_compares_what_threads_have_waited_for(ranks):
    for left in ranks(4)(is_compared, by_host()):
        assert left[0] >= left[-1]


def loses_a_peer(rank: int, chosen: Plan) -> str:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, chosen, timeout_s=2)
    if rank == 3:
        time.sleep(3.0)  # in place of its backward
        return ""
    try:
        loss_of(model, part(rank, [2, 2, 2, 2])).backward()
        optimizer.step()
        full_state_dict(model)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_does_not_come_is_named(ranks):
    outcomes = ranks(4).outcomes(loses_a_peer, by_host(), limit_s=60.0)
    assert "rank 3" in str(outcomes[0].value or outcomes[0].error)


def is_refused(rank: int, chosen: Plan) -> str:
    with pytest.raises(InputError) as raised:
        apply(net(), None, chosen)
    return str(raised.value)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"exchange": "sharded"}, "exchange by host and for exchange 'sharded' at once"),
        ({"peers_per_host": 4}, "4 of 4 peers on each host"),
    ],
)
def test_what_does_not_go_together_is_refused(ranks, policy, says):
    chosen = by_host()
    units = (msgspec.structs.replace(chosen.units[0], **policy), *chosen.units[1:])
    said = ranks(4)(is_refused, msgspec.structs.replace(chosen, units=units))
    assert all(says in one for one in said)
