"""Sharded exchange: each rank updates its chunk of every parameter, and nobody notices."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_optimizer_state_dict, full_state_dict
from meshwright.executor.sharded_gradient import ShardedGradient
from meshwright.planner.plan import Plan
from plans import plan, scheduled, unit
from reference import twin
from torch import Tensor, nn
from torch.nn import functional as F

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
    """Sizes that no number of ranks divides, a matrix in another memory format, a tied weight, and a
    parameter with fewer elements than ranks."""

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
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        x = torch.tanh(self.first(x))
        x = self.back(torch.tanh(self.wide(x)))
        x = torch.tanh(self.again(torch.tanh(self.tied(x))))
        return self.last(self.scale(x.unsqueeze(-1)).squeeze(-1))


NAMES = ("conv", "first", "wide", "back", "tied", "again", "scale", "last")


def net() -> Net:
    return Net().double()


def shards(world: int, *, hybrid: bool = False, bucket_bytes: int = 300, **options: Any) -> Plan:
    """Every unit's exchange is sharded; ``hybrid`` divides two of them over two ranks as well."""
    units = []
    for name in NAMES:
        style = {"wide": "column", "back": "row"}.get(name, "none") if hybrid else "none"
        made = unit(name, 1 if style == "none" else 2, style, world)
        units.append(msgspec.structs.replace(made, exchange="sharded"))
    with scheduled("priority"):
        return plan(world, units, bucket_bytes=bucket_bytes, **options)


def layouts(world: int) -> list[Plan]:
    """Plain data parallelism with small slices and with large ones, and divided units whose peers
    shard (with two ranks these have none)."""
    return [
        shards(world),
        shards(world, bucket_bytes=2**20),
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process(ranks, world, optimizer):
    steps = 20 if optimizer in ("sgd", "adamw") else 3
    ranks(world)(equals_one_process, world, optimizer, steps)
