"""Layers that every rank leaves out by its own draws, beside divided ones, against one process that
draws as all of them do."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_state_dict
from plans import plan, scheduled, unit
from torch import Tensor, nn

WIDTH, LAYERS, RANKS, SAMPLES, STEPS = 8, 4, 2, 3, 6
RATE = 0.5


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layerdrop = RATE
        self.draws = random.Random()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.draws.random() >= self.layerdrop:
                x = layer(x).tanh()
        return self.last(x)


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(model: Dropping) -> None:
    """The same steps in one process: every rank's samples by that rank's draws."""
    optimizer = optimizer_of(model)
    draws = [random.Random(rank) for rank in range(RANKS)]
    for step in range(STEPS):
        for rank in range(RANKS):
            model.draws = draws[rank]
            (model(inputs(step, rank)).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()


def drops(rank: int, schedule: str, divided: bool) -> None:
    torch.manual_seed(0)
    model = Dropping().double()
    reference = copy.deepcopy(model)
    alone(reference)
    model.draws = random.Random(rank)
    optimizer = optimizer_of(model)
    with scheduled(schedule):
        ends = [unit("first", 2, "column", RANKS), unit("last", 2, "row", RANKS)]
        made = plan(RANKS, ends if divided else [])
    planned, optimizer = apply(model, optimizer, made)
    for step in range(STEPS):
        planned(inputs(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found, expected = full_state_dict(planned), reference.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_nobody_waits_for_a_layer_that_others_left_out(ranks, schedule, divided):
    ranks(RANKS)(drops, schedule, divided)
