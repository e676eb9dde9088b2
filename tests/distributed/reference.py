"""Training under a plan beside the same training by one process on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.models.workload import Batch
from meshwright.planner.schema.plan import Plan
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-4)


def shares(batch: int, world_size: int, counts: Sequence[int] | None = None) -> list[int]:
    """Where each rank's samples begin, and the batch size at the end."""
    if counts is None:
        counts = [batch // world_size + (r < batch % world_size) for r in range(world_size)]
    return [sum(counts[:r]) for r in range(world_size + 1)]


def train_alone(
    model: nn.Module, name: str, batches: Sequence[Batch], loss: Loss
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the final state of one process."""
    optimizer = optimizer_of(name, model.parameters())
    losses = []
    for batch in batches:
        value = loss(model(*batch.args, **batch.kwargs), batch.target)
        losses.append(value.item())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


def train_together(
    rank: int,
    model: nn.Module,
    name: str,
    batches: Sequence[Batch],
    loss: Loss,
    plan: Plan,
    counts: Sequence[int] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """The same of this rank's part in training under ``plan``; losses of the whole batch."""
    optimizer = optimizer_of(name, model.parameters())
    apply(model, optimizer, plan, timeout_s=20)
    position = plan.placement.index(rank)
    losses = []
    for batch in batches:
        bounds = shares(batch.size, plan.world_size, counts)
        mine = batch.slice(bounds[position], bounds[position + 1])
        value = loss(model(*mine.args, **mine.kwargs), mine.target)
        losses.append(whole_loss(value, mine.size, batch.size))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_state_dict(model)


def whole_loss(value: Tensor, mine: int, whole: int) -> float:
    """The mean over the batch, from the means over each rank's samples."""
    part = value.detach().double() * mine / whole if mine else torch.zeros((), dtype=torch.float64)
    part = part.cpu()  # the same group on ranks that have no samples
    torch.distributed.all_reduce(part)
    return part.item()


def assert_equal(
    found: tuple[list[float], dict[str, Tensor]],
    expected: tuple[list[float], dict[str, Tensor]],
    relative: float = 1e-9,
    absolute: float = 1e-10,
    loss_relative: float | None = None,
) -> None:
    """The yardstick: every element of the state, and the losses."""
    losses, state = found
    for a, b in zip(losses, expected[0], strict=True):
        assert abs(a - b) <= (loss_relative or relative) * abs(b) + absolute, (losses, expected[0])
    assert list(state) == list(expected[1])
    for name, tensor in state.items():
        other = expected[1][name]
        assert tensor.shape == other.shape, name
        over = (tensor.double() - other.double()).abs() - (
            relative * other.double().abs() + absolute
        )
        assert not over.numel() or over.max() <= 0, (name, over.max())


def twin(model: nn.Module) -> nn.Module:
    """A copy that no plan has touched."""
    return copy.deepcopy(model)


def gradients_alone(model: nn.Module, batch: Batch, loss: Loss) -> dict[str, Tensor]:
    """One process's gradients of the whole batch."""
    model.zero_grad()
    loss(model(*batch.args, **batch.kwargs), batch.target).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradients_together(
    rank: int, model: nn.Module, batch: Batch, loss: Loss, counts: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """The whole gradients, put together from all ranks, of a model that a plan was applied to."""
    run = run_of(model)
    bounds = shares(batch.size, run.world.size, counts)
    mine = batch.slice(bounds[run.world.position], bounds[run.world.position + 1])
    model.zero_grad()
    loss(model(*mine.args, **mine.kwargs), mine.target).backward()
    return whole_gradients(model)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, put together from all ranks. Collective."""
    run = run_of(model)
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        shard = run.divided_parameters.get(parameter)
        gradient = parameter.grad.detach().as_subclass(Tensor)
        whole[name] = shard.gather(gradient, run.watch) if shard else gradient.clone()
    return whole


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest deviation of a gradient, in parts of what it may be in float32: 1e-5 of its norm
    and 1e-7 of the norm of all."""
    assert found.keys() == expected.keys()
    whole = sum(g.double().square().sum() for g in expected.values()).sqrt()
    off = [
        (found[n].double() - g.double()).norm() / (1e-5 * g.double().norm() + 1e-7 * whole)
        for n, g in expected.items()
    ]
    return max(off).item()
