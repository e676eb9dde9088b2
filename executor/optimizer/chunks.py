"""A model's state where ranks keep chunks of parameters: saved without communication, loaded from
chunks or from whole tensors, and put together where somebody asks for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.schema.errors import InputError
from ..gradients.flat_shard import FlatShardSpec
from ..gradients.pending import bare
from ..gradients.reshard import SAVING, use_of
from ..redistribution.shards import LocalPart


class LocalChunk(LocalPart):
    """A parameter in a ``state_dict`` of which this rank has a chunk: the elements from ``slot``
    times the chunk's size on, in the order in which they lie in memory. ``peers`` is the number of
    chunks, ``held_shape`` the shape of what they make up together."""

    peers: int
    slot: int
    held_shape: tuple[int, ...]

    @staticmethod
    def of(chunk: Tensor, sharing: FlatShardSpec) -> LocalChunk:
        """A rank's chunk, described."""
        marked = chunk.as_subclass(LocalChunk)
        marked.peers, marked.slot = sharing.peers, sharing.slot
        marked.held_shape = tuple(sharing.shape)
        return marked

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalChunk:
        copied = self.as_subclass(Tensor).clone().as_subclass(LocalChunk)
        copied.__dict__.update(self.__dict__)
        return copied

    def fits(self, sharing: FlatShardSpec) -> bool:
        """Whether it is the same chunk of the same whole."""
        place = self.peers, self.slot, self.held_shape
        return place == (sharing.peers, sharing.slot, tuple(sharing.shape))


torch.serialization.add_safe_globals([LocalChunk])  # so that torch.load reads it back by default


def install_chunks(model: nn.Module, sharings: Mapping[nn.Parameter, FlatShardSpec]) -> None:
    """Makes the modules whose parameters are fully sharded save and load this rank's chunks."""
    for module in model.modules():
        if any(p in sharings for p in module._parameters.values() if p is not None):
            module.register_state_dict_pre_hook(_before_saving)  # type: ignore[no-untyped-call]
            module.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]


def _chunks(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    for leaf, parameter in module._parameters.items():
        used = use_of(parameter) if parameter is not None else None
        if parameter is not None and used is not None:
            yield leaf, parameter, used


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for _, parameter, used in () if keep_vars else _chunks(module):
        chunk = used.fetcher.peek(used.grad_group, used.entry)
        described = LocalChunk.of(chunk, used.grad_group.sharings[used.entry])
        parameter.__dict__[SAVING] = described


def _after_saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for leaf, parameter, _ in _chunks(module):
        described = parameter.__dict__.pop(SAVING, None)
        if described is not None and prefix + leaf in state:
            state[prefix + leaf] = described


def _before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for leaf, parameter, used in _chunks(module):
        value, sharing = state.get(prefix + leaf), used.grad_group.sharings[used.entry]
        if not isinstance(value, LocalChunk):
            used.fetcher.chunk(used.grad_group, used.entry)  # what is copied goes to the chunk
            continue
        if not value.fits(sharing):
            raise InputError(
                f"{prefix + leaf!r} is chunk {value.slot} of {value.peers} of shape "
                f"{list(value.held_shape)}, this rank has chunk {sharing.slot} of {sharing.peers} "
                f"of shape {list(sharing.shape)}: load a full_state_dict"
            )
        used.fetcher.chunk(used.grad_group, used.entry).copy_(value.as_subclass(Tensor))
        torch.autograd.graph.increment_version(parameter)  # as a copy into the whole would
        state[prefix + leaf] = parameter


def held_parameters(model: nn.Module) -> list[Tensor]:
    """What this rank has in memory of a model's parameters now: chunks, and what is whole."""
    held = []
    for parameter in model.parameters():
        used = use_of(parameter)
        held.append(bare(parameter))
        if used is not None:
            held.append(used.fetcher.peek(used.grad_group, used.entry))
    return held


def whole_chunks(
    model: nn.Module, sharings: Mapping[nn.Parameter, FlatShardSpec]
) -> Iterator[tuple[str, Any]]:
    """A model's state entry by entry, chunks put together. Collective over their peers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    done: dict[nn.Parameter, Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, LocalChunk):
            parameter = named[name]
            if parameter not in done:
                done[parameter] = sharings[parameter].whole(value.as_subclass(Tensor))
            value = done[parameter]
        yield name, value
