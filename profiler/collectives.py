"""Times collectives on one process group, as the executor calls them, and fits lines to them.

Every rank runs the same sequence; a time is the slowest rank's, since everyone waits for it, and
the median over rounds. Rounds go through all operations and sizes in turn, so that a disturbance
does not hit one of them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..planner.schema.cluster import Collective, CollectiveCurve
from ..planner.schema.curve import Curve

COLLECTIVES: tuple[Collective, ...] = (
    "p2p",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)
FLOAT = 4
# Share of the budget after which no longer message is timed: each size is sent twice by each of
# five collectives, so that the first round stays within the budget even on a slow network.
LONGEST = 1 / 40

# torch 2.13 renamed both; the old names warn there.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Group:
    """A process group of ``ranks`` ranks in which this rank is ``member``."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]
    member: int
    device: torch.device
    seconds: dict[tuple[Collective, int], list[float]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def operation(self, collective: Collective, size_bytes: int) -> Callable[[], None]:
        """A call of the collective; sizes as in ``CollectiveCurve``."""
        count = max(size_bytes // FLOAT, 1)
        if collective == "p2p":
            return self._p2p(count)
        issue = self._issued(collective, count)

        def run() -> None:
            work = issue(group=self.handle, async_op=True)
            if work is not None:
                work.wait()

        return run

    def _issued(self, collective: Collective, count: int) -> Callable[..., dist.Work | None]:
        """The collective with its tensors, to be issued on a group."""
        if collective == "all_reduce":
            return partial(dist.all_reduce, self._empty(count))
        if collective == "all_to_all":
            each = -(-count // max(self.size - 1, 1))
            splits = [0 if m == self.member else each for m in range(self.size)]
            out, into = self._empty(sum(splits)), self._empty(sum(splits))
            return partial(dist.all_to_all_single, into, out, splits, splits)
        shard = self._empty(-(-count // self.size))
        full = self._empty(shard.numel() * self.size)
        if collective == "all_gather":
            return partial(_ALL_GATHER, full, shard)
        return partial(_REDUCE_SCATTER, shard, full)

    def _empty(self, count: int) -> Tensor:
        return torch.zeros(count, device=self.device)

    def _p2p(self, count: int) -> Callable[[], None]:
        tensor, first, second = self._empty(count), self.ranks[0], self.ranks[-1]

        # There and back: half of it is one message.
        def run() -> None:
            if self.member == 0:
                dist.send(tensor, second, group=self.handle)
                dist.recv(tensor, second, group=self.handle)
            elif self.member == self.size - 1:
                dist.recv(tensor, first, group=self.handle)
                dist.send(tensor, first, group=self.handle)

        return run


def synchronise(device: torch.device) -> None:
    """Waits for a device's queue; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(group: Group, collective: Collective, size_bytes: int) -> float:
    """Seconds of one call on the slowest member. Collective over the group."""
    run = group.operation(collective, size_bytes)
    # The first call of a size may connect and allocate: it is not timed.
    run()
    synchronise(group.device)
    dist.barrier(group=group.handle)
    start = time.perf_counter()
    run()
    synchronise(group.device)
    taken = time.perf_counter() - start
    slowest = torch.tensor([taken], dtype=torch.float64, device=group.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group.handle)
    return float(slowest) / (2 if collective == "p2p" else 1)


def measure(
    group: Group,
    sizes: Sequence[int],
    rounds: int,
    budget_s: float,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Fills ``group.seconds``. Collective; rounds stop early when ``budget_s`` is used up, and
    sizes where one message would use up too much of it, on all members alike."""
    start = time.perf_counter()
    left: dict[Collective, list[int]] = {c: sorted(sizes) for c in COLLECTIVES}
    for _ in range(rounds):
        for collective in COLLECTIVES:
            for size in left[collective]:
                taken = time_once(group, collective, size)
                group.seconds.setdefault((collective, size), []).append(taken)
                # The line through smaller ones must do. All members have the slowest one's time, so
                # all leave the same sizes out.
                if taken > LONGEST * budget_s:
                    left[collective] = [s for s in left[collective] if s <= size]
                    break
            tick()
        # Agreed, as a member that stops alone leaves the others waiting in the next round.
        spent = torch.tensor([time.perf_counter() - start], device=group.device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=group.handle)
        if float(spent) > budget_s:
            break


def curves(group: Group, sharing: int = 1) -> tuple[CollectiveCurve, ...]:
    """The medians as curves, with their fitted lines. Where ``sharing`` groups were timed at once
    over one network interface, sizes are those of all of them together: what the wire carried."""
    found = []
    for collective in COLLECTIVES:
        points = {s: v for (c, s), v in group.seconds.items() if c == collective}
        sizes = sorted(points)
        medians = [float(torch.tensor(points[s], dtype=torch.float64).median()) for s in sizes]
        wire = [float(size * sharing) for size in sizes]
        line = fit_line(wire, medians)
        found.append(
            CollectiveCurve(
                collective=collective,
                ranks=group.size,
                seconds=Curve(x=tuple(wire), y=tuple(medians)),
                latency_s=line.latency_s,
                bytes_per_s=line.bytes_per_s,
            )
        )
    return tuple(found)


class Line(NamedTuple):
    """Latency in seconds and bandwidth in bytes per second."""

    latency_s: float
    bytes_per_s: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least squared *relative* errors, latency and slope not negative."""
    # Here, as it takes a third of a second to import and only probing needs it.
    from scipy.optimize import lsq_linear

    size, time = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    # Relative, as sizes span five orders of magnitude and the large ones would drown the latency.
    rows = np.stack([np.ones_like(size), size], axis=1) / time[:, None]
    # Unknowns of about one, for the solver's sake: a slope is less than a billionth.
    scale = np.array([time.min(), time.max() / size.max()])
    found = lsq_linear(rows * scale, np.ones_like(size), bounds=(0, np.inf)).x * scale
    slope = float(found[1])
    # A slope of zero says only that the largest message was too small to tell.
    fastest = float(size.max() / time.max()) * 1e3
    return Line(float(found[0]), 1 / slope if slope > 1 / fastest else fastest)
