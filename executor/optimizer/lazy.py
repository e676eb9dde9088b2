"""Steps that are applied later: ``step()`` takes gradients over while they are still exchanged, and
each unit's parameters are updated when they are needed."""

# [Note: Lazy optimizer steps]
# ``optimizer.step`` is replaced on the object by a function that returns before anything has come.
# What a step does is fixed in it: the hyperparameters of all groups are copied, and of each
# gradient that is on its way it is noted that this step has taken it over. So schedulers and
# ``zero_grad`` afterwards change nothing. Then, for each group of gradients that travel together:
#
# - dense and lossy exchanges: its parameters are suspended (pending.py). Their first reader, as a
#   rule the unit's next forward, waits for the gradients, has the optimizer update these
#   parameters, and applies other updates whose gradients are there while it waits
#   (``PriorityExchange.finish``). What somebody has waited for already is updated in ``step()``.
# - sharded exchanges: a thread waits, updates chunks and gathers parameters (see [Note: Sharded
#   steps pipeline] in gradients/sharded.py).
# - early release: backward has updated them already (gradients/release.py), and ``step()`` checks
#   that it meant the same.
#
# Who waits else: ``state_dict`` of model and optimizer, the next ``step()``, the next backward, the
# end of the process. A unit is updated by the optimizer's own ``step``, called on a view of it that
# holds that unit's parameters and shares its state. An optimizer that cannot work like that steps
# as ever, and so waits for all gradients.

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...planner.schema.errors import InputError
from ...planner.schema.pins import EARLY_RELEASE, forbidding
from ..comm.steps import given_step, replace_step
from ..gradients.buckets import GradParam
from ..gradients.flat_shard import FlatShardSpec, ShardedGradient
from ..gradients.fully_sharded import FullyShardedGradGroup
from ..gradients.momentum import Momentum
from ..gradients.pending import WaitingGradient, resume, suspend
from ..gradients.priority import PriorityExchange
from ..gradients.release import EarlyUpdates, copy_groups
from ..gradients.sharded import ShardedGradGroup, ShardedStepPipeline
from ..gradients.slices import GradGroup
from ..gradients.topk import SparseGradient, applied_sparse, make_dense
from .chunks import Groups, StepOn, own_step, update_chunks
from .kinds import updates_elementwise
from .state import shard_loaded_state, shard_state


class LazySteps:
    """The steps of one optimizer. ``exchange()`` is the exchange in force, ``sharded`` says how
    ranks share the parameters that are updated in chunks."""

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: Callable[[], PriorityExchange],
        sharded: Mapping[nn.Parameter, FlatShardSpec],
        momentum: Momentum | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._momentum = momentum
        self._sharded = sharded
        self._warned = False
        self.early = EarlyUpdates(optimizer, self._release)
        given = given_step(optimizer)
        self._own: Any = type(optimizer).step
        if given is not None:
            self._own = lambda optimizer, *closure: given(*closure)

        def step(optimizer: Optimizer, closure: Any = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
            return self._step(closure)

        replace_step(optimizer, step)
        optimizer.register_state_dict_pre_hook(lambda _: exchange().finish_all())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: exchange().finish_all())
        if sharded:
            shard_state(optimizer, sharded)
            shard_loaded_state(optimizer, sharded)

    def _step(self, closure: Any) -> Any:
        exchange = self._exchange()
        if any(grad_group.released for grad_group in exchange.grad_groups):
            self.early.end(closure=closure is not None, scaled=_is_scaled(self._optimizer))
        for grad_group in exchange.grad_groups:
            if grad_group.update is not None:  # of a step before, which no forward has needed
                exchange.finish(grad_group)
        sharded = [g for g in exchange.grad_groups if isinstance(g, ShardedGradGroup)]
        if sharded or self._frozen(exchange):
            return self._step_sharded(exchange, sharded, closure)
        if closure is not None or _is_scaled(self._optimizer) or not self._can_be_lazy():
            return self._step_at_once(closure)
        self._take_over(exchange, copy_groups(self._groups()), set())
        return None

    def _release(self, parameters: list[nn.Parameter]) -> None:
        """Applies gradients in backward, with the hyperparameters of this moment."""
        reason = releases_not(self._optimizer)
        if reason is not None:
            raise InputError(reason)
        groups = self._optimizer.param_groups
        parted = groups if self._momentum is None else self._momentum.without_momentum(groups)
        rest = {p for p in parameters if p.grad is None or not applied_sparse(p, p.grad, parted)}
        self._apply(_only(parted, rest))

    def _take_over(
        self, exchange: PriorityExchange, groups: Groups, sharded: set[nn.Parameter]
    ) -> None:
        """Applies what is there, and postpones the rest but for ``sharded`` parameters."""
        parameters = {p for group in groups for p in group["params"]} - sharded
        later: dict[GradGroup, list[GradParam]] = {}
        for param, grad_group in exchange.group_of.items():
            waits = isinstance(param.parameter.grad, WaitingGradient) and grad_group.in_flight
            if waits and param.parameter in parameters:
                later.setdefault(grad_group, []).append(param)
        now = parameters - {param.parameter for params in later.values() for param in params}
        for parameter in now:
            make_dense(parameter)
        self._apply(_only(groups, now))
        for grad_group, params in later.items():
            self._postpone(exchange, grad_group, params, groups)

    def _postpone(
        self,
        exchange: PriorityExchange,
        grad_group: GradGroup,
        params: list[GradParam],
        groups: Groups,
    ) -> None:
        parameters = [param.parameter for param in params]
        gradients = grad_group.gradients  # zero_grad may replace ``grad``, and not these

        def update() -> None:
            for parameter in parameters:
                resume(parameter)
            rest = [p for p in params if not applied_sparse(p.parameter, gradients[p], groups)]
            # While the optimizer works, parameters show it what the step has taken over, whatever
            # stands in ``grad`` now: dense gradients, for as long as it needs them.
            before = {p.parameter: p.parameter.grad for p in rest}
            try:
                for p in rest:
                    sent = gradients[p]
                    dense = sent.dense() if isinstance(sent, SparseGradient) else None
                    p.parameter.grad = p.show(sent) if dense is None else dense
                self._apply(_only(groups, before))
            finally:
                for parameter, shown in before.items():
                    parameter.grad = shown

        grad_group.update = update
        for parameter in parameters:
            gradient = parameter.grad
            assert isinstance(gradient, WaitingGradient)
            gradient.taken = True
            suspend(parameter, lambda: exchange.finish(grad_group))

    def _step_sharded(
        self, exchange: PriorityExchange, grad_groups: list[ShardedGradGroup], closure: Any
    ) -> Any:
        reason = _reason(self._optimizer)
        if reason is not None:
            raise InputError(
                f"optimizer {type(self._optimizer).__name__} {reason}, which cannot be while the "
                "plan shards the exchange of some units: do without, or plan with exchange 'dense'"
            )
        loss = None
        if closure is not None:  # which these optimizers call once, before anything else
            with torch.enable_grad():
                loss = closure()
        groups = copy_groups(self._groups())
        sharded = {param.parameter for grad_group in grad_groups for param in grad_group.params}
        frozen = self._frozen(exchange)
        self._take_over(exchange, groups, sharded | set(frozen))
        self._update_frozen(frozen, groups)
        is_scaled = _is_scaled(self._optimizer)
        if is_scaled:
            exchange.finish_all()  # the scaler takes its scale away after the step
        on_stream = any(grad_group.on_stream for grad_group in grad_groups)
        with torch.no_grad():
            pipeline = self._pipeline(exchange, grad_groups, groups)
            if is_scaled or on_stream:
                pipeline.run()
            else:
                pipeline.start()
        return loss

    def _frozen(self, exchange: PriorityExchange) -> list[nn.Parameter]:
        """Parameters whose state ranks share, that were frozen and kept their gradients: no group
        has them any more, and optimizers go on to update them."""
        if not self._sharded:
            return []
        exchanged = {param.parameter for param in exchange.group_of}
        return [p for p in self._sharded if p.grad is not None and p not in exchanged]

    def _update_frozen(self, parameters: Sequence[nn.Parameter], groups: Groups) -> None:
        """Updates this rank's chunks of them and puts all chunks together. Collective."""
        if not parameters:
            return
        specs = {p: self._sharded[p] for p in parameters}
        with torch.no_grad():
            chunks = {p: _chunk(p, spec, spec.chunk_of(p)) for p, spec in specs.items()}
            update_chunks(chunks, groups, self._optimizer.state, own_step(self._optimizer))
            for parameter, spec in specs.items():
                parameter.copy_(spec.all_gather(chunks[parameter].detach()))

    def _pipeline(
        self, exchange: PriorityExchange, grad_groups: Sequence[ShardedGradGroup], groups: Groups
    ) -> ShardedStepPipeline:
        # Groups that other ranks have gradients of are among them: gathers are collective.
        changed = [
            group
            for group in grad_groups
            if group.changed or any(p.parameter.grad is not None for p in group.params)
        ]
        state, step_on = self._optimizer.state, own_step(self._optimizer)
        pipeline = exchange.step_pipeline(
            {g: _chunk_update(g, groups, state, step_on) for g in changed}
        )
        for grad_group in changed:
            _postpone_sharded(exchange, grad_group, pipeline)
        return pipeline

    def _groups(self) -> Groups:
        groups = self._optimizer.param_groups
        if self._momentum is None:
            return groups
        self._momentum.stepped = True
        return self._momentum.without_momentum(groups)

    def _step_at_once(self, closure: Any) -> Any:
        """The optimizer's own step, which waits for every gradient that it reads."""
        optimizer = self._optimizer
        if closure is None:
            self._complete_all()
        if self._momentum is None:
            return self._own(optimizer, *(() if closure is None else (closure,)))
        loss = None
        if closure is not None:  # SGD calls it once, first; its backward needs the true groups
            with torch.enable_grad():
                loss = closure()
            self._complete_all()
        before = optimizer.param_groups
        optimizer.param_groups = self._groups()
        try:
            self._own(optimizer)
        finally:
            optimizer.param_groups = before
        return loss

    def _complete_all(self) -> None:
        for param in self._exchange().group_of:
            make_dense(param.parameter)

    def _apply(self, groups: Groups) -> None:
        own_step(self._optimizer)(groups, self._optimizer.state)

    def _can_be_lazy(self) -> bool:
        """Whether the optimizer works parameter by parameter; warns once where not."""
        reason = _reason(self._optimizer)
        if reason is None:
            return True
        if not self._warned:
            self._warned = True
            name = type(self._optimizer).__name__
            warnings.warn(
                f"optimizer {name} {reason}: each step waits for all gradients", stacklevel=4
            )
        return False


def _chunk_update(
    grad_group: ShardedGradGroup, groups: Groups, state: dict[Any, Any], step_on: StepOn
) -> Callable[[], None]:
    """The optimizer's step on this rank's chunks of a group's parameters, to be done later with
    the gradients that there are now. Their state stands under the real parameters."""
    chunks: dict[nn.Parameter, nn.Parameter] = {}
    for param, spec in grad_group.specs.items():
        if param.parameter.grad is not None:
            own = grad_group.chunk_of(param)
            chunks[param.parameter] = _chunk(param.parameter, spec, own)
    return partial(update_chunks, chunks, groups, state, step_on)


def _chunk(parameter: nn.Parameter, spec: FlatShardSpec, own: torch.Tensor) -> nn.Parameter:
    """This rank's elements of a parameter, ``own``, with those of its gradient."""
    chunk, gradient = nn.Parameter(own), parameter.grad
    assert gradient is not None
    if isinstance(gradient, ShardedGradient):
        chunk.grad = gradient.take_over()
    else:
        chunk.grad = spec.chunk_of(gradient).clone()  # it may be zeroed before it is used
    return chunk


def _postpone_sharded(
    exchange: PriorityExchange, grad_group: ShardedGradGroup, pipeline: ShardedStepPipeline
) -> None:
    """Makes parameters wait, when touched, for their update and the chunks of the others."""
    parameters = [param.parameter for param in grad_group.params]
    suspended = parameters
    if isinstance(grad_group, FullyShardedGradGroup):
        suspended = []  # they wait to be unsharded anyway, which waits for the pipeline
        exchange.unshard_manager.reshard(grad_group)
    grad_group.start_step(pipeline)

    def update() -> None:
        for parameter in suspended:
            resume(parameter)
            torch.autograd.graph.increment_version(parameter)

    grad_group.update = update
    for parameter in parameters:
        # What autograd has saved of it is not what it saved any more, from now on.
        torch.autograd.graph.increment_version(parameter)
    for parameter in suspended:
        suspend(parameter, lambda: exchange.finish(grad_group))


def releases_not(optimizer: Optimizer | None) -> str | None:
    """Why gradients cannot be released early with an optimizer, in a sentence with the remedy."""
    if optimizer is None:
        return (
            "the plan releases gradients early, that is applies them in backward, and no optimizer "
            f"was given: pass it with the model, or plan with {forbidding(EARLY_RELEASE)}"
        )
    reason = _reason(optimizer)
    if reason is None:
        return None
    return (
        f"optimizer {type(optimizer).__name__} {reason}, so its gradients cannot be released "
        "early: use one of torch's that works element by element, such as AdamW, without step "
        f"hooks, or plan with {forbidding(EARLY_RELEASE)}"
    )


def _reason(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot update one unit at a time."""
    if given_step(optimizer) is not None:
        return "has been given a step of its own"
    if not updates_elementwise(optimizer):
        return "is not known to update each parameter by itself"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "has step hooks"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is differentiable"
    return None


def _is_scaled(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler has handed its scale to the optimizer."""
    return hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")


def _only(groups: Groups, wanted: Collection[nn.Parameter]) -> Groups:
    """The groups with those of their parameters only."""
    return [{**g, "params": [p for p in g["params"] if p in wanted]} for g in groups]
