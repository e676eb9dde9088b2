"""Units that take a part of the ranks (burst parallelism, Park et al., arXiv 2112.10065): how their
tensors travel.

What such a unit leaves stays where it was made until something asks for it, and goes from there
straight to where it is needed (``planner.cost.ownership`` says which pieces move). Ranks that a
move gives nothing to do not wait for it.

Two things keep parallel branches on different ranks from waiting for each other. What leaves a
branch is fetched when both have been called. And what enters them is sent to all of them when the
first is called: in the forward before, each tensor's takers have been seen. As backward does the
same in reverse, it gets to its own branch before it waits for the gradients of the others.

Every rank takes part in the graph: a rank that a unit leaves idle has an empty tensor in its place,
tied to the same moves. So all ranks issue the moves of backward in one order, the reverse of
forward's.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.spec import SplitSpec
from ...planner.cost.ownership import Box, Form, TensorPlacement, box, home, transfers
from ...planner.schema.layout import Layout
from ...planner.schema.plan import UnitPlan
from ..comm.groups import Group, World
from ..comm.watchdog import Watchdog
from .cache import version_of
from .lazy import LazyRedistributed
from .redistribute import Meter, Mover, Piece, Route


class Want(NamedTuple):
    """In what form a unit needs a tensor; ``features`` and their ``dim`` where it is sliced.
    ``unit`` and ``number`` say which input of which unit it is."""

    unit: str
    number: int
    target: TensorPlacement
    features: int
    dim: int | None
    doing: str

    @property
    def form(self) -> tuple[TensorPlacement, int, int | None]:
        """What two takers of one tensor can share."""
        return self.target, self.features, self.dim


def want(unit: UnitPlan, spec: SplitSpec | None, form: Form, doing: str, index: int = 0) -> Want:
    """What ``unit`` needs of its input ``index`` in that form."""
    target = TensorPlacement(unit.layout, form)
    if form == "features":
        assert spec is not None, "what is divided has a specification"
        return Want(unit.name, index, target, spec.features, spec.feature_dim, doing)
    return Want(unit.name, index, target, 1, None, doing)


@lru_cache(maxsize=4096)
def crossing(
    counts: tuple[int, ...],
    source: TensorPlacement,
    target: TensorPlacement,
    features: int,
    position: int,
    start: int,
) -> Route:
    """A position's part where positions that feed ``counts`` samples go from ``source`` to
    ``target``. Members of pieces are counted from position ``start``.
    """
    have, need = (_box(counts, held, features, position) for held in (source, target))
    moves = transfers(counts, source, target, features, local=True)
    return Route(
        have,
        need,
        tuple(Piece(m.target - start, _inside(m.box, have)) for m in moves if m.source == position),
        tuple(Piece(m.source - start, _inside(m.box, need)) for m in moves if m.target == position),
        all(m.source == m.target for m in moves),
    )


def _box(counts: tuple[int, ...], held: TensorPlacement, features: int, position: int) -> Box:
    """What a position holds; where it is idle, no samples of the whole length."""
    if held.layout.place(position) is None:
        return Box(0, 0, 0, features)
    return box(counts, held, features, position)


def _inside(piece: Box, outer: Box) -> Box:
    return Box(
        piece.lo - outer.lo, piece.hi - outer.lo, piece.left - outer.left, piece.right - outer.left
    )


First = tuple[str, int, int, bool]
"""The first taking of a tensor in a forward: the unit, which of its inputs, the number of its
call, and whether gradients are wanted."""


@dataclass
class _Taken:
    """A tensor that units have taken in this forward: the first of them, and what each got."""

    tensor: Tensor
    version: int
    first: First
    wants: list[Want] = field(default_factory=list)
    moved: dict[tuple[TensorPlacement, int, int | None], Tensor] = field(default_factory=dict)


class Bursts:
    """The moves of one run. ``counts()`` are the samples that each position feeds now."""

    def __init__(
        self,
        world: World,
        watch: Watchdog,
        meter: Meter,
        issued: Callable[[str, int, Group], None],
        counts: Callable[[], tuple[int, ...]],
    ) -> None:
        self.world, self.watch, self.counts = world, watch, counts
        self.anchor = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
        """A leaf that every rank's graph leads to."""
        self._issued = issued
        self._movers = {
            span: Mover(group, watch, meter, issued, outside=world.position not in span)
            for span, group in world.spans.items()
        }
        self.home = home(world.size)
        self._described: dict[tuple[object, ...], Any] = {}
        self._taken: dict[int, _Taken] = {}
        self._ahead: dict[First, list[Want]] = {}
        self._firsts: Counter[tuple[str, int]] = Counter()

    @property
    def everyone(self) -> Group:
        """All ranks, in the order of positions."""
        return self.world.spans[range(self.world.size)]

    def begin(self) -> None:
        """Before a forward."""
        self._taken = {}
        self._firsts.clear()

    def end(self, *, learn: bool) -> None:
        """After a forward: remembers (with ``learn``) which tensors had several takers."""
        if learn:
            for taken in self._taken.values():
                self._ahead[taken.first] = taken.wants
        self._taken = {}

    # -- moves ---------------------------------------------------------------------------------

    def bring(self, tensor: Tensor, wanted: Want, *, alone: bool = False) -> Tensor:
        """The tensor as it is wanted. Collective. With ``alone`` it is not sent to its other takers
        yet, as this one may change it in place.
        """
        taken = self._taken.get(id(tensor))
        if taken is None or taken.version != version_of(tensor):
            first = self._first(wanted)
            taken = self._taken[id(tensor)] = _Taken(tensor, version_of(tensor), first)
            for other in () if alone else self._ahead.get(first, ()):
                self._take(taken, other)
        taken.wants.append(wanted)
        return self._take(taken, wanted)

    def _first(self, wanted: Want) -> First:
        key = wanted.unit, wanted.number
        self._firsts[key] += 1
        return *key, self._firsts[key], torch.is_grad_enabled()

    def _take(self, taken: _Taken, wanted: Want) -> Tensor:
        if wanted.form not in taken.moved:  # who wants the same gets the same
            taken.moved[wanted.form] = self._move(taken.tensor, wanted)
        return taken.moved[wanted.form]

    def _move(self, tensor: Tensor, wanted: Want) -> Tensor:
        if not isinstance(tensor, LazyRedistributed):
            return self.travel(tensor, self.home, wanted.features, wanted.dim, wanted)
        if tensor.changes or not _fits(tensor, wanted):
            return self._move(tensor.home(), wanted)
        source, features, dim = tensor.source, wanted.features, wanted.dim
        if tensor.dim_held is not None:
            features, dim = int(tensor.shape[tensor.dim_held]), tensor.dim_held
        return self.travel(tensor.local, source, features, dim, wanted)

    def travel(
        self, local: Tensor, source: TensorPlacement, features: int, dim: int | None, wanted: Want
    ) -> Tensor:
        """What this rank holds of a tensor as ``source`` says, brought where it is wanted;
        ``features`` along ``dim`` are sliced at one end. Collective."""
        span = self._span(source.layout, wanted.target.layout)
        position = self.world.position
        way = crossing(self.counts(), source, wanted.target, features, position, span.start)
        if way.quiet and way.have == way.need:
            return local
        return self._movers[span].move(local, way, dim, wanted.doing)

    def _span(self, source: Layout, target: Layout) -> range:
        """The positions that take part in a move: those of one of its ends, if they contain the
        other's."""
        for one, other in ((source, target), (target, source)):
            inside = other.first >= one.first and other.positions.stop <= one.positions.stop
            if inside and one.positions in self._movers:
                return one.positions
        return range(self.world.size)

    # -- shapes --------------------------------------------------------------------------------

    def describe(self, layout: Layout, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """What a unit's output looks like: ``make()`` of the layout's first position, on every
        rank. Collective the first time for each ``key``; it is kept then."""
        key = (layout, *key)
        if key not in self._described:
            position, group = self.world.position, self.everyone
            text = pickle.dumps(make()) if position == layout.first else b""
            length = torch.tensor([len(text)])
            self._from(layout.first, length, group)
            wire = torch.frombuffer(bytearray(text or int(length)), dtype=torch.uint8)
            self._from(layout.first, wire, group)
            self._described[key] = pickle.loads(wire.numpy().tobytes())
        return self._described[key]

    def _from(self, position: int, tensor: Tensor, group: Group) -> None:
        tensor_there = tensor.cuda() if group.on_stream else tensor
        doing = "the description of a unit's output"
        self._issued(doing, 0, group)
        source = self.world.placement[position]
        work = dist.broadcast(tensor_there, src=source, group=group.handle, async_op=True)
        self.watch.wait(work, group, doing)
        if tensor_there is not tensor:
            tensor.copy_(tensor_there)


def _fits(held: LazyRedistributed, wanted: Want) -> bool:
    """Whether what is held can go to where it is wanted without being put together before."""
    if wanted.dim is None or held.dim_held is None:
        return True
    same = wanted.dim % len(held.shape) == held.dim_held
    return same and held.shape[held.dim_held] == wanted.features
