"""What a launched script's ranks note of their steps."""

from __future__ import annotations

import torch
from meshwright.executor.apply import apply
from meshwright.executor.launch.report import WARM_UP, _RunFigures
from plans import plan as plan_by_hand
from plans import scheduled

STEPS = WARM_UP + 4


def steps_noted(rank: int, schedule: str) -> int:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scheduled(schedule):
        apply(model, optimizer, plan_by_hand(2, statistics="local"))
    recorder = _RunFigures(model, optimizer)
    for _ in range(STEPS):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = recorder.figures()
    return found.steps if found is not None else 0


def test_a_step_is_noted_once_whether_applied_at_once_or_lazily(ranks):
    for schedule in ("barrier", "priority"):
        assert ranks(2)(steps_noted, schedule) == [STEPS - WARM_UP - 1] * 2
