"""Steps that are applied later: ``step()`` takes gradients over while they are still exchanged, and
each unit's parameters are updated when they are needed.

What a step does is settled when it is called: the hyperparameters of all groups are copied and the
gradients are taken over, so that schedulers and ``zero_grad`` afterwards change nothing. Each unit
is updated by the optimizer's own ``step``, called on a view of it that holds that unit's parameters
and shares its state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.schema.errors import InputError
from ..gradients.buckets import GradParam
from ..gradients.momentum import Momentum
from ..gradients.pending import resume, suspend
from ..gradients.priority import PriorityExchange, waiting_grad_groups
from ..gradients.sharded import ShardedGradGroup
from ..gradients.slices import GradGroup
from ..gradients.sparse import SparseGradient, completed, moved
from ..gradients.waiting import WaitingGradient
from .early import EarlyUpdates
from .sharded_steps import Sharings, StepOn, cut_state, step_grad_groups
from .state import ELEMENTWISE

Groups = list[dict[str, Any]]


class LazySteps:
    """The steps of one optimizer. ``exchange()`` is the exchange in force, ``sharings`` says how
    ranks share the parameters that are updated in chunks."""

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: Callable[[], PriorityExchange],
        sharings: Sharings,
        momentum: Momentum | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._momentum = momentum
        self._told = False
        self.early = EarlyUpdates(optimizer, self._release)
        before = optimizer.step
        self._own: Any = type(optimizer).step

        def step(optimizer: Optimizer, closure: Any = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
            return self._step(closure)

        if hasattr(before, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self.finish())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self.finish())
        if sharings:
            cut_state(optimizer, sharings)
            optimizer.register_load_state_dict_post_hook(lambda o: cut_state(o, sharings))

    def finish(self) -> None:
        """Applies what is still pending."""
        self._exchange().finish_all()

    def _step(self, closure: Any) -> Any:
        exchange = self._exchange()
        if any(grad_group.released for grad_group in exchange.grad_groups):
            self.early.end(closure=closure is not None, scaled=_scaled(self._optimizer))
        for grad_group in exchange.grad_groups:
            if grad_group.update is not None:  # of a step before, which no forward has needed
                exchange.finish(grad_group)
        sharded = [p for p in exchange.grad_groups if isinstance(p, ShardedGradGroup)]
        if sharded:
            return self._step_sharded(exchange, sharded, closure)
        if closure is not None or _scaled(self._optimizer) or not self._able():
            return self._at_once(closure)
        self._take_over(exchange, _snapshot(self._groups()), set())
        return None

    def _release(self, parameters: list[nn.Parameter]) -> None:
        """Applies gradients in backward, with the hyperparameters of this moment."""
        reason = releases_not(self._optimizer)
        if reason is not None:
            raise InputError(reason)
        groups = self._optimizer.param_groups
        parted = groups if self._momentum is None else self._momentum.without(groups)
        rest = [p for p in parameters if p.grad is None or not moved(p, p.grad, parted)]
        self._apply(_only(parted, rest))

    def _take_over(
        self, exchange: PriorityExchange, settled: Groups, sharded: set[nn.Parameter]
    ) -> None:
        """Applies what is there, and postpones the rest but for ``sharded`` parameters."""
        parameters = [p for group in settled for p in group["params"] if p not in sharded]
        later = waiting_grad_groups(exchange, parameters)
        taken = {entry.parameter for entries in later.values() for entry in entries}
        for parameter in set(parameters) - taken:
            completed(parameter)
        self._apply(_only(settled, [p for p in parameters if p not in taken]))
        for grad_group, entries in later.items():
            self._postpone(exchange, grad_group, entries, settled)

    def _step_sharded(
        self, exchange: PriorityExchange, grad_groups: list[ShardedGradGroup], closure: Any
    ) -> Any:
        """A step of which some parameters are updated in chunks. The optimizers that can be had
        here call a closure once, before anything else."""
        reason = _reason(self._optimizer, self._own)
        if reason is not None:
            raise InputError(
                f"optimizer {type(self._optimizer).__name__} {reason}, which cannot be while the "
                "plan shards the exchange of some units: do without, or plan with exchange 'dense'"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settled = _snapshot(self._groups())
        mine = {entry.parameter for grad_group in grad_groups for entry in grad_group.entries}
        self._take_over(exchange, settled, mine)
        scaled = _scaled(self._optimizer)
        if scaled:
            exchange.finish_all()  # the scaler takes these away after the step
        on_stream = any(e.group.on_stream for grad_group in grad_groups for e in grad_group.entries)
        state, step_on = self._optimizer.state, self._stepper()
        with torch.no_grad():
            aside = not (scaled or on_stream)
            step_grad_groups(exchange, grad_groups, settled, state, step_on, aside=aside)
        return loss

    def _groups(self) -> Groups:
        groups = self._optimizer.param_groups
        if self._momentum is None:
            return groups
        self._momentum.step()
        return self._momentum.without(groups)

    def _at_once(self, closure: Any) -> Any:
        """The optimizer's own step, which waits for every gradient that it reads."""
        optimizer = self._optimizer
        for entry in self._exchange().home if closure is None else ():
            completed(entry.parameter)
        if self._momentum is None:
            return self._own(optimizer, *(() if closure is None else (closure,)))
        loss = None
        if closure is not None:  # SGD calls it once, first; its backward needs the true groups
            with torch.enable_grad():
                loss = closure()
            for entry in self._exchange().home:
                completed(entry.parameter)
        before = optimizer.param_groups
        optimizer.param_groups = self._groups()
        try:
            self._own(optimizer)
        finally:
            optimizer.param_groups = before
        return loss

    def _postpone(
        self,
        exchange: PriorityExchange,
        grad_group: GradGroup,
        entries: list[GradParam],
        settled: Groups,
    ) -> None:
        parameters = [entry.parameter for entry in entries]
        gradients = grad_group.gradients

        def update() -> None:
            for parameter in parameters:
                resume(parameter)
            rest = [e for e in entries if not moved(e.parameter, gradients[e], settled)]
            _with_gradients(
                {e.parameter: _shown(e, gradients[e]) for e in rest},
                lambda: self._apply(_only(settled, [e.parameter for e in rest])),
            )

        grad_group.update = update
        for parameter in parameters:
            gradient = parameter.grad
            assert isinstance(gradient, WaitingGradient)
            gradient.taken = True
            suspend(parameter, lambda: exchange.finish(grad_group))

    def _apply(self, groups: Groups) -> None:
        """The optimizer's own step on some parameters."""
        self._stepper()(groups, self._optimizer.state)

    def _stepper(self) -> StepOn:
        """The optimizer's own step, as the optimizer is now."""
        optimizer = self._optimizer
        attributes = {k: v for k, v in optimizer.__dict__.items() if k != "step"}

        def step_on(groups: Groups, state: dict[Any, Any]) -> None:
            if not any(group["params"] for group in groups):
                return
            view: Any = object.__new__(type(optimizer))
            view.__dict__.update(attributes)
            view.param_groups = [group for group in groups if group["params"]]
            view.state = state
            view.step()

        return step_on

    def _able(self) -> bool:
        """Whether the optimizer works parameter by parameter; says so where not."""
        optimizer = self._optimizer
        reason = _reason(optimizer, self._own)
        if reason is None:
            return True
        if not self._told:
            self._told = True
            name = type(optimizer).__name__
            warnings.warn(
                f"optimizer {name} {reason}: each step waits for all gradients", stacklevel=4
            )
        return False


def releases_not(optimizer: Optimizer | None) -> str | None:
    """Why gradients cannot be released early with an optimizer, in a sentence with the remedy."""
    if optimizer is None:
        return (
            "the plan releases gradients early, that is applies them in backward, and no optimizer "
            "was given: pass it with the model, or plan with --forbid early-release"
        )
    own: Any = type(optimizer).step
    reason = _reason(optimizer, own)
    if reason is None:
        return None
    return (
        f"optimizer {type(optimizer).__name__} {reason}, so its gradients cannot be released "
        "early: use one of torch's that works element by element, such as AdamW, without step "
        "hooks, or plan with --forbid early-release"
    )


def _scaled(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler has handed its scale to the optimizer."""
    return hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")


def _shown(entry: GradParam, gradient: Tensor) -> Tensor:
    """A gradient as an optimizer wants it; one that came in parts for as long as the step needs."""
    if isinstance(gradient, SparseGradient):
        return gradient.average.dense()
    return entry.show(gradient)


def _reason(optimizer: Optimizer, own: Any) -> str | None:
    """Why an optimizer cannot update one unit at a time."""
    known = [getattr(torch.optim, name) for name in ELEMENTWISE]
    if not any(own is cls.step for cls in known):
        return "is not known to update each parameter by itself"
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks:
        return "has step hooks"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is differentiable"
    return None


def _snapshot(groups: Groups) -> Groups:
    """The groups with their hyperparameters as they are now."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return [{k: v if k == "params" else copied(v) for k, v in g.items()} for g in groups]


def _only(groups: Groups, parameters: list[nn.Parameter]) -> Groups:
    """The groups with those of their parameters only."""
    wanted = set(parameters)
    return [{**g, "params": [p for p in g["params"] if p in wanted]} for g in groups]


def _with_gradients(gradients: dict[nn.Parameter, Tensor], work: Callable[[], None]) -> None:
    """Runs ``work`` while parameters have those gradients, whatever stands in ``grad`` now."""
    before = {parameter: parameter.grad for parameter in gradients}
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    try:
        work()
    finally:
        for parameter, shown in before.items():
            parameter.grad = shown
