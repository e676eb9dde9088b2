"""Which optimizers a plan can be trained with, and those that plans name."""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...planner.schema.capability import Capability
from ...planner.schema.errors import InputError
from ...planner.schema.goal import OPTIMIZERS, OptimizerName
from ...planner.schema.plan import SHARDING
from ..comm.steps import given_step, parameters_of

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop",
    "ASGD",
)  # fmt: skip
"""Optimizers of torch whose update of an element depends on that element's gradient alone, so that
a slice is updated as it would be within the whole."""


def updates_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is that of one of them: neither a subclass nor whoever has put another in
    its place may change it."""
    if given_step(optimizer) is not None:
        return False
    own: Any = type(optimizer).step
    return any(own is getattr(torch.optim, name).step for name in ELEMENTWISE)


def check(optimizer: torch.optim.Optimizer, divided: set[nn.Parameter], *, sharded: bool) -> None:
    """Refuses optimizers that look at whole matrices where the plan divides them, and warns of
    those that are not known. Where it ``sharded`` an exchange, those are refused as well.
    """
    name = type(optimizer).__name__
    if not parameters_of(optimizer).isdisjoint(divided) and not _derives_elementwise(optimizer):
        if _of_torch(type(optimizer)):
            raise InputError(
                f"optimizer {name} looks at whole parameters and the plan divides some: use one "
                "that works element by element, such as AdamW, or plan with data parallelism only "
                "(--forbid column --forbid row --forbid pair, or auto_parallelize with this one)"
            )
        warnings.warn(
            f"optimizer {name} is not known to work element by element: where the plan divides a "
            "parameter it sees this rank's slice only",
            stacklevel=3,
        )
    if sharded and not updates_elementwise(optimizer):
        raise InputError(
            f"optimizer {name} is not known to work element by element, and the plan shards the "
            f"exchange of some units: use one of {', '.join(ELEMENTWISE)}, or plan without "
            "(--forbid sharded --forbid fully_sharded, or auto_parallelize with this one)"
        )


def planned_for(optimizer: torch.optim.Optimizer | None, capability: Capability) -> Capability:
    """The capability less what ``check`` refuses, or warns of, where ``optimizer`` is to train."""
    if optimizer is None or updates_elementwise(optimizer):
        return capability
    whole = tuple(policy for policy in capability.exchange if policy not in SHARDING)
    styles = capability.styles if _derives_elementwise(optimizer) else ("none",)
    return msgspec.structs.replace(capability, exchange=whole, styles=styles)


class _Others:
    """Has every optimizer checked at its first step, as the one was that a plan was told of: models
    are trained by several, too."""

    def __init__(self) -> None:
        # For each owner its divided parameters, and the optimizers that were checked for it.
        self._of: weakref.WeakKeyDictionary[
            object, tuple[set[nn.Parameter], weakref.WeakSet[torch.optim.Optimizer]]
        ] = weakref.WeakKeyDictionary()
        self._hooked = False

    def watch(
        self, owner: object, given: torch.optim.Optimizer | None, divided: set[nn.Parameter]
    ) -> None:
        """From now on, for as long as there is ``owner``, whose parameters ``divided`` are."""
        self._of[owner] = divided, weakref.WeakSet([given] if given is not None else [])
        if not self._hooked:  # for good: torch cannot bear hooks to go while it calls them
            self._hooked = True
            register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for divided, known in list(self._of.values()):
            if optimizer not in known:
                check(optimizer, divided, sharded=False)
                known.add(optimizer)


_others = _Others()
check_others = _others.watch


def check_holds(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer of another model; it may hold parameters of other modules besides."""
    if parameters_of(optimizer).isdisjoint(model.parameters()):
        raise InputError(
            f"this {type(optimizer).__name__} holds no parameter of this {type(model).__name__}: "
            "make it with the model's own, such as SGD(model.parameters(), lr=0.1)"
        )


def _derives_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of ``ELEMENTWISE``, or of a class derived from one."""
    names = {cls.__name__ for cls in type(optimizer).__mro__ if _of_torch(cls)}
    return not names.isdisjoint(ELEMENTWISE)


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
