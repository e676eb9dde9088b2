"""A workload's real data as global batches, and the accuracy that training on it reached."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
import torch.distributed as dist

from ...models.workload import Batch, Workload
from ..parallel import run_of
from .train import share_of

EVALUATED = 64
"""Samples of one forward when a rank evaluates its share: bounds memory, not the result."""


def drawing(workload: Workload, batch: int) -> Callable[[int], Batch]:
    """Gives the global batch of each step, the same on every rank: the training data in an order
    that is drawn anew for each pass, or random batches where the workload has no data."""
    if workload.data is None:
        return lambda number: _random(workload, batch, number)
    data = workload.data("train")
    size = min(batch, data.size)
    steps = data.size // size

    def draw(number: int) -> Batch:
        order = torch.randperm(
            data.size, generator=torch.Generator().manual_seed(number // steps), device="cpu"
        )
        start = number % steps * size
        return data.take(order[start : start + size])

    return draw


def _random(workload: Workload, batch: int, number: int) -> Batch:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        return workload.make_batch(batch)


def accuracy(workload: Workload, device: torch.device) -> float | None:
    """The share of right predictions on the test data, every rank predicting its part; None where
    the workload has none. Collective; the model is left in training mode."""
    if workload.data is None or workload.accuracy is None:
        return None
    run = run_of(workload.model)
    whole = workload.data("test")
    mine = share_of(whole, run)
    # As many forwards on every rank, since divided units need all of them.
    pieces = ceil(ceil(whole.size / run.world.size) / EVALUATED)
    right = 0.0
    workload.model.eval()
    with torch.no_grad():
        for i in range(pieces):
            part = mine.slice(mine.size * i // pieces, mine.size * (i + 1) // pieces).to(device)
            output = workload.model(*part.args, **part.kwargs)
            right += part.size * workload.accuracy(output, part.target) if part.size else 0.0
    workload.model.train()
    total = torch.tensor(right, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / whole.size
