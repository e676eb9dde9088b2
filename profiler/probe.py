"""The link probe: what the links among the ranks of a process group do, as a Cluster."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..executor.launch.start import device_name, memory_bytes, software
from ..planner.schema.cluster import Cluster, CollectiveCurve, Device, Interference, Level, Node
from ..planner.schema.errors import InputError
from .collect import COLLECTIVES, Group, curves, measure
from .host_link import host_bytes_per_s
from .interference import measure_interference

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 9
BUDGET_S = 8.0
"""Seconds for all groups together; on a slow network fewer rounds are made."""

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
        mine = curves(group, sharing(group_sets, [host for host, _, _ in hosts]))
        if group.size == dist.get_world_size():
            interference = measure_interference(group)
        found.setdefault(level, []).extend(mine)
        for handle in handles:
            dist.destroy_process_group(handle)
    cluster = _cluster(hosts, found, interference, _host_rates(where))
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
    mine = (socket.gethostname(), device_name(device), memory_bytes(device))
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
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
    mine: Group | None = None
    handles = []
    rank = dist.get_rank()
    for ranks in sets:
        handle = dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")
        if rank in ranks:
            mine = Group(handle, ranks, ranks.index(rank), device)
            handles.append(handle)
    assert mine is not None, "the groups of a set cover all ranks"
    return mine, handles


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
