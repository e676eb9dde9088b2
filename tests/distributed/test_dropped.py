"""Layer dropping on real ranks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from lossy import Training, assert_equal_on_all_ranks, lossy_plan, net, share
from meshwright.executor.apply import apply
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.parallel import (
    exchange_state_dict,
    load_exchange_state_dict,
    run_of,
)
from meshwright.planner.schema.errors import InputError
from torch import nn
from torch.nn import functional as F


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


OPTIMIZERS = {"sgd": momentum, "adamw": adamw}


def the_whole_ratio_is_dense(rank: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    for limit in (2**20, 700):
        dense = Training(lossy_plan("dense", 1.0, slices_bytes=limit), make)
        dropped = Training(lossy_plan("dropped", 1.0, slices_bytes=limit), make)
        for a, b in zip(dense.steps(range(10)), dropped.steps(range(10)), strict=True):
            assert torch.equal(a, b)
        assert dense.run.meter.sent_bytes == dropped.run.meter.sent_bytes


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_ratio_one_equals_dense_bit_for_bit(ranks, optimizer):
    ranks(2)(the_whole_ratio_is_dense, optimizer)


def ranks_stay_equal(rank: int, optimizer: str, world: int) -> None:
    dense = Training(lossy_plan("dense", 1.0, world), OPTIMIZERS[optimizer])
    dropped = Training(lossy_plan("dropped", 0.4, world), OPTIMIZERS[optimizer])
    dense.steps(range(20))
    start = dropped.parameters()
    for parameters in dropped.steps(range(20)):
        assert_equal_on_all_ranks(parameters)
    assert not torch.equal(start, parameters)
    share = dropped.run.meter.sent_bytes / dense.run.meter.sent_bytes
    assert 0.35 < share < 0.55, share  # the first backward sends everything


@pytest.mark.parametrize(
    ("optimizer", "world"),
    [("sgd", 2), ("adamw", 2), pytest.param("sgd", 4, marks=pytest.mark.slow)],
)
def test_ranks_agree_and_send_the_ratio(ranks, optimizer, world):
    ranks(world)(ranks_stay_equal, optimizer, world)


def sent_and_held_are_computed(rank: int) -> None:
    """With a rate of 1 and no momentum, what is applied and what is held add up to what the ranks
    have computed. Losses are linear in the parameters, so gradients are known beforehand."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)).double()
    chosen = lossy_plan("dropped", 0.3)
    chosen = msgspec.structs.replace(
        chosen, units=tuple(msgspec.structs.replace(u, modules=(m,), name=m)
                            for u, m in zip(chosen.units, ("0", "1"), strict=False))
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    apply(model, optimizer, chosen, timeout_s=20)
    start = [p.detach().clone() for p in model.parameters()]
    computed = [torch.zeros_like(p) for p in start]
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        rows = [
            [torch.randint(-8, 9, p.shape, generator=generator).double() for p in start]
            for _ in range(2)
        ]
        out = model(torch.zeros(1, 4, dtype=torch.float64))
        linear = sum((p * r).sum() for p, r in zip(model.parameters(), rows[rank], strict=True))
        (out.sum() * 0 + linear).backward()
        optimizer.step()
        optimizer.zero_grad()
        for total, both in zip(computed, zip(*rows, strict=True), strict=True):
            total += sum(both) / 2
        residuals = exchange_state_dict(model)["residuals"]
        names = [name for name, _ in model.named_parameters()]
        for name, p, s, total in zip(names, model.parameters(), start, computed, strict=True):
            mine = residuals.get(name, {}).get("residual", torch.zeros_like(p))
            everyones = mine.clone()
            torch.distributed.all_reduce(everyones)
            # Sums of whole numbers: no rounding, so no tolerance.
            assert torch.equal((s - p.detach()) + everyones / 2, total), (step, name)


def test_nothing_is_lost_while_it_is_held(ranks):
    ranks(2)(sent_and_held_are_computed)


def resumes(rank: int, exchange: str, ratio: float, **options: str) -> None:
    lossy = Lossy(patience=4, stages=2, stage_backwards=3)
    chosen = lossy_plan(exchange, ratio, **options)
    whole = Training(chosen, momentum, lossy=lossy)
    expected = whole.steps(range(14))
    first = Training(chosen, momentum, lossy=lossy)
    first.steps(range(7))
    file = io.BytesIO()
    saved = (
        first.model.state_dict(),
        first.optimizer.state_dict(),
        exchange_state_dict(first.model),
    )
    torch.save(saved, file)
    file.seek(0)
    model, optimizer, exchange_state = torch.load(file, weights_only=True)
    second = Training(chosen, momentum, lossy=lossy)
    second.steps([90])  # leaves something to be replaced
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    load_exchange_state_dict(second.model, exchange_state)
    for a, b in zip(second.steps(range(7, 14)), expected[7:], strict=True):
        assert torch.equal(a, b)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks):
    ranks(2)(resumes, "dropped", 0.3)


def refuses_what_another_rank_saved(rank: int) -> None:
    training = Training(lossy_plan("dropped", 0.3))
    training.steps(range(3))
    state = exchange_state_dict(training.model)
    with pytest.raises(InputError, match=f"saved with rank {1 - rank}, this is rank {rank}"):
        load_exchange_state_dict(training.model, {**state, "rank": 1 - rank})
    with pytest.raises(InputError, match="saved with world_size 3"):
        load_exchange_state_dict(training.model, {**state, "world_size": 3})
    with pytest.raises(InputError, match="holds parts of 'other'"):
        load_exchange_state_dict(training.model, {**state, "residuals": {"other": {}}})
    unsaid = {what: part for what, part in state.items() if what != "residuals"}
    with pytest.raises(InputError, match="says nothing of 'residuals'"):
        load_exchange_state_dict(training.model, unsaid)
    # What comes before the one that does not fit is not loaded either.
    residuals = {
        name: {"residual": torch.ones_like(parts["residual"])}
        for name, parts in state["residuals"].items()
    }
    residuals["3.weight"] = {"residual": torch.zeros(2)}
    with pytest.raises(InputError, match=r"'3.weight' has shape \(2,\), its parameter \(40, 24\)"):
        load_exchange_state_dict(training.model, {**state, "residuals": residuals})
    dropped = state["policies"]["dropped"]
    for other, match in (
        ({**dropped, "waited": {}}, "differs in whether it drops '"),
        ({**dropped, "credit_bytes": []}, "differs in whether it drops other ratios"),
    ):
        policies = {**state["policies"], "dropped": other}
        with pytest.raises(InputError, match=match):
            load_exchange_state_dict(
                training.model, {**state, "residuals": {}, "policies": policies}
            )
    kept = exchange_state_dict(training.model)
    assert kept["policies"] == state["policies"]
    for name, parts in state["residuals"].items():
        assert torch.equal(kept["residuals"][name]["residual"], parts["residual"])


def test_state_of_another_run_is_refused(ranks):
    ranks(2)(refuses_what_another_rank_saved)


def waits_no_longer_than_allowed(rank: int) -> None:
    """One unit's gradients are tiny: only patience sends them."""
    training = Training(lossy_plan("dropped", 0.5), lossy=Lossy(patience=3))
    weight = training.model[5].weight
    weight.register_hook(lambda gradient: gradient * 1e-4)
    changed = []
    for step in range(10):
        before = weight.detach().clone()
        training.steps([step])
        changed.append(not torch.equal(before, weight.detach()))
    assert changed == [step % 4 == 0 for step in range(10)], changed


def test_what_is_never_large_is_sent_after_a_while(ranks):
    ranks(2)(waits_no_longer_than_allowed)


def leaves_alone_what_is_not_sent(rank: int) -> None:
    training = Training(lossy_plan("dropped", 0.2), momentum)
    always = [n for n, p in training.model.named_parameters() if p.ndim == 1]
    dropped = 0
    for step in range(8):
        inputs, target = share(rank, step, torch.float32)
        F.cross_entropy(training.model(inputs), target).backward()
        without = [n for n, p in training.model.named_parameters() if p.grad is None]
        before = {n: p.detach().clone() for n, p in training.model.named_parameters()}
        assert not set(without) & set(always)
        dropped += len(without)
        training.optimizer.step()
        training.optimizer.zero_grad()
        for name in without:  # momentum does not move it either
            assert torch.equal(before[name], training.model.get_parameter(name).detach())
    assert dropped >= 8


def test_norms_and_biases_are_always_sent_and_others_left_alone(ranks):
    ranks(2)(leaves_alone_what_is_not_sent)


class Branches(nn.Module):
    """Each rank may use another of two branches, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        self.branches = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](self.head(x))


def unused_on_some_ranks(
    rank: int, exchange: str, how: dict[str, Any] | None = None, **options: str
) -> None:
    torch.manual_seed(3)
    model = Branches()
    chosen = lossy_plan(exchange, 0.4, **options)
    names = ("head", "branches.0", "branches.1", "branches.2")
    units = [
        msgspec.structs.replace(u, modules=(n,), name=n)
        for u, n in zip(chosen.units, names, strict=True)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **(how or {}))
    chosen = msgspec.structs.replace(chosen, units=tuple(units))
    apply(model, optimizer, chosen, timeout_s=20, lossy=Lossy(patience=2, stages=0))
    never = model.branches[2].weight.detach().clone()
    for step in range(12):
        # Ranks use different branches, and both the first from the eighth step on.
        which = 0 if step >= 8 else (rank + step) % 2
        model(torch.randn(2, 4) + rank, which).square().sum().backward()
        assert model.branches[2].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        values = torch.cat([p.detach().flatten() for p in model.state_dict().values()])
        assert_equal_on_all_ranks(values)
    assert torch.equal(model.branches[2].weight.detach(), never)


def test_parameters_unused_on_some_ranks_or_on_all(ranks):
    ranks(2)(unused_on_some_ranks, "dropped")


def accumulates(rank: int) -> None:
    """Two backwards before a step, and gradients kept from no_sync, with everything sent."""
    for exchange in ("dense", "dropped"):
        training = Training(lossy_plan(exchange, 1.0))
        for step in range(6):
            for part in range(2):
                inputs, target = share(rank, 2 * step + part, torch.float32)
                F.cross_entropy(training.model(inputs), target).backward()
            with training.model.no_sync():
                inputs, target = share(rank, 50 + step, torch.float32)
                F.cross_entropy(training.model(inputs), target).backward()
            inputs, target = share(rank, 70 + step, torch.float32)
            F.cross_entropy(training.model(inputs), target).backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=step % 2 == 0)
        found = training.parameters()
        assert_equal_on_all_ranks(found)
        if exchange == "dense":
            expected = found
    assert torch.equal(found, expected)


def test_accumulation_is_that_of_dense_exchange(ranks):
    ranks(2)(accumulates)


def refuses_the_barrier(rank: int) -> None:
    chosen = msgspec.structs.replace(lossy_plan("dropped", 0.5), schedule="barrier")
    with pytest.raises(
        InputError, match="unit '0' asks for exchange policy 'dropped', which needs"
    ):
        apply(net(), None, chosen)


def test_lossy_exchange_needs_priority(ranks):
    ranks(2)(refuses_the_barrier)


def keeps_what_is_held_when_parameters_are_frozen(rank: int) -> None:
    training = Training(lossy_plan("dropped", 0.1))
    training.steps(range(3))
    residuals = exchange_state_dict(training.model)["residuals"]
    assert "3.weight" in residuals
    training.model[0].weight.requires_grad_(False)
    inputs, _ = share(rank, 9, torch.float32)
    training.model(inputs)
    after = exchange_state_dict(training.model)["residuals"]
    assert torch.equal(after["3.weight"]["residual"], residuals["3.weight"]["residual"])
    for parameters in training.steps(range(3, 8)):
        assert_equal_on_all_ranks(parameters)


def test_freezing_a_parameter_keeps_what_is_held_of_others(ranks):
    ranks(2)(keeps_what_is_held_when_parameters_are_frozen)


def goes_on_when_it_is_trained_again(rank: int, policy: str, which: Sequence[int]) -> None:
    """As where two parts of a model are trained in turn."""
    training = Training(lossy_plan(policy, 0.1))
    training.steps(range(3))
    model = training.model
    names = [f"{i}.weight" for i in which]
    before = exchange_state_dict(model)["residuals"]
    exchange = run_of(model).priority
    momentum = exchange.topk.momentum if exchange.topk is not None else None
    inputs, _ = share(rank, 9, torch.float32)
    for trained in (False, True):
        for i in which:
            model[i].weight.requires_grad_(trained)
        model(inputs)
    after = exchange_state_dict(model)["residuals"]
    assert any(name in before for name in names)
    for name in set(names) & set(before):
        for kind, held in before[name].items():
            assert torch.equal(after[name][kind], held), (name, kind)
    exchange = run_of(model).priority
    if exchange.topk is not None:
        assert exchange.topk.momentum is momentum
    for parameters in training.steps(range(3, 5)):
        assert_equal_on_all_ranks(parameters)


@pytest.mark.parametrize("policy", ["dropped", "topk", "int8"])
@pytest.mark.parametrize("which", [(3,), (0, 3, 5)])
def test_what_is_held_of_a_frozen_parameter_goes_on_when_it_is_trained_again(ranks, policy, which):
    ranks(2)(goes_on_when_it_is_trained_again, policy, which)
