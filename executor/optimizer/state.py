"""An optimizer whose parameters have been divided: its state follows, slice by slice.

The optimizer stays the same object with the same ``Parameter`` objects in its groups, so schedulers
that hold it stay valid.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.schema.errors import InputError
from ...planner.schema.goal import OPTIMIZERS, OptimizerName
from ..comm.steps import parameters_of
from ..comm.watchdog import Watchdog
from ..gradients.flat_shard import FlatShardSpec
from ..redistribution.shards import Shard

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


def slice_state(optimizer: torch.optim.Optimizer, shards: dict[nn.Parameter, Shard]) -> None:
    """Replaces state of a divided parameter's full shape by this member's slice of it."""
    for parameter, shard in shards.items():
        _keep_part(optimizer.state.get(parameter, {}), shard.full_shape, shard.take)


def shard_state(
    optimizer: torch.optim.Optimizer, sharded: Mapping[nn.Parameter, FlatShardSpec]
) -> None:
    """Replaces state of a parameter's full shape by this rank's chunk of it."""
    for parameter, spec in sharded.items():
        _keep_part(optimizer.state.get(parameter, {}), spec.shape, spec.chunk_of)


def _keep_part(state: dict[str, Any], shape: torch.Size, part: Callable[[Tensor], Tensor]) -> None:
    # A copy, as a view would keep the memory of the whole.
    state.update(_changed(state, shape, lambda value: part(value).clone()))


def gather_optimizer_state(
    optimizer: torch.optim.Optimizer,
    shards: dict[nn.Parameter, Shard],
    sharded: dict[nn.Parameter, FlatShardSpec],
    watch: Watchdog,
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of divided parameters, and of those that ranks
    update in chunks, whole. Collective."""
    gathered: dict[str, Any] = optimizer.state_dict()
    whole = dict(gathered["state"])
    for index, parameter in _numbered(optimizer).items():
        if index not in whole:
            continue
        # Chunks first: what they make up may be the slice of a divided parameter.
        if parameter in sharded:
            spec = sharded[parameter]
            whole[index] = _changed(whole[index], torch.Size([spec.own_numel]), spec.all_gather)
        if parameter in shards:
            gather = partial(shards[parameter].gather, watch=watch)
            whole[index] = _changed(whole[index], parameter.shape, gather)
    return {**gathered, "state": whole}


def scatter_optimizer_state(
    optimizer: torch.optim.Optimizer, shards: dict[nn.Parameter, Shard], state: dict[str, Any]
) -> None:
    """Loads what ``gather_optimizer_state`` returned, or a single process's ``state_dict``."""
    missing = [key for key in ("state", "param_groups") if key not in state]
    if missing:
        raise InputError(
            f"this optimizer state holds no {missing[0]!r}: give what full_optimizer_state_dict "
            "returned, or what a single process's optimizer.state_dict() did"
        )
    local = dict(state["state"])
    for index, parameter in _numbered(optimizer).items():
        if index in local and parameter in shards:
            shard = shards[parameter]
            local[index] = _changed(local[index], shard.full_shape, shard.take)
    optimizer.load_state_dict({**state, "state": local})


def _changed(
    state: dict[str, Any], shape: torch.Size, change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """A parameter's state with ``change`` done to what has an element for each of ``shape``."""
    # Not to a step count, which is a scalar, though a parameter may be one.
    return {
        k: change(v) if isinstance(v, Tensor) and v.ndim > 0 and v.shape == shape else v
        for k, v in state.items()
    }


def _numbered(optimizer: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Parameters by the numbers that ``state_dict`` gives them."""
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


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
