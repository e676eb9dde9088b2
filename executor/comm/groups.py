"""Which rank stands at which position, and the process groups through which ranks talk.

Gradient exchange, redistribution (with statistics), and control traffic never share a process
group: two threads that issue on one gloo group gave wrong sums without any error, and on one
group nothing can overtake. All groups are created in one order on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...planner.schema.layout import Layout

Place = int | Layout
"""What groups are made for: the degree of layouts that take all ranks, or a layout that leaves some
idle."""

CONTROL_BACKEND = "gloo"
"""Control vectors live on the host, whatever carries the tensors."""

_handles: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Any]] = WeakKeyDictionary()
"""The process groups made so far, by the default group that they belong to. They are used again by
the next plan that is applied: each costs threads and connections, which torch never gives back
while the default group lives."""

GRACE_S = 5.0
"""A collective's own time limit beyond ours, so that our sentence comes before its error."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. ``ranks`` is in the order of members; ``member`` is this rank's.

    ``handle`` is None where the rank is alone: nothing is sent then. torch numbers the ranks of a
    process group in ascending order, so ``slots[i]`` is the number there of member ``i``.
    """

    ranks: tuple[int, ...]
    member: int
    handle: dist.ProcessGroup | None
    label: str
    on_stream: bool = False
    """Whether its collectives run on a device's streams, where a wait does not hold the host."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def slots(self) -> tuple[int, ...]:
        ascending = sorted(self.ranks)
        return tuple(ascending.index(rank) for rank in self.ranks)

    @property
    def ascending(self) -> bool:
        """Whether members are numbered as torch numbers them."""
        return list(self.ranks) == sorted(self.ranks)


@dataclass(frozen=True)
class World:
    """This rank's place among all, and the groups that it belongs to.

    ``neighbours[m]`` are the members of its group of degree m: they redistribute among each other.
    ``peers[m]`` hold the same shard of a unit of degree m: they exchange its gradient (degree 1:
    all ranks). ``likes[m]`` are the same ranks as ``peers[m]`` in a process group of their own, for
    batch statistics and buffers; ``gathers[m]`` and ``reads[m]`` again, where a plan shards units
    of degree m, and ``fetches[m]`` where it shards their parameters. Layouts that leave positions
    idle have such groups of their own, under the layout; a rank that they leave idle is alone in
    them. ``spans`` are the positions between which samples of such layouts move.
    """

    rank: int
    size: int
    position: int
    placement: tuple[int, ...]
    control: Group
    neighbours: dict[Place, Group]
    peers: dict[Place, Group]
    likes: dict[Place, Group]
    gathers: dict[Place, Group] = field(default_factory=dict)
    reads: dict[Place, Group] = field(default_factory=dict)
    fetches: dict[Place, Group] = field(default_factory=dict)
    spans: dict[range, Group] = field(default_factory=dict)

    def place(self, layout: Layout) -> Place:
        """What the groups of a layout are found under."""
        return place_of(layout, self.size)

    def by_position(self, by_rank: Sequence[int]) -> tuple[int, ...]:
        """Reorders what is listed by rank."""
        return tuple(by_rank[rank] for rank in self.placement)


def make_world(
    placement: Sequence[int],
    degrees: Iterable[int],
    device: torch.device,
    timeout_s: float,
    sharded: Iterable[Place] = (),
    fetched: Iterable[Place] = (),
    parts: Iterable[Layout] = (),
    *,
    crossing: bool = False,
) -> World:
    """Creates the groups that layouts of ``degrees`` need for tensors on ``device``, those of
    ``sharded`` also for shards among peers, of ``fetched`` for parameters that are put together for
    each use; those of layouts that take a part of the ranks (``parts``); and with ``crossing`` one
    for what goes straight from one division to another. Collective over all ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=timeout_s + GRACE_S)
    maker = _Maker(rank, tuple(placement), device.type, limit)
    everyone = [range(size)]
    control = maker.make("control", everyone, CONTROL_BACKEND)
    peers: dict[Place, Group] = {1: maker.make("exchange", everyone)}
    likes: dict[Place, Group] = {1: maker.make("statistics", everyone)}
    neighbours: dict[Place, Group] = {}
    for degree in sorted({d for d in degrees if d > 1}):
        layout = _whole(degree, size)
        same = [layout.peers(member) for member in range(degree)]
        neighbours[degree] = maker.make(
            f"redistribution {degree}", [layout.group(g) for g in range(layout.groups)]
        )
        peers[degree] = maker.make(f"exchange {degree}", same)
        likes[degree] = maker.make(f"statistics {degree}", same)
    spans: dict[range, Group] = {}
    if crossing:
        spans[range(size)] = maker.make("redistribution", everyone)
    for layout in sorted({one for part in parts for one in (part, flat(part))}):
        same = [layout.peers(member) for member in range(layout.degree)]
        if layout.degree > 1:
            groups = [layout.group(g) for g in range(layout.groups)]
            neighbours[layout] = maker.make("redistribution in parts", groups)
        peers[layout] = maker.make("exchange in parts", same)
        likes[layout] = maker.make("statistics in parts", same)
        for span in (range(size), layout.positions):
            if span not in spans:
                spans[span] = maker.make("redistribution in parts", [span])
    gathers: dict[Place, Group] = {}
    reads: dict[Place, Group] = {}
    fetches: dict[Place, Group] = {}
    for_uses = set(fetched)
    for place in sorted(set(sharded), key=_in_order):
        layout = place if isinstance(place, Layout) else _whole(place, size)
        same = [layout.peers(member) for member in range(layout.degree)]
        told = "in parts" if isinstance(place, Layout) else str(place)
        gathers[place] = maker.make(f"parameters {told}", same)
        reads[place] = maker.make(f"reads {told}", same)
        if place in for_uses:
            fetches[place] = maker.make(f"uses {told}", same)
    position = maker.placement.index(rank)
    return World(
        rank, size, position, maker.placement, control, neighbours, peers, likes, gathers, reads,
        fetches, spans,
    )  # fmt: skip


def place_of(layout: Layout, size: int) -> Place:
    """What the groups of a layout of ``size`` ranks are found under."""
    return layout.degree if layout.size == size else layout


def flat(layout: Layout) -> Layout:
    """The same positions, each with samples of its own: what holds parameters that a divided unit
    has whole."""
    return Layout(groups=layout.size, first=layout.first)


def _whole(degree: int, size: int) -> Layout:
    return Layout(groups=size // degree, degree=degree)


def _in_order(place: Place) -> tuple[bool, int, int, int]:
    if isinstance(place, Layout):
        return True, place.groups, place.degree, place.first
    return False, place, 0, 0


@dataclass(frozen=True)
class _Maker:
    rank: int
    placement: tuple[int, ...]
    device: str
    timeout: timedelta

    def make(
        self, label: str, divisions: Sequence[Sequence[int]], backend: str | None = None
    ) -> Group:
        """The group of this rank among those that ``divisions`` (of positions) describe, or one of
        itself alone."""
        mine: Group | None = None
        for positions in divisions:
            ranks = tuple(self.placement[p] for p in positions)
            handle = None
            if len(ranks) > 1:  # every rank takes part in the creation, members or not
                handle = self._handle(label, sorted(ranks), backend)
            if self.rank in ranks:
                stream = handle is not None and backend is None and self._on_stream(handle)
                mine = Group(ranks, ranks.index(self.rank), handle, label, stream)
        return mine or Group((self.rank,), 0, None, label)

    def _handle(self, label: str, ranks: list[int], backend: str | None) -> Any:
        default = dist.group.WORLD
        assert default is not None, "World is made within a process group"
        known = _handles.setdefault(default, {})
        key = (label, *ranks, backend, self.timeout)
        if key not in known:
            with computing_first():
                known[key] = dist.new_group(ranks, timeout=self.timeout, backend=backend)
        return known[key]

    def _on_stream(self, handle: dist.ProcessGroup) -> bool:
        return self.device == "cuda" and "nccl" in str(dist.get_backend_config(handle))


@contextmanager
def computing_first() -> Iterator[None]:
    """Threads that are started inside do not interrupt one that computes.

    On CPUs a library's threads wake for every packet. Each time they take the processor from the
    thread that computes, and its caches. As batch threads (Linux's SCHED_BATCH, which needs no
    privilege) they get their turn a few milliseconds later and find more packets, which the kernel
    has kept for them meanwhile: a third of the switches (docs/results/exchange.md). Where a
    processor is idle they start at once, as ever. Does nothing on other systems, or where the user
    has chosen a scheduling class.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    # New threads inherit the class of the one that starts them.
    plain = os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, plain)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, plain)
