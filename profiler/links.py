"""The links among the ranks of a process group, measured, as a Cluster: collectives, how computing
and communicating slow each other, and the link between a device and its host's memory."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..executor.launch.start import device_name, memory_bytes, software
from ..planner.schema.cluster import Cluster, CollectiveCurve, Device, Interference, Level, Node
from ..planner.schema.errors import InputError
from .collectives import COLLECTIVES, Group, curves, measure, synchronise

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 9
# Seconds for all groups together; on a slow network fewer rounds are made.
BUDGET_S = 8.0

Progress = Callable[[int, int, str], None]


def probe(
    *,
    device: torch.device | None = None,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
) -> Cluster:
    """Measures latency and bandwidth of point-to-point messages, all-reduce, all-gather,
    reduce-scatter and all-to-all by message size, on the groups that plans use (neighbours, and
    ranks with equal places in these), how much computing and communicating slow each other, and on
    CUDA what each device's link to its host's memory carries while all devices use theirs.

    Collective: every rank of an initialised process group calls it, and all get the same Cluster.
    Uses process groups of its own and ends them. Raises ``InputError`` where there is no group.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise InputError(
            "a probe needs at least two ranks: start it with torchrun, or with --ranks 2"
        )
    where = device or torch.device("cpu")
    hosts = _hosts(where)
    _check_order([host for host, _, _ in hosts])
    plan = _groups(hosts)
    found: dict[str, list[CollectiveCurve]] = {}
    interference = Interference()
    ticks = _Ticks(progress, len(plan) * rounds * len(COLLECTIVES))
    for level, group_sets in plan:
        group, handles = _join(group_sets, where)
        measure(group, sizes, rounds, budget_s / len(plan), ticks)
        own = curves(group, sharing(group_sets, [host for host, _, _ in hosts]))
        if group.size == dist.get_world_size():
            interference = measure_interference(group)
        found.setdefault(level, []).extend(own)
        for handle in handles:
            dist.destroy_process_group(handle)
    cluster = _cluster(hosts, found, interference, _host_rates(where))
    # Every rank has measured its own groups; all plan from rank 0's figures.
    answer: list[Any] = [cluster]
    dist.broadcast_object_list(answer, src=0)
    ticks.finish()
    return answer[0]  # type: ignore[no-any-return]


class _Ticks:
    """Counts measured collectives for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, "measuring links")

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total, "measured links")


def _hosts(device: torch.device) -> list[tuple[str, str, int]]:
    """(host name, device name, memory of the device or host) of each rank. Collective."""
    own = (socket.gethostname(), device_name(device), memory_bytes(device))
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    if device.type == "cuda":
        return rows
    names = [row[0] for row in rows]
    return [(host, name, memory // names.count(host)) for host, name, memory in rows]


def _host_rates(device: torch.device) -> list[float | None]:
    """What each rank's device and its host's memory exchange, all ranks at the same time.
    Collective."""
    dist.barrier()
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, host_bytes_per_s(device))
    return rows


GroupSets = list[tuple[int, ...]]


def _groups(hosts: Sequence[tuple[str, str, int]]) -> list[tuple[str, GroupSets]]:
    """The sets of groups to measure one after the other, with the level that each is about.

    For every divisor of the world size the neighbours in blocks of it, and the ranks that have the
    same place in the blocks: those at once which plans use at once.
    """
    world = len(hosts)
    found: list[tuple[str, GroupSets]] = []
    for size in (d for d in range(2, world + 1) if world % d == 0):
        blocks = [tuple(range(i, i + size)) for i in range(0, world, size)]
        found.append((_level_of(blocks, hosts), blocks))
        stride = world // size
        peers = [tuple(range(i, world, stride)) for i in range(stride)]
        if peers != blocks and _level_of(peers, hosts) != _level_of(blocks, hosts):
            found.append((_level_of(peers, hosts), peers))
    return found


def sharing(sets: GroupSets, hosts: Sequence[str]) -> int:
    """How many of the groups, which run at once, share the busiest host's network interface (1
    where none leaves its host): what one of them takes is then what all their bytes take."""
    crossing = [{hosts[r] for r in ranks} for ranks in sets]
    loads = [sum(1 for c in crossing if len(c) > 1 and host in c) for host in hosts]
    return max(*loads, 1)


def _check_order(hosts: Sequence[str]) -> None:
    """Ranks are numbered through the hosts: a Cluster says so, and groups of neighbours need it."""
    changes = [b for a, b in pairwise(hosts) if a != b]
    if len(set(hosts)) != len(changes) + 1:
        raise InputError(
            f"ranks alternate between hosts ({', '.join(hosts[:8])}): start them so that each "
            "host's ranks are numbered one after the other, as torchrun does"
        )


def _level_of(sets: GroupSets, hosts: Sequence[tuple[str, str, int]]) -> str:
    crossing = any(len({hosts[r][0] for r in ranks}) > 1 for ranks in sets)
    return "inter" if crossing else "intra"


def _join(sets: GroupSets, device: torch.device) -> tuple[Group, list[dist.ProcessGroup]]:
    """Creates all groups of a set, in one order on all ranks; this rank's, and its handles."""
    own: Group | None = None
    handles = []
    rank = dist.get_rank()
    for ranks in sets:
        # new_group is collective over all ranks, also for those that are not in the group.
        handle = dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")
        if rank in ranks:
            own = Group(handle, ranks, ranks.index(rank), device)
            handles.append(handle)
    assert own is not None, "the groups of a set cover all ranks"
    return own, handles


def _cluster(
    hosts: Sequence[tuple[str, str, int]],
    found: dict[str, list[CollectiveCurve]],
    interference: Interference,
    host_rates: Sequence[float | None],
) -> Cluster:
    order = list(dict.fromkeys(host for host, _, _ in hosts))
    nodes = tuple(
        Node(
            name=host,
            devices=tuple(
                Device(name=name, memory_bytes=memory, host_bytes_per_s=rate, source="measured")
                for (other, name, memory), rate in zip(hosts, host_rates, strict=True)
                if other == host
            ),
        )
        for host in order
    )
    levels = []
    for name, measured in found.items():
        best = {c.ranks: c for c in measured if c.collective == "p2p"}
        line = best[min(best)]
        levels.append(
            Level(
                name=name,  # type: ignore[arg-type]
                latency_s=line.latency_s,
                bytes_per_s=line.bytes_per_s,
                curves=tuple({(c.collective, c.ranks): c for c in measured}.values()),
            )
        )
    return Cluster(
        name=f"{len(hosts)} ranks on {', '.join(order[:4])}{' and more' if len(order) > 4 else ''}",
        nodes=nodes,
        levels=tuple(levels),
        interference=interference,
        origin="measured",
        software=software(),
    )


# Large enough that starting a copy (some 10 µs) is less than a hundredth of it at 100 GB/s.
COPY_BYTES = 1 << 28
COPY_ROUNDS = 5


def host_bytes_per_s(device: torch.device) -> float | None:
    """What the slower direction between a device and pinned memory of its host carries; None for a
    CPU, whose memory is the host's.

    Where several ranks call it at once, each has what the others leave of a link that they share,
    as in a run.
    """
    if device.type == "cpu":
        return None
    return copy_rate(device)


def copy_rate(
    device: torch.device,
    size_bytes: int = COPY_BYTES,
    rounds: int = COPY_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes per second of the slower direction: in each the median of ``rounds`` copies, after one
    that does not count. Pinned memory where the device has another than the host's."""
    here = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    slower = max(
        _copy_s(into, from_, device, rounds, clock)
        for into, from_ in ((there, here), (here, there))
    )
    return size_bytes / max(slower, 1e-9)


def _copy_s(
    into: Tensor, from_: Tensor, device: torch.device, rounds: int, clock: Callable[[], float]
) -> float:
    taken = []
    for _ in range(rounds + 1):
        start = clock()
        into.copy_(from_, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(clock() - start)
    return median(taken[1:])


MESSAGE_BYTES = 4 * 2**20
SLOWDOWN_ROUNDS = 5
# On a CPU the communication library's threads take cores and memory bandwidth from the computation;
# on a GPU its kernels take multiprocessors. Three things are timed in turn, several rounds: a fixed
# amount of computing, a fixed amount of communicating, and the computing while the communicating
# goes on.
LOAD_S = 0.06
# No further round is begun after so long.
SLOWDOWN_BUDGET_S = 3.0


class _Load:
    """A piece of computing like training's: a convolution and a matrix product."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.image = torch.randn(4, 32, 32, 32, device=device)
        self.kernel = torch.randn(32, 32, 3, 3, device=device)
        self.matrix = torch.randn(384, 384, device=device)
        self.repeats = 1

    def run(self) -> float:
        """Seconds of the load."""
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(self.repeats):
                F.conv2d(self.image, self.kernel, padding=1)
                self.matrix @ self.matrix
        synchronise(self.device)
        return time.perf_counter() - start


def measure_interference(group: Group) -> Interference:
    """The slowdowns, as medians over rounds and the mean over ranks. Collective over the group."""
    load = _Load(group.device)
    load.run()
    load.repeats = _agreed(group, max(int(LOAD_S / max(load.run(), 1e-6)), 1))
    tensor = torch.zeros(MESSAGE_BYTES // 4, device=group.device)
    messages = _agreed(group, max(int(LOAD_S / max(_send(group, tensor, 1), 1e-6)), 2))
    rows = _rounds(group, load, tensor, messages)
    compute = median(together / max(alone, 1e-9) for alone, _, together, _ in rows)
    # Communicating goes on under computing for at most as long as that lasts.
    communicate = median(_stretch(sent, together, both) for _, sent, together, both in rows)
    slow = torch.tensor([compute, communicate], dtype=torch.float64, device=group.device)
    dist.all_reduce(slow, group=group.handle)
    compute, communicate = (slow / group.size).tolist()
    return Interference(
        compute_slowdown=max(compute, 1.0), communication_slowdown=max(communicate, 1.0)
    )


def _rounds(
    group: Group, load: _Load, tensor: torch.Tensor, messages: int
) -> list[tuple[float, float, float, float]]:
    """Rounds until there are enough or time is up, on all members alike."""
    start = time.perf_counter()
    rows: list[tuple[float, float, float, float]] = []
    while len(rows) < SLOWDOWN_ROUNDS:
        rows.append(_round(group, load, tensor, messages))
        if _agreed(group, int(time.perf_counter() - start > SLOWDOWN_BUDGET_S)):
            break
    return rows


def _agreed(group: Group, count: int) -> int:
    """The largest count of all members: all must do the same."""
    value = torch.tensor([count], dtype=torch.int64, device=group.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group.handle)
    return int(value)


def _send(group: Group, tensor: torch.Tensor, messages: int) -> float:
    start = time.perf_counter()
    for _ in range(messages):
        dist.all_reduce(tensor, group=group.handle)
    synchronise(group.device)
    return time.perf_counter() - start


def _round(
    group: Group, load: _Load, tensor: torch.Tensor, messages: int
) -> tuple[float, float, float, float]:
    """Seconds of computing alone, communicating alone, computing under communication, and until
    both are over."""
    dist.barrier(group=group.handle)
    alone = load.run()
    dist.barrier(group=group.handle)
    sent = _send(group, tensor, messages)
    dist.barrier(group=group.handle)
    start = time.perf_counter()
    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for _ in range(messages)]
    together = load.run()
    for work in works:
        if work is not None:
            work.wait()
    synchronise(group.device)
    return alone, sent, together, time.perf_counter() - start


def _stretch(sent: float, together: float, both: float) -> float:
    """How much slower communicating was while computing went on for ``together`` seconds.

    If it ended with the computing or before, all of it was slowed; else what was left ran alone:
    both = together + (sent - together / slowdown).
    """
    if both <= together * 1.02:
        return max(together / sent, 1.0)
    done_meanwhile = sent - (both - together)
    return together / done_meanwhile if done_meanwhile > 0.05 * together else 1.0
