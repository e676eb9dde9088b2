"""Moves a tensor between the forms in which a group's members hold it.

Which pieces go where is what ``planner.cost.ownership.transfers`` says, nothing else. One autograd
function does all moves: forward it gathers pieces; its backward runs the same pieces the other way
and adds what comes back, for a sample that several members used has a gradient from each. The sum
of partial results in forward is that same transpose, and the gather is its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.ownership import Box, Form, TensorPlacement, box, transfers
from ...planner.schema.errors import RunError
from ...planner.schema.layout import Layout, data_parallel
from ..comm.buffers import alias_for_comm, release_comm_buffers
from ..comm.groups import Group
from ..comm.watchdog import Watchdog


class Piece(NamedTuple):
    """What goes to, or comes from, one member: samples and features within the local tensor."""

    member: int
    box: Box


@dataclass(frozen=True)
class Route:
    """One member's part in a move: the shape it has and needs, what it sends and receives.

    Boxes count from the start of the tensor that the member holds. ``quiet`` says that nothing
    moves between any members.
    """

    have: Box
    need: Box
    send: tuple[Piece, ...]
    receive: tuple[Piece, ...]
    quiet: bool = False


@lru_cache(maxsize=4096)
def route(counts: tuple[int, ...], source: Form, target: Form, features: int, member: int) -> Route:
    """The part of ``member`` where a group whose members feed ``counts`` samples goes from form
    ``source`` to ``target``. ``features`` is the length of the dimension that is sliced.
    """
    start, end = _held(source, len(counts)), _held(target, len(counts))
    have, need = box(counts, start, features, member), box(counts, end, features, member)
    moves = transfers(counts, start, end, features, local=True)
    return Route(
        have,
        need,
        tuple(Piece(m.target, _inside(m.box, have)) for m in moves if m.source == member),
        tuple(Piece(m.source, _inside(m.box, need)) for m in moves if m.target == member),
    )


def _held(form: Form, degree: int) -> TensorPlacement:
    """A form within one group, which is a world of its own: samples are at home there."""
    layout = data_parallel(degree) if form == "samples" else Layout(groups=1, degree=degree)
    return TensorPlacement(layout, form)


def _inside(piece: Box, outer: Box) -> Box:
    return Box(
        piece.lo - outer.lo, piece.hi - outer.lo, piece.left - outer.left, piece.right - outer.left
    )


@dataclass
class Meter:
    """What redistribution has taken on this rank (moves, seconds waited), and the bytes that it has
    sent to others: all of them, those of redistribution, those of the exchange of gradients."""

    moves: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0
    moved_bytes: int = 0
    exchanged_bytes: int = 0


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
        self.group = group
        self.outside = outside
        self.watch = watch
        self.meter = meter
        self._issued = issued

    def move(
        self, tensor: Tensor, way: Route, dim: int | None, doing: str, *, reduce: bool = False
    ) -> Tensor:
        """The tensor as ``way`` leads it; with ``reduce`` backwards along it, adding the pieces.

        ``dim`` is the dimension of features, None where only samples move. Collective.
        """
        if dim is not None and dim < 0:
            dim += tensor.ndim
        self._check(tensor, way.need if reduce else way.have, dim, doing)
        return _Move.apply(tensor, self, way, dim, doing, reduce)  # type: ignore[no-any-return, no-untyped-call]

    def _check(self, tensor: Tensor, held: Box, dim: int | None, doing: str) -> None:
        if tensor.shape[0] != held.hi - held.lo or (
            dim is not None and tensor.shape[dim] != held.right - held.left
        ):
            raise RunError(
                f"{doing} got a tensor of shape {list(tensor.shape)} where it holds "
                f"{held.hi - held.lo} samples: tensors that enter or leave a divided unit need "
                "the model's samples in dim 0"
            )

    def shift(
        self, tensor: Tensor, way: Route, dim: int | None, doing: str, reduce: bool
    ) -> Tensor:
        """The move itself, without autograd."""
        out, into, shape = way.send, way.receive, way.need
        if reduce:
            out, into, shape = way.receive, way.send, way.have
        size = list(tensor.shape)
        size[0] = shape.hi - shape.lo
        if dim is not None:
            size[dim] = shape.right - shape.left
        result = tensor.new_zeros(size) if reduce else tensor.new_empty(size)
        received = {}
        if not (way.quiet or self.outside):
            lengths = [_numel(size, p.box, dim) for p in into]
            received = self._swap(tensor, out, lengths, into, dim, doing)
        for piece in into:  # in the order of members, so that sums are the same in every run
            part = _part(result, piece.box, dim)
            if piece.member == self.group.member:
                own = next(p.box for p in out if p.member == piece.member)
                arrived = _part(tensor, own, dim)
            else:
                arrived = received[piece.member].view(part.shape)
            part.add_(arrived) if reduce else part.copy_(arrived)
        return result

    def _swap(
        self,
        tensor: Tensor,
        out: Sequence[Piece],
        lengths: Sequence[int],
        into: Sequence[Piece],
        dim: int | None,
        doing: str,
    ) -> dict[int, Tensor]:
        """Sends the pieces in ``out`` to the other members; what they send, flat, by member."""
        me, slots = self.group.member, self.group.slots
        sends = {p.member: _part(tensor, p.box, dim) for p in out if p.member != me}
        expects = {p.member: n for p, n in zip(into, lengths, strict=True) if p.member != me}
        order = sorted(range(self.group.size), key=slots.__getitem__)
        width = tensor.element_size()
        flat = [sends[m].reshape(-1) for m in order if m in sends]
        waits = bool(expects) or self.group.on_stream
        # One piece is sent from where it lies, which nothing touches while this rank waits (a
        # gradient that is one number, seen as many, lies nowhere).
        still = waits and len(flat) == 1 and flat[0].stride(0) == 1
        buffer = flat[0] if still else torch.cat([tensor.new_empty(0), *flat])
        arriving = tensor.new_empty(sum(expects.values()))
        self._issued(doing, 0, self.group)
        # Bytes travel, so that every type does.
        carried = [alias_for_comm(tensor.view(torch.uint8)) for tensor in (arriving, buffer)]
        work = dist.all_to_all_single(
            carried[0],
            carried[1],
            [expects.get(m, 0) * width for m in order],
            [sends[m].numel() * width if m in sends else 0 for m in order],
            group=self.group.handle,
            async_op=True,
        )
        self.meter.moves += 1
        if waits:
            self.meter.seconds += self.watch.wait(work, self.group, doing)
            release_comm_buffers(carried)
        else:  # who only gives need not wait until others take
            self.watch.follow(work, doing)
        self.meter.sent_bytes += buffer.numel() * width
        self.meter.moved_bytes += buffer.numel() * width
        arrived, start = {}, 0
        for member in (m for m in order if m in expects):
            arrived[member] = arriving.narrow(0, start, expects[member])
            start += expects[member]
        return arrived


class _Move(torch.autograd.Function):
    """``Mover.shift``, whose backward is the same move the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        mover: Mover,
        way: Route,
        dim: int | None,
        doing: str,
        reduce: bool,
    ) -> Tensor:
        ctx.move = (mover, way, dim, doing, reduce)
        return mover.shift(tensor, way, dim, doing, reduce)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mover, way, dim, doing, reduce = ctx.move
        back = doing if doing.endswith("backward") else f"{doing}, backward"
        moved = _Move.apply(gradients[0], mover, way, dim, back, not reduce)  # type: ignore[no-untyped-call]
        return moved, None, None, None, None, None


def _part(tensor: Tensor, piece: Box, dim: int | None) -> Tensor:
    part = tensor[piece.lo : piece.hi]
    return part if dim is None else part.narrow(dim, piece.left, piece.right - piece.left)


def _numel(size: Sequence[int], piece: Box, dim: int | None) -> int:
    count = piece.hi - piece.lo
    for i, length in enumerate(size[1:], start=1):
        count *= piece.right - piece.left if i == dim else length
    return count
