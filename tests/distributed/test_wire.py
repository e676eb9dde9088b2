"""Gradients that travel as bfloat16: sums of what ranks have rounded, the same on all of them."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.gradients.flat_shard import flat
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.planner.explain.compare import with_exchange, with_wire
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import ExchangePolicy, Plan
from plans import SCHEDULES, plan, scheduled, unit
from reference import twin
from test_sharded import NAMES, OPTIMIZERS, Net, counts_of, data, loss_of, part, same_everywhere
from torch import Tensor, nn

from tests.sampling import sampled

POLICIES: tuple[ExchangePolicy, ...] = ("dense", "sharded", "fully_sharded")


def rounded(chosen: Plan) -> Plan:
    """The plan with the gradients of all units rounded to travel."""
    return with_wire(chosen, "bf16")


def of_names(world: int, *, hybrid: bool = False, message_bytes: int = 300) -> Plan:
    styles = {"wide": "column", "back": "row"} if hybrid else {}
    units = [
        unit(name, 2 if name in styles else 1, styles.get(name, "none"), world) for name in NAMES
    ]
    return plan(world, units, message_bytes=message_bytes)


def plans(world: int) -> dict[str, Plan]:
    """Every way in which rounded gradients travel."""
    found = {}
    for message_bytes in (300, 2**20):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                found[f"{schedule} {message_bytes}"] = of_names(world, message_bytes=message_bytes)
        for policy in POLICIES[1:]:
            found[f"{policy} {message_bytes}"] = with_exchange(
                of_names(world, message_bytes=message_bytes), policy
            )
    with scheduled("priority"):
        late = of_names(world)
        units = tuple(msgspec.structs.replace(u, early_release=True) for u in late.units)
        found["released early"] = msgspec.structs.replace(late, units=units)
        found["divided"] = of_names(world, hybrid=True)
        idle = of_names(world)
        part = msgspec.structs.replace(idle.units[2], layout=Layout(groups=world - 1))
        units = (*idle.units[:2], part, *idle.units[3:])
        found["an idle rank"] = msgspec.structs.replace(idle, units=units)
    return {name: rounded(chosen) for name, chosen in found.items()}


def floats(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].float(), batch[1]


# -- what a gradient becomes -----------------------------------------------------------------------


def sums_what_is_rounded(rank: int, policy: ExchangePolicy) -> None:
    counts = [2, 2]  # the same weight for both, so that no other rounding comes between
    for message_bytes in (300, 2**20):
        schedules = SCHEDULES if policy == "dense" else SCHEDULES[1:]
        for schedule in schedules:
            with scheduled(schedule):
                chosen = of_names(2, message_bytes=message_bytes)
            if policy != "dense":
                chosen = with_exchange(chosen, policy)
            model = Net()
            alone = twin(model)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            apply(model, optimizer, rounded(chosen), timeout_s=20)
            loss_of(model, floats(part(rank, counts))).backward()
            loss_of(alone, floats(part(rank, counts))).backward()
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert torch.equal(p.grad * 1, expected(q.grad, policy)), (name, message_bytes)


def expected(own: Tensor, policy: ExchangePolicy) -> Tensor:
    """The average of both ranks' gradients, of which ``own`` is this rank's."""
    both = of_both(own)
    short = [one.bfloat16() for one in both]
    if policy == "dense":
        return in_form_of(own, (short[0] + short[1]).float() / 2)
    # Whoever owns an element has its own gradient as it is.
    first = torch.arange(own.numel()) < -(-own.numel() // 2)
    return in_form_of(own, torch.where(first, both[0] + short[1], short[0] + both[1]) / 2)


def of_both(own: Tensor) -> list[Tensor]:
    """Both ranks' tensors, flat in the order of memory, in which chunks and slices are cut."""
    mine = flat(own).clone()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return both


def in_form_of(like: Tensor, elements: Tensor) -> Tensor:
    """A tensor of that form with those elements in its memory."""
    made = torch.empty_like(like)
    flat(made).copy_(elements)
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_sums_of_what_was_rounded(ranks, policy):
    ranks(2)(sums_what_is_rounded, policy)


# -- training --------------------------------------------------------------------------------------


def stays_near_one_process(rank: int, chosen: Plan, most: float) -> None:
    """Trains for 20 steps: parameters are alike on all ranks, and at most that share of what one
    process has moved them away from its own."""
    counts = counts_of(chosen.world_size)[: chosen.world_size]
    place = chosen.placement.index(rank)
    model = Net()
    alone = twin(model)
    optimizer, other = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, alone))
    apply(model, optimizer, chosen, timeout_s=20)
    for seed in range(20):
        loss_of(model, floats(part(place, counts, seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone, floats(data(sum(counts), seed))).backward()
        other.step()
        other.zero_grad()
    same_everywhere(model)
    start, reference = whole(Net().state_dict()), whole(alone.state_dict())
    found = whole(full_state_dict(model))
    assert (found - reference).norm() <= most * (reference - start).norm()


def whole(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


CASES = [
    *((2, name) for name in plans(2)),
    *sampled([(3, name) for name in plans(3) if name != "divided"], 3),
    *sampled([(4, name) for name in plans(4)], 3),
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_parameters_stay_alike_and_near_one_process(ranks, world, name):
    # Rounding moves what has been learnt by a few thousandths.
    ranks(world)(stays_near_one_process, plans(world)[name], 0.005)


# -- bytes -----------------------------------------------------------------------------------------


def sends(rank: int, chosen: Plan) -> int:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen, timeout_s=20)
    model(torch.randn(4, 64)).square().mean().backward()
    run_of(model).finish_steps()
    return run_of(model).meter.exchanged_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_half_of_the_bytes_travel(ranks, schedule):
    with scheduled(schedule):
        exact = plan(2, [unit("0", 1, "none", 2), unit("1", 1, "none", 2)])
    whole = ranks(2)(sends, exact)[0]
    assert whole == 4 * 2 * (64 * 64 + 64)
    assert ranks(2)(sends, rounded(exact))[0] == whole // 2


def overflows(rank: int, policy: ExchangePolicy) -> None:
    """A gradient that is not finite shows as such on all ranks, and only in its own step."""
    with scheduled("priority"):
        chosen = with_exchange(of_names(2), policy)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, rounded(chosen), timeout_s=20)
    loss = loss_of(model, floats(part(rank, [2, 2])))
    (loss * (torch.inf if rank == 0 else 1.0)).backward()
    assert not torch.isfinite(model.last.weight.grad * 1).all()
    optimizer.zero_grad()
    loss_of(model, floats(part(rank, [2, 2]))).backward()
    assert torch.isfinite(model.last.weight.grad * 1).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_overflows_does_not_stay(ranks, policy):
    ranks(2)(overflows, policy)
