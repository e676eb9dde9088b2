"""Small vectors that ranks show each other: the header of a forward, agreement on a set-up.

A header tells every rank how many samples each rank feeds in this forward, and lets all notice
that they are not in the same forward, before anything goes wrong in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.schema.errors import InputError, RunError
from .groups import World
from .watchdog import Watchdog


class Row(NamedTuple):
    """One rank's header. ``shapes`` is a digest of its inputs' shapes without the batch dim,
    ``mode`` tells training from evaluation."""

    number: int
    samples: int
    shapes: int
    mode: int


class Gathered:
    """A vector of each rank, on its way. ``rows`` waits for it."""

    def __init__(
        self, parts: list[Tensor], work: dist.Work | None, wait: Callable[[dist.Work | None], None]
    ) -> None:
        self._parts = parts
        self._work = work
        self._wait = wait

    def rows(self) -> list[list[float]]:
        """The vectors in rank order."""
        self._wait(self._work)
        self._work = None
        return [part.tolist() for part in self._parts]


class Control:
    """Exchanges of control vectors over the ``control`` group."""

    def __init__(self, world: World, watch: Watchdog) -> None:
        self.world = world
        self.watch = watch
        self.seconds = 0.0

    def gather(self, values: Sequence[float], doing: str, *, whole: bool = True) -> Gathered:
        """Starts to show ``values`` (``whole`` numbers or real ones) to every rank."""
        mine = torch.tensor(values, dtype=torch.int64 if whole else torch.float64, device="cpu")
        handle = self.world.control.handle
        if handle is None:
            return Gathered([mine], None, lambda work: None)
        parts = [torch.empty_like(mine) for _ in range(self.world.size)]
        self.watch.issued(f"the header of {doing}", self.world.control)
        work = dist.all_gather(parts, mine, group=handle, async_op=True)
        self.watch.follow(work, doing)
        return Gathered(parts, work, lambda w: self._wait(w, doing))

    def most(self, vector: Tensor, doing: str) -> Gathered:
        """Starts to reduce ``vector`` to the largest of all ranks, in place."""
        handle = self.world.control.handle
        if handle is None:
            return Gathered([vector], None, lambda work: None)
        self.watch.issued(f"the vote of {doing}", self.world.control)
        work = dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=handle, async_op=True)
        self.watch.follow(work, doing)
        return Gathered([vector], work, lambda w: self._wait(w, doing))

    def total(self, vector: Tensor, doing: str) -> Gathered:
        """Starts to add ``vector`` up over all ranks, in place."""
        handle = self.world.control.handle
        if handle is None:
            return Gathered([vector], None, lambda work: None)
        self.watch.issued(f"the sum of {doing}", self.world.control)
        work = dist.all_reduce(vector, group=handle, async_op=True)
        self.watch.follow(work, doing)
        return Gathered([vector], work, lambda w: self._wait(w, doing))

    def _wait(self, work: dist.Work | None, doing: str) -> None:
        self.seconds += self.watch.wait(work, self.world.control, doing)

    def agree(self, what: str, digest: int, remedy: str) -> None:
        """Raises ``InputError`` unless every rank has the same digest. Collective."""
        digests = [row[0] for row in self.gather([digest], f"the comparison of {what}").rows()]
        odd = [r for r, other in enumerate(digests) if other != digests[0]]
        if odd:
            names = ", ".join(str(r) for r in odd)
            raise InputError(f"{what} of rank {names} differs from that of rank 0: {remedy}")


class Header:
    """The headers of all ranks for one forward."""

    def __init__(self, mine: Row, gathered: Gathered, strict: bool) -> None:
        self._mine = mine
        self._gathered = gathered
        self._strict = strict
        self._rows: list[Row] | None = None

    @property
    def number(self) -> int:
        """Which forward this is."""
        return self._mine.number

    def rows(self) -> list[Row]:
        """One row of each rank. Waits the first time; raises ``RunError`` where they do not fit."""
        if self._rows is None:
            rows = [Row(*(int(v) for v in row)) for row in self._gathered.rows()]
            check_rows(rows, strict=self._strict)
            self._rows = rows
        return self._rows


def check_rows(rows: Sequence[Row], *, strict: bool) -> None:
    """Raises ``RunError`` unless the ranks are in the same forward; where a unit is divided
    (``strict``), in the same mode and with inputs of the same shapes too."""
    _same(
        [row.number for row in rows],
        "rank {0} is in forward {1} while rank {2} is in forward {3}: every rank must call the "
        "model equally often, with an empty batch where it has no samples",
    )
    if not strict:
        return
    _same(
        [row.mode for row in rows],
        "rank {0} and rank {2} call the model in different modes: where a unit is divided over "
        "ranks all must be in train() or all in eval(), and all with gradients or all without",
    )
    _same(
        [row.shapes for row in rows],
        "the inputs of rank {0} and rank {2} differ in more than their number of samples: where a "
        "unit is divided over ranks pad them to one shape",
    )


def _same(values: Sequence[int], sentence: str) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise RunError(sentence.format(0, values[0], rank, value))


def digest(text: str) -> int:
    """A whole number below 2^62 that stands for the text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
