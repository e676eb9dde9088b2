"""Divided parameters and buffers: which slice this rank holds, the whole from all slices, and both
in a ``state_dict``.

Divided entries of ``model.state_dict()`` (or of any submodule's) are DTensors over the group's
members, made from what this rank holds, without communication: saving them on one rank cannot hang.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...models.spec import ParameterCut
from ...models.splits import join_parameter, slice_parameter
from ...planner.schema.errors import InputError
from ...planner.schema.layout import Layout, Style
from ...planner.schema.plan import UnitPlan
from ..comm.groups import Group, Place, World
from ..comm.two_way import gather_rows
from ..comm.watchdog import Watchdog

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. To import these takes most of a second, which planning can do
    without: where nobody has, nothing is one."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


class LocalTensor(Tensor):
    """What this rank has of a tensor, in a ``state_dict``. Where it is copied, moved or computed
    with, as of the best weights so far or of an average, what that makes knows which part it is."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        base: Any = super()
        made = base.__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, LocalTensor) and not made.__dict__:
            parts = (a for a in args if isinstance(a, type(made)) and a.shape == made.shape)
            made.__dict__.update(next(parts, made).__dict__)
        return made


class LocalShard(LocalTensor):
    """A slice in a ``state_dict`` that no DTensor can describe: unevenly divided packed blocks, or
    members that are not in the order of ranks. ``dim``, ``blocks``, ``degree``, ``member`` and
    ``full_shape`` say which slice it is.
    """

    dim_cut: int
    blocks: int
    degree: int
    member: int
    full_shape: tuple[int, ...]

    @staticmethod
    def of(
        local: Tensor, full_shape: torch.Size, dim: int, blocks: int, degree: int, member: int
    ) -> LocalShard:
        """``local``, sharing its memory, with what says which slice it is."""
        shard = local.as_subclass(LocalShard)
        shard.dim_cut, shard.blocks, shard.degree, shard.member = dim, blocks, degree, member
        shard.full_shape = tuple(full_shape)
        return shard

    @property
    def place(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        """All that says which slice it is."""
        return self.dim_cut, self.blocks, self.degree, self.member, self.full_shape


# The ``member`` of a ``LocalShard`` on a rank that its unit leaves idle.
NOWHERE = -1


# The attribute of a DTensor in a ``state_dict`` that says which member's slice it holds.
_MEMBER = "_meshwright_member"


class LocalPart(LocalTensor):
    """A part of this rank's slice, in a ``state_dict``, which others than members share."""


@dataclass(frozen=True, eq=False)
class Shard:
    """One member's slice of a parameter or buffer, which ``degree`` members divide. ``names`` are
    all its names in the model."""

    names: tuple[str, ...]
    cut: ParameterCut
    degree: int
    group: Group
    full_shape: torch.Size
    full_stride: tuple[int, ...]

    @property
    def parts(self) -> int:
        """How many parts of it the members share out."""
        return self.cut.parts(self.full_shape[self.cut.dim])

    def take(self, full: Tensor) -> Tensor:
        """This member's slice of the whole."""
        self._check_shape(full)
        return slice_parameter(full, self.cut, self.degree, self.group.member)

    def _check_shape(self, full: Tensor) -> None:
        if full.shape != self.full_shape:
            raise InputError(
                f"{self.names[0]!r} has shape {list(full.shape)}, expected "
                f"{list(self.full_shape)}: load a state of the same model"
            )

    def describe(self, local: Tensor) -> Tensor:
        """The slice as it stands in a ``state_dict``. Communicates nothing."""
        placement = self._placement()
        if placement is None:
            return self._mark(local)
        from torch.distributed.tensor import DTensor

        handle = self.group.handle
        assert handle is not None
        mesh = DeviceMesh.from_group(handle, local.device.type)
        # Unchecked, as a check communicates; with shape and stride, as slices may be uneven.
        described = DTensor.from_local(
            local, mesh, [placement], run_check=False,
            shape=self.full_shape, stride=self.full_stride,
        )  # fmt: skip
        # A DTensor that one rank alone has saved says nothing of whose slice it holds.
        described.__dict__[_MEMBER] = self.group.member
        return described

    def _placement(self) -> Placement | None:
        """How DTensor would call this division, None where it has no word for it."""
        from torch.distributed.tensor.placement_types import Shard, _StridedShard

        if not self.group.ascending:
            return None
        if self.cut.blocks == 1:
            return Shard(self.cut.dim)
        if self.full_shape[self.cut.dim] % (self.cut.blocks * self.degree):
            return None
        return _StridedShard(self.cut.dim, split_factor=self.cut.blocks)

    def _mark(self, local: Tensor) -> LocalShard:
        cut, member = self.cut, self.group.member
        return LocalShard.of(local, self.full_shape, cut.dim, cut.blocks, self.degree, member)

    def accept(self, value: Tensor) -> Tensor:
        """The slice out of what a ``state_dict`` offers: the whole, or the same slice."""
        if is_dtensor(value):
            self._check_member(value)
            same = value.placements == (self._placement(),) and value.shape == self.full_shape
            if same and value.device_mesh.mesh.tolist() == list(self.group.ranks):
                return value.to_local()
            return self.take(value.full_tensor())
        if isinstance(value, LocalShard):
            if value.place != self._mark(value).place:
                raise InputError(
                    f"{self.names[0]!r} is a slice of another division: load a full_state_dict"
                )
            return value.as_subclass(Tensor)
        return self.take(value)

    def _check_member(self, value: Any) -> None:
        ranks = value.device_mesh.mesh.tolist()
        saved, rank = value.__dict__.get(_MEMBER), self.group.ranks[self.group.member]
        if saved is not None and ranks[saved] != rank:
            raise InputError(
                f"{self.names[0]!r} is the slice of rank {ranks[saved]}, and is loaded on rank "
                f"{rank}: load on each rank what it has saved itself, or what full_state_dict "
                "returned"
            )

    def gather(self, local: Tensor, watch: Watchdog) -> Tensor:
        """The whole, on every member. Collective over the group."""
        length = self.full_shape[self.cut.dim]
        shapes = []
        for member in range(self.degree):
            shape = list(self.full_shape)
            bounds = self.cut.bounds(length, self.degree, member)
            shape[self.cut.dim] = sum(right - left for left, right in bounds)
            shapes.append(torch.Size(shape))
        # Padded to the longest: gloo gathers tensors of one size only.
        padded = local.new_zeros(max(shape.numel() for shape in shapes))
        padded[: local.numel()] = local.reshape(-1)
        parts = padded.new_empty(len(shapes), padded.numel())
        doing = f"gathering {self.names[0]!r}"
        watch.issued(doing, self.group)
        # Bytes, so that every dtype travels.
        work, _ = gather_rows(parts.view(torch.uint8), padded.view(torch.uint8), self.group)
        watch.wait(work, self.group, doing)
        ranks = self.group.group_ranks
        shards = [parts[ranks[m]][: s.numel()].view(s) for m, s in enumerate(shapes)]
        return join_parameter(shards, self.cut, self.full_shape)


@dataclass(frozen=True, eq=False)
class SubsetShard(Shard):
    """A parameter or buffer of a unit that takes a part of the ranks. It lives where it is used:
    a rank that the unit leaves idle has an empty tensor in its place, and gradients, optimizer
    state and memory are those of the ranks that compute. A gathered state is sent from the unit's
    first position to all; ``state_dict``, which never communicates, has an empty ``LocalShard`` on
    idle ranks.

    ``group`` are all ranks, in the order of positions; ``slice_`` is this rank's slice where the
    tensor is divided."""

    layout: Layout
    world: World
    slice_: Shard | None = None

    @staticmethod
    def of(
        world: World,
        layout: Layout,
        name: str,
        names: tuple[str, ...],
        tensor: Tensor,
        cut: ParameterCut | None,
    ) -> SubsetShard:
        """That of ``tensor``, a unit's own ``name`` for it being one of its ``names``."""
        full, part = (tensor.shape, tensor.stride()), None
        if cut is not None and layout.place(world.position) is not None:
            part = Shard(names, cut, layout.degree, world.redistribution[layout], *full)
        everyone = world.crossings[range(world.size)]
        degree = layout.degree if cut is not None else 1
        whole = cut or ParameterCut(name, 0)
        return SubsetShard(names, whole, degree, everyone, *full, layout, world, part)

    @property
    def here(self) -> bool:
        return self.layout.place(self.world.position) is not None

    def take(self, full: Tensor) -> Tensor:
        self._check_shape(full)
        if not self.here:
            return full.new_empty(0)
        return full if self.slice_ is None else self.slice_.take(full)

    def describe(self, local: Tensor) -> Tensor:
        if self.here:
            return local if self.slice_ is None else self.slice_.describe(local)
        return LocalShard.of(local, self.full_shape, 0, 0, self.degree, NOWHERE)

    def accept(self, value: Tensor) -> Tensor:
        if isinstance(value, LocalShard) and (value.member == NOWHERE) == self.here:
            raise InputError(
                f"{self.names[0]!r} lives on other ranks in the state that is loaded: load a "
                "full_state_dict"
            )
        if not self.here:
            plain = value.to_local() if is_dtensor(value) else value
            return torch.empty(0, dtype=plain.dtype, device=plain.device)
        return self.take(value) if self.slice_ is None else self.slice_.accept(value)

    def gather(self, local: Tensor, watch: Watchdog) -> Tensor:
        """The whole, on every rank. Collective over all."""
        if not self.here:
            full = local.new_empty(self.full_shape)
        elif self.slice_ is not None:
            full = self.slice_.gather(local, watch)
        else:
            full = local.detach().clone(memory_format=torch.contiguous_format)
        doing = f"fetching {self.names[0]!r}"
        watch.issued(doing, self.group)
        source = self.world.placement[self.layout.first]
        wire = full.contiguous().view(-1).view(torch.uint8)
        work = dist.broadcast(wire, src=source, group=self.group.handle, async_op=True)
        watch.wait(work, self.group, doing)
        return wire.view(full.dtype).view(self.full_shape)


@dataclass
class ModelShards:
    """What this rank holds of the parameters and buffers that a plan divides. ``names`` are all
    names of each tensor of the model, by its identity (``aliases``).

    ``places`` and ``styles`` are those of the unit that a module belongs to, by the module's name,
    where the unit is divided or leaves ranks idle.
    """

    names: dict[int, list[str]]
    parameters: dict[nn.Parameter, Shard] = field(default_factory=dict)
    buffers: dict[int, Shard] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    styles: dict[str, Style] = field(default_factory=dict)
    _gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.buffers or tensor in self.parameters

    def names_of(self, tensor: Tensor) -> tuple[str, ...]:
        return tuple(self.names[id(tensor)])

    def add(self, tensor: Tensor, shard: Shard) -> None:
        """Notes what this rank keeps of a tensor that is about to be sliced."""
        if not isinstance(tensor, nn.Parameter):
            self.buffers[id(tensor)] = shard
        elif tensor not in self.parameters:
            self.parameters[tensor] = shard
            if tensor.grad is not None:
                # Off until the parameter is sliced: torch takes no gradient of another shape.
                self._gradients[tensor], tensor.grad = tensor.grad, None

    def slice_gradients(self) -> None:
        """Gives the parameters, which have been sliced, their part of the gradients they had."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = self.parameters[parameter].take(gradient)
        self._gradients.clear()

    def add_modules(self, model: nn.Module, unit: UnitPlan, place: Place) -> None:
        """Notes place and style of the unit for every module inside it."""
        for path in unit.modules:
            for name, _ in model.get_submodule(path).named_modules(prefix=path):
                self.places[name], self.styles[name] = place, unit.style

    @property
    def by_name(self) -> dict[str, Shard]:
        """Each divided parameter's and buffer's slice, under all of its names."""
        shards = [*self.parameters.values(), *self.buffers.values()]
        return {name: shard for shard in shards for name in shard.names}


def aliases(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter and buffer, by the tensor's identity."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return names


# -- state dicts -------------------------------------------------------------------------------


def install(model: nn.Module, shards: dict[str, Shard]) -> None:
    """Makes the modules that hold divided tensors save and load them as such."""
    owned: dict[str, dict[str, Shard]] = {}
    for name, shard in shards.items():
        path, _, leaf = name.rpartition(".")
        owned.setdefault(path, {})[leaf] = shard
    done: set[nn.Module] = set()
    for path, own in owned.items():
        module = model.get_submodule(path)
        if module not in done:  # a module may have several names
            done.add(module)
            _install_on(module, own)


def _install_on(module: nn.Module, shards: dict[str, Shard]) -> None:
    # Closures, as at the ends of units: ``copy.deepcopy`` of a module takes functions as they
    # are, and would copy what a bound method or a partial holds, down to process groups.
    def describe(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for leaf, shard in shards.items():
            value = state.get(prefix + leaf)
            # ``keep_vars`` asks for the parameters themselves.
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter | LocalPart):
                state[prefix + leaf] = shard.describe(value)

    def accept(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for leaf, shard in shards.items():
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
                with torch.no_grad():
                    local = value.to_local() if is_dtensor(value) else value
                    plain = local.as_subclass(Tensor) if isinstance(local, LocalShard) else local
                full = shard.gather(plain, watch)
                # Where nobody asked for it the memory goes at once, tensor by tensor.
                done[id(shard)] = full if wanted else full.new_empty(0)
            whole[name] = done[id(shard)]
    return whole if wanted else {}
