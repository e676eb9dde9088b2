"""Random plans whose units take a part of the ranks, and what must hold of each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_optimizer_state_dict, full_state_dict, run_of
from meshwright.planner.layout import Layout
from meshwright.planner.plan import MemoryPolicy, Plan, UnitPlan
from meshwright.planner.wire import moved_bytes, ring_bytes
from meshwright.units.discover import Discovery, discover
from meshwright.units.spec import UnitSpec
from meshwright.units.workload import Batch
from plans import plan, scheduled
from reference import assert_equal, optimizer_of, twin, whole_loss
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 2
WIDTH = 6


class Chain(nn.Module):
    """One unit after another, with a shortcut over two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 7)
        self.third = nn.Linear(7, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.head(self.norm(y + self.third(torch.tanh(self.second(y)))))


class Branches(nn.Module):
    """Three branches of convolutions between a stem and a head, normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.ways = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Softplus(), nn.Conv2d(4, w, 3))
            for w in (2, 3, 4)
        )
        self.head = nn.Linear(9 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(torch.cat([way(y) for way in self.ways], 1).flatten(1))


class Block(nn.Module):
    """Attention and a block of two linear layers, each with its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    """Numbers in, one of them out; the last layer shares the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.block = Block()
        self.scores = nn.Linear(8, 10, bias=False)
        self.scores.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.block(self.embed(x))).mean(1)


def _draw(name: str, size: int) -> Batch:
    if name == "tokens":
        x = torch.randint(10, (size, 4))
    elif name == "branches":
        x = torch.randn(size, 2, 4, 4, dtype=torch.float64)
    else:
        x = torch.randn(size, 5, dtype=torch.float64)
    return Batch((x,), torch.randint(3, (size,)))


MODELS = {"chain": Chain, "branches": Branches, "tokens": Tokens}
_found: dict[str, Discovery] = {}


def build(name: str) -> tuple[nn.Module, Discovery]:
    """A model of that name, the same on every rank, and its units."""
    torch.manual_seed(7)
    model = MODELS[name]().double().train()
    if name not in _found:
        _found[name] = discover(twin(model), _draw(name, 4))
    return model, _found[name]


@dataclass(frozen=True)
class Trial:
    """A random plan, and how the batch of each step is shared out."""

    seed: int
    model: str
    plan: Plan
    counts: tuple[tuple[int, ...], ...]
    optimizer: str

    def __str__(self) -> str:
        units = ", ".join(
            f"{u.name} {u.layout} {u.style} {u.memory} {u.exchange}"
            for u in self.plan.units
            if u.modules
        )
        return (
            f"seed {self.seed}: {self.model} {self.plan.schedule} at {self.plan.placement} with "
            f"{self.optimizer}, {self.counts} samples, slices of {self.plan.bucket_bytes}: {units}"
        )


def trial(seed: int, world: int) -> Trial:
    """The plan of a seed."""
    rng = random.Random(seed)
    name = rng.choice(sorted(MODELS))
    _, found = build(name)
    schedule = rng.choice(["barrier", "priority"])
    shards = schedule == "priority" and rng.random() < 0.4
    units: dict[str, UnitPlan] = {}
    for unit in found.units:
        units[unit.name] = _decide(rng, unit, world, shards)
    if name == "tokens":  # the tied ones live together, whole
        layout = _layout(rng, world, 1)
        for tied in [u for u in found.units if "embed" in u.modules or "scores" in u.modules]:
            units[tied.name] = msgspec.structs.replace(
                units[tied.name], layout=layout, style="none"
            )
    with scheduled(schedule):  # type: ignore[arg-type]
        made = plan(
            world,
            list(units.values()),
            placement=rng.sample(range(world), world),
            bucket_bytes=rng.choice([64, 256, 4096]),
        )
    counts = tuple(_shares(rng, world) for _ in range(STEPS))
    return Trial(seed, name, made, counts, rng.choice(["sgd", "adamw"]))


def _layout(rng: random.Random, world: int, degree: int | None = None) -> Layout:
    degree = degree or rng.choice([1, 1, 1, 2])
    groups = rng.randint(1, world // degree) if world >= degree else 1
    first = rng.randint(0, world - groups * degree)
    return Layout(groups=groups, degree=degree, first=first)


def _decide(rng: random.Random, unit: UnitSpec, world: int, shards: bool) -> UnitPlan:
    layout, style = Layout(groups=world), "none"
    memory: MemoryPolicy = "keep"
    if unit.modules:
        layout, style = _layout(rng, world), "none"
        if layout.degree > 1:
            fits = [
                s.style
                for s in unit.splits
                if s.parts >= layout.degree and (s.uneven or s.parts % layout.degree == 0)
            ]
            if fits:
                style = rng.choice(fits)
            else:
                layout = Layout(groups=layout.size, first=layout.first)
        if rng.random() < 0.3:
            memory = "recompute"
    return UnitPlan(
        name=unit.name,
        kind=unit.kind,
        modules=unit.modules,
        batched_inputs=unit.batched_inputs,
        layout=layout,
        style=style,  # type: ignore[arg-type]
        memory=memory,
        exchange="sharded" if shards and unit.modules and rng.random() < 0.7 else "dense",
    )


def _shares(rng: random.Random, world: int) -> tuple[int, ...]:
    """Samples of each position: even, or any, none included."""
    if rng.random() < 0.4:
        return (2,) * world
    counts = [rng.randint(0, 4) for _ in range(world)]
    counts[rng.randrange(world)] += 2  # batch normalisation needs two
    return tuple(counts)


def check(rank: int, seed: int, world: int) -> None:
    """The plan of a seed trains as one process does, and sends what it is said to send."""
    one = trial(seed, world)
    model, found = build(one.model)
    torch.manual_seed(seed)
    batches = [_draw(one.model, sum(counts)) for counts in one.counts]
    expected = _alone(twin(model), one, batches)
    optimizer = optimizer_of(one.optimizer, model.parameters())
    apply(model, optimizer, one.plan, timeout_s=20)
    run, position = run_of(model), one.plan.placement.index(rank)
    losses = []
    for batch, counts in zip(batches, one.counts, strict=True):
        starts = [0, *accumulate(counts)]
        mine = batch.slice(starts[position], starts[position + 1])
        before = run.meter.moved_bytes
        value = _loss(model, mine)
        losses.append(whole_loss(value, mine.size, batch.size))
        value.backward()
        sent = run.meter.moved_bytes - before
        predicted = moved_bytes(one.plan, found.edges, counts)[position]
        assert sent == predicted, f"{sent} bytes sent, {predicted} predicted"
        _check_exchanged(model, one.plan)
        _check_norm(model, expected, len(losses) - 1)
        optimizer.step()
        optimizer.zero_grad()
    state = full_optimizer_state_dict(model, optimizer)["state"]
    assert_equal((losses, full_state_dict(model)), (expected.losses, expected.state))
    _check_optimizer(state, expected)


@dataclass
class _Expected:
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    optimizer: dict[int, dict[str, Any]]


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(*batch.args), batch.target)


def _alone(model: nn.Module, one: Trial, batches: Sequence[Batch]) -> _Expected:
    optimizer = optimizer_of(one.optimizer, model.parameters())
    losses, norms = [], []
    for batch in batches:
        value = _loss(model, batch)
        losses.append(value.item())
        value.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return _Expected(losses, norms, dict(model.state_dict()), optimizer.state_dict()["state"])


def _check_exchanged(model: nn.Module, made: Plan) -> None:
    """Gradients travel among those who computed them only: as much as rings send. Rounded down for
    each message, where a ring's share is not whole."""
    run = run_of(model)
    sent, run.meter.exchanged_bytes = run.meter.exchanged_bytes, 0
    if any(unit.exchange != "dense" for unit in made.units):
        return
    predicted, messages = 0.0, 0
    for entry in run.gradients.entries:
        payload = entry.parameter.numel() * entry.parameter.element_size()
        where = entry.layout or Layout(groups=made.world_size // entry.degree)
        predicted += 0 if entry.idle else ring_bytes(payload, where.groups)
        messages += 1 + payload // made.bucket_bytes
    told = f"{sent} bytes sent, {predicted} predicted"
    assert predicted - messages <= sent <= predicted * (1 + 1e-12), told


def _check_norm(model: nn.Module, expected: _Expected, step: int) -> None:
    """Unmodified clipping is right on every rank, those that a unit leaves idle too."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    assert abs(norm - expected.norms[step]) <= 1e-9 * expected.norms[step], (norm, expected.norms)


def _check_optimizer(state: dict[int, dict[str, Any]], expected: _Expected) -> None:
    assert state.keys() == expected.optimizer.keys()
    for index, entries in expected.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(state[index][key], value, rtol=1e-9, atol=1e-10)


def check_many(rank: int, seeds: Sequence[int], world: int, log: str) -> None:
    """Every seed's plan, one after the other. ``log`` is a file that has the one that is run."""
    for seed in seeds:
        if rank == 0:
            Path(log).write_text(str(trial(seed, world)))
        with _told(seed, world):
            check(rank, seed, world)


@contextmanager
def _told(seed: int, world: int) -> Iterator[None]:
    """An error names the plan that it came from."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{trial(seed, world)}: {error}") from error
