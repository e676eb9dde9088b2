"""The links among the ranks of a process group, measured, as a Cluster: each host's network,
collectives, the link between a device and its host's memory, and what of that device tensors cannot
have."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..executor.comm.pairwise import connect
from ..executor.comm.setups import device_name, software
from ..executor.launch.devices import ranks_on
from ..executor.launch.start import memory_bytes
from ..models.units.storages import release_workspaces
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
from .interference import measure_interference
from .places import places_of_ranks
from .progress import StageProgress
from .timing import spread_of

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
    # As much as the slowest of the links has carried in time.
    sizes_bytes = [max(size for _, size in group.seconds) for _, _, group in measured]
    devices, memories = _with_reserves(devices, where, taken_in_a_run(where, min(sizes_bytes)))
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


def communicators(ranks: int) -> int:
    """How many groups with tensors so many ranks have in a run with units that are divided to one
    degree: of all ranks those of gradients and of statistics, and of the divided units these and
    that of redistributions (``executor/comm/groups.py``). Where these are divided among all ranks
    nobody has the same part of them."""
    return 5 if any(ranks % degree == 0 for degree in range(2, ranks)) else 3


def taken_in_a_run(device: torch.device, message_bytes: int) -> int:
    """``taken_bytes`` while as many communicators are there as a run has, of all ranks, and the
    workspaces of a step. Each collective sends a message of ``message_bytes`` once, as NCCL takes
    its buffers when they are needed. Collective over all ranks."""
    if device.type == "cpu":
        return 0
    workspaces, ranks = workspace_bytes(device), dist.get_world_size()
    groups = [join([tuple(range(ranks))], device) for _ in range(communicators(ranks))]
    for group in groups:
        for collective in COLLECTIVES:
            group.operation(collective, message_bytes)()
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
    release_workspaces(device)  # what was taken before is taken anew, and so is seen
    # Not all libraries compute in bfloat16 on GPUs that have no such arithmetic.
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    for dtype in (torch.float32, torch.bfloat16 if native else torch.float16):
        _train_once(device, dtype)
    return release_workspaces(device)


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
