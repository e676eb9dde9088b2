"""``state_dict`` without communication, the gathered state, and loading either.

Divided entries of ``model.state_dict()`` (or of any submodule's) are DTensors over the group's
members, made from what this rank holds. Saving them on one rank cannot hang.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm.watchdog import Watchdog
from .shards import LocalPart, LocalShard, Shard


def install(model: nn.Module, shards: dict[str, Shard]) -> None:
    """Makes the modules that hold divided tensors save and load them as such."""
    owned: dict[str, dict[str, Shard]] = {}
    for name, shard in shards.items():
        path, _, leaf = name.rpartition(".")
        owned.setdefault(path, {})[leaf] = shard
    for path, entries in owned.items():
        _install_on(model.get_submodule(path), entries)


def _install_on(module: nn.Module, entries: dict[str, Shard]) -> None:
    def describe(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for leaf, shard in entries.items():
            value = state.get(prefix + leaf)
            # ``keep_vars`` asks for the parameters themselves.
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter | LocalPart):
                state[prefix + leaf] = shard.describe(value)

    def accept(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for leaf, shard in entries.items():
            value = state.get(prefix + leaf)
            if isinstance(value, Tensor) and not isinstance(value, LocalPart):
                state[prefix + leaf] = shard.accept(value)

    module.register_state_dict_post_hook(describe)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(accept)  # type: ignore[no-untyped-call]


def gather_state(
    state: Iterable[tuple[str, Any]],
    shards: dict[str, Shard],
    watch: Watchdog,
    *,
    rank: int,
    only: int | None,
) -> dict[str, Any]:
    """A state with every divided entry whole: plain tensors, new ones where they were divided.

    With ``only`` that rank alone gets it, and groups without it need not gather.
    """
    whole: dict[str, Any] = {}
    done: dict[int, Tensor] = {}
    wanted = only is None or only == rank
    for name, value in state:
        shard = shards.get(name)
        if shard is None:
            whole[name] = value
        elif only is None or only in shard.group.ranks:
            if id(shard) not in done:
                full = shard.gather(_local(value), watch)
                done[id(shard)] = full if wanted else full.new_empty(0)
            whole[name] = done[id(shard)]
    return whole if wanted else {}


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return value.to_local()
    return value.as_subclass(Tensor) if isinstance(value, LocalShard) else value
