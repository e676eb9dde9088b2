"""A step on chunks of parameters: each rank updates its own with the user's own optimizer.

The optimizer's ``step`` runs on a view of it whose parameters are the chunks, where they lie in the
parameters' memory; their state stands in ``optimizer.state`` under the real parameters.

``step()`` settles what is to be done, with which hyperparameters and gradients, and returns; see
``trip`` for what does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...planner.schema.errors import InputError
from ..gradients.flat_shard import FlatShardSpec
from ..gradients.fully_sharded import FullyShardedGradGroup
from ..gradients.pending import resume, suspend
from ..gradients.priority import PriorityExchange
from ..gradients.sharded import ShardedGradGroup
from ..gradients.sharded_gradient import ShardedGradient
from ..gradients.step_pipeline import ShardedStepPipeline
from .state import ELEMENTWISE

Groups = list[dict[str, Any]]
Sharings = Mapping[nn.Parameter, FlatShardSpec]
StepOn = Callable[[Groups, dict[Any, Any]], None]
"""The optimizer's own step on groups of parameters and their state."""


def check(optimizer: Optimizer) -> None:
    """Raises ``InputError`` unless the optimizer can update any part of a parameter by itself."""
    own: Any = type(optimizer).step
    if not any(own is getattr(torch.optim, name).step for name in ELEMENTWISE):
        raise InputError(
            f"optimizer {type(optimizer).__name__} is not known to work element by element, and "
            f"the plan shards the exchange of some units: use one of {', '.join(ELEMENTWISE)}, or "
            "plan with exchange 'dense'"
        )


def step_grad_groups(
    exchange: PriorityExchange,
    grad_groups: Sequence[ShardedGradGroup],
    groups: Groups,
    state: dict[Any, Any],
    step_on: StepOn,
    *,
    aside: bool,
) -> None:
    """Updates this rank's chunks as gradients arrive, and gathers the parameters in forward order;
    ``aside`` while the caller goes on. ``groups`` and ``state`` are the optimizer's. Collective."""
    concerned = [
        p for p in grad_groups if p.changed or any(e.parameter.grad is not None for e in p.entries)
    ]
    trip = exchange.trip({p: _updating(p, groups, state, step_on) for p in concerned})
    for grad_group in concerned:
        _postpone(exchange, grad_group, trip)
    trip.start() if aside else trip.run()


def _updating(
    grad_group: ShardedGradGroup, groups: Groups, state: dict[Any, Any], step_on: StepOn
) -> Callable[[], None]:
    """The optimizer's step on this rank's chunks of a parcel's parameters, to be done later with
    the gradients that there are now."""
    chunks: dict[nn.Parameter, nn.Parameter] = {}
    for entry, sharing in grad_group.sharings.items():
        parameter, gradient = entry.parameter, entry.parameter.grad
        if gradient is None:
            continue
        chunks[parameter] = chunk = nn.Parameter(grad_group.own(entry))
        if isinstance(gradient, ShardedGradient):
            chunk.grad = gradient.taken_over()
        else:
            chunk.grad = sharing.part(gradient).clone()  # it may be zeroed before it is used
    mine = [{**g, "params": [chunks[p] for p in g["params"] if p in chunks]} for g in groups]

    def update() -> None:
        states: dict[Any, Any] = defaultdict(dict)
        states.update({c: state[p] for p, c in chunks.items() if p in state})
        step_on(mine, states)
        state.update({p: states[c] for p, c in chunks.items() if c in states})

    return update


def _postpone(
    exchange: PriorityExchange, grad_group: ShardedGradGroup, trip: ShardedStepPipeline
) -> None:
    """Makes parameters wait, when touched, for their update and the chunks of the others."""
    parameters = [entry.parameter for entry in grad_group.entries]

    def land() -> None:
        for parameter in parameters:
            resume(parameter)
            torch.autograd.graph.increment_version(parameter)

    if isinstance(grad_group, FullyShardedGradGroup):
        _postpone_alone(exchange, grad_group, trip)
        return
    grad_group.depart(trip)
    grad_group.update = land
    for parameter in parameters:
        # What autograd has saved of it is not what it saved any more, from now on.
        torch.autograd.graph.increment_version(parameter)
        suspend(parameter, lambda: exchange.finish(grad_group))


def _postpone_alone(
    exchange: PriorityExchange, grad_group: FullyShardedGradGroup, trip: ShardedStepPipeline
) -> None:
    """The same where parameters wait for their next use anyway."""
    assert exchange.uses is not None
    exchange.uses.depart(grad_group)
    grad_group.depart(trip)
    grad_group.update = _nothing
    for entry in grad_group.entries:
        torch.autograd.graph.increment_version(entry.parameter)


def _nothing() -> None:
    """What is left to do once the chunks are updated."""


def cut_state(optimizer: Optimizer, sharings: Sharings) -> None:
    """Replaces state of a parameter's full shape by this rank's chunk of it."""
    for parameter, sharing in sharings.items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if sharing.is_whole(value):
                state[key] = sharing.part(value).clone()
