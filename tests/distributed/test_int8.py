"""Exchange in eight bits: ranks apply what they have sent, and the rest is kept for later."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.gradients.flat_shard import flat
from meshwright.executor.gradients.int8 import dequantize, quantize
from meshwright.executor.parallel import (
    exchange_state_dict,
    full_state_dict,
    load_exchange_state_dict,
    run_of,
)
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan
from plans import plan, unit
from reference import twin
from test_sharded import OPTIMIZERS, Net, loss_of, part
from test_wire import floats, in_form_of, of_both, of_names, stays_near_one_process
from torch import Tensor, nn

from tests.sampling import sampled


def in_eight_bits(world: int, *, hybrid: bool = False, message_bytes: int = 2**20) -> Plan:
    chosen = of_names(world, hybrid=hybrid, message_bytes=message_bytes)
    return with_exchange(chosen, "int8")


def sends_rounded_sums(rank: int) -> None:
    """Bit for bit what one process makes of both ranks' gradients, over several backwards."""
    model = Net()
    alone = twin(model)
    apply(model, OPTIMIZERS["sgd"](model.parameters()), in_eight_bits(2), timeout_s=20)
    left = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
    for seed in range(4):
        for each in (model, alone):
            each.zero_grad()
            loss_of(each, floats(part(rank, [2, 2], seed))).backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            sent = q.grad
            if q.ndim > 1:
                sent, left[name] = rounded(q.grad + left[name])
            assert torch.equal(p.grad * 1, mean_of(sent)), (name, seed)


def rounded(computed: Tensor) -> tuple[Tensor, Tensor]:
    """What is sent, and what is left."""
    sent = dequantize(quantize(flat(computed).clone()), computed.dtype)
    sent = in_form_of(computed, sent)
    return sent, computed - sent


def mean_of(own: Tensor) -> Tensor:
    first, second = of_both(own)
    return in_form_of(own, (first + second) / 2)


def test_gradients_are_means_of_what_was_rounded(ranks):
    ranks(2)(sends_rounded_sums)


CASES = [
    (2, False, 300),
    (2, False, 2**20),
    (2, True, 300),
    *sampled([(3, False, 300), (4, True, 300), (4, False, 2**20)], 2),
]


@pytest.mark.parametrize(("world", "hybrid", "message_bytes"), CASES)
def test_parameters_stay_alike_and_near_one_process(ranks, world, hybrid, message_bytes):
    chosen = in_eight_bits(world, hybrid=hybrid, message_bytes=message_bytes)
    ranks(world)(stays_near_one_process, chosen, 0.01)


def goes_on_from_a_checkpoint(rank: int, chosen: Plan) -> None:
    def started() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        apply(model, optimizer, chosen, timeout_s=20)
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            loss_of(model, floats(part(rank, [2, 2], seed))).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = started()
    train(model, optimizer, range(6))
    once = full_state_dict(model)
    model, optimizer = started()
    train(model, optimizer, range(3))
    # The exchange first: what the last step has still to do must not come later.
    exchange = exchange_state_dict(model)
    assert any(entry for entry in exchange.values())
    saved = full_state_dict(model), optimizer.state_dict()
    model, optimizer = started()
    train(model, optimizer, range(90, 91))  # leaves a step that nobody has waited for
    load_exchange_state_dict(model, exchange)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 6))
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, once[name]), name


def test_what_is_left_is_saved_with_the_training(ranks):
    ranks(2)(goes_on_from_a_checkpoint, in_eight_bits(2))


def overflows(rank: int, chosen: Plan) -> None:
    model = Net()
    apply(model, OPTIMIZERS["sgd"](model.parameters()), chosen, timeout_s=20)
    for factor in (1.0, torch.inf if rank == 0 else 1.0, 1.0, 1.0):
        model.zero_grad()
        (loss_of(model, floats(part(rank, [2, 2]))) * factor).backward()
        finite = bool(torch.isfinite(model.first.weight.grad * 1).all())
        bad = torch.tensor(factor == torch.inf, dtype=torch.int32)
        dist.all_reduce(bad)
        assert finite == (bad.item() == 0)


def test_what_overflows_does_not_stay(ranks):
    ranks(2)(overflows, in_eight_bits(2))


def sends(rank: int, exchange: str) -> int:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    chosen = plan(2, [unit("0", 1, "none", 2), unit("1", 1, "none", 2)])
    apply(
        model, torch.optim.SGD(model.parameters(), lr=0.1), with_exchange(chosen, exchange),
        timeout_s=20,
    )  # fmt: skip
    model(torch.randn(4, 64)).square().mean().backward()
    run_of(model).finish_steps()
    return run_of(model).meter.exchanged_bytes


def test_a_quarter_of_the_bytes_travels_between_two_ranks(ranks):
    exact, short = (ranks(2)(sends, exchange)[0] for exchange in ("dense", "int8"))
    assert exact == 4 * 2 * 64 * 64
    assert short == exact // 4 * (1 + 4 / 256)


def leaves_in_one_line(rank: int, exchange: str, message_bytes: int) -> None:
    """No sum of the library's, which would come behind the messages: biases and scales, cut into
    slices too, are exact means all the same."""
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    alone = twin(model)
    units = [unit(name, 1, "none", 2) for name in "012"]
    chosen = with_exchange(plan(2, units, message_bytes=message_bytes), exchange, 0.5)
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen, timeout_s=20)
    world = run_of(model).world
    gradients, sums = world.gradients[1], []
    own = dist.all_reduce

    def seen(*args: object, group: object = None, **options: object) -> object:
        if group in (gradients.handle, gradients.opposite):
            sums.append(args)
        return own(*args, group=group, **options)

    dist.all_reduce = seen
    try:
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * seed + rank))
            for each in (model, alone):
                each.zero_grad()
                each(x).square().mean().backward()
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                if q.ndim == 1:
                    assert torch.equal(p.grad * 1, mean_of(q.grad)), (name, seed)
    finally:
        dist.all_reduce = own
    assert not sums


@pytest.mark.parametrize("message_bytes", [100, 2**20])
@pytest.mark.parametrize("exchange", ["int8", "topk"])
def test_what_is_sent_whole_leaves_in_line_with_the_messages(ranks, exchange, message_bytes):
    ranks(2)(leaves_in_one_line, exchange, message_bytes)


def test_units_that_leave_ranks_idle_are_refused_by_name():
    chosen = in_eight_bits(2)
    units = list(chosen.units)
    units[1] = msgspec.structs.replace(units[1], layout=Layout(groups=1))
    idle = msgspec.structs.replace(chosen, units=tuple(units))
    assert "exchange 'int8'" in CAPABILITY.refusals(idle)[0]
