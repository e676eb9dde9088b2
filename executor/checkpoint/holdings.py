"""Who holds what of a model's parameters and buffers under a plan, and who writes it: each element
is written by one rank, and every rank writes about as much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...planner.schema.layout import Layout
from ..gradients.flat_shard import FlatShardSpec
from ..gradients.pending import bare
from ..gradients.reshard import sharded_param
from ..redistribution.shards import Shard, SubsetShard
from ..run import Run
from .boxes import CutPiece, HeldPart, TensorBox

SHARED_OUT = 2**16
"""From so many elements on, those who hold a tensor alike write a share of it each; of a smaller
one all is written by one of them, a matter of milliseconds."""


@dataclass(frozen=True)
class StateTensor:
    """A tensor in the shape that one process would give it, and the boxes of it that this rank has
    to write or to read, each with the memory of its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[TensorBox, Tensor], ...]


@dataclass(frozen=True)
class Holding:
    """What this rank holds of one parameter or buffer: ``part`` of it, as number ``peer`` of the
    ``peers`` that hold the same. ``part`` is None where its unit leaves this rank idle. ``spec``
    says which elements this rank updates, where those who hold it share that out.
    """

    name: str
    tensor: Tensor
    full_shape: tuple[int, ...]
    part: HeldPart | None
    peers: int
    peer: int
    number: int
    spec: FlatShardSpec | None = None

    @property
    def of_buffer(self) -> bool:
        return not isinstance(self.tensor, nn.Parameter)

    @property
    def state_part(self) -> HeldPart | None:
        """What this rank holds of the optimizer's state of it."""
        if self.part is None or self.spec is None:
            return self.part
        return replace(self.part, flat=self.spec.bounds, stride=self.spec.stride)

    def written(self, local: Tensor, part: HeldPart) -> Iterator[tuple[TensorBox, Tensor]]:
        """What this rank writes of ``local``, which holds that part: boxes of the whole."""
        if part.flat is not None:
            yield from part.views(local)
        elif self.of_buffer:
            # Rank 0's are what the next forward gives to all: between steps others' may differ.
            if self.peer == 0:
                yield from part.views(local)
        elif part.numel >= SHARED_OUT and self.peers > 1:
            yield from part.share(local, self.peer, self.peers)
        elif self.is_writer:
            yield from part.views(local)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what is not shared out."""
        return self.number % self.peers == self.peer

    def values(self) -> tuple[Tensor, HeldPart]:
        """The parameter's or buffer's elements on this rank, to be read, and which they are: those
        that this rank alone writes, where holders share that out. Steps must be finished."""
        assert self.part is not None
        param = sharded_param(self.tensor)
        if param is not None:
            local, part = param.peek(), self.state_part
        elif self.spec is not None:
            local, part = self.spec.chunk_of(bare(self.tensor)), self.state_part
        else:
            local, part = bare(self.tensor), self.part
        assert part is not None
        return local, part

    def destination(self) -> tuple[Tensor, HeldPart]:
        """The same elements to be overwritten, with all that this rank holds. Call it on all ranks:
        a fully sharded parameter gives its whole back."""
        assert self.part is not None
        torch.autograd.graph.increment_version(self.tensor)
        param = sharded_param(self.tensor)
        if param is None:
            return bare(self.tensor), self.part
        assert self.state_part is not None
        return param.chunk(), self.state_part


def holdings_of(model: nn.Module, run: Run) -> list[Holding]:
    """One for each parameter and each buffer that is saved with the model, under the first of its
    names; in one order on all ranks."""
    found: dict[int, Holding] = {}
    for name, tensor in _tensors(model):
        if id(tensor) not in found:
            found[id(tensor)] = _holding(name, tensor, run, len(found))
    return list(found.values())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer


def _holding(name: str, tensor: Tensor, run: Run, number: int) -> Holding:
    world, shard = run.world, run.shards.get(name)
    spec = run.flat_shards.get(tensor) if isinstance(tensor, nn.Parameter) else None
    shape = tuple(tensor.shape)
    if shard is None:
        # Numbered by rank, as rank 0's buffers count.
        whole = HeldPart(shape, shape)
        return Holding(name, tensor, shape, whole, world.size, world.rank, number, spec)
    full_shape, degree, cut = tuple(shard.full_shape), shard.degree, shard
    layout = Layout(groups=world.size // degree, degree=degree)
    if isinstance(shard, SubsetShard):
        layout, cut = shard.layout, shard.slice_ or shard
    if layout.place(world.position) is None:
        return Holding(name, tensor, full_shape, None, 1, 0, number)
    part = HeldPart(full_shape, shape)
    if degree > 1:
        part = replace(part, dim=cut.cut.dim, pieces=_pieces(cut))
    # Of a unit on a part of the ranks, what is not cut has a degree of one whatever the layout's.
    peer = (world.position - layout.first) // degree
    return Holding(name, tensor, full_shape, part, layout.size // degree, peer, number, spec)


def _pieces(shard: Shard) -> tuple[CutPiece, ...]:
    length = shard.full_shape[shard.cut.dim]
    pieces, local = [], 0
    for left, right in shard.cut.bounds(length, shard.degree, shard.group.member):
        pieces.append(CutPiece(local, left, right - left))
        local += right - left
    return tuple(pieces)
