"""Exchanges that send a part, with gradients that overflow and a scaler that leaves such steps
out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lossy import Training, assert_equal_on_all_ranks, lossy_plan, share
from meshwright.executor.gradients.feedback import Lossy
from meshwright.planner.schema.errors import InputError
from torch.nn import functional as F

STEPS, BAD = 40, 7


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def overflow_once(rank: int, exchange: str, ratio: float, feedback: str) -> None:
    chosen = lossy_plan(exchange, ratio, feedback=feedback)
    training = Training(chosen, momentum, lossy=Lossy(stages=0, patience=4))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for step in range(STEPS):
        inputs, target = share(rank, step % 4, torch.float32)
        loss = F.cross_entropy(training.model(inputs), target)
        losses.append(float(loss))
        # One rank's loss is infinite once; all ranks must leave that step out.
        bad = torch.inf if step == BAD and rank == 0 else 1.0
        scaler.scale(loss * bad).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        scales = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(scales, torch.tensor([scaler.get_scale()]))
        assert scales[0] == scales[1], step
    # Half for each step that is left out: the bad one, and one more where part of it was held.
    assert scaler.get_scale() >= 64.0
    parameters = training.parameters()
    assert parameters.isfinite().all()
    assert_equal_on_all_ranks(parameters)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize(
    ("exchange", "ratio", "feedback"),
    [
        ("topk", 0.05, "residual"),
        ("topk", 0.05, "in_place"),
        ("topk", 0.05, "mirror"),
        ("dropped", 0.3, "residual"),
    ],
)
def test_an_overflow_costs_one_step(ranks, exchange, ratio, feedback):
    ranks(2)(overflow_once, exchange, ratio, feedback)


def decays(rank: int, feedback: str) -> None:
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)

    training = Training(lossy_plan("topk", 0.1, feedback=feedback), make)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    inputs, target = share(rank, 0, torch.float32)
    scaler.scale(F.cross_entropy(training.model(inputs), target)).backward()
    with pytest.raises(InputError, match="a gradient scaler would divide it by the scale"):
        scaler.step(training.optimizer)


@pytest.mark.parametrize("feedback", ["residual", "in_place", "mirror"])
def test_weight_decay_that_was_added_before_is_not_unscaled(ranks, feedback):
    ranks(2)(decays, feedback)
