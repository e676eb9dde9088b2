"""Sharded exchange: each rank updates its chunk of every parameter, and nobody notices."""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.gradients.flat_shard import ShardedGradient
from meshwright.executor.gradients.sharded import ShardedGradGroup
from meshwright.executor.parallel import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    run_of,
)
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import ExchangePolicy, Plan
from plans import plan, unit
from reference import twin
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sampling import sampled

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-3),
}


class Net(nn.Module):
    """Sizes that no number of ranks divides, a matrix in another memory format, a tied weight, and
    a parameter with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 5, 3)
        self.first = nn.Linear(20, 7)
        self.wide = nn.Linear(7, 24)
        self.back = nn.Linear(24, 7)
        self.tied = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.scale = nn.Linear(1, 1)
        self.last = nn.Linear(7, 3)
        self.short = self.tied_too = False
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        x = torch.tanh(self.first(x))
        if self.short:
            return self.last(self.tied(x) if self.tied_too else x)
        x = self.back(torch.tanh(self.wide(x)))
        x = torch.tanh(self.again(torch.tanh(self.tied(x))))
        return self.last(self.scale(x.unsqueeze(-1)).squeeze(-1))


_policies: list[ExchangePolicy] = ["sharded"]


@contextmanager
def sharing(policy: ExchangePolicy) -> Iterator[None]:
    """Plans made inside shard by that policy."""
    _policies.append(policy)
    try:
        yield
    finally:
        _policies.pop()


NAMES = ("conv", "first", "wide", "back", "tied", "again", "scale", "last")


def net() -> Net:
    return Net().double()


def shards(world: int, *, hybrid: bool = False, message_bytes: int = 300, **options: Any) -> Plan:
    """Every unit's exchange is sharded; ``hybrid`` divides two of them over two ranks as well."""
    units = []
    for name in NAMES:
        style = {"wide": "column", "back": "row"}.get(name, "none") if hybrid else "none"
        units.append(unit(name, 1 if style == "none" else 2, style, world))
    return with_exchange(plan(world, units, message_bytes=message_bytes, **options), _policies[-1])


def layouts(world: int) -> list[Plan]:
    """Plain data parallelism with small slices and with large ones, and divided units whose peers
    shard (with two ranks these have none)."""
    return [
        shards(world),
        shards(world, message_bytes=2**20),
        shards(world, hybrid=True, placement=list(reversed(range(world)))),
    ]


def data(size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, 4, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (size,), generator=generator)


def part(place: int, counts: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs, target = data(sum(counts), seed)
    start = sum(counts[:place])
    return inputs[start : start + counts[place]], target[start : start + counts[place]]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def close_states(found: dict[str, Any], other: torch.optim.Optimizer) -> None:
    expected = other.state_dict()["state"]
    assert found["state"].keys() == expected.keys()
    for index, state in expected.items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found["state"][index][key], value, rtol=1e-9, atol=1e-10)


def same_everywhere(model: nn.Module) -> None:
    """Parameters are bit-identical on all ranks."""
    for name, tensor in full_state_dict(model).items():
        mine = tensor.detach().clone(memory_format=torch.contiguous_format)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        assert all(torch.equal(mine, other) for other in others), name


def counts_of(world: int) -> list[int]:
    return [3, 1] if world == 2 else [2, 1, 0, 3]


class Pair:
    """A model under a plan, and its twin in one process."""

    def __init__(self, rank: int, chosen: Plan, optimizer: str = "sgd") -> None:
        self.world = chosen.world_size
        self.place = chosen.placement.index(rank)
        self.model = net()
        self.alone = twin(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.other = OPTIMIZERS[optimizer](self.alone.parameters())
        apply(self.model, self.optimizer, chosen, timeout_s=20)

    def backward(self, seed: int = 1) -> None:
        counts = counts_of(self.world)
        loss_of(self.model, part(self.place, counts, seed)).backward()
        loss_of(self.alone, data(sum(counts), seed)).backward()

    def step(self, *, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.other.step()
        self.other.zero_grad(set_to_none=set_to_none)

    def check(self) -> None:
        close(full_state_dict(self.model), dict(self.alone.state_dict()))
        same_everywhere(self.model)


def equals_one_process(rank: int, world: int, optimizer: str, steps: int) -> None:
    for chosen in layouts(world):
        pair = Pair(rank, chosen, optimizer)
        for seed in range(steps):
            pair.backward(seed)
            pair.step()
        pair.check()
        found = full_optimizer_state_dict(pair.model, pair.optimizer)
        expected = pair.other.state_dict()
        assert found["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert found["state"][index].keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(found["state"][index][key], value, rtol=1e-9, atol=1e-10)


ALIKE = {"adamax", "asgd", "nadam", "radam", "rprop"}
"""Optimizers that step as others do."""
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("optimizer", "world"),
    [
        *(
            pytest.param(name, 2, marks=[pytest.mark.slow] if name in ALIKE else [])
            for name in OPTIMIZERS
        ),
        *sampled([(name, 4) for name in OPTIMIZERS], 2),
    ],
)
def test_equals_one_process(ranks, world, optimizer):
    steps = 20 if optimizer in ("sgd", "adamw") else 3
    ranks(world)(equals_one_process, world, optimizer, steps)


def divides_state(rank: int, world: int, optimizer: str) -> None:
    """This rank's state is its share of the whole: at most ``world - 1`` elements of padding for
    each parameter, and scalars."""
    pair = Pair(rank, shards(world), optimizer)
    pair.backward()
    pair.step()
    pair.optimizer.state_dict()  # waits until the step has been applied
    copies = {"sgd": 1, "adamw": 2}[optimizer]
    mine = [v for state in pair.optimizer.state.values() for v in state.values() if v.ndim]
    elements = [p.numel() for p in pair.model.parameters()]
    bytes_ = sum(v.numel() * v.element_size() for v in mine)
    assert bytes_ <= 8 * copies * sum(-(-n // world) for n in elements)
    total = torch.tensor(sum(v.numel() for v in mine))
    dist.all_reduce(total)
    assert total.item() == copies * sum(elements)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("world", WORLDS)
def test_optimizer_state_is_divided(ranks, world, optimizer):
    ranks(world)(divides_state, world, optimizer)


def clips_by_norm(rank: int, world: int) -> None:
    for chosen in layouts(world):
        for foreach in (None, True, False):
            for order in (2.0, math.inf, 1.0):
                pair = Pair(rank, chosen)
                for seed in range(2):
                    pair.backward(seed)
                    ours, theirs = (
                        nn.utils.clip_grad_norm_(m.parameters(), 0.01, order, foreach=foreach)
                        for m in (pair.model, pair.alone)
                    )
                    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
                    shown = [p.grad for p in pair.model.parameters()]
                    shared = [g for g in shown if isinstance(g, ShardedGradient)]
                    assert len(shared) in (len(shown), len(shown) - 3)  # two ranks divide three
                    assert all(g._gradient is None for g in shared)  # nothing was put together
                    pair.step()
                pair.check()


def clips_by_value(rank: int, world: int) -> None:
    for chosen in layouts(world):
        pair = Pair(rank, chosen)
        for seed in range(2):
            pair.backward(seed)
            for model in (pair.model, pair.alone):
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            pair.step()
        pair.check()


def shows_gradients(rank: int, world: int) -> None:
    """Between backward and step a gradient is the whole average; changes to it count."""
    for chosen in (shards(world), shards(world, message_bytes=2**20)):
        pair = Pair(rank, chosen)
        pair.backward()
        for p, q in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
            assert p.grad.shape == p.shape
            for ask in (Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm):
                torch.testing.assert_close(ask(p.grad), ask(q.grad), rtol=1e-12, atol=0)
            assert p.grad._gradient is None
            torch.testing.assert_close(p.grad.norm(dim=0), q.grad.norm(dim=0))
            assert p.grad._gradient is not None
            torch.testing.assert_close(p.grad * 1, q.grad, rtol=1e-9, atol=1e-12)
        pair.model.first.weight.grad[0] = 3.0
        pair.alone.first.weight.grad[0] = 3.0
        for model in (pair.model, pair.alone):
            model.wide.weight.grad = model.wide.weight.grad.t().clone().t() * 2
            model.last.weight.grad *= 0.5
            model.back.bias.grad.zero_()
            model.tied.weight.grad.clamp_(max=0.01)
        pair.step()
        pair.check()
        pair.backward()
        pair.optimizer.step()
        torch.testing.assert_close(pair.model.wide.bias.grad * 1, pair.alone.wide.bias.grad)


def accumulates(rank: int, world: int) -> None:
    """``no_sync``, two backwards before one step, and a step without ``zero_grad`` after it."""
    for chosen in layouts(world):
        pair = Pair(rank, chosen)
        with pair.model.no_sync():
            pair.backward(0)
        pair.backward(1)
        pair.backward(2)
        with pair.model.no_sync():
            pair.backward(3)
        pair.backward(4)
        pair.optimizer.step()
        pair.other.step()
        pair.backward(5)
        pair.step()
        pair.check()


def zeroes(rank: int, world: int) -> None:
    for chosen in layouts(world):
        for set_to_none in (True, False):
            pair = Pair(rank, chosen, "adamw")
            for seed in range(3):
                if seed == 1:  # a backward whose gradients nobody wants
                    loss_of(pair.model, part(pair.place, counts_of(world))).backward()
                    pair.optimizer.zero_grad(set_to_none=set_to_none)
                pair.backward(seed)
                pair.step(set_to_none=set_to_none)
                grads = [p.grad for p in pair.model.parameters()]
                assert all((g is None) if set_to_none else not g.any() for g in grads)
            pair.check()


def follows_schedulers(rank: int, world: int) -> None:
    pair = Pair(rank, shards(world))
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8)
        for o in (pair.optimizer, pair.other)
    ]
    for seed in range(5):
        pair.backward(seed)
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in (pair.optimizer, pair.other):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * seed
    pair.check()


def steps_with_a_closure(rank: int, world: int) -> None:
    pair = Pair(rank, shards(world))
    counts = counts_of(world)
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            pair.optimizer.zero_grad()
            loss = loss_of(pair.model, part(pair.place, counts, seed))
            loss.backward()
            return loss

        assert pair.optimizer.step(closure).requires_grad
        pair.other.zero_grad()
        loss_of(pair.alone, data(sum(counts), seed)).backward()
        pair.other.step()
    pair.check()


def parameters_unused(rank: int, world: int) -> None:
    """Units that a rank does not use, or none does; freezing and thawing."""
    pair = Pair(rank, shards(world), "adamw")
    place, counts = pair.place, counts_of(world)
    for seed in range(4):
        pair.alone.short = pair.model.short = True
        inputs, target = data(sum(counts), seed)
        bounds = [sum(counts[:r]) for r in range(world + 1)]
        pair.model.tied_too = place == 0
        loss_of(pair.model, part(place, counts, seed)).backward()
        losses = []
        for r, count in enumerate(counts):
            if count:
                pair.alone.tied_too = r == 0
                rows = slice(bounds[r], bounds[r + 1])
                losses.append(loss_of(pair.alone, (inputs[rows], target[rows])) * count)
        (sum(losses) / sum(counts)).backward()
        assert pair.model.wide.weight.grad is None
        pair.step()
        pair.check()
    pair.alone.short = pair.model.short = False
    for seed in range(4):
        for model in (pair.model, pair.alone):
            model.wide.requires_grad_(seed % 2 == 0)
        pair.backward(seed)
        pair.step()
        pair.check()


def frozen_with_gradients(rank: int, world: int) -> None:
    """What is frozen and keeps its gradient is updated on, with its state, as in one process."""
    pair = Pair(rank, shards(world), "adamw")

    def train(*, wide: bool) -> None:
        for model in (pair.model, pair.alone):
            model.wide.requires_grad_(wide)

    for seed in range(5):
        train(wide=seed not in (2, 3))
        pair.backward(seed)
        if seed == 1:  # between two backwards of one step
            train(wide=False)
            pair.backward(seed + 10)
        pair.step(set_to_none=seed == 3)
        pair.check()


def evaluates_and_averages(rank: int, world: int) -> None:
    """Whatever reads parameters after a step sees the new ones, on one rank alone too."""
    pair = Pair(rank, shards(world))
    moving = [torch.zeros_like(p) for p in pair.model.parameters()]
    theirs = [torch.zeros_like(p) for p in pair.alone.parameters()]
    for seed in range(3):
        pair.backward(seed)
        pair.step()
        for average, p in zip(moving, pair.model.parameters(), strict=True):
            average.lerp_(p.detach(), 0.3)
        for average, p in zip(theirs, pair.alone.parameters(), strict=True):
            average.lerp_(p.detach(), 0.3)
        if rank == 0:
            pair.model.eval()
            with torch.inference_mode():
                torch.testing.assert_close(
                    pair.model(data(4, 9)[0]), pair.alone(data(4, 9)[0]), rtol=1e-9, atol=1e-10
                )
            pair.model.train()
            assert list(pair.model.state_dict()) == list(pair.alone.state_dict())
    for ours, other in zip(moving, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-10)


def resumes(rank: int, world: int) -> None:
    """From this rank's own state, from the whole one, and from one process's, before or after the
    plan is applied."""
    for chosen in layouts(world):
        pair = Pair(rank, chosen, "adamw")
        for seed in range(2):
            pair.backward(seed)
            pair.step()
        weights = copy.deepcopy(full_state_dict(pair.model))
        own = copy.deepcopy(pair.optimizer.state_dict())
        whole = copy.deepcopy(full_optimizer_state_dict(pair.model, pair.optimizer))
        alone = copy.deepcopy(pair.other.state_dict())
        pair.backward(2)
        pair.step()
        for way in ("own", "whole", "alone", "before"):
            again = Pair.__new__(Pair)
            again.world, again.place = pair.world, pair.place
            again.model, again.alone, again.other = net(), pair.alone, pair.other
            again.model.load_state_dict(weights)
            again.optimizer = OPTIMIZERS["adamw"](again.model.parameters())
            if way == "before":
                again.optimizer.load_state_dict(copy.deepcopy(alone))
            apply(again.model, again.optimizer, chosen, timeout_s=20)
            if way == "own":
                again.optimizer.load_state_dict(own)
            elif way == "whole":
                load_full_optimizer_state_dict(again.model, again.optimizer, whole)
            elif way == "alone":
                load_full_optimizer_state_dict(again.model, again.optimizer, copy.deepcopy(alone))
            counts = counts_of(world)
            loss_of(again.model, part(again.place, counts, 2)).backward()
            again.optimizer.step()
            again.check()
            close_states(full_optimizer_state_dict(again.model, again.optimizer), pair.other)


def scaler_skips_everywhere(rank: int, world: int) -> None:
    for optimizer in ("sgd", "fused"):
        pair = Pair(rank, shards(world), optimizer)
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        counts = counts_of(world)
        for seed in range(3):
            losses = (
                loss_of(pair.model, part(pair.place, counts, seed)),
                loss_of(pair.alone, data(sum(counts), seed)),
            )
            for scaler, loss in zip(scalers, losses, strict=True):
                scaler.scale(loss).backward()
            if seed == 1:  # in one rank's chunk only
                gradient = pair.model.first.weight.grad
                assert isinstance(gradient, ShardedGradient)
                if rank == world - 1:
                    gradient.as_chunk()[-1] = math.inf
                pair.alone.first.weight.grad[0, 0] = math.inf
            for scaler, step in zip(scalers, (pair.optimizer, pair.other), strict=True):
                scaler.step(step)
                scaler.update()
            pair.optimizer.zero_grad()
            pair.other.zero_grad()
            pair.check()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0


CHECKS = [
    clips_by_norm,
    clips_by_value,
    shows_gradients,
    accumulates,
    zeroes,
    follows_schedulers,
    steps_with_a_closure,
    parameters_unused,
    frozen_with_gradients,
    evaluates_and_averages,
    resumes,
    scaler_skips_everywhere,
]


@pytest.mark.parametrize(
    ("check", "world"),
    [*((check, 2) for check in CHECKS), *sampled([(check, 4) for check in CHECKS], 4)],
)
def test_user(ranks, check, world):
    ranks(world)(check, world)


def read_on_one_rank(rank: int) -> None:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, shards(2), timeout_s=2)
    loss_of(model, part(rank, [2, 2])).backward()
    if rank == 0:
        model.first.weight.grad.sum()
    else:
        time.sleep(3)


@pytest.mark.slow
def test_a_gradient_read_on_one_rank_ends_in_a_sentence(ranks):
    first, _ = ranks(2).outcomes(read_on_one_rank)
    assert first.kind == "RunError"
    assert "putting 'first.weight' together" in first.error
    assert "read gradients on all of them" in first.error


def read_in_another_order(rank: int) -> None:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply(model, optimizer, shards(2), timeout_s=2)
    loss_of(model, part(rank, [2, 2])).backward()
    layer = model.tied if rank else model.first
    layer.bias.grad.sum()  # as many elements on both ranks


def test_gradients_read_in_another_order_are_not_mixed_up(ranks):
    for outcome in ranks(2).outcomes(read_in_another_order):
        assert outcome.kind == "RunError"
        assert "ranks ask for different tensors at once" in outcome.error


SLOW_S = 0.5
# How long a rank waits for averages that a test lets go, which none should.
HELD_S = 20.0


def slow_averages(grad_group: ShardedGradGroup) -> None:
    """Its gradients stay away for a while."""
    late_averages(grad_group, lambda: time.sleep(SLOW_S))


def held_averages(grad_group: ShardedGradGroup) -> threading.Event:
    """Its gradients stay away while this event is not set, as it is at first."""
    let_go = threading.Event()
    let_go.set()

    def hold() -> None:
        assert let_go.wait(HELD_S), "it waits for averages that are held"

    late_averages(grad_group, hold)
    return let_go


def late_averages(grad_group: ShardedGradGroup, hold: Callable[[], None]) -> None:
    soon = grad_group.wait_for_averages

    def wait(watch: Any) -> float:
        hold()
        return soon(watch)

    grad_group.wait_for_averages = wait  # type: ignore[method-assign]


def first_grad_group(model: nn.Module) -> ShardedGradGroup:
    return next(p for p in run_of(model).priority.grad_groups if isinstance(p, ShardedGradGroup))


def steps_without_waiting(rank: int) -> None:
    """A step returns while gradients are on their way; whatever is changed after it counts no
    more, and parameters wait."""
    for optimizer in ("sgd", "adamw"):
        pair = Pair(rank, shards(2), optimizer)
        let_go = held_averages(first_grad_group(pair.model))
        for seed in range(2):
            pair.backward(seed)
            if seed:  # gradients that have been put together, and one of the user's own
                for model in (pair.model, pair.alone):
                    model.first.weight.grad.clamp_(max=0.1)
                    model.wide.weight.grad = model.wide.weight.grad * 2
            let_go.clear()
            pair.step(set_to_none=False)
            for group in pair.optimizer.param_groups:
                group["lr"] *= 1.0
            assert run_of(pair.model).busy
            threading.Timer(0.1, let_go.set).start()
            pair.check()
            assert let_go.is_set()


def changes_gradients_after_a_step(rank: int) -> None:
    pair = Pair(rank, shards(2))
    slow_averages(first_grad_group(pair.model))
    pair.backward()
    pair.optimizer.step()
    pair.other.step()
    for model in (pair.model, pair.alone):
        for p in model.parameters():
            p.grad.mul_(100.0)
    pair.check()
    for p, q in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad * 1, q.grad, rtol=1e-9, atol=1e-10)


def one_reads_after_a_step(rank: int) -> Pair:
    """Rank 0 reads what it needs rank 1 for, whose averages are late."""
    pair = Pair(rank, shards(2))
    if rank == 1:
        slow_averages(first_grad_group(pair.model))
    pair.backward()
    pair.step()
    if rank == 0:
        close(dict(pair.model.state_dict()), dict(pair.alone.state_dict()))
    return pair


def reads_while_the_other_is_elsewhere(rank: int) -> None:
    """One rank saves its parameters while the other waits for it in something else."""
    pair = one_reads_after_a_step(rank)
    dist.barrier()
    pair.check()


def ends_while_the_other_reads(rank: int) -> None:
    """A rank that has left the process group still sends what the last step owes the others."""
    one_reads_after_a_step(rank)
    dist.destroy_process_group()


def keeps_old_graphs_from_new_weights(rank: int) -> None:
    """What autograd has saved of a parameter is known to be old as soon as ``step`` returns."""
    pair = Pair(rank, shards(2))
    slow_averages(first_grad_group(pair.model))
    loss = loss_of(pair.model, part(rank, [3, 1]))
    loss.backward(retain_graph=True)
    pair.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "check",
    [
        steps_without_waiting,
        changes_gradients_after_a_step,
        reads_while_the_other_is_elsewhere,
        ends_while_the_other_reads,
        keeps_old_graphs_from_new_weights,
    ],
    ids=lambda check: check.__name__,
)
def test_a_step_does_not_wait(ranks, check):
    ranks(2)(check)


def steps_on_one_rank(rank: int) -> None:
    pair = Pair(rank, shards(2))
    run_of(pair.model).watch.timeout_s = 2
    pair.backward()
    if rank == 0:
        pair.optimizer.step()
        pair.model.state_dict()
    else:
        time.sleep(3)


@pytest.mark.slow
def test_a_step_on_one_rank_ends_in_a_sentence(ranks):
    first, _ = ranks(2).outcomes(steps_on_one_rank)
    assert first.kind == "RunError"
    assert "rank 0 waits in the gathering of the updated" in first.error


def fails_in_its_step(rank: int) -> None:
    pair = Pair(rank, shards(2))
    grad_group = first_grad_group(pair.model)

    def wait(watch: Any) -> float:
        raise ValueError("this one is lost")

    grad_group.wait_for_averages = wait  # type: ignore[method-assign]
    pair.backward()
    pair.optimizer.step()
    pair.model.last.weight.sum()


def test_what_fails_after_a_step_is_said_where_parameters_are_touched(ranks):
    for outcome in ranks(2).outcomes(fails_in_its_step):
        assert (outcome.kind, outcome.error) == ("ValueError", "this one is lost")


def says_what_is_wrong(rank: int) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    chosen = shards(2)
    model = net()
    with pytest.raises(InputError, match="optimizer Own is not known to work element by element"):
        apply(model, Own(model.parameters(), lr=0.1), chosen)
    with pytest.raises(InputError, match="'sharded', which needs the schedule by priority"):
        apply(model, None, msgspec.structs.replace(chosen, schedule="barrier"))
    pair = Pair(rank, chosen)
    pair.optimizer.register_step_pre_hook(lambda *_: None)
    pair.backward()
    with pytest.raises(InputError, match="has step hooks"):
        pair.optimizer.step()


def is_dense_for_other_optimizers(rank: int) -> None:
    """An optimizer that was not passed along sees whole gradients, and updates whole parameters."""
    model = net()
    alone = twin(model)
    held = [*model.first.parameters(), *model.last.parameters()]
    loose = [p for p in model.parameters() if all(p is not q for q in held)]
    first = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="shards the exchange of"):
        apply(model, first, shards(2))
    second = torch.optim.AdamW(loose, lr=1e-3)
    names = dict(alone.named_parameters())
    mine = [n for n, p in model.named_parameters() if any(p is q for q in held)]
    others = [
        torch.optim.SGD([names[n] for n in mine], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for n, p in names.items() if n not in mine], lr=1e-3),
    ]
    for seed in range(3):
        loss_of(model, part(rank, [3, 1], seed)).backward()
        loss_of(alone, data(4, seed)).backward()
        for optimizer in (first, second, *others):
            optimizer.step()
            optimizer.zero_grad()
    close(full_state_dict(model), dict(alone.state_dict()))
    assert sum(s["momentum_buffer"].numel() for s in first.state.values()) < sum(
        p.numel() for p in held
    )
    assert all(second.state[p]["exp_avg"].shape == p.shape for p in loose)


def is_freed_with_its_model(rank: int) -> None:
    pair = Pair(rank, shards(2))
    pair.backward()
    pair.optimizer.step()
    pair.backward(2)
    run = weakref.ref(pair.model._meshwright_run)
    del pair
    gc.collect()
    assert run() is None


@pytest.mark.parametrize(
    "check", [says_what_is_wrong, is_dense_for_other_optimizers, is_freed_with_its_model]
)
def test_limits(ranks, check):
    ranks(2)(check)
