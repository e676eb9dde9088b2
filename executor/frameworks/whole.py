"""Frameworks save ``state_dict()`` of one rank: for as long as they do, that of a planned model and
of its optimizer is what one process would have."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...models.compiled import unwrapped
from ...planner.schema.errors import InputError
from ..checkpoint.folder import refused_apart
from ..comm.steps import parameters_of
from ..parallel import (
    full_optimizer_state_dict,
    full_state_dict,
    is_parallel,
    load_full_optimizer_state_dict,
    run_of,
)


def check_saved_by(framework: str, model: nn.Module) -> None:
    """Raises ``InputError`` for a plan under which a rank has what a framework does not save."""
    plan = run_of(model).whole_plan
    if plan.local_steps is not None:
        raise refused_apart("let it save nothing", f" of {framework}")
    waiting = next((unit for unit in plan.units if unit.lossy), None)
    if waiting is not None:
        raise InputError(
            f"unit {waiting.name!r} leaves part of its gradient for later steps "
            f"({waiting.exchange}), which a checkpoint of {framework} does not hold: save with "
            "mw.checkpoint and let it save nothing, or plan without --min-fidelity (min_fidelity)"
        )


def tell_even_shares(framework: str, model: nn.Module) -> None:
    """Says what a framework that feeds all ranks alike makes of planned shares of the batch."""
    run = run_of(model)
    plan, rank = run.whole_plan, run.world.rank
    if not plan.local_batch_sizes:
        return
    run.local_batches.satisfied()  # it need not be said by each rank that gets more than planned
    if rank == 0:
        sizes = ", ".join(str(plan.local_batch_size(r)) for r in range(plan.world_size))
        warnings.warn(
            f"{framework} feeds all ranks alike, and the plan, made for ranks of unequal speed, "
            f"has {sizes} samples for them: it trains the same, and steps take longer than "
            "predicted; a loop of your own may load plan.local_batch_size(rank) samples",
            stacklevel=4,
        )


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer itself, of what a framework has wrapped around it."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


Pairs = Sequence[tuple[nn.Module, Optimizer]]


def pairs_of(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Pairs:
    """Each planned model with each optimizer that updates parameters of it."""
    planned = [unwrapped(model) for model in models if is_parallel(model)]
    return [
        (model, optimizer)
        for model in planned
        for optimizer in map(innermost, optimizers)
        if parameters_of(optimizer) & set(model.parameters())
    ]


def is_whole(model: nn.Module) -> bool:
    """Whether ``state_dict()`` of a planned model is whole at the moment."""
    return "state_dict" in vars(unwrapped(model))


@contextmanager
def saving_whole(
    framework: str, models: Sequence[nn.Module], pairs: Pairs, *, rank0_only: bool
) -> Iterator[None]:
    """While the block runs, ``state_dict()`` of models and optimizers is whole. Collective at its
    beginning and not later, so that a framework may ask on one rank alone: rank 0 where
    ``rank0_only``, as the others then keep no copy of the models."""
    own = [unwrapped(model) for model in models if is_parallel(model)]
    own = [model for model in own if not is_whole(model)]  # a block inside a block
    for model in own:
        check_saved_by(framework, model)
    replaced: list[Any] = []
    try:
        for model in own:
            state = full_state_dict(model, rank0_only=rank0_only)
            vars(model)["state_dict"] = _state_of_module(state)
            replaced.append(model)
        for model, optimizer in pairs:
            if "state_dict" not in vars(optimizer):
                of_all = full_optimizer_state_dict(model, optimizer)
                vars(optimizer)["state_dict"] = lambda of_all=of_all: of_all
                replaced.append(optimizer)
        yield
    finally:
        for changed in replaced:
            del vars(changed)["state_dict"]


def _state_of_module(state: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        # Asked for by a module around this one, too: what torch.compile returns.
        found = OrderedDict[str, Any]() if destination is None else destination
        found.update({f"{prefix}{name}": value for name, value in state.items()})
        return found

    return state_dict


@contextmanager
def loading_whole(pairs: Pairs) -> Iterator[None]:
    """While the block runs, optimizers load whole state, each rank its part."""
    replaced: list[Optimizer] = []
    try:
        for model, optimizer in pairs:
            vars(optimizer)["load_state_dict"] = _loading(model, optimizer)
            replaced.append(optimizer)
        yield
    finally:
        for optimizer in replaced:
            vars(optimizer).pop("load_state_dict", None)


def _loading(model: nn.Module, optimizer: Optimizer) -> Callable[[dict[str, Any]], None]:
    def load_state_dict(state: dict[str, Any]) -> None:
        # What loads the parts is the optimizer's own again.
        del vars(optimizer)["load_state_dict"]
        try:
            load_full_optimizer_state_dict(model, optimizer, state)
        finally:
            vars(optimizer)["load_state_dict"] = load_state_dict

    return load_state_dict
