"""The links among the ranks of a process group, measured, as a Cluster: each host's network,
collectives, how computing and communicating slow each other, and the link between a device and its
host's memory."""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..executor.comm.moments import Moment, now, seconds_between
from ..executor.comm.pairwise import connect
from ..executor.comm.setups import device_name, software
from ..executor.launch.devices import ranks_on
from ..executor.launch.start import memory_bytes
from ..planner.cost.collectives import Fabric, rings
from ..planner.cost.redistribution import all_to_all_load
from ..planner.memory.reserved import fragments_bytes
from ..planner.schema.cluster import (
    Cluster,
    Collective,
    CollectiveCurve,
    Device,
    Interference,
    Level,
    Node,
)
from ..planner.schema.errors import InputError
from .collectives import COLLECTIVES, MeasuredGroup, curves, measure, slowest, synchronise
from .host_rates import Rates, common_rate, differ, measure_host_rates
from .places import places_of_ranks
from .progress import StageProgress
from .timing import keep_busy, longer, spread_of, timed

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
DEVICE_SIZES = (*SIZES, 1 << 26, 1 << 28)
"""Between GPUs: their links are at their rate from tens of megabytes on only, and a redistribution
of a large batch sends hundreds. What takes too long is left out (``collectives.LONGEST``)."""
ROUNDS = 9
# Seconds for all groups together; on a slow network fewer rounds are made, of smaller messages.
BUDGET_S = 12.0
HOSTS_S, SLOWDOWN_S = 3.0, 3.0
"""Seconds that measuring the hosts' rates, and interference, mostly takes."""

Progress = Callable[[int, int, str], None]


def probe(
    *,
    device: torch.device | None = None,
    sizes: Sequence[int] | None = None,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
) -> Cluster:
    """Measures what the network carries from host to host, latency and bandwidth of point-to-point
    messages, all-reduce, all-gather, reduce-scatter and all-to-all by message size, on the groups
    that plans use (neighbours, and ranks with equal places in these), how much computing and
    communicating slow each other, and on CUDA what each device's link to its host's memory carries
    while all devices use theirs.

    Sizes (``SIZES``, between GPUs ``DEVICE_SIZES``) and rounds follow the links: the groups
    together take about ``budget_s``.
    Collective: every rank of an initialised process group calls it, and all get the same Cluster.
    Uses process groups of its own and ends them. Raises ``InputError`` where there is no group.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise InputError(
            "a probe needs at least two ranks: start it with torchrun, or with --ranks 2 (ranks=2)"
        )
    where = device or torch.device("cpu")
    sizes = sizes or (SIZES if where.type == "cpu" else DEVICE_SIZES)
    hosts, devices = _hosts(where)
    _check_order(hosts)
    plan = _groups(hosts)
    names = [f"measuring links ({i} of {len(plan)})" for i in range(1, len(plan) + 1)]
    slowed = "measuring interference"
    stages = StageProgress(
        progress,
        {"measuring hosts": HOSTS_S if len(set(hosts)) > 1 else 0.0}
        | {name: budget_s / len(plan) / 2 for name in names}
        | {slowed: SLOWDOWN_S},
    )
    rates = None
    if len(set(hosts)) > 1:
        # NCCL makes a group's communicator with the first call, for which all must come: before
        # that a message between two of them would wait for the others (``join`` does the same).
        slowest([0.0], where)
        rates = measure_host_rates(hosts, where, partial(stages.at, "measuring hosts"))
    measured: list[tuple[str, GroupSets, MeasuredGroup]] = []
    interference = Interference()
    for (level, group_sets), name in zip(plan, names, strict=True):
        group = join(group_sets, where)
        measure(group, sizes, rounds, budget_s / len(plan), partial(stages.at, name))
        # Once, among all ranks, the last of the sets: a Cluster has one figure for each slowdown.
        if group.size == dist.get_world_size():
            stages.at(slowed, 0.0)
            interference = measure_interference(group)
        measured.append((level, group_sets, group))
        _leave(group)
    devices, memories = _with_reserves(devices, where, taken_in_a_run(where))
    # All plan from rank 0's figures, to the last digit.
    answer: list[Any] = [_cluster(hosts, devices, measured, interference, rates, memories)]
    dist.broadcast_object_list(answer, src=0)
    stages.end("measured links")
    return answer[0]  # type: ignore[no-any-return]


def _hosts(device: torch.device) -> tuple[list[str], list[Device]]:
    """The host's name and the device of each rank. Collective."""
    # All ranks copy at the same time, as they do in a run: they may share a link to their host.
    dist.barrier()
    own = Device(
        name=device_name(device), memory_bytes=memory_bytes(device),
        host_bytes_per_s=host_bytes_per_s(device), source="measured",
    )  # fmt: skip
    hosts = [host for host, _ in places_of_ranks(device)]
    devices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(devices, own)
    if device.type == "cpu":
        # What a CPU rank has is its host's memory, which all ranks of the host share.
        devices = [
            msgspec.structs.replace(d, memory_bytes=d.memory_bytes // hosts.count(host))
            for host, d in zip(hosts, devices, strict=True)
        ]
    return hosts, devices


def _with_reserves(
    devices: Sequence[Device], device: torch.device, taken: int
) -> tuple[list[Device], list[int | None]]:
    """The ranks' devices with what tensors cannot have of them, and their hosts' memory where that
    is another. Collective."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (reserve_bytes(device, taken), host_memory_bytes(device)))
    found = [
        msgspec.structs.replace(one, reserve_bytes=reserve)
        for one, (reserve, _) in zip(devices, rows, strict=True)
    ]
    return found, [memory for _, memory in rows]


COMMUNICATOR_BYTES = 1 << 24
"""Of a message that each collective sends once: NCCL takes its buffers when they are needed."""


def communicators(ranks: int) -> int:
    """How many groups with tensors so many ranks have in a run with units that are divided to one
    degree: of all ranks those of gradients and of statistics, and of the divided units these and
    that of redistributions (``executor/comm/groups.py``). Where these are divided among all ranks
    nobody has the same part of them."""
    return 5 if any(ranks % degree == 0 for degree in range(2, ranks)) else 3


def taken_in_a_run(device: torch.device) -> int:
    """``taken_bytes`` while as many communicators are there as a run has, of all ranks, and the
    workspaces of a step. Collective over all ranks."""
    if device.type == "cpu":
        return 0
    workspaces, ranks = workspace_bytes(device), dist.get_world_size()
    groups = [join([tuple(range(ranks))], device) for _ in range(communicators(ranks))]
    for group in groups:
        for collective in COLLECTIVES:
            group.operation(collective, COMMUNICATOR_BYTES)()
    synchronise(device)
    # Of a GPU that they share all ranks see what all take, and none has left when another looks.
    groups[0].meet()
    taken = taken_bytes(device, workspaces)
    groups[0].meet()
    for group in groups:
        _leave(group)
    return taken


def workspace_bytes(device: torch.device) -> int:
    """What libraries keep of torch's allocator on a GPU when a step has used them and no tensor is
    left: cuBLAS a workspace for each thread and stream that has made a product."""
    if device.type == "cpu":
        return 0
    # What was taken before is taken anew, and so is seen.
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        _train_once(device, dtype)
    synchronise(device)
    return max(torch.cuda.memory_allocated(device) - before, 0)


@torch.enable_grad()
def _train_once(device: torch.device, dtype: torch.dtype) -> None:
    """A convolution and matrix products, forward, and backward in autograd's thread, on the stream
    that computes, as a run has them."""
    how: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    image, kernel = torch.ones(8, 16, 16, 16, **how), torch.ones(16, 16, 3, 3, **how)
    rows = F.conv2d(image, kernel, padding=1).flatten(1)
    weight, bias = torch.ones(256, rows.shape[1], **how), torch.ones(256, **how)
    product = F.linear(rows, weight, bias)  # with a bias another library's than without
    (product @ product.t()).sum().backward()  # type: ignore[no-untyped-call]


def taken_bytes(device: torch.device, workspaces: int = 0) -> int:
    """What of a GPU's memory tensors do not take: contexts (other processes' as well), kernels,
    buffers of NCCL, and the ``workspaces`` that this rank has of torch's allocator. Of a GPU that
    ranks share a rank's part."""
    if device.type == "cpu":
        return 0
    (free, total), ranks = torch.cuda.mem_get_info(device), ranks_on(device)
    # The other ranks measure the same, so their tensors take as much.
    of_tensors = torch.cuda.memory_reserved(device) - workspaces
    return max(total - free - ranks * of_tensors, 0) // ranks


def reserve_bytes(device: torch.device, taken: int) -> int:
    """What of a device's memory tensors cannot have, where so much was ``taken`` besides them; none
    of a CPU's."""
    return taken + fragments_bytes(memory_bytes(device)) if device.type == "cuda" else 0


def host_memory_bytes(device: torch.device) -> int | None:
    """The memory of the device's host; None for a CPU, whose memory it is."""
    return None if device.type == "cpu" else memory_bytes(torch.device("cpu"))


def single_device(device: torch.device) -> tuple[Device, int | None]:
    """A device by itself, measured, and its host's memory."""
    workspaces = workspace_bytes(device)
    described = Device(
        name=device_name(device), memory_bytes=memory_bytes(device),
        host_bytes_per_s=host_bytes_per_s(device),
        reserve_bytes=reserve_bytes(device, taken_bytes(device, workspaces)), source="measured",
    )  # fmt: skip
    return described, host_memory_bytes(device)


GroupSets = list[tuple[int, ...]]


def _groups(hosts: Sequence[str]) -> list[tuple[str, GroupSets]]:
    """The sets of groups to measure one after the other, with the level that each is about.

    For every divisor of the world size the neighbours in blocks of it, and the ranks that have the
    same place in the blocks: those at once which plans use at once. Where all of these cross hosts
    (2 ranks on one, 1 on another), pairs inside hosts, too, which leave some ranks out.
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
    pairs = _pairs_inside(hosts)
    if pairs and all(level == "inter" for level, _ in found):
        found.insert(0, ("intra", pairs))
    return found


def _pairs_inside(hosts: Sequence[str]) -> GroupSets:
    """Neighbours on one host, two by two."""
    members = [[r for r, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    return [pair for own in members for pair in zip(own[::2], own[1::2], strict=False)]


def _check_order(hosts: Sequence[str]) -> None:
    """Ranks are numbered through the hosts: a Cluster says so, and groups of neighbours need it."""
    changes = [b for a, b in itertools.pairwise(hosts) if a != b]
    if len(set(hosts)) != len(changes) + 1:
        raise InputError(
            f"ranks alternate between hosts ({', '.join(hosts[:8])}): start them so that each "
            "host's ranks are numbered one after the other, as torchrun does"
        )


class _Waiting(MeasuredGroup):
    """What a rank has where only others' groups are measured: it comes to the barriers of all
    ranks and agrees on the times, as of a group of the set."""

    def operation(self, collective: Collective, size_bytes: int) -> Callable[[], None]:
        return lambda: None

    def meet(self) -> None: ...


def join(sets: GroupSets, device: torch.device) -> MeasuredGroup:
    """Creates the group of a set that this rank is in; where it is in none, it waits for others."""
    rank, backend = dist.get_rank(), "nccl" if device.type == "cuda" else "gloo"
    # By every rank, member or not, which nobody waits for. Among its members only torch would name
    # a group after its ranks: a second one of that name finds the addresses of the first, which are
    # gone, where a member is not there yet.
    mine = next((ranks for ranks in sets if rank in ranks), sets[0])

    def made() -> dist.ProcessGroup:
        handles: list[dist.ProcessGroup]
        handles = [dist.new_group(list(ranks), backend=backend) for ranks in sets]
        return handles[sets.index(mine)]

    handle = made()
    opposite = made() if backend == "gloo" else None
    if rank not in mine:
        return _Waiting(handle, mine, -1, device, opposite)
    if opposite is not None:
        connect(handle, opposite)
    group = MeasuredGroup(handle, mine, mine.index(rank), device, opposite)
    group.meet()
    return group


def _leave(group: MeasuredGroup) -> None:
    """Ends the process groups of ``join``."""
    for handle in (group.handle, group.opposite):
        if handle is not None:
            dist.destroy_process_group(handle)


def _cluster(
    hosts: Sequence[str],
    devices: Sequence[Device],
    measured: Sequence[tuple[str, GroupSets, MeasuredGroup]],
    interference: Interference,
    rates: Rates | None,
    memories: Sequence[int | None] | None = None,
) -> Cluster:
    order = list(dict.fromkeys(hosts))
    nodes = tuple(
        Node(
            name=name,
            devices=tuple(d for host, d in zip(hosts, devices, strict=True) if host == name),
            host_memory_bytes=memories[hosts.index(name)] if memories else None,
        )
        for name in order
    )
    lines = {name: _line(name, measured, rates) for name in dict.fromkeys(m[0] for m in measured)}
    cluster = Cluster(
        name=f"{len(hosts)} ranks on {', '.join(order[:4])}{' and more' if len(order) > 4 else ''}",
        nodes=nodes,
        levels=tuple(lines.values()),
        interference=interference,
        pair_bytes_per_s=_pairs(hosts, rates, lines),
        origin="measured",
        software=software(),
    )
    fabric = Fabric(cluster, tuple(range(len(hosts))))
    found: dict[str, list[CollectiveCurve]] = {}
    for name, sets, group in measured:
        positions = np.array(sets)
        ring = rings(fabric, positions).scale
        # A member of a ring sends to one neighbour, of an all-to-all to hosts and its own alike.
        busiest = all_to_all_load(fabric, positions) if name == "inter" else ring
        found.setdefault(name, []).extend(curves(group, ring, busiest))
    levels = tuple(
        msgspec.structs.replace(
            level,
            curves=tuple({(c.collective, c.ranks): c for c in found[level.name]}.values()),
            spread=_spread(group for name, _, group in measured if name == level.name),
        )
        for level in cluster.levels
    )
    return msgspec.structs.replace(cluster, levels=levels)


# What takes less is mostly Python's, and hidden or small.
NOTICED_S = 1e-3


def _spread(groups: Iterable[MeasuredGroup]) -> float:
    """How far the times of one collective and size lay apart."""
    every = (seconds for group in groups for seconds in group.seconds.values())
    return spread_of(s for s in every if s and median(s) >= NOTICED_S)


def _line(
    name: str, measured: Sequence[tuple[str, GroupSets, MeasuredGroup]], rates: Rates | None
) -> Level:
    """The level without its curves. Its line is that of the fewest ranks, two neighbours and nobody
    beside them; between hosts the bandwidth is what streams carried."""
    group = min((m[2] for m in measured if m[0] == name), key=lambda g: g.size)
    line = next(c for c in curves(group) if c.collective == "p2p")
    if name == "intra" or rates is None:
        return Level(name="intra", latency_s=line.latency_s, bytes_per_s=line.bytes_per_s)
    bytes_per_s, least, first_s = common_rate(rates), line.seconds.x[0], line.seconds.y[0]
    # Less than the wire takes is what a token bucket lets through: then all of it is latency.
    wire_s = least / bytes_per_s
    latency_s = first_s - wire_s if first_s > wire_s else first_s
    return Level(name="inter", latency_s=latency_s, bytes_per_s=bytes_per_s)


def _pairs(
    hosts: Sequence[str], rates: Rates | None, lines: Mapping[str, Level]
) -> tuple[tuple[float, ...], ...]:
    """The bandwidth between each two ranks where the hosts' links differ, else nothing: a level's
    line says the same, and plans for equal hosts are found sooner."""
    if rates is None or not differ(rates):
        return ()
    node = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    inside = lines["intra"].bytes_per_s if "intra" in lines else 0.0
    return tuple(
        tuple(
            0.0 if i == j else inside if a == b else float(rates[a, b]) for j, b in enumerate(node)
        )
        for i, a in enumerate(node)
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
"""The largest message that is sent beside computing, as large as slices mostly are: short ones wait
for cores longer than for links. On slow links it is one that takes half of ``LOAD_S``, and between
GPUs a larger one where ``MOST_MESSAGES`` would not last so long."""
MOST_MESSAGES = 64
"""As many are sent at most to find out how many take ``LOAD_S``; between GPUs as many at all."""
SLOWDOWN_ROUNDS = 5
# On a CPU the communication library's threads take cores and memory bandwidth from the computation;
# on a GPU its kernels take multiprocessors. Three things are timed in turn, several rounds: a fixed
# amount of computing, a fixed amount of communicating, and the computing while the communicating
# goes on.
LOAD_S = 0.15
# No further round is begun after so long.
SLOWDOWN_BUDGET_S = 3.0

# [Note: Loads on a GPU]
# A host takes some 10 µs to launch a kernel. A load of small pieces and messages takes as long as
# its launches, alone or in company, and tells nothing about the device. So three things differ from
# a CPU. Pieces are so large that a few fill LOAD_S, and so are messages: a load is about 200
# launches, far fewer than a driver lets wait, so that the host is never held up. The device is kept
# busy until the host has issued all of it (``ahead_s``), and what is timed begins then. And
# messages and pieces are issued in turns, in case the host falls behind after all.
# Messages are issued on a stream of their own: a collective begins when the stream on which it was
# issued has come so far, and on the one that computes each would wait for the pieces before it.

MOST_PIECES = 64
"""Of so many a load on a GPU consists at most, of two launches each."""
PIECE_S = LOAD_S / MOST_PIECES
"""A piece takes a GPU so long, or as much memory as it may: ``PIECE_BYTES``."""
PIECE_BYTES = 2**31


class _Pieces:
    """Pieces of computing like training's, a convolution and a matrix product."""

    ahead_s = 0.0
    """What a GPU's host takes to issue a load; see [Note: Loads on a GPU]. None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pieces = device, 1
        self.size(1)

    def size(self, times: int) -> None:
        """From now on a piece is so many times the work of the smallest one."""
        self.image = torch.randn(4 * times, 32, 32, 32, device=self.device)
        self.kernel = torch.randn(32, 32, 3, 3, device=self.device)
        # A product's work grows with the third power of the side.
        side = 32 * round(12 * times ** (1 / 3))
        self.matrix = torch.randn(side, side, device=self.device)

    def compute(self) -> float:
        """Seconds of computing."""
        start = self._begun()
        for _ in range(self.pieces):
            self.piece()
        return seconds_between(start, now(self.device))

    @torch.no_grad()
    def piece(self) -> None:
        F.conv2d(self.image, self.kernel, padding=1)
        self.matrix @ self.matrix

    def enlarged(self) -> int:
        """Makes pieces larger until one takes a GPU long enough; how many times as large."""
        times = 1
        while self.piece_s() < PIECE_S:
            # Results take as much as what they are made of, and the next size is twice this one.
            if 2 * 2 * (self.image.nbytes + self.matrix.nbytes) > PIECE_BYTES:
                break
            times *= 2
            self.size(times)
        return times

    def piece_s(self) -> float:
        """Seconds that a GPU takes for one piece by itself, without those of its host."""
        # The first of a size allocates and chooses kernels.
        first = timed(self.piece, self.device)
        return max(timed(self.piece, self.device, first.issued_s).done_s, 1e-6)

    def _begun(self) -> Moment:
        """The moment at which a load begins: on a GPU once the host has had time to issue it."""
        if self.ahead_s:
            keep_busy(self.device, longer(self.ahead_s))
        return now(self.device)


class _Load(_Pieces):
    """Pieces of computing and messages, each for about ``LOAD_S``: the same numbers of messages on
    all members, who would else wait for ever, and on CPUs of pieces."""

    def __init__(self, group: MeasuredGroup) -> None:
        super().__init__(group.device)
        self.group = group
        self.message = torch.zeros(_message_bytes(group) // 4, device=group.device)
        self.messages = 1
        on_streams = group.device.type != "cpu"
        # The first run starts threads and allocates; it does not count.
        self.compute()
        if on_streams:
            # Alike: of ranks that share a GPU ``taken_bytes`` supposes that all keep as much.
            self.size(_agreed(group, self.enlarged()))
            self.pieces = min(max(int(LOAD_S / self.piece_s()), 1), MOST_PIECES)
        else:
            self.pieces = _agreed(group, max(int(LOAD_S / max(self.compute(), 1e-6)), 1))
        # Twice: what a link has saved up, as a token bucket does, lets the first ones through.
        for most in (MOST_MESSAGES, MOST_MESSAGES if on_streams else sys.maxsize):
            each_s = self.send() / self.messages
            self.messages = _agreed(group, min(max(int(LOAD_S / max(each_s, 1e-6)), 2), most))
        if on_streams:
            self.ahead_s = self._issuing_s()

    def send(self) -> float:
        """Seconds of communicating. Collective."""
        start = self._begun()
        for _ in range(self.messages):
            dist.all_reduce(self.message, group=self.group.handle)
        return seconds_between(start, now(self.device))

    def both(self) -> tuple[float, float]:
        """Seconds of computing under communication, and until communication is over. Collective."""
        return self._both_on_streams() if self.device.type != "cpu" else self._both_on_host()

    def _both_on_host(self) -> tuple[float, float]:
        start, over = now(self.device), None
        issued = [self._message() for _ in range(self.messages)]
        works = [work for work in issued if work is not None]
        for _ in range(self.pieces):
            self.piece()
            if over is None and works and works[-1].is_completed():
                over = now(self.device)
        computed = now(self.device)
        if over is None:
            for work in works:
                work.wait()
            over = now(self.device)
        return seconds_between(start, computed), seconds_between(start, over)

    def _both_on_streams(self) -> tuple[float, float]:
        # The host is far ahead of both: only streams can tell.
        own_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        start = self._begun()
        works = self._issue_in_turns(own_stream)
        computed = now(self.device)
        # The stream that computes would tell when both are over.
        with torch.cuda.stream(own_stream):
            for work in works:
                work.wait()
            over = now(self.device)
        # The message's memory must not be written again before.
        torch.cuda.current_stream(self.device).wait_stream(own_stream)
        return seconds_between(start, computed), seconds_between(start, over)

    def _issue_in_turns(self, own_stream: torch.cuda.Stream) -> list[dist.Work]:
        """Issues messages on ``own_stream``, and pieces where the device computes. Collective."""
        works = []
        own_stream.wait_stream(torch.cuda.current_stream(self.device))
        for turn in range(max(self.messages, self.pieces)):
            if turn < self.messages:
                with torch.cuda.stream(own_stream):
                    works.append(self._message())
            if turn < self.pieces:
                self.piece()
        return [work for work in works if work is not None]

    def _message(self) -> dist.Work | None:
        work: dist.Work | None
        work = dist.all_reduce(self.message, group=self.group.handle, async_op=True)
        return work

    def _issuing_s(self) -> float:
        """What the slowest member's host takes to issue both: all are kept busy for as long, and
        begin at about the same time. Collective."""
        own_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first may make what is used again
            issued_s = timed(lambda: self._issue_in_turns(own_stream), self.device).issued_s
        return _agreed(self.group, ceil(1e6 * issued_s)) / 1e6


def measure_interference(group: MeasuredGroup) -> Interference:
    """The slowdowns, as medians over rounds and the mean over ranks. Collective over the group."""
    load, start = _Load(group), time.perf_counter()
    rows: list[tuple[float, float]] = []
    while len(rows) < SLOWDOWN_ROUNDS:
        group.meet()
        compute_s = load.compute()
        group.meet()
        # What a link has saved up while it was idle, as a token bucket does, is used up first.
        load.send()
        group.meet()
        sent = load.send()
        group.meet()
        together, over = load.both()
        rows.append((_stretch(compute_s, over, together), _stretch(sent, together, over)))
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


def _message_bytes(group: MeasuredGroup) -> int:
    """The largest size up to ``MESSAGE_BYTES`` whose all-reduce takes no more than half of
    ``LOAD_S``, by what was measured; between GPUs the first one from there on of which
    ``MOST_MESSAGES`` take ``LOAD_S``, or the largest."""
    taken = {
        size: median(seconds)
        for (name, size), seconds in sorted(group.seconds.items())
        if name == "all_reduce"
    }
    quick = [size for size, seconds in taken.items() if seconds <= LOAD_S / 2] or [min(taken)]
    size = min(quick[-1], MESSAGE_BYTES)
    if group.device.type == "cpu":
        return size
    larger = [s for s in quick if s >= size]
    return next((s for s in larger if MOST_MESSAGES * taken[s] >= LOAD_S), larger[-1])


def _agreed(group: MeasuredGroup, count: int) -> int:
    """The largest count of all members: all must do the same."""
    value = torch.tensor([count], dtype=torch.int64, device=group.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group.handle)
    return int(value)


def _stretch(alone: float, other: float, over: float) -> float:
    """How much slower work was that takes ``alone`` seconds by itself and was ``over`` after some,
    while the other kind of work went on for ``other`` seconds.

    If it was over before the other, all of it was slowed; else what was left ran alone:
    over = other + (alone - other / slowdown).
    """
    if over <= other:
        return max(over / max(alone, 1e-9), 1.0)
    done_meanwhile = alone - (over - other)
    return other / done_meanwhile if done_meanwhile > 0.05 * other else 1.0
