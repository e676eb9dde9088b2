"""An optimizer whose parameters have been divided: its state follows, slice by slice.

The optimizer stays the same object with the same ``Parameter`` objects in its groups, so schedulers
that hold it stay valid.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...planner.schema.errors import InputError
from ..comm.watchdog import Watchdog
from ..gradients.flat_shard import FlatShardSpec
from ..redistribution.shards import Shard
from .chunks import has_main_weights

_SAVED_BY = "meshwright_rank"
"""The key of an optimizer's saved state that says which rank's part it is, and of how many."""


def mark_state(optimizer: torch.optim.Optimizer) -> None:
    """From now on what the optimizer saves says whose part it is, and no other rank loads it: the
    parts of ranks are of one shape, so that nothing else would tell them apart."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def mark(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[_SAVED_BY] = (rank, ranks)

    def check(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved, count = state.get(_SAVED_BY, (rank, ranks))
        if (saved, count) != (rank, ranks):
            raise InputError(
                f"this optimizer state is the part of rank {saved} of {count}, and is loaded on "
                f"rank {rank} of {ranks}: load on each rank what it has saved itself, or what "
                "full_optimizer_state_dict returned, which any number of ranks may load"
            )

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(check)


def slice_state(optimizer: torch.optim.Optimizer, shards: dict[nn.Parameter, Shard]) -> None:
    """Replaces state of a divided parameter's full shape by this member's slice of it, now and
    after each ``load_state_dict``, which may have been given a single process's."""

    def slice_it(optimizer: torch.optim.Optimizer) -> None:
        for parameter, shard in shards.items():
            _keep_part(optimizer.state.get(parameter, {}), shard.full_shape, shard.take)

    slice_it(optimizer)
    if shards:
        optimizer.register_load_state_dict_post_hook(slice_it)


def shard_state(
    optimizer: torch.optim.Optimizer, sharded: Mapping[nn.Parameter, FlatShardSpec]
) -> None:
    """Replaces state of a parameter's full shape by this rank's chunk of it."""
    for parameter, spec in sharded.items():
        _keep_part(optimizer.state.get(parameter, {}), spec.shape, spec.chunk_of)


def shard_loaded_state(
    optimizer: torch.optim.Optimizer, sharded: Mapping[nn.Parameter, FlatShardSpec]
) -> None:
    """Of what is loaded into the optimizer from now on, it keeps this rank's chunks."""
    loaded: dict[str, Any] = {}

    def restore(optimizer: torch.optim.Optimizer) -> None:
        _restore_types(optimizer, sharded, loaded)
        loaded.clear()

    optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.update(state))
    # Before anything is cut: what was loaded may be whole, and of a parameter that is divided too.
    optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda o: shard_state(o, sharded))


def _restore_types(
    optimizer: torch.optim.Optimizer,
    sharded: Mapping[nn.Parameter, FlatShardSpec],
    loaded: dict[str, Any],
) -> None:
    # Torch makes all state that it loads of its parameter's type; that of main weights is float32.
    numbers = (number for group in loaded["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, _numbered(optimizer).values(), strict=True):
        if parameter not in sharded or not has_main_weights(parameter):
            continue
        for key, value in loaded["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                device = optimizer.state[parameter][key].device
                optimizer.state[parameter][key] = value.to(device)


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
    gathered.pop(_SAVED_BY, None)
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
