"""Optimizers that look at the loss, which each rank has of its own samples only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .comm.steps import replace_step

if TYPE_CHECKING:
    from .run import Run


def average_losses(optimizer: Optimizer, reference: weakref.ref[Run]) -> None:
    """From now on an LBFGS gets from its closure the mean of the loss over the samples of all
    ranks, by which it chooses how far to go and when to end. The run is referred to weakly: an
    optimizer may be there for longer."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    before: Callable[..., Any] = optimizer.step

    def step(_: Optimizer, closure: Callable[[], Any]) -> Any:
        def averaged() -> Any:
            loss, run = closure(), reference()
            if run is None or run.forward is None:
                return loss
            mean = _mean(run, float(loss))
            return loss.new_tensor(mean) if isinstance(loss, Tensor) else mean

        return before(averaged)

    replace_step(optimizer, step)


def _mean(run: Run, loss: float) -> float:
    """The mean over all ranks' samples of what is a mean over each one's. Collective."""
    assert run.forward is not None
    weighted = [run.forward.factor() * loss]
    rows = run.control.gather(weighted, "the loss of a closure", whole=False).rows()
    return sum(row[0] for row in rows) / len(rows)
