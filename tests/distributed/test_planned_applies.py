"""What ``plan`` returns, ``apply`` accepts: models of every kind, with pins drawn at random."""

from __future__ import annotations

import random

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.launch.train import train_step
from meshwright.models.zoo import build
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.request import searched
from meshwright.planner.solve.unit_options import all_options
from meshwright.profiler.estimate import estimate
from torch import Tensor, nn

from tests.sampling import sampled

pytestmark = pytest.mark.timeout(600)

RANKS, BATCH, DRAWS = 4, 12, 5
MODELS = ("mlp", "gpt-mini", "cnn-digits", "seq2seq-mini", "bert-tiny", "odd")


class Odd(nn.Module):
    """What is hard to divide, in one model: a parameter used three times, one used by the model's
    own code, a branch that no samples enter, a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.others = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.positions, self.scale = nn.Embedding(4, 8), nn.Parameter(torch.ones(8))
        self.twice, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.others.weight = self.head.weight = self.symbols.weight

    def forward(self, x: Tensor) -> Tensor:
        inner = self.symbols(x) + self.others(x.flip(1)) + self.positions(torch.arange(4))
        inner = self.twice(torch.tanh(self.twice(self.norm(inner)))) * self.scale
        return self.head(inner + self.down(torch.relu(self.up(inner)))).mean(1)


def workload(name: str) -> mw.Workload:
    torch.manual_seed(0)
    if name != "odd":
        return build(name)

    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randint(20, (size, 4)),), torch.randint(20, (size,)))

    return mw.Workload("odd", Odd(), make_batch, nn.functional.cross_entropy)


def cluster() -> Cluster:
    here = Device(name="a100-sxm-40gb", memory_bytes=2**40)
    levels = tuple(
        Level(name=name, latency_s=1e-4, bytes_per_s=rate)
        for name, rate in (("intra", 1e9), ("inter", 1e7))
    )
    nodes = tuple(Node(name=f"host-{i}", devices=(here,) * 2) for i in range(2))
    return Cluster(name="slow", nodes=nodes, levels=levels)


def drawn(found: ModelProfile, draw: random.Random) -> Plan | None:
    """A plan with random pins on some units; None where the pins exclude each other."""
    goal = Goal(batch=BATCH, batch_statistics=draw.choice(("local", "global")))
    bursts = draw.random() < 0.5
    capability = CAPABILITY if bursts else searched(CAPABILITY)
    model = CostModel(found, cluster(), goal)
    pins = []
    for unit, options in zip(found.units, all_options(model, capability), strict=True):
        if not unit.fixed and draw.random() < 0.5:
            one = draw.choice(options)
            pins.append(Pin(unit=unit.name, only=(one.layout,), styles=(one.style,)))
    try:
        return mw.plan(
            found, cluster(), msgspec.structs.replace(goal, pins=tuple(pins)), bursts=bursts,
            schedule=draw.choice(("barrier", "priority")), solver="heuristic",
        )  # fmt: skip
    except (mw.InfeasibleError, mw.InputError):
        return None


def plans(name: str) -> list[Plan]:
    draw = random.Random(name)
    found = estimate(workload(name), "a100-sxm-40gb", batches=(4, 12))
    made = (drawn(found, draw) for _ in range(DRAWS))
    return [plan for plan in made if plan is not None]


def applied(rank: int, name: str, made: list[Plan]) -> None:
    """Each plan is applied to a fresh model, which takes a step."""
    for plan in made:
        given = workload(name)
        optimizer = torch.optim.SGD(given.model.parameters(), lr=0.01)
        apply(given.model, optimizer, plan)
        torch.manual_seed(1)
        loss = train_step(given, plan, given.make_batch(BATCH), optimizer)
        assert torch.tensor(loss).isfinite()


@pytest.mark.parametrize("name", sampled(MODELS, 3))
def test_what_is_planned_is_applied(ranks, name):
    made = plans(name)
    assert len(made) > DRAWS // 4
    ranks(RANKS)(applied, name, made, limit_s=240.0)
