"""A parameter whose elements are shared among the peers and whose memory is free, or may be soon:
how its readers are noticed, and how it is saved and loaded."""

# [Note: Resharded parameters]
# A fully sharded parameter stays the same object with the same shape while its storage is empty.
# Its class is swapped for one with ``ResharedParam`` in front (``suspend`` in pending.py), so that
# every torch function that needs the values comes here first and has the whole unsharded, on every
# rank in one order. The storage is emptied and filled in place (``resize`` in fully_sharded.py):
# what autograd has saved has the storage, and finds the values there again. The hooks on saved
# tensors in ``UnshardManager`` notice when autograd takes it out.
#
# Three functions are answered without the whole, as ranks may call them alone: a copy of a whole
# tensor into it (``load_state_dict``) goes to the chunk; ``detach`` while a ``state_dict`` is made
# gives a placeholder, for which the chunk is put into the state; the version counter counts steps.

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.trees import leaves_of
from ...planner.schema.errors import InputError, RunError
from ..redistribution.shards import LocalPart
from .buckets import GradParam
from .flat_shard import FlatShardSpec
from .fully_sharded import FullyShardedGradGroup
from .pending import PARAM_METADATA, PendingParam, bare

if TYPE_CHECKING:
    from .unshard import UnshardManager

SHARDED = "_meshwright_sharded"
"""Where a parameter keeps a reference to who unshards it."""
_SAVING = "_meshwright_saving"
"""Where it keeps what stands for it in a ``state_dict``, while one is made."""

_VERSION: Any = Tensor._version
_WITHOUT_MEMORY = PARAM_METADATA | {_VERSION.__get__, Tensor.is_inference}


class ShardedParam(NamedTuple):
    """A fully sharded parameter, and who unshards it."""

    manager: UnshardManager
    grad_group: FullyShardedGradGroup
    grad_param: GradParam

    @property
    def spec(self) -> FlatShardSpec:
        return self.grad_group.specs[self.grad_param]

    def peek(self) -> Tensor:
        """This rank's chunk, to be read on this rank alone."""
        return self.manager.peek(self.grad_group, self.grad_param)

    def chunk(self) -> Tensor:
        """This rank's chunk, to be changed, on all ranks alike."""
        self.manager.reshard(self.grad_group)
        return self.grad_group.chunks[self.grad_param]


class ShardedParamRef:
    """What a fully sharded parameter knows of who unshards it. Called, it unshards it."""

    def __init__(
        self, manager: UnshardManager, grad_group: FullyShardedGradGroup, grad_param: GradParam
    ) -> None:
        # Weak: the parameter may outlive them.
        self._manager, self._grad_group = weakref.ref(manager), weakref.ref(grad_group)
        self._grad_param = grad_param

    def get(self) -> ShardedParam | None:
        """None where those who unshard it are gone."""
        manager, grad_group = self._manager(), self._grad_group()
        if manager is None or grad_group is None:
            return None
        return ShardedParam(manager, grad_group, self._grad_param)

    def __call__(self) -> None:
        param = self.get()
        if param is not None:
            param.manager.unshard([param.grad_group], ())

    def __reduce__(self) -> Any:
        return bool, ()  # it stands in the parameter's __dict__, and is not saved with it


def sharded_param(parameter: Tensor) -> ShardedParam | None:
    """A parameter that is fully sharded, and who unshards it; None where it is not."""
    reference = parameter.__dict__.get(SHARDED)
    return reference.get() if isinstance(reference, ShardedParamRef) else None


class ResharedParam(PendingParam):
    """Mixed into the class of such a parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WITHOUT_MEMORY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        plain_copy = func is Tensor.copy_ and not torch.is_grad_enabled()
        if plain_copy and isinstance(args[0], ResharedParam) and _copied_to_chunk(*args[:2]):
            return args[0]
        if func is Tensor.detach and _SAVING in args[0].__dict__:
            return args[0].__dict__[_SAVING]
        leaves = leaves_of((args, kwargs))
        with _whole_for(next((t for t in leaves if isinstance(t, ResharedParam)), None)):
            return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _whole_for(self):
            return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _whole_for(self):
            return super().__reduce_ex__(protocol)

    def _finish_for(self, arguments: list[Any]) -> None:
        # All arguments together: to unshard one could reshard another.
        myself: Any = self
        param = sharded_param(myself)
        if param is None:
            raise RunError(
                f"a parameter of shape {list(myself.shape)} is read whose model is gone, and with "
                "it what other ranks have of it: keep the model as long as its parameters"
            )
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        params = [sharded_param(t) for t in tensors if isinstance(t, ResharedParam)]
        groups = [p.grad_group for p in params if p and p.manager is param.manager]
        param.manager.unshard(groups, tensors)


def _whole_for(parameter: Any) -> AbstractContextManager[None]:
    # Outside the model's forward, what is unsharded in it is watched again when it ends.
    param = sharded_param(parameter) if parameter is not None else None
    return param.manager.around_read() if param is not None else nullcontext()


def _copied_to_chunk(target: Any, source: Any) -> bool:
    """Copies a whole tensor into the chunk of ``target``; False where that cannot be."""
    if source is target:
        return True
    param = sharded_param(target)
    if param is None or not isinstance(source, Tensor) or isinstance(source, PendingParam):
        return False
    if source.shape != target.shape or source.is_meta:
        return False
    chunk = param.chunk()
    chunk.copy_(param.spec.chunk_of(source.to(chunk.device, chunk.dtype)))
    torch.autograd.graph.increment_version(target)  # as the copy into the whole would have
    return True


class LocalChunk(LocalPart):
    """A parameter in a ``state_dict`` of which this rank has a chunk: that of number ``slot`` of as
    many as there are ``peers``. ``held_shape`` is the shape of what they make up together."""

    # These names stand in checkpoints.
    peers: int
    slot: int
    held_shape: tuple[int, ...]

    @staticmethod
    def of(chunk: Tensor, spec: FlatShardSpec) -> LocalChunk:
        marked = chunk.as_subclass(LocalChunk)
        marked.peers, marked.slot, marked.held_shape = (
            spec.peers,
            spec.group_rank,
            tuple(spec.shape),
        )
        return marked

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalChunk:
        copied = self.as_subclass(Tensor).clone().as_subclass(LocalChunk)
        copied.__dict__.update(self.__dict__)
        return copied

    def fits(self, spec: FlatShardSpec) -> bool:
        """Whether it is the same chunk of the same whole."""
        own = spec.peers, spec.group_rank, tuple(spec.shape)
        return (self.peers, self.slot, self.held_shape) == own


torch.serialization.add_safe_globals([LocalChunk])  # so that torch.load reads it back by default


def install_chunks(model: nn.Module, sharded: Mapping[nn.Parameter, FlatShardSpec]) -> None:
    """Makes the modules whose parameters are fully sharded save and load this rank's chunks."""
    for module in model.modules():
        if any(p in sharded for p in module._parameters.values() if p is not None):
            module.register_state_dict_pre_hook(_before_saving)  # type: ignore[no-untyped-call]
            module.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]


def _sharded_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedParam]]:
    for leaf, parameter in module._parameters.items():
        param = sharded_param(parameter) if parameter is not None else None
        if parameter is not None and param is not None:
            yield leaf, parameter, param


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        for _, parameter, param in _sharded_params(module):
            parameter.__dict__[_SAVING] = LocalChunk.of(param.peek(), param.spec)


def _after_saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for leaf, parameter, _ in _sharded_params(module):
        described = parameter.__dict__.pop(_SAVING, None)
        if described is not None and prefix + leaf in state:
            state[prefix + leaf] = described


def _before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for leaf, parameter, param in _sharded_params(module):
        value, spec = state.get(prefix + leaf), param.spec
        if not isinstance(value, LocalChunk):
            param.chunk()  # reshards it, so that the whole which is copied goes to the chunk
            continue
        if not value.fits(spec):
            raise InputError(
                f"{prefix + leaf!r} is chunk {value.slot} of {value.peers} of shape "
                f"{list(value.held_shape)}, this rank has chunk {spec.group_rank} of {spec.peers} "
                f"of shape {list(spec.shape)}: load a full_state_dict"
            )
        param.chunk().copy_(value.as_subclass(Tensor))
        torch.autograd.graph.increment_version(parameter)  # as a copy into the whole would
        state[prefix + leaf] = parameter  # which torch copies onto itself: nothing is left to do


def resident_parameters(model: nn.Module) -> list[Tensor]:
    """What this rank has in memory of a model's parameters now: chunks, and what is whole."""
    sharded = (sharded_param(parameter) for parameter in model.parameters())
    chunks = [param.peek() for param in sharded if param is not None]
    return [*(bare(parameter) for parameter in model.parameters()), *chunks]


def whole_chunks(
    model: nn.Module, sharded: Mapping[nn.Parameter, FlatShardSpec]
) -> Iterator[tuple[str, Any]]:
    """A model's state entry by entry, chunks put together. Collective over their peers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    done: dict[nn.Parameter, Tensor] = {}  # tied parameters are gathered once
    for name, value in model.state_dict().items():
        if isinstance(value, LocalChunk):
            parameter = named[name]
            if parameter not in done:
                done[parameter] = sharded[parameter].all_gather(value.as_subclass(Tensor))
            value = done[parameter]
        yield name, value
