"""Plain data parallelism: equality with one process, and what a DDP user expects."""

from __future__ import annotations

import pytest
import torch
from meshwright.models.workload import Batch
from plans import SCHEDULES, plan, scheduled
from reference import assert_equal, train_alone, train_together, twin
from torch import nn
from torch.nn import functional as F


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    ).to(dtype)


def batches(size: int, steps: int = 3, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            (torch.randn(size, 6, generator=generator, dtype=dtype),),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def equal_to_one_process(rank: int, optimizer: str, counts: list[int], schedule: str) -> None:
    model, data = small(), batches(sum(counts))
    expected = train_alone(twin(model), optimizer, data, F.cross_entropy)
    with scheduled(schedule):
        chosen = plan(len(counts), message_bytes=300)
    found = train_together(rank, model, optimizer, data, F.cross_entropy, chosen, counts)
    assert_equal(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("counts", [[4, 4], [5, 2], [6, 0]])
def test_equal_to_one_process(ranks, optimizer, counts, schedule):
    ranks(2)(equal_to_one_process, optimizer, counts, schedule)
