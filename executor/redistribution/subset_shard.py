"""Parameters and buffers of units that take a part of the ranks: they live where they are used.

A rank that a unit leaves idle has an empty tensor in the place of each. Gradients, optimizer state
and memory are those of the ranks that compute. A state that is whole (``full_state_dict``) is sent
from the unit's first position to all; ``state_dict``, which never communicates, has an empty
``LocalShard`` on ranks that have nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...planner.schema.errors import InputError
from ...planner.schema.layout import Layout
from ..comm.groups import World
from ..comm.watchdog import Watchdog
from .shards import LocalShard, Shard

NOWHERE = -1
"""The member of a marked slice on a rank that has none."""


@dataclass(frozen=True, eq=False)
class SubsetShard(Shard):
    """Who has a tensor. ``group`` are all ranks, in the order of positions; ``slice_`` is this
    rank's slice of it where ``members`` of each group divide it."""

    layout: Layout
    world: World
    members: int = 1
    slice_: Shard | None = None

    @property
    def degree(self) -> int:
        """Over how many members it is divided."""
        return self.members

    @property
    def here(self) -> bool:
        """Whether this rank has it, or a slice of it."""
        return self.layout.place(self.world.position) is not None

    def take(self, full: Tensor) -> Tensor:
        """What this rank has of the whole."""
        if full.shape != self.full_shape:
            raise InputError(
                f"{self.names[0]!r} has shape {list(full.shape)}, expected "
                f"{list(self.full_shape)}: load a state of the same model"
            )
        if not self.here:
            return full.new_empty(0)
        return full if self.slice_ is None else self.slice_.take(full)

    def describe(self, local: Tensor) -> Tensor:
        """What this rank has as it stands in a ``state_dict``."""
        if self.here:
            return local if self.slice_ is None else self.slice_.describe(local)
        shard = local.as_subclass(LocalShard)
        shard.dim_cut, shard.blocks, shard.degree, shard.member = 0, 0, self.degree, NOWHERE
        shard.full_shape = tuple(self.full_shape)
        return shard

    def accept(self, value: Tensor) -> Tensor:
        """What this rank has out of what a ``state_dict`` offers."""
        if isinstance(value, LocalShard) and (value.member == NOWHERE) == self.here:
            raise InputError(
                f"{self.names[0]!r} lives on other ranks in the state that is loaded: load a "
                "full_state_dict"
            )
        if not self.here:
            plain = value.to_local() if isinstance(value, DTensor) else value
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
