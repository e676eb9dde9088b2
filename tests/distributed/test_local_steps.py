"""Hosts that train apart, beside one process that trains as each of them in turn."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.micro import micro_batches
from meshwright.executor.parallel import (
    agreed_state_dict,
    exchange_state_dict,
    full_state_dict,
    load_exchange_state_dict,
    run_of,
)
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.local_steps import LocalSteps
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from test_sharded import NAMES, OPTIMIZERS, data, loss_of, net, same_everywhere
from torch import Tensor, nn

State = dict[str, Tensor]

STREAMED = LocalSteps(hosts=2, inner_steps=4, fragments=(0, 3), delay=1, mixing=0.5)
AT_ONCE = LocalSteps(hosts=2, inner_steps=3)
PLACEMENTS = {"in order": (0, 1, 2, 3), "mixed": (2, 0, 3, 1)}


def apart(
    local: LocalSteps,
    ranks: int = 4,
    *,
    schedule: str = "priority",
    hybrid: bool = False,
    **options: Any,
) -> Plan:
    """A plan with local steps; ``hybrid`` divides two units over the two ranks of each host."""
    with scheduled(schedule):
        styles = {"wide": "column", "back": "row"} if hybrid else {}
        units = [
            unit(name, 2 if name in styles else 1, styles.get(name, "none"), ranks)
            for name in NAMES
        ]
        made = plan(ranks, units, statistics="local", message_bytes=300, **options)
    return msgspec.structs.replace(made, local_steps=local)


def slower(optimizer: Any) -> Any:
    """A learning-rate schedule of the user's."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


class Alone:
    """One process that trains as each host in turn, and averages as the two papers have it."""

    def __init__(self, local: LocalSteps, optimizer: str) -> None:
        self.local, first = local, net()
        self.models = [copy.deepcopy(first) for _ in range(local.hosts)]
        self.optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in self.models]
        self.schedules = [slower(o) for o in self.optimizers]
        self.agreed = {n: p.detach().clone() for n, p in first.named_parameters()}
        self.momentum = {n: torch.zeros_like(t) for n, t in self.agreed.items()}
        self.sent: dict[int, State] = {}
        self.steps = 0

    def names(self, fragment: int) -> list[str]:
        bounds = [*self.local.fragments, len(NAMES)]
        units = NAMES[bounds[fragment] : bounds[fragment + 1]]
        found = [n for n in self.agreed if n.partition(".")[0] in units]
        # The scale stands between units, which counts to the first.
        return found + [
            n for n in self.agreed if fragment == 0 and n.partition(".")[0] not in NAMES
        ]

    def step(self, batches: Sequence[Any], parts: int = 1) -> None:
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()
        self.steps += 1
        many, length = len(self.local.fragments), self.local.inner_steps
        for fragment in range(many):
            turn = -(-(fragment + 1) * length // many)
            if self.steps % length == turn % length:
                self.leave(fragment)
        for fragment in range(many):
            turn = -(-(fragment + 1) * length // many)
            due = self.steps - self.local.delay
            if due >= turn and due % length == turn % length:
                self.arrive(fragment)

    @torch.no_grad()
    def leave(self, fragment: int) -> None:
        own = [dict(model.named_parameters()) for model in self.models]
        self.sent[fragment] = {
            n: sum(self.agreed[n] - p[n] for p in own) / len(own) for n in self.names(fragment)
        }

    @torch.no_grad()
    def arrive(self, fragment: int) -> None:
        for name, moved in self.sent.pop(fragment).items():
            self.momentum[name] = self.local.outer_momentum * self.momentum[name] + moved
            self.agreed[name] -= self.local.outer_lr * (
                moved + self.local.outer_momentum * self.momentum[name]
            )
            for model in self.models:
                own = dict(model.named_parameters())[name]
                own.copy_(self.local.mixing * self.agreed[name] + (1 - self.local.mixing) * own)


def alike(found: State, expected: State) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def of_host(host: int, step: int, size: int = 4) -> Any:
    return data(size, 10 * step + host)


def my_part(batch: Any, place: int, ranks: int) -> Any:
    size = len(batch[0]) // ranks
    return tuple(t[size * place : size * (place + 1)] for t in batch)


def trains_as_hosts_in_turn(rank: int, chosen: Plan, optimizer: str, steps: int = 13) -> None:
    local = chosen.local_steps
    model = net()
    mine = OPTIMIZERS[optimizer](model.parameters())
    apply(model, mine, chosen, timeout_s=20)
    schedule = slower(mine)
    alone = Alone(local, optimizer)
    for step in range(steps):
        alone.step([of_host(h, step) for h in range(local.hosts)])
        train(model, mine, chosen, rank, step)
        schedule.step()
    host = run_of(model).world.host
    agreed = agreed_state_dict(model)  # while the last step may wait to be applied
    alike(full_state_dict(model), dict(alone.models[host].named_parameters()))
    alike(agreed, alone.agreed)
    same_on(run_of(model).everyone.group.handle, agreed)
    same_on(run_of(model).control.group.handle, full_state_dict(model))


def train(model: nn.Module, optimizer: Any, chosen: Plan, rank: int, step: int) -> None:
    """One step on this rank's part of its host's batch."""
    each = chosen.world_size // chosen.local_steps.hosts
    host, place = divmod(chosen.placement.index(rank), each)
    batch = my_part(of_host(host, step), place, each)
    pieces = (batch,) if chosen.micro_batches == 1 else micro_batches(model, batch, 2)
    for piece in pieces:
        loss_of(model, piece).backward()
    optimizer.step()
    optimizer.zero_grad()


def same_on(group: Any, state: State) -> None:
    """Whether all ranks of a group have the same bits."""
    if group is None:
        return
    for name, tensor in state.items():
        largest, least = tensor.detach().clone(), tensor.detach().clone()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
        assert torch.equal(largest, least), name


@pytest.mark.parametrize("local", [STREAMED, AT_ONCE], ids=["streamed", "at once"])
@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_training_equals_hosts_in_turn(ranks, local, schedule):
    ranks(4)(trains_as_hosts_in_turn, apart(local, schedule=schedule), "sgd")


@pytest.mark.parametrize("order", PLACEMENTS)
def test_units_divided_inside_hosts(ranks, order):
    chosen = apart(STREAMED, hybrid=True, placement=PLACEMENTS[order])
    ranks(4)(trains_as_hosts_in_turn, chosen, "adamw")


def test_hosts_of_one_rank(ranks):
    ranks(2)(trains_as_hosts_in_turn, apart(STREAMED, 2), "adamw")


def test_micro_batches(ranks):
    ranks(2)(trains_as_hosts_in_turn, apart(STREAMED, 2, micro_batches=2), "sgd")


def is_data_parallel(rank: int, chosen: Plan) -> None:
    """Rounds of one step, whose average is taken as it is."""
    model = net()
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    apply(model, optimizers[0], chosen, timeout_s=20)
    for step in range(6):
        train(model, optimizers[0], chosen, rank, step)
        halves = [of_host(host, step) for host in range(2)]
        loss_of(alone, tuple(torch.cat(pair) for pair in zip(*halves, strict=True))).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    alike(full_state_dict(model), dict(alone.named_parameters()))
    same_everywhere(model)


def test_averaging_each_step_is_data_parallelism(ranks):
    local = LocalSteps(hosts=2, inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
    ranks(4)(is_data_parallel, apart(local))


def resumes(rank: int, chosen: Plan) -> None:
    """Saved in the midst of a round, with a message on its way, training goes on to the same
    bits."""
    models = [net(), net()]
    made = [OPTIMIZERS["adamw"](m.parameters()) for m in models]
    for model, optimizer in zip(models, made, strict=True):
        apply(model, optimizer, chosen, timeout_s=20)
    for step in range(6):
        train(models[0], made[0], chosen, rank, step)
    assert run_of(models[0]).apart.state()["in_flight"], "the test means to save a message"
    states = (
        copy.deepcopy(models[0].state_dict()),
        copy.deepcopy(made[0].state_dict()),
        exchange_state_dict(models[0]),
    )
    models[1].load_state_dict(states[0])
    made[1].load_state_dict(states[1])
    load_exchange_state_dict(models[1], states[2])
    for step in range(6, 12):
        for model, optimizer in zip(models, made, strict=True):
            train(model, optimizer, chosen, rank, step)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach()), name
    with pytest.raises(InputError, match="says nothing of local steps, unlike this plan"):
        load_exchange_state_dict(models[1], {**states[2], "local_steps": None})
    other = {**states[2]["local_steps"], "round": [6, 2, 0, 3]}
    with pytest.raises(InputError, match="a round of other steps, with averages on their way"):
        load_exchange_state_dict(models[1], {**states[2], "local_steps": other})
    what = r"save model\.state_dict\(\), optimizer\.state_dict\(\) and mw\.exchange_state_dict"
    with pytest.raises(InputError, match=what):
        mw.checkpoint("kept", models[0], made[0])


def test_training_resumes(ranks):
    # The first fragment leaves after step 2 of 4 and would arrive two steps later: 6 has left it.
    local = msgspec.structs.replace(STREAMED, delay=2)
    ranks(4)(resumes, apart(local))


def loads_weights_under_the_plan(rank: int, chosen: Plan) -> None:
    """Weights that are loaded after the plan was applied, beside a model that had them before."""
    models = [net(), net()]
    with torch.no_grad():
        for param in models[0].parameters():
            param.add_(1.0)
    weights = copy.deepcopy(models[0].state_dict())
    made = [OPTIMIZERS["sgd"](m.parameters()) for m in models]
    for model, optimizer in zip(models, made, strict=True):
        apply(model, optimizer, chosen, timeout_s=20)
    models[1].load_state_dict(weights)
    alike(agreed_state_dict(models[1]), weights)
    for step in range(chosen.local_steps.inner_steps):
        for model, optimizer in zip(models, made, strict=True):
            train(model, optimizer, chosen, rank, step)
    for first, second in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(first, second)


def test_weights_that_are_loaded_under_the_plan_are_what_hosts_agree_on(ranks):
    ranks(2)(loads_weights_under_the_plan, apart(AT_ONCE, 2))


def averages_statistics(rank: int, chosen: Plan) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, optimizer, chosen, timeout_s=20)
    torch.manual_seed(rank)
    for _ in range(2):
        before = model[1].running_mean.clone()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    return [before, model[1].running_mean.clone()]


def test_running_statistics_are_averaged_at_the_end_of_a_round(ranks):
    local = LocalSteps(hosts=2, inner_steps=2)
    with scheduled("barrier"):
        units = [unit(name, 1, "none", 2) for name in ("0", "1")]
        chosen = plan(2, units, statistics="local")
    found = ranks(2)(averages_statistics, msgspec.structs.replace(chosen, local_steps=local))
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[1][0])


def agrees_on_statistics(rank: int, chosen: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """In the midst of a round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, optimizer, chosen, timeout_s=20)
    torch.manual_seed(rank)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    own = model[1].running_mean.clone()
    agreed = agreed_state_dict(model)["1.running_mean"]
    return own, agreed, model[1].running_mean.clone()


def test_running_statistics_are_agreed_on_between_rounds(ranks):
    with scheduled("barrier"):
        units = [unit(name, 1, "none", 2) for name in ("0", "1")]
        chosen = plan(2, units, statistics="local")
    local = LocalSteps(hosts=2, inner_steps=5)
    first, second = ranks(2)(
        agrees_on_statistics, msgspec.structs.replace(chosen, local_steps=local)
    )
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[1], (first[0] + second[0]) / 2)
    for own, _, after in (first, second):
        assert torch.equal(own, after)


def freezes_a_layer(rank: int, chosen: Plan) -> list[Tensor]:
    """Its weight at the end of each round after that."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, chosen, timeout_s=20)
    frozen, rounds = model.back.weight, []
    for step in range(5 * chosen.local_steps.inner_steps):
        if step == 2 * chosen.local_steps.inner_steps + 1:
            frozen.requires_grad_(requires_grad=False)
        train(model, optimizer, chosen, rank, step)
        if not frozen.requires_grad and run_of(model).apart.step_number % 3 == 0:
            rounds.append(frozen.detach().clone())
    return rounds


def test_a_parameter_that_is_frozen_later_stays(ranks):
    first, second = ranks(2)(freezes_a_layer, apart(AT_ONCE, 2))
    assert len(first) == 3
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, first[0])


def joins(rank: int, chosen: Plan) -> tuple[int, int]:
    """A loop of the user's own, whose hosts have different numbers of batches."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model, optimizer, _ = mw.auto_parallelize(model, optimizer, plan=chosen, timeout_s=20)
    steps = 0
    for batch in mw.join(model, [of_host(rank, step) for step in range(3 + 2 * rank)]):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    run = run_of(model)
    agreed = mw.agreed_state_dict(model)
    assert all(tensor.isfinite().all() for tensor in agreed.values())
    same_on(run.everyone.group.handle, agreed)
    return steps, run.apart.step_number


def test_a_loop_whose_hosts_end_at_different_times(ranks):
    assert ranks(2)(joins, apart(AT_ONCE, 2)) == [(5, 5), (5, 5)]


def leaves_out_a_step(rank: int, chosen: Plan) -> str:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, chosen, timeout_s=2)
    try:
        for step in range(3 - (rank == 1)):
            train(model, optimizer, chosen, rank, step)
        time.sleep(3.0 * (rank == 1))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_host_that_makes_fewer_steps_is_named(ranks):
    outcomes = ranks(2).outcomes(leaves_out_a_step, apart(AT_ONCE, 2), limit_s=60.0)
    said = str(outcomes[0].value or outcomes[0].error)
    assert "the average over hosts of fragment 0" in said
    assert "rank 1" in said


def is_refused(rank: int, chosen: Plan, *, given: bool = True) -> str:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters()) if given else None
    with pytest.raises(InputError) as raised:
        apply(model, optimizer, chosen)
    return str(raised.value)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"exchange": "sharded"}, "asks for exchange 'sharded'"),
        ({"exchange": "fully_sharded"}, "asks for exchange 'fully_sharded'"),
        ({"peers_per_host": 2}, "asks for an exchange by host"),
        ({"layout": Layout(groups=1, degree=4), "style": "row"}, "is divided across 2 hosts"),
        ({"layout": Layout(groups=2)}, "leaves ranks idle"),
    ],
)
def test_what_does_not_go_together_is_refused(ranks, policy, says):
    chosen = apart(AT_ONCE)
    units = (msgspec.structs.replace(chosen.units[1], **policy), *chosen.units[2:])
    said = ranks(4)(is_refused, msgspec.structs.replace(chosen, units=units))
    assert all(says in one for one in said)
    assert all("plan without --allow-local-steps" in one for one in said)


def test_the_optimizer_must_be_given(ranks):
    assert all(
        "no optimizer was given" in one
        for one in ranks(2)(is_refused, apart(AT_ONCE, 2), given=False)
    )
