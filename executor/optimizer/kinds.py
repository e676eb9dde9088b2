"""Which optimizers a plan can be trained with, and those that plans name."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.schema.errors import InputError
from ...planner.schema.goal import OPTIMIZERS, OptimizerName
from ..comm.steps import parameters_of

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop",
    "ASGD",
)  # fmt: skip
"""Optimizers of torch whose update of an element depends on that element's gradient alone, so that
a slice is updated as it would be within the whole."""


def updates_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is that of one of them: a subclass may not change it."""
    own: Any = type(optimizer).step
    return any(own is getattr(torch.optim, name).step for name in ELEMENTWISE)


def check(optimizer: torch.optim.Optimizer, divided: set[nn.Parameter], *, sharded: bool) -> None:
    """Refuses optimizers that look at whole matrices where the plan divides them, and warns of
    those that are not known. Where it ``sharded`` an exchange, those are refused as well.
    """
    optimized = parameters_of(optimizer)
    name = type(optimizer).__name__
    names = {cls.__name__ for cls in type(optimizer).__mro__ if _of_torch(cls)}
    if optimized & divided and not names & set(ELEMENTWISE):
        if _of_torch(type(optimizer)):
            raise InputError(
                f"optimizer {name} looks at whole parameters and the plan divides some: use one "
                "that works element by element, such as AdamW, or plan with data parallelism only"
            )
        warnings.warn(
            f"optimizer {name} is not known to work element by element: where the plan divides a "
            "parameter it sees this rank's slice only",
            stacklevel=3,
        )
    if sharded and not updates_elementwise(optimizer):
        raise InputError(
            f"optimizer {name} is not known to work element by element, and the plan shards the "
            f"exchange of some units: use one of {', '.join(ELEMENTWISE)}, or plan with exchange "
            "'dense'"
        )


def check_holds(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer of another model; it may hold parameters of other modules besides."""
    if parameters_of(optimizer).isdisjoint(model.parameters()):
        raise InputError(
            f"this {type(optimizer).__name__} holds no parameter of this {type(model).__name__}: "
            "make it with the model's own, such as SGD(model.parameters(), lr=0.1)"
        )


def _of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim") and cls.__name__ != "Optimizer"


def ready(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """The model on this rank's device. Parameter objects stay, so optimizers stay valid: one of
    another model is refused before anything is measured."""
    if device.type != "cpu":
        model.to(device)
    if optimizer is not None and isinstance(model, nn.Module):
        check_holds(optimizer, model)


def optimizer_for(
    name: OptimizerName, parameters: Iterable[Tensor], rate: float = 1e-3
) -> torch.optim.Optimizer:
    """A new optimizer of that name, as the planner's table has it."""
    known = OPTIMIZERS[name]
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, known.torch_class)
    options = {"momentum": known.momentum} if known.momentum else {}
    return kind(parameters, lr=rate, **options)


def optimizer_name(optimizer: torch.optim.Optimizer | None) -> OptimizerName:
    """Which of the goal's optimizers has the same state per parameter."""
    if optimizer is None:
        return "sgd"
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum" if any(g["momentum"] for g in optimizer.param_groups) else "sgd"
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adam"
