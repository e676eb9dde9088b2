"""The links among the ranks of a process group, measured, as a Cluster: collectives, how computing
and communicating slow each other, and the link between a device and its host's memory."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
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
    hosts, devices = _hosts(where)
    _check_order(hosts)
    plan = _groups(hosts)
    found: dict[str, list[CollectiveCurve]] = {}
    interference = Interference()
    done, total = itertools.count(1), len(plan) * rounds * len(COLLECTIVES)

    def tick() -> None:
        if progress is not None:
            progress(next(done), total, "measuring links")

    for level, group_sets in plan:
        group = _join(group_sets, where)
        measure(group, sizes, rounds, budget_s / len(plan), tick)
        own = curves(group, sharing(group_sets, hosts))
        # Once, among all ranks: a Cluster has one figure for each slowdown.
        if group.size == dist.get_world_size():
            interference = measure_interference(group)
        found.setdefault(level, []).extend(own)
        dist.destroy_process_group(group.handle)
    # Every rank has measured its own groups; all plan from rank 0's figures.
    answer: list[Any] = [_cluster(hosts, devices, found, interference)]
    dist.broadcast_object_list(answer, src=0)
    if progress is not None:
        progress(total, total, "measured links")
    return answer[0]  # type: ignore[no-any-return]


def _hosts(device: torch.device) -> tuple[list[str], list[Device]]:
    """The host's name and the device of each rank. Collective."""
    # All ranks copy at the same time, as they do in a run: they may share a link to their host.
    dist.barrier()
    own = Device(
        name=device_name(device), memory_bytes=memory_bytes(device),
        host_bytes_per_s=host_bytes_per_s(device), source="measured",
    )  # fmt: skip
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (socket.gethostname(), own))
    hosts = [host for host, _ in rows]
    devices = [found for _, found in rows]
    if device.type == "cpu":
        # What a CPU rank has is its host's memory, which all ranks of the host share.
        devices = [
            msgspec.structs.replace(d, memory_bytes=d.memory_bytes // hosts.count(host))
            for host, d in rows
        ]
    return hosts, devices


GroupSets = list[tuple[int, ...]]


def _groups(hosts: Sequence[str]) -> list[tuple[str, GroupSets]]:
    """The sets of groups to measure one after the other, with the level that each is about.

    For every divisor of the world size the neighbours in blocks of it, and the ranks that have the
    same place in the blocks: those at once which plans use at once.
    """

    def level_of(sets: GroupSets) -> str:
        crossing = any(len({hosts[r] for r in ranks}) > 1 for ranks in sets)
        return "inter" if crossing else "intra"

    world = len(hosts)
    found: list[tuple[str, GroupSets]] = []
    for size in (d for d in range(2, world + 1) if world % d == 0):
        blocks = [tuple(range(i, i + size)) for i in range(0, world, size)]
        found.append((level_of(blocks), blocks))
        stride = world // size
        strided = [tuple(range(i, world, stride)) for i in range(stride)]
        # On the same links as the blocks they would be measured twice.
        if level_of(strided) != level_of(blocks):
            found.append((level_of(strided), strided))
    return found


def sharing(sets: GroupSets, hosts: Sequence[str]) -> int:
    """How many of the groups, which run at once, share the busiest host's network interface (1
    where none leaves its host): what one of them takes is then what all their bytes take."""
    crossing = [{hosts[r] for r in ranks} for ranks in sets]
    loads = [sum(1 for c in crossing if len(c) > 1 and host in c) for host in hosts]
    return max(*loads, 1)


def _check_order(hosts: Sequence[str]) -> None:
    """Ranks are numbered through the hosts: a Cluster says so, and groups of neighbours need it."""
    changes = [b for a, b in itertools.pairwise(hosts) if a != b]
    if len(set(hosts)) != len(changes) + 1:
        raise InputError(
            f"ranks alternate between hosts ({', '.join(hosts[:8])}): start them so that each "
            "host's ranks are numbered one after the other, as torchrun does"
        )


def _join(sets: GroupSets, device: torch.device) -> Group:
    """Creates all groups of a set, in one order on all ranks; this rank's."""
    own: Group | None = None
    for ranks in sets:
        # new_group is collective over all ranks, also for those that are not in the group.
        handle = dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")
        if dist.get_rank() in ranks:
            own = Group(handle, ranks, ranks.index(dist.get_rank()), device)
    assert own is not None, "the groups of a set cover all ranks"
    return own


def _cluster(
    hosts: Sequence[str],
    devices: Sequence[Device],
    found: dict[str, list[CollectiveCurve]],
    interference: Interference,
) -> Cluster:
    order = list(dict.fromkeys(hosts))
    nodes = tuple(
        Node(
            name=name,
            devices=tuple(d for host, d in zip(hosts, devices, strict=True) if host == name),
        )
        for name in order
    )
    levels = []
    for name, measured in found.items():
        # The level's own line is that of the fewest ranks: two neighbours and nobody beside them.
        line = min((c for c in measured if c.collective == "p2p"), key=lambda c: c.ranks)
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
    return None if device.type == "cpu" else copy_rate(device)


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
    slower = 1e-9
    for into, source in ((there, here), (here, there)):
        taken = []
        for _ in range(rounds + 1):
            start = clock()
            into.copy_(source, non_blocking=True)
            synchronise(device)
            taken.append(clock() - start)
        slower = max(slower, median(taken[1:]))
    return size_bytes / slower


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
    """Pieces of computing like training's, a convolution and a matrix product, and messages, each
    for about ``LOAD_S``: the same numbers of both on all members, who would else wait for ever."""

    def __init__(self, group: Group) -> None:
        self.group, device = group, group.device
        self.image = torch.randn(4, 32, 32, 32, device=device)
        self.kernel = torch.randn(32, 32, 3, 3, device=device)
        self.matrix = torch.randn(384, 384, device=device)
        self.message = torch.zeros(MESSAGE_BYTES // 4, device=device)
        self.pieces = self.messages = 1
        # The first run starts threads and allocates; it does not count.
        self.compute()
        self.pieces = _agreed(group, max(int(LOAD_S / max(self.compute(), 1e-6)), 1))
        self.messages = _agreed(group, max(int(LOAD_S / max(self.send(), 1e-6)), 2))

    def compute(self) -> float:
        """Seconds of computing."""
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(self.pieces):
                F.conv2d(self.image, self.kernel, padding=1)
                self.matrix @ self.matrix
        synchronise(self.group.device)
        return time.perf_counter() - start

    def send(self) -> float:
        """Seconds of communicating. Collective."""
        start = time.perf_counter()
        for _ in range(self.messages):
            dist.all_reduce(self.message, group=self.group.handle)
        synchronise(self.group.device)
        return time.perf_counter() - start

    def both(self) -> tuple[float, float]:
        """Seconds of computing under communication, and until both are over. Collective."""
        start = time.perf_counter()
        works = [
            dist.all_reduce(self.message, group=self.group.handle, async_op=True)
            for _ in range(self.messages)
        ]
        computed_s = self.compute()
        for work in works:
            if work is not None:
                work.wait()
        synchronise(self.group.device)
        return computed_s, time.perf_counter() - start


def measure_interference(group: Group) -> Interference:
    """The slowdowns, as medians over rounds and the mean over ranks. Collective over the group."""
    load, start = _Load(group), time.perf_counter()
    rows: list[tuple[float, float]] = []
    while len(rows) < SLOWDOWN_ROUNDS:
        dist.barrier(group=group.handle)
        alone = load.compute()
        dist.barrier(group=group.handle)
        sent = load.send()
        dist.barrier(group=group.handle)
        together, over = load.both()
        rows.append((together / max(alone, 1e-9), _stretch(sent, together, over)))
        # The clock of one member must not end the rounds of another's.
        if _agreed(group, int(time.perf_counter() - start > SLOWDOWN_BUDGET_S)):
            break
    medians = [median(column) for column in zip(*rows, strict=True)]
    slow = torch.tensor(medians, dtype=torch.float64, device=group.device)
    dist.all_reduce(slow, group=group.handle)
    compute, communicate = (slow / group.size).tolist()
    # Less than 1 is noise: nothing gets quicker by having company.
    return Interference(
        compute_slowdown=max(compute, 1.0), communication_slowdown=max(communicate, 1.0)
    )


def _agreed(group: Group, count: int) -> int:
    """The largest count of all members: all must do the same."""
    value = torch.tensor([count], dtype=torch.int64, device=group.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group.handle)
    return int(value)


def _stretch(sent: float, together: float, both: float) -> float:
    """How much slower communicating was while computing went on for ``together`` seconds.

    If it ended with the computing or before, all of it was slowed; else what was left ran alone:
    both = together + (sent - together / slowdown).
    """
    # Within 2% the end of computing and that of communicating cannot be told apart.
    if both <= together * 1.02:
        return max(together / sent, 1.0)
    done_meanwhile = sent - (both - together)
    return together / done_meanwhile if done_meanwhile > 0.05 * together else 1.0
