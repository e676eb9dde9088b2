"""Times collectives on process groups, as the executor calls them, and fits lines to them.

Every rank runs the same sequence; a time is the slowest rank's of all groups, since everyone waits
for it, and the median over rounds, of short calls their lower quartile. Rounds go through all
operations and sizes in turn, so that a disturbance does not hit one of them alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..executor.comm.groups import Group
from ..executor.comm.moments import now, seconds_between
from ..executor.comm.two_way import all_to_all, gather_rows
from ..planner.schema.cluster import Collective, CollectiveCurve
from ..planner.schema.curve import Curve

COLLECTIVES: tuple[Collective, ...] = (
    "p2p",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)
# Where a rank has one core, short calls of one size are of two kinds: at the link's rate, or 3 to 4
# ms longer (Linux 6.18; about half of them), when another thread of the rank held the core for a
# slice of the scheduler's. In a step a rank sleeps while it waits and most are of the first kind:
# from medians the waits of a small network were predicted to be four times the measured ones. For
# longer calls a slice is little, and their median is nearer to what steps wait.
SCHEDULER_SLICE_S, SHORT = 4e-3, 0.25
FLOAT = 4
# The longest call's share of the budget: five collectives, one of them there and back, and smaller
# sizes then take about half of it in a round, and two rounds are made.
LONGEST = 1 / 12
# From so long on, what the first call of a size does besides (connecting, allocating) is nothing,
# and few rounds tell enough; of quicker calls there are no fewer than so many.
LONG_S, FEWEST = 0.1, 3

# torch 2.13 renamed it; the old name warns there.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Call = tuple[Collective, int]
"""A collective and its size in bytes."""


@dataclass
class MeasuredGroup:
    """A process group of ``ranks`` ranks in which this rank is ``member``."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]
    member: int
    device: torch.device
    opposite: dist.ProcessGroup | None = None
    seconds: dict[Call, list[float]] = field(default_factory=dict)
    _space: dict[str, Tensor] = field(default_factory=dict)

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
            work = issue()
            if work is not None:
                work.wait()

        return run

    def meet(self) -> None:
        """Waits for all members. Collective over the group."""
        # With its number, or torch warns that it takes the current device.
        numbers = [self.device.index or 0] if self.device.type == "cuda" else None
        dist.barrier(group=self.handle, device_ids=numbers)

    @property
    def group(self) -> Group:
        """As the executor has groups."""
        on_stream = self.device.type == "cuda"
        return Group(
            self.ranks, self.member, self.handle, "measured", on_stream, opposite=self.opposite
        )

    def _issued(self, collective: Collective, count: int) -> Callable[[], dist.Work | None]:
        """What issues the collective with its tensors."""
        how: dict[str, Any] = {"group": self.handle, "async_op": True}
        if collective == "all_reduce":
            return partial(dist.all_reduce, self._tensor("out", count), **how)
        # Gradients are added up by NCCL; see [Note: Sums and rows on a device's streams] in
        # executor/gradients/sharded.py. Partial sums inside a unit are not, but are taken for that.
        adds_up = collective == "reduce_scatter" and self.device.type == "cuda"
        if collective in ("all_to_all", "reduce_scatter") and not adds_up:
            # The executor scatters so too and adds up what has come: gloo's own reduce-scatter is
            # an all-reduce inside and sends twice as much.
            parts = self.size - (collective == "all_to_all")
            each = -(-count // max(parts, 1))
            splits = [0 if m == self.member else each for m in range(self.size)]
            out, into = self._tensor("out", sum(splits)), self._tensor("into", sum(splits))
            return lambda: all_to_all(into, out, splits, splits, self.group)[0]
        shard = self._tensor("out", -(-count // self.size))
        full = self._tensor("into", shard.numel() * self.size)
        if adds_up:
            return partial(_SCATTER, shard, full, **how)
        if self.opposite is None:
            return partial(_ALL_GATHER, full, shard, **how)
        return lambda: gather_rows(full.view(self.size, -1), shard, self.group)[0]

    def _tensor(self, use: str, count: int) -> Tensor:
        """All sizes share their memory: it is there, and known, when a size is timed."""
        space = self._space.get(use)
        if space is None or space.numel() < count:
            space = self._space[use] = torch.empty(count, device=self.device).zero_()
        return space[:count]

    def _p2p(self, count: int) -> Callable[[], None]:
        tensor, first, second = self._tensor("out", count), self.ranks[0], self.ranks[-1]

        # As batches of one: for what comes by itself NCCL makes a communicator of the two.
        def pass_on(operation: Callable[..., Any], peer: int) -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.handle)]):
                work.wait()

        # There and back: half of it is one message.
        def run() -> None:
            if self.member == 0:
                pass_on(dist.isend, second)
                pass_on(dist.irecv, second)
            elif self.member == self.size - 1:
                pass_on(dist.irecv, first)
                pass_on(dist.isend, first)

        return run


def synchronise(device: torch.device) -> None:
    """Waits for a device's queue; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The largest of all ranks for each. Collective over all ranks."""
    found = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


# Calls that are timed together on a device: one by itself would be mostly the host's launch and the
# wait for it, which a run does not have. Of large messages fewer, whose start is nothing.
BATCH_BYTES, MOST_CALLS = 1 << 26, 16


def calls_at_once(device: torch.device, size_bytes: int) -> int:
    """How many calls are timed as one; on a CPU a call is what a run has."""
    if device.type == "cpu":
        return 1
    return max(min(BATCH_BYTES // max(size_bytes, 1), MOST_CALLS), 2)


def time_once(group: MeasuredGroup, collective: Collective, size_bytes: int) -> float:
    """Seconds of one call on this rank, all groups of a set at once. Collective over all ranks."""
    run = group.operation(collective, size_bytes)
    calls = calls_at_once(group.device, size_bytes)
    dist.barrier()
    start = now(group.device)
    for _ in range(calls):
        run()
    taken = seconds_between(start, now(group.device)) / calls
    return taken / (2 if collective == "p2p" else 1)


def measure(
    group: MeasuredGroup,
    sizes: Sequence[int],
    rounds: int,
    budget_s: float,
    tick: Callable[[float], None] = lambda share: None,
) -> None:
    """Fills ``group.seconds``, alike on all ranks; all have one group of the set each. Sizes grow
    as long as one call takes a small part of ``budget_s``, and rounds are made while one more fits
    in it, at the end of quick calls only. ``tick`` is told the share that is over. Collective over
    all ranks."""
    start = time.perf_counter()
    calls = _affordable(group, sizes, LONGEST * budget_s)
    for number in range(1, rounds + 1):
        begun = time.perf_counter()
        tick(min(max(number / (rounds + 1), (begun - start) / budget_s), 0.95))
        taken = slowest([time_once(group, *call) for call in calls], group.device)
        for call, seconds in zip(calls, taken, strict=True):
            group.seconds[call].append(seconds)
        now = time.perf_counter()
        # Agreed, as a rank that stops alone leaves the others waiting in the next round.
        spent, last = slowest([now - start, now - begun], group.device)
        if spent + last > budget_s:
            quick = [c for c, seconds in zip(calls, taken, strict=True) if seconds < LONG_S]
            if not quick or (len(quick) == len(calls) and number >= FEWEST):
                break
            calls = quick
    tick(1.0)


def _affordable(group: MeasuredGroup, sizes: Sequence[int], longest_s: float) -> list[Call]:
    """The calls that take no longer than that, each made once: point to point last, as a link's
    token bucket fills while the other way is used, and sizes in turn, as it does in pauses."""
    for collective in COLLECTIVES:
        known: list[tuple[int, float]] = []
        for size in sorted(sizes):
            if _next_s(known, size) > longest_s:
                break
            taken = slowest([time_once(group, collective, size)], group.device)[0]
            known.append((size, taken))
            group.seconds[collective, size] = [taken] if taken > LONG_S else []
    return sorted(group.seconds, key=lambda call: (call[0] == "p2p", call[1]))


def _next_s(known: Sequence[tuple[int, float]], size: int) -> float:
    """What a call of ``size`` will take, given sizes and seconds of smaller ones."""
    if len(known) < 2:
        return known[-1][1] if known else 0.0
    # By what the last bytes took: the first may have gone at any speed.
    (before, less), (last, most) = known[-2:]
    return most + max(most - less, 0.0) / (last - before) * (size - last)


def curves(
    group: MeasuredGroup, ring: float = 1.0, all_to_all: float = 1.0
) -> tuple[CollectiveCurve, ...]:
    """The times as curves, with their fitted lines. ``ring`` is how many times as many bytes would
    have taken as long with nobody beside the group, at the bandwidth of the level; ``all_to_all``
    how many the busiest end of a link carried there for each that a member sent."""
    found = []
    for collective in COLLECTIVES:
        scale = all_to_all if collective == "all_to_all" else ring
        points = {s: v for (c, s), v in group.seconds.items() if c == collective}
        sizes = sorted(points)
        taken = [_typical_s(points[s]) for s in sizes]
        wire = [float(size * scale) for size in sizes]
        line = fit_line(wire, taken)
        found.append(
            CollectiveCurve(
                collective=collective,
                ranks=group.size,
                seconds=Curve(x=tuple(wire), y=tuple(taken)),
                latency_s=line.latency_s,
                bytes_per_s=line.bytes_per_s,
            )
        )
    return tuple(found)


def _typical_s(seconds: Sequence[float]) -> float:
    short, middle = np.quantile(seconds, (SHORT, 0.5))
    return float(short if short < SCHEDULER_SLICE_S else middle)


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
