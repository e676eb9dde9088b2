"""Small vectors that ranks show each other: the header of a forward, agreement on a set-up.

A header tells every rank how many samples each rank feeds in this forward, and lets all notice
that they are not in the same forward, before anything goes wrong in silence.
"""

import hashlib
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.schema.errors import InputError, RunError
from ...planner.schema.record import decode, encode
from .groups import Group, World
from .setups import HostSetup, check_versions, digest_text, setup_here
from .watchdog import Watchdog


class RankRow(NamedTuple):
    """One rank's header. ``shapes`` is a digest of its inputs' shapes without the batch dim,
    ``mode`` tells training from evaluation."""

    number: int
    samples: int
    shapes: int
    mode: int


class PendingGather:
    """A vector of each rank, or one of all, on its way."""

    def __init__(
        self,
        parts: list[Tensor],
        wait: Callable[[], None] = lambda: None,
        has_come: Callable[[], bool] = lambda: True,
    ) -> None:
        self._parts, self._wait, self.has_come = parts, wait, has_come

    def rows(self) -> list[list[float]]:
        """The vectors in rank order. Waits for them."""
        self._wait()
        return [part.tolist() for part in self._parts]


class Control:
    """Exchanges of control vectors over the ``control`` group, or over another one."""

    def __init__(self, world: World, watch: Watchdog, group: Group | None = None) -> None:
        self.group = group or world.control
        self.watch = watch
        self.seconds = 0.0

    def gather(self, values: Sequence[float], doing: str, *, whole: bool = True) -> PendingGather:
        """Starts to show ``values`` (``whole`` numbers or real ones) to every rank."""
        mine = torch.tensor(values, dtype=torch.int64 if whole else torch.float64, device="cpu")
        handle = self.group.handle
        if handle is None:
            return PendingGather([mine])
        parts = [torch.empty_like(mine) for _ in range(self.group.size)]
        self.watch.issued(f"what ranks tell for {doing}", self.group)
        return self._started(
            dist.all_gather(parts, mine, group=handle, async_op=True), parts, doing
        )

    def all_reduce_max(self, vector: Tensor, doing: str) -> PendingGather:
        """Starts to reduce ``vector`` to the largest of all ranks, in place."""
        return self._all_reduce(vector, dist.ReduceOp.MAX, f"the vote of {doing}", doing)

    def all_reduce_sum(self, vector: Tensor, doing: str) -> PendingGather:
        """Starts to add ``vector`` up over all ranks, in place."""
        return self._all_reduce(vector, dist.ReduceOp.SUM, f"the sum of {doing}", doing)

    def _all_reduce(
        self, vector: Tensor, op: dist.ReduceOp.RedOpType, name: str, doing: str
    ) -> PendingGather:
        handle = self.group.handle
        if handle is None:
            return PendingGather([vector])
        self.watch.issued(name, self.group)
        work = dist.all_reduce(vector, op=op, group=handle, async_op=True)
        return self._started(work, [vector], doing)

    def _started(self, work: dist.Work, parts: list[Tensor], doing: str) -> PendingGather:
        # By priority a rank that has all gradients itself may never wait for the votes, so the
        # watchdog does.
        self.watch.follow(work, doing)

        def wait() -> None:
            self.seconds += self.watch.wait(work, self.group, doing)

        return PendingGather(parts, wait, work.is_completed)

    def agree(self, what: str, digest: int, remedy: str) -> None:
        """Raises ``InputError`` unless every rank has the same digest. Collective."""
        digests = self._column(digest, f"the comparison of {what}")
        odd = [r for r, other in enumerate(digests) if other != digests[0]]
        if odd:
            hosts = self.texts(socket.gethostname(), "the names of hosts")
            names = _with_hosts(odd, hosts)
            raise InputError(
                f"{what} of rank {names} differs from that of rank {_with_hosts([0], hosts)}: "
                f"{remedy}"
            )

    def agree_on_setup(self, device: torch.device) -> list[HostSetup]:
        """Raises ``InputError`` where hosts have other versions; the ranks' where anything else
        differs. Collective."""
        mine = setup_here(device)
        doing = "the comparison of versions and devices"
        digests = self._column(digest(digest_text(mine)), doing)
        # What differs is shown only where something does: all ranks know whether.
        if len(set(digests)) == 1:
            return []
        setups = [
            decode(HostSetup, text.encode()) for text in self.texts(encode(mine).decode(), doing)
        ]
        check_versions(setups)
        return setups

    def texts(self, text: str, doing: str) -> list[str]:
        """The text of every rank, in their order. Collective."""
        data = text.encode()
        lengths = self._column(len(data), doing)
        padded = [*data, *(0 for _ in range(max(lengths) - len(data)))]
        rows = self.gather(padded, doing).rows()
        return [
            bytes(int(value) for value in row[:length]).decode()
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _column(self, value: int, doing: str) -> list[int]:
        return [int(row[0]) for row in self.gather([value], doing).rows()]


def _with_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``2, 3 (host b)``; ranks alone where all are on one host."""
    numbers = ", ".join(map(str, ranks))
    if len(set(hosts)) == 1:
        return numbers
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    return f"{numbers} ({'host' if len(names) == 1 else 'hosts'} {', '.join(names)})"


class Header:
    """The headers of all ranks for one forward. ``number`` says which forward that is."""

    def __init__(self, mine: RankRow, gathered: PendingGather, strict: bool) -> None:
        self.number = mine.number
        self._gathered = gathered
        self._strict = strict
        self._rows: list[RankRow] | None = None

    def rows(self) -> list[RankRow]:
        """One row of each rank. Waits the first time; raises ``RunError`` where they do not fit."""
        if self._rows is None:
            rows = [RankRow(*(int(v) for v in row)) for row in self._gathered.rows()]
            check_rows(rows, strict=self._strict)
            self._rows = rows
        return self._rows


def check_rows(rows: Sequence[RankRow], *, strict: bool) -> None:
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
    """A whole number that stands for the text, the same in every process."""
    # Two bits less than the hash has, so that it and its negative are 64-bit integers.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
