"""Moves a tensor between the forms in which a group's members hold it.

What goes where is what ``planner.cost.redistribution`` says, nothing else. One autograd function
does all moves: forward it gathers boxes; its backward runs the same boxes the other way and adds
what comes back, for a sample that several members used has a gradient from each. The sum of partial
results in forward is that same transpose, and the gather is its backward.
"""

# [Note: Forms of a divided tensor]
#
# Between units a tensor is in one of two forms (planner/cost/ownership.py): ``batch_shard``, every
# rank its own samples, or ``feature_shard``, every member of a group its slice of the features of
# all the group's samples. Units need their input in one of these, or as ``replicate``, all samples
# of the group with all features. Who moves it, and when:
#
# - The input of a divided unit moves in the pre-hook of the unit's first module
#   (``Boundary.enter``), that of a unit on a part of the ranks in ``BurstUnit.enter``. What another
#   unit needs alike has moved already (cache.py; [Note: Shared redistributions] in
#   planner/cost/redistribution.py).
# - The output of a column unit is a feature shard. It moves when something asks for its values: it
#   is a ``LazyRedistributed`` (lazy.py), which the next unit takes as it is where that unit is
#   divided in the same way, and any torch function first materializes as the rank's own samples.
# - The partial sums of a row or pair unit are reduced to each member's own samples inside the unit
#   (``Boundary.reduce``), so its output is a batch shard.
# - The model's output is materialized when its forward ends (``Run.finish``), what recomputed
#   regions save before that (executor/memory/regions.py).
#
# Backward needs nothing of its own: every move is a ``_Move`` in the autograd graph, whose backward
# is the move the other way. All members run the same units in the same order, so their moves meet.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...planner.cost.ownership import Box, Form, TensorPlacement
from ...planner.cost.redistribution import PositionTransfers, Transfer, position_transfers
from ...planner.schema.errors import RunError
from ...planner.schema.layout import Layout, data_parallel
from ..comm.buffers import release_comm_buffers
from ..comm.groups import Group
from ..comm.two_way import all_to_all
from ..comm.watchdog import Watchdog


class Route(PositionTransfers):
    """One member's ``PositionTransfers``: peers are members of the group, and boxes count from the
    start of the tensor that the member holds."""

    __slots__ = ()

    def reversed(self) -> Route:
        return Route(self.need, self.have, self.receive, self.send, self.quiet)


# Of one forward after another only the counts of samples change, and those seldom.
@lru_cache(maxsize=4096)
def route(
    counts: tuple[int, ...],
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
    position: int,
    first: int = 0,
) -> Route:
    """A position's part where positions that feed ``counts`` samples go from ``source`` to
    ``target``; ``features`` is the length of the dim that is sliced. Members count from position
    ``first``."""
    have, need, send, receive, quiet = position_transfers(
        counts, source, target, features, position
    )
    sends = tuple(Transfer(t.peer - first, _inside(t.box, have)) for t in send)
    receives = tuple(Transfer(t.peer - first, _inside(t.box, need)) for t in receive)
    return Route(have, need, sends, receives, quiet)


def group_route(
    counts: tuple[int, ...], source: Form, target: Form, features: int, member: int
) -> Route:
    """The part of ``member`` in a move inside one group, whose members feed ``counts`` samples: the
    group is a world of its own."""
    degree = len(counts)
    by_samples, whole = data_parallel(degree), Layout(groups=1, degree=degree)
    ends = (
        TensorPlacement(by_samples if form == "batch_shard" else whole, form)
        for form in (source, target)
    )
    return route(counts, *ends, features, member)


def _inside(box: Box, outer: Box) -> Box:
    return Box(box.lo - outer.lo, box.hi - outer.lo, box.left - outer.left, box.right - outer.left)


@dataclass
class Meter:
    """What redistribution has taken on this rank (moves, seconds waited), and the bytes that it has
    sent to others: all of them, those of redistribution, those of the exchange of gradients."""

    moves: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0
    moved_bytes: int = 0
    exchanged_bytes: int = 0


class Dims(NamedTuple):
    """The dimensions of samples and of features (None: only samples move) in a tensor."""

    batch: int
    features: int | None


class _Step(NamedTuple):
    """How a tensor moves: along ``route``, cut in ``dims``, called ``doing`` in reports; with
    ``add`` boxes that arrive are added to zeros."""

    route: Route
    dims: Dims
    doing: str
    add: bool


class Mover:
    """Moves tensors among the members of one group. A rank ``outside`` of it moves nothing."""

    def __init__(
        self,
        group: Group,
        watch: Watchdog,
        meter: Meter,
        issued: Callable[[str, int, Group], None],
        *,
        outside: bool = False,
    ) -> None:
        self.group, self.outside, self.watch, self.meter = group, outside, watch, meter
        self._issued = issued

    def move(
        self, tensor: Tensor, route: Route, dims: Dims, doing: str, *, add: bool = False
    ) -> Tensor:
        """The tensor after its way along ``route``; with ``add`` overlapping boxes are summed.
        Collective."""
        batch, features = dims
        if features is not None and features < 0:
            features += tensor.ndim
        have = route.have
        if tensor.shape[batch : batch + 1] != (have.hi - have.lo,) or (
            features is not None and tensor.shape[features] != have.right - have.left
        ):
            raise RunError(
                f"{doing} got a tensor of shape {list(tensor.shape)} where it holds "
                f"{have.hi - have.lo} samples: tensors that enter or leave this divided unit need "
                f"the model's samples in dim {batch}"
            )
        step = _Step(route, Dims(batch, features), doing, add)
        return _Move.apply(tensor, self, step)  # type: ignore[no-any-return, no-untyped-call]

    def run(self, tensor: Tensor, step: _Step) -> Tensor:
        """The move itself, without autograd."""
        (_, need, send, receive, quiet), dims = step.route, step.dims
        received = {}
        if not (quiet or self.outside):
            received = self._all_to_all(tensor, step)
        # Not earlier: what has been sent is gone by now.
        size = _size(tensor, need, dims)
        result = tensor.new_zeros(size) if step.add else tensor.new_empty(size)
        for member, box in receive:  # in the order of members, so that sums repeat in every run
            part = _part(result, box, dims)
            if member == self.group.member:
                kept = next(t.box for t in send if t.peer == member)
                arrived = _part(tensor, kept, dims)
            else:
                arrived = received[member].view(part.shape)
            if step.add:
                part.add_(arrived)
            else:
                part.copy_(arrived)
        return result

    def _all_to_all(self, tensor: Tensor, step: _Step) -> dict[int, Tensor]:
        """Sends the boxes of other members; what these send, flat, by member."""
        (_, _, send, receive, _), dims, doing, _ = step
        me, ranks = self.group.member, self.group.group_ranks
        sends = {t.peer: _part(tensor, t.box, dims) for t in send if t.peer != me}
        expects = {t.peer: prod(_size(tensor, t.box, dims)) for t in receive if t.peer != me}
        # Torch splits the buffers in the order of ranks, which is not always that of members.
        order = sorted(range(self.group.size), key=ranks.__getitem__)
        width = tensor.element_size()
        parts = [sends[m] for m in order if m in sends]
        waits = bool(expects) or self.group.on_stream
        # One box is sent from where it lies, which nothing touches while this rank waits.
        in_place = waits and len(parts) == 1 and parts[0].is_contiguous()
        buffer = parts[0].view(-1) if in_place else _joined(tensor, parts)
        arriving = tensor.new_empty(sum(expects.values()))
        self._issued(doing, 0, self.group)
        # Bytes travel, so that every dtype does.
        work, held = all_to_all(
            arriving.view(torch.uint8),
            buffer.view(torch.uint8),
            [expects.get(m, 0) * width for m in order],
            [sends[m].numel() * width if m in sends else 0 for m in order],
            self.group,
        )
        self.meter.moves += 1
        if waits:
            self.meter.seconds += self.watch.wait(work, self.group, doing)
            release_comm_buffers(held)
        else:  # who only gives need not wait until others take
            self.watch.follow(work, doing)
        self.meter.sent_bytes += buffer.numel() * width
        self.meter.moved_bytes += buffer.numel() * width
        members = [m for m in order if m in expects]
        return dict(zip(members, torch.split(arriving, [expects[m] for m in members]), strict=True))


class _Move(torch.autograd.Function):
    """``Mover.run``, whose backward is the same move the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mover: Mover, step: _Step) -> Tensor:
        ctx.mover, ctx.step = mover, step
        return mover.run(tensor, step)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        route, dims, doing, add = ctx.step
        # Applied as a function of its own, so that a gradient of the gradient moves too.
        back = doing if doing.endswith("backward") else f"{doing}, backward"
        step = _Step(route.reversed(), dims, back, not add)
        moved = _Move.apply(gradients[0], ctx.mover, step)  # type: ignore[no-untyped-call]
        return moved, None, None


def _size(like: Tensor, box: Box, dims: Dims) -> list[int]:
    """The size of a tensor like that one, of the samples and the features of a box."""
    size = list(like.shape)
    size[dims.batch] = box.hi - box.lo
    if dims.features is not None:
        size[dims.features] = box.right - box.left
    return size


def _joined(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other in new memory."""
    sizes = [part.numel() for part in parts]
    joined = like.new_empty(sum(sizes))
    for piece, part in zip(torch.split(joined, sizes), parts, strict=True):
        piece.view(part.shape).copy_(part)
    return joined


def _part(tensor: Tensor, box: Box, dims: Dims) -> Tensor:
    part = tensor.narrow(dims.batch, box.lo, box.hi - box.lo)
    if dims.features is None:
        return part
    return part.narrow(dims.features, box.left, box.right - box.left)
