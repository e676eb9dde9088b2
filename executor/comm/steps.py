"""What an optimizer holds, and being told of the beginning and the end of its steps."""

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def parameters_of(optimizer: Optimizer | None) -> set[nn.Parameter]:
    """The parameters that an optimizer updates; none without one."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {p for group in groups for p in group["params"]}


def before_each_step(
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer | None,
    begins: Callable[[Optimizer], None],
) -> None:
    """Calls ``begins`` before each of the user's steps: of ``optimizer``, and of any other that has
    some of ``parameters``."""
    if optimizer is not None:
        own = optimizer.step

        def step(used: Optimizer, *args: Any, **kwargs: Any) -> Any:
            begins(used)
            return own(*args, **kwargs)

        replace_step(optimizer, step)
    mine = {id(p) for p in parameters}
    given = weakref.ref(optimizer) if optimizer is not None else lambda: None

    def hook(used: Optimizer, args: Any, kwargs: Any) -> None:
        if used is given() or is_view(used):
            return
        if any(id(p) in mine for group in used.param_groups for p in group["params"]):
            begins(used)

    register_optimizer_step_pre_hook(hook)


VIEW = "_meshwright_view"
"""The attribute of an object that stands for an optimizer in a part of its step."""


def is_view(optimizer: Optimizer) -> bool:
    """Whether its steps are parts of another's."""
    return VIEW in vars(optimizer)


def after_each_step(
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer | None,
    stepped: Callable[[Optimizer], None],
) -> None:
    """Calls ``stepped`` after each of the user's steps: of ``optimizer``, or without one of any
    that has some of ``parameters``."""
    if optimizer is not None:
        # Not torch's hooks: a lazy step calls them for everything that it is applied to.
        before = optimizer.step

        def step(used: Optimizer, *args: Any, **kwargs: Any) -> Any:
            loss = before(*args, **kwargs)
            stepped(used)
            return loss

        replace_step(optimizer, step)
        return
    mine = {id(p) for p in parameters}

    def hook(used: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in mine for group in used.param_groups for p in group["params"]):
            stepped(used)

    register_optimizer_step_post_hook(hook)


def given_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The step that somebody has put on the optimizer in place of its class's: to clamp weights
    after it, say. Not what a scheduler has put there, which counts steps, nor ``replace_step``."""
    step = vars(optimizer).get("step")
    if step is None or hasattr(step, _BEFORE):
        return getattr(step, _BEFORE, None)
    given: Callable[..., Any] = step
    if not hasattr(step, "_wrapped_by_lr_sched"):
        return given
    counted: Callable[..., Any] | None = getattr(step, "__wrapped__", None)
    if counted is None or counted is type(optimizer).step:
        return None
    return MethodType(counted, optimizer)


def counts_as_its_own(step: Callable[..., Any], optimizer: Optimizer) -> None:
    """Says of a ``step`` that will stand on the optimizer that it does what was there before."""
    setattr(step, _BEFORE, given_step(optimizer))


# What a replaced step says of the one before it; a scheduler's that is put over it says the same.
_BEFORE = "_meshwright_given"


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> None:
    """Makes ``step(optimizer, …)`` the step of one optimizer."""
    counts_as_its_own(step, optimizer)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a scheduler looks for its own mark
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
