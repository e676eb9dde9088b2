"""Where the elements that a rank holds of a parameter stand in the undivided tensor: as boxes,
which mean the same under every plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


class TensorBox(NamedTuple):
    """A rectangular part of a tensor: where it begins in each dim, and how far it goes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: TensorBox) -> TensorBox | None:
        """What two boxes of a tensor have in common; None where that is nothing."""
        starts, sizes = [], []
        for at, size, other_at, other_size in zip(*self, *other, strict=True):
            starts.append(max(at, other_at))
            sizes.append(min(at + size, other_at + other_size) - starts[-1])
        return TensorBox(tuple(starts), tuple(sizes)) if all(s > 0 for s in sizes) else None

    def inside(self, memory: Tensor, inner: TensorBox) -> Tensor:
        """The part of this box's ``memory`` that is the box ``inner``."""
        for dim, at in enumerate(inner.offsets):
            memory = memory.narrow(dim, at - self.offsets[dim], inner.sizes[dim])
        return memory


class CutPiece(NamedTuple):
    """Along the dim in which a tensor is cut: ``length`` elements from ``local`` on in this rank's
    slice are those from ``full`` on in the whole."""

    local: int
    full: int
    length: int


@dataclass(frozen=True)
class HeldPart:
    """What this rank holds of a tensor of ``full_shape``: its slice of ``shape``, cut along ``dim``
    into ``pieces`` (none: it is not cut), or of that slice the elements ``flat`` in the order in
    which they lie in memory, whose ``stride`` is that of the slice.
    """

    full_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int = 0
    pieces: tuple[CutPiece, ...] = ()
    flat: tuple[int, int] | None = None
    stride: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """How many elements are held."""
        return prod(self.shape) if self.flat is None else self.flat[1] - self.flat[0]

    def views(self, local: Tensor) -> Iterator[tuple[TensorBox, Tensor]]:
        """Each box of the whole that is held, with a view of its elements in ``local``: the slice,
        or one dim of its elements ``flat``."""
        if self.flat is None:
            yield from self._in_whole(TensorBox((0,) * len(self.shape), self.shape), local)
            return
        # A permutation of the dims in which the slice is contiguous.
        order = sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim])
        back = sorted(range(len(order)), key=order.__getitem__)
        start = 0
        for box in flat_boxes([self.shape[dim] for dim in order], *self.flat):
            view = local[start : start + prod(box.sizes)].view(box.sizes).permute(back)
            start += view.numel()
            offsets = tuple(box.offsets[dim] for dim in back)
            yield from self._in_whole(TensorBox(offsets, tuple(view.shape)), view)

    def share(self, local: Tensor, number: int, of: int) -> Iterator[tuple[TensorBox, Tensor]]:
        """The same of one of as many equal shares of the slice, along its longest dim."""
        assert self.flat is None, "a flat part has one holder"
        dim = max(range(len(self.shape)), key=self.shape.__getitem__)
        length = self.shape[dim]
        start, stop = length * number // of, length * (number + 1) // of
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        offsets[dim], sizes[dim] = start, stop - start
        yield from self._in_whole(
            TensorBox(tuple(offsets), tuple(sizes)), local.narrow(dim, start, stop - start)
        )

    def _in_whole(self, box: TensorBox, view: Tensor) -> Iterator[tuple[TensorBox, Tensor]]:
        """A box of the slice, as boxes of the whole."""
        if not self.pieces:
            if view.numel():
                yield box, view
            return
        start, stop = box.offsets[self.dim], box.offsets[self.dim] + box.sizes[self.dim]
        for piece in self.pieces:
            left, right = max(start, piece.local), min(stop, piece.local + piece.length)
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[self.dim], sizes[self.dim] = piece.full + left - piece.local, right - left
            if left < right and view.numel():
                part = view.narrow(self.dim, left - start, right - left)
                yield TensorBox(tuple(offsets), tuple(sizes)), part


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorBox]:
    """The boxes that make up elements ``start`` to ``stop`` of a contiguous tensor, in order: at
    most two for each dim but one."""
    if start >= stop:
        return
    if not shape:
        yield TensorBox((), ())
        return
    inner = prod(shape[1:])
    row, into = divmod(start, inner)
    rows = (stop - start) // inner if not into else 0
    if rows:
        yield TensorBox((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        end = start + rows * inner
    else:  # begins or ends inside a row
        end = min(stop, (row + 1) * inner)
        for box in flat_boxes(shape[1:], into, into + end - start):
            yield TensorBox((row, *box.offsets), (1, *box.sizes))
    yield from flat_boxes(shape, end, stop)
