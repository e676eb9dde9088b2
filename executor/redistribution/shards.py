"""Divided parameters and buffers: which slice this member holds, and the whole from all slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ...models.spec import ParameterCut
from ...models.splits import join_parameter, slice_parameter
from ...planner.schema.errors import InputError
from ..comm.groups import Group
from ..comm.watchdog import Watchdog


class LocalShard(Tensor):
    """A slice in a ``state_dict`` that no DTensor can describe: unevenly divided packed blocks, or
    members that are not in the order of ranks. ``dim``, ``blocks``, ``degree``, ``member`` and
    ``full_shape`` say which slice it is.
    """

    dim_cut: int
    blocks: int
    degree: int
    member: int
    full_shape: tuple[int, ...]

    @property
    def place(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        """All that says which slice it is."""
        return self.dim_cut, self.blocks, self.degree, self.member, self.full_shape


class LocalPart(Tensor):
    """A part of this rank's slice, in a ``state_dict``, which others than members share."""


@dataclass(frozen=True, eq=False)
class Shard:
    """One member's slice of a parameter or buffer. ``names`` are all its names in the model."""

    names: tuple[str, ...]
    cut: ParameterCut
    group: Group
    full_shape: torch.Size
    full_stride: tuple[int, ...]

    @property
    def degree(self) -> int:
        return self.group.size

    def take(self, full: Tensor) -> Tensor:
        """This member's slice of the whole."""
        if full.shape != self.full_shape:
            raise InputError(
                f"{self.names[0]!r} has shape {list(full.shape)}, expected "
                f"{list(self.full_shape)}: load a state of the same model"
            )
        return slice_parameter(full, self.cut, self.degree, self.group.member)

    def describe(self, local: Tensor) -> Tensor:
        """The slice as it stands in a ``state_dict``. Communicates nothing."""
        placement = self._placement()
        if placement is None:
            return self._mark(local)
        handle = self.group.handle
        assert handle is not None
        mesh = DeviceMesh.from_group(handle, local.device.type)
        return DTensor.from_local(
            local,
            mesh,
            [placement],
            run_check=False,
            shape=self.full_shape,
            stride=self.full_stride,
        )

    def _placement(self) -> Placement | None:
        """How DTensor would call this division, None where it has no word for it."""
        if not self.group.ascending:
            return None
        if self.cut.blocks == 1:
            return DTensorShard(self.cut.dim)
        if self.full_shape[self.cut.dim] % (self.cut.blocks * self.degree):
            return None
        return _StridedShard(self.cut.dim, split_factor=self.cut.blocks)

    def _mark(self, local: Tensor) -> LocalShard:
        shard = local.as_subclass(LocalShard)
        shard.dim_cut, shard.blocks = self.cut.dim, self.cut.blocks
        shard.degree, shard.member = self.degree, self.group.member
        shard.full_shape = tuple(self.full_shape)
        return shard

    def accept(self, value: Tensor) -> Tensor:
        """The slice out of what a ``state_dict`` offers: the whole, or the same slice."""
        if isinstance(value, DTensor):
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

    def gather(self, local: Tensor, watch: Watchdog) -> Tensor:
        """The whole, on every member. Collective over the group."""
        shapes = [self._shape(member) for member in range(self.degree)]
        longest = max(shape.numel() for shape in shapes)
        padded = local.new_zeros(longest)
        padded[: local.numel()] = local.reshape(-1)
        parts = [torch.empty_like(padded) for _ in shapes]
        wire = [part.view(torch.uint8) for part in parts]
        doing = f"gathering {self.names[0]!r}"
        watch.issued(doing, self.group)
        work = dist.all_gather(
            wire, padded.view(torch.uint8), group=self.group.handle, async_op=True
        )
        watch.wait(work, self.group, doing)
        slots = self.group.slots
        shards = [parts[slots[m]][: s.numel()].view(s) for m, s in enumerate(shapes)]
        return join_parameter(shards, self.cut, self.full_shape)

    def _shape(self, member: int) -> torch.Size:
        """The shape of a member's slice."""
        shape = list(self.full_shape)
        bounds = self.cut.bounds(shape[self.cut.dim], self.degree, member)
        shape[self.cut.dim] = sum(right - left for left, right in bounds)
        return torch.Size(shape)


def aliases(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter and buffer, by the tensor's identity."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return names


def by_name(shards: Sequence[Shard]) -> dict[str, Shard]:
    """Each name's shard."""
    return {name: shard for shard in shards for name in shard.names}
