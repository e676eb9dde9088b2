"""Exchange of low rank: ranks apply means of thin matrices, and the rest is kept for later."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.gradients.flat_shard import flat
from meshwright.executor.gradients.low_rank import LowRankSlice
from meshwright.executor.parallel import (
    exchange_state_dict,
    full_state_dict,
    load_exchange_state_dict,
    run_of,
)
from meshwright.planner.cost.exchange import matrix_sides
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import Plan
from plans import plan, unit
from reference import twin
from test_int8 import goes_on_from_a_checkpoint, overflows, sends
from test_sharded import OPTIMIZERS, Net, loss_of, part
from test_wire import floats, of_both, of_names, stays_near_one_process
from torch import Tensor, nn

from tests.sampling import sampled


def of_low_rank(world: int, *, hybrid: bool = False, message_bytes: int = 2**20) -> Plan:
    return thin(of_names(world, hybrid=hybrid, message_bytes=message_bytes))


def thin(chosen: Plan, ratio: float = 0.2) -> Plan:
    return with_exchange(chosen, "low_rank", ratio)


def sends_thin_matrices(rank: int) -> None:
    """What one process makes of both ranks' gradients, over several backwards."""
    model = Net()
    alone = twin(model)
    apply(model, OPTIMIZERS["sgd"](model.parameters()), of_low_rank(2), timeout_s=20)
    groups = run_of(model).priority.grad_groups
    slices = [one for g in groups for one in g.slices if isinstance(one, LowRankSlice)]
    begun = [(p.name, directions) for one in slices for p, directions in one.directions.items()]
    basis = {name: (one.left, one.right) for name, one in begun}
    left = {name: [torch.zeros(p.numel())] * 2 for name, p in alone.named_parameters()}
    for seed in range(5):
        for each in (model, alone):
            each.zero_grad()
            loss_of(each, floats(part(rank, [2, 2], seed))).backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            both, found = of_both(q.grad), flat(p.grad * 1)  # as they lie in memory
            if name not in basis:
                assert torch.equal(found, (both[0] + both[1]) / 2), name
                continue
            totals = [
                (g + e).view(matrix_sides(q.shape)) for g, e in zip(both, left[name], strict=True)
            ]
            sent = [projected(total, *basis[name], seed) for total in totals]
            mean = (sent[0] + sent[1]) / 2
            torch.testing.assert_close(found, mean.view(-1), rtol=1e-4, atol=1e-6)
            left[name] = [(t - s).view(-1) for t, s in zip(totals, sent, strict=True)]
            basis[name] = turned((totals[0] + totals[1]) / 2, *basis[name], seed)


def projected(total: Tensor, rows: Tensor, columns: Tensor, step: int) -> Tensor:
    """What of a matrix lies in the directions, in turns those for its columns and its rows."""
    return total @ columns @ columns.T if step % 2 == 0 else rows @ rows.T @ total


def turned(mean: Tensor, rows: Tensor, columns: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The directions after a step."""
    if step % 2 == 0:
        return torch.linalg.qr(mean @ columns).Q, columns
    return rows, torch.linalg.qr(mean.T @ rows).Q


def test_gradients_are_means_of_thin_matrices(ranks):
    ranks(2)(sends_thin_matrices)


def sends_all_in_the_end(rank: int) -> None:
    """What was sent in the mean, and what ranks hold in the mean, is the mean of what they have
    computed."""
    model = Net()
    alone = twin(model)
    apply(model, OPTIMIZERS["sgd"](model.parameters()), of_low_rank(2), timeout_s=20)
    sent, computed = ({n: torch.zeros_like(p) for n, p in alone.named_parameters()} for _ in "ab")
    for seed in range(6):
        for each, sums in ((model, sent), (alone, computed)):
            each.zero_grad()
            loss_of(each, floats(part(rank, [2, 2], seed))).backward()
            for name, p in each.named_parameters():
                sums[name] += p.grad * 1
    held = exchange_state_dict(model)["residuals"]
    assert any(r.any() for parts in held.values() for r in parts.values())
    for name, parts in held.items():
        (residual,) = parts.values()
        all_of_it = [computed[name], residual.clone()]
        for each in all_of_it:
            dist.all_reduce(each)
        expected, waiting = (each / 2 for each in all_of_it)
        torch.testing.assert_close(sent[name] + waiting, expected, rtol=1e-4, atol=1e-5)


def test_what_is_sent_and_what_is_held_is_what_was_computed(ranks):
    ranks(2)(sends_all_in_the_end)


CASES = [
    (2, False, 300),
    (2, True, 300),
    *sampled([(3, False, 300), (4, True, 300), (4, False, 2**20)], 2),
]


@pytest.mark.parametrize(("world", "hybrid", "message_bytes"), CASES)
def test_parameters_stay_alike(ranks, world, hybrid, message_bytes):
    chosen = of_low_rank(world, hybrid=hybrid, message_bytes=message_bytes)
    ranks(world)(stays_near_one_process, chosen, 0.9)


def test_gradients_are_released_early(ranks):
    chosen = of_low_rank(2)
    units = tuple(msgspec.structs.replace(one, early_release=True) for one in chosen.units)
    ranks(2)(stays_near_one_process, msgspec.structs.replace(chosen, units=units), 0.9)


def test_directions_and_what_is_left_are_saved_with_the_training(ranks):
    ranks(2)(goes_on_from_a_checkpoint, of_low_rank(2))


def saves_without_reading_first(rank: int) -> list[bool]:
    """One rank reads its parameters, and so waits for what is still coming; the other does not."""
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, of_low_rank(2), timeout_s=20)
    loss_of(model, floats(part(rank, [2, 2], 0))).backward()
    optimizer.step()
    if rank == 0:
        model.state_dict()
    state = exchange_state_dict(model)
    return [one["by_rows"] for one in state["policies"]["low_rank"]["directions"].values()]


def test_all_ranks_save_the_directions_after_the_step(ranks):
    first, second = ranks(2)(saves_without_reading_first)
    assert first == second
    assert first
    assert not any(first)


def sends_all_in_another_format(rank: int) -> None:
    """``sends_all_in_the_end`` of a convolution whose memory format is changed on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    chosen = thin(plan(2, [unit(name, 1, "none", 2) for name in "02"]))
    apply(model, OPTIMIZERS["sgd"](model.parameters()), chosen, timeout_s=20)
    sent = torch.zeros_like(model[0].weight)
    alone = twin(model)
    computed = torch.zeros_like(sent)
    for step in range(6):
        if step == 3:
            model.to(memory_format=torch.channels_last)
        both = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        for net, sums, x in ((model, sent, both[rank]), (alone, computed, both.flatten(0, 1))):
            net.zero_grad()
            net(x).square().mean().backward()
            sums += net[0].weight.grad * 1
    waiting = exchange_state_dict(model)["residuals"]["0.weight"]["residual"].contiguous()
    dist.all_reduce(waiting)
    torch.testing.assert_close(sent + waiting / 2, computed, rtol=1e-4, atol=1e-5)


def test_what_is_held_follows_the_memory_format(ranks):
    ranks(2)(sends_all_in_another_format)


def keeps_what_is_held_of_frozen(rank: int) -> None:
    def step(model: nn.Module, seed: int) -> None:
        model.zero_grad()
        loss_of(model, floats(part(rank, [2, 2], seed))).backward()
        run_of(model).finish_steps()

    def started() -> nn.Module:
        model = Net()
        apply(model, OPTIMIZERS["sgd"](model.parameters()), of_low_rank(2), timeout_s=20)
        step(model, 0)
        return model

    model = started()
    held = exchange_state_dict(model)["residuals"]
    name, parameter = next((n, p) for n, p in model.named_parameters() if n in held)
    parameter.requires_grad_(False)
    step(model, 1)
    state = exchange_state_dict(model)
    assert torch.equal(state["residuals"][name]["residual"], held[name]["residual"])
    other = started()
    step(other, 2)
    dict(other.named_parameters())[name].requires_grad_(False)
    step(other, 3)
    load_exchange_state_dict(other, state)
    dict(other.named_parameters())[name].requires_grad_(True)
    step(other, 4)
    parameter.requires_grad_(True)
    step(model, 4)
    for known, part_of in exchange_state_dict(model)["residuals"].items():
        again = exchange_state_dict(other)["residuals"][known]["residual"]
        assert torch.equal(part_of["residual"], again), known


def test_what_is_held_of_frozen_parameters_is_saved_and_loaded(ranks):
    ranks(2)(keeps_what_is_held_of_frozen)


def test_what_overflows_does_not_stay(ranks):
    ranks(2)(overflows, of_low_rank(2))


def trains_half_precision(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 8, bias=False)).bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = thin(plan(2, [unit("0", 1, "none", 2), unit("1", 1, "none", 2)]))
    apply(model, optimizer, chosen, timeout_s=20)
    for _ in range(4):
        model(torch.ones(4, 32, dtype=torch.bfloat16) * (rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = full_state_dict(model)
    for old, new in zip(before, state.values(), strict=True):
        assert not torch.equal(old, new)
    return {name: value.clone() for name, value in state.items()}


def test_gradients_of_16_bits_travel_as_thin_matrices_of_32(ranks):
    first, second = ranks(2)(trains_half_precision)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.isfinite(value).all()


def test_a_thin_matrix_travels(ranks):
    """Of a square matrix at rank 64 of 64 that is the gradient itself; at a ratio of 1/16, rank 4,
    four columns."""
    (exact, *_), (whole, *_) = (ranks(2)(sends, exchange) for exchange in ("dense", "low_rank"))
    assert exact == whole == 4 * 2 * 64 * 64
    (short, *_) = ranks(2)(sends_thinly)
    assert short == exact // 16


def sends_thinly(rank: int) -> int:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    chosen = thin(plan(2, [unit("0", 1, "none", 2), unit("1", 1, "none", 2)]), 1 / 16)
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen, timeout_s=20)
    model(torch.randn(4, 64)).square().mean().backward()
    run_of(model).finish_steps()
    return run_of(model).meter.exchanged_bytes
