"""A step on chunks of parameters: each rank updates its own with the user's own optimizer.

The optimizer's ``step`` runs on a view of it whose parameters are the chunks, where they lie in the
parameters' memory; their state stands in ``optimizer.state`` under the real parameters.

All of it happens inside ``step()``, which waits for the last gradients: collectives must be issued
in one order by the thread that trains, and a rank must be able to read its parameters afterwards
without any other rank's help.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..planner.errors import InputError
from .optimizer import ELEMENTWISE
from .pending import resume, suspend
from .priority import PriorityExchange
from .sharded import ShardedParcel
from .sharded_gradient import ShardedGradient
from .sharing import Sharing

Groups = list[dict[str, Any]]
Sharings = Mapping[nn.Parameter, Sharing]
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


def step_parcels(
    exchange: PriorityExchange,
    parcels: Sequence[ShardedParcel],
    groups: Groups,
    state: dict[Any, Any],
    step_on: StepOn,
) -> None:
    """Updates this rank's chunks as gradients arrive, and issues the gathering of the parameters
    in forward order. ``groups`` and ``state`` are the optimizer's. Collective."""
    updated: set[ShardedParcel] = set()

    def update(parcel: ShardedParcel) -> None:
        exchange.finish(parcel)
        updated.add(parcel)
        _update(parcel, groups, state, step_on)

    for parcel in parcels:
        concerned = parcel.changed or any(e.parameter.grad is not None for e in parcel.entries)
        for other in parcels:  # must be updated anyway, while this one comes
            if parcel in updated or parcel.there:
                break
            if other not in updated and other.there and other is not parcel:
                update(other)
        if parcel not in updated:
            update(parcel)
        if concerned:
            _gather(exchange, parcel)


def _update(parcel: ShardedParcel, groups: Groups, state: dict[Any, Any], step_on: StepOn) -> None:
    """The optimizer's step on this rank's chunks of a parcel's parameters."""
    chunks: dict[nn.Parameter, nn.Parameter] = {}
    for entry, sharing in parcel.sharings.items():
        parameter, gradient = entry.parameter, entry.parameter.grad
        if gradient is None:
            continue
        chunk = nn.Parameter(sharing.part(parameter))
        if isinstance(gradient, ShardedGradient):
            gradient.taken = True
            chunk.grad = gradient.part()
        else:
            chunk.grad = sharing.part(gradient)
        chunks[parameter] = chunk
    mine = [{**g, "params": [chunks[p] for p in g["params"] if p in chunks]} for g in groups]
    states: dict[Any, Any] = defaultdict(dict)
    states.update({c: state[p] for p, c in chunks.items() if p in state})
    step_on(mine, states)
    state.update({p: states[c] for p, c in chunks.items() if c in states})


def _gather(exchange: PriorityExchange, parcel: ShardedParcel) -> None:
    """Sends the chunks to all peers; parameters wait for those of the others when touched."""
    parameters = [entry.parameter for entry in parcel.entries]

    def land() -> None:
        for parameter in parameters:
            resume(parameter)
            torch.autograd.graph.increment_version(parameter)

    exchange.gather(parcel)
    parcel.update = land
    for parameter in parameters:
        suspend(parameter, lambda: exchange.finish(parcel))


def cut_state(optimizer: Optimizer, sharings: Sharings) -> None:
    """Replaces state of a parameter's full shape by this rank's chunk of it."""
    for parameter, sharing in sharings.items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if sharing.is_whole(value):
                state[key] = sharing.part(value).clone()
