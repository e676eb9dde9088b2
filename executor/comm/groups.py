"""Which rank stands at which position, and the process groups through which ranks talk."""

# What different threads issue, or what may overtake, never shares a process group: two threads that
# issue on one gloo group gave wrong sums without any error, and on one group nothing can overtake.

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...planner.schema.layout import Layout
from .pairwise import connect

Place = int | Layout
"""What groups are made for: the degree of layouts that take all ranks, or a layout that leaves some
idle."""

CONTROL_BACKEND = "gloo"
"""Control vectors live on the host, whatever carries the tensors."""
DEVICE_BACKEND = "nccl"
"""What carries tensors on GPUs, where the default group has it."""
# The process groups made so far, by the default group that they belong to. The next plan that is
# applied uses them again: each costs threads and connections, which torch never gives back while
# the default group lives.
_handles: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Any]] = WeakKeyDictionary()
GRACE_S = 5.0
"""A collective's own time limit beyond ours, so that our sentence comes before its error."""
DEVICE_GRACE_S = 60.0
"""So much later still on GPUs, where torch's watchdog ends the process, by a limit that counts from
the moment at which a collective was issued and not from that at which it is needed."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. ``ranks`` is in the order of members; ``member`` is this rank's.

    ``handle`` is None where the rank is alone: nothing is sent then. torch numbers the ranks of a
    process group in ascending order, so ``group_ranks[i]`` is the number there of member ``i``.
    """

    ranks: tuple[int, ...]
    member: int
    handle: dist.ProcessGroup | None
    label: str
    on_stream: bool = False
    """Whether its collectives run on a device's streams, where a wait does not hold the host."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where it carries tensors of its own making: on the host unless on a device's streams."""
    opposite: dist.ProcessGroup | None = None
    """On gloo, a second process group of the same ranks for what goes to lower ones, so that
    messages each way do not wait for each other; see [Note: Two process groups for the two ways] in
    two_way.py. None where all that it carries is all-reduced, and on a device's streams."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group_ranks(self) -> tuple[int, ...]:
        ascending = sorted(self.ranks)
        return tuple(ascending.index(rank) for rank in self.ranks)

    @property
    def ways(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
        """What goes to higher ranks and what goes to lower ones, where each has its own."""
        if self.handle is None or self.opposite is None or self.on_stream:
            return None
        return self.handle, self.opposite

    @property
    def in_pairs(self) -> bool:
        """Whether what is gathered goes as messages between two ranks."""
        return self.ways is not None and self.size == 2

    @property
    def ascending(self) -> bool:
        """Whether members are numbered as torch numbers them."""
        return list(self.ranks) == sorted(self.ranks)


@dataclass(frozen=True)
class HostGroups:
    """The process groups of an exchange by host, one for each of its stages: those of this rank's
    host who add gradients up, those in its place on all hosts, and its host's again to gather."""

    adding: Group
    across: Group
    gathering: Group


@dataclass(frozen=True)
class World:
    """This rank's place among all, and the process groups that it belongs to.

    ====================== ================================== ======================================
    groups                 ranks of one group                 what they carry
    ====================== ================================== ======================================
    ``control``            all, on gloo                       headers, votes, agreements
    ``redistribution[m]``  the m that divide a unit           what goes into and out of such units
    ``gradients[m]``       those with the same shard (1: all) the exchange of gradients
    ``statistics[m]``      the same                           batch statistics, buffers
    ``updated_chunks[m]``  the same, if a unit is sharded     chunks that a step has updated
    ``full_gradients[m]``  the same, if a unit is sharded     what a user asks of a sharded gradient
    ``unshards[m]``        the same, if it is fully sharded   parameters for a forward or backward
    ``crossings[span]``    those at a range of positions      samples from one layout to another
    ``hosts[m, n]``        of those with the same shard, runs gradients that are added up on hosts
                           of n, and those across the runs    before these exchange them
    ``everyone``           all of all hosts, on gloo, where   agreements of all hosts
                           hosts train apart (else None)
    ``apart``              those in one place of all hosts    what hosts average where they train
                           that train apart                   apart
    ``agreed[m]``          on such a host, those with the     the same, among the ranks that share
                           same shard                         it out
    ====================== ================================== ======================================

    Where hosts train apart (local steps) each is a world by itself: "all" are the ranks of this
    host, in all but ``everyone`` and ``apart``. ``rank`` is the number among all hosts' ranks,
    ``placement`` lists those of this host, and ``host`` of ``host_count`` is this one.

    ``checkpoint_group`` makes one more, for the threads that write checkpoints. m is a degree.
    Layouts that leave positions idle have groups of their own, under the layout; who is idle there
    is alone in its groups. ``make_world`` creates all but that one; which thread issues on
    which is in [Note: Who issues collectives on which group] in gradients/priority.py.
    """

    rank: int
    size: int
    position: int
    placement: tuple[int, ...]
    control: Group
    redistribution: dict[Place, Group] = field(default_factory=dict)
    gradients: dict[Place, Group] = field(default_factory=dict)
    statistics: dict[Place, Group] = field(default_factory=dict)
    updated_chunks: dict[Place, Group] = field(default_factory=dict)
    full_gradients: dict[Place, Group] = field(default_factory=dict)
    unshards: dict[Place, Group] = field(default_factory=dict)
    crossings: dict[range, Group] = field(default_factory=dict)
    hosts: dict[tuple[int, int], HostGroups] = field(default_factory=dict)
    agreed: dict[int, Group] = field(default_factory=dict)
    everyone: Group | None = None
    apart: Group | None = None
    host: int = 0
    host_count: int = 1

    def by_position(self, by_rank: Sequence[int]) -> tuple[int, ...]:
        """Reorders what is listed by rank."""
        ascending = sorted(self.placement)
        return tuple(by_rank[ascending.index(rank)] for rank in self.placement)

    @property
    def share(self) -> tuple[int, int]:
        """This rank's part of a batch of all hosts: (its number, how many parts there are)."""
        return self.host * self.size + self.position, self.host_count * self.size


def make_world(
    placement: Sequence[int],
    degrees: Iterable[int],
    device: torch.device,
    timeout_s: float,
    sharded: Collection[Place] = (),
    fully_sharded: Collection[Place] = (),
    subsets: Iterable[Layout] = (),
    by_host: Iterable[tuple[int, int]] = (),
    *,
    gathered: Collection[Place] = (),
    crossing: bool = False,
    host_count: int = 1,
    host_tensors: bool = True,
) -> World:
    """Creates the groups for layouts of ``degrees`` and for ``subsets``, layouts that leave ranks
    idle, for tensors on ``device``; with ``crossing`` also one for what goes straight from one
    division to another. ``gathered`` are places whose gradients are not all-reduced but gathered,
    or sharded. ``by_host`` are (degree, peers on a host) of gradients that are exchanged
    by host, on gloo. With a ``host_count`` above 1 the positions are divided into so many equal
    runs, hosts that train apart, for one of which all else is said. Without
    ``host_tensors``, none of the model being on the host, groups on GPUs have no sockets of gloo
    beside, of which each rank would have one to every other in every group. Collective over all
    ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size() // host_count
    limit = timedelta(seconds=timeout_s + GRACE_S)
    host, position = divmod(placement.index(rank), size)
    hosts = [tuple(placement[size * h : size * (h + 1)]) for h in range(host_count)]
    make_by = partial(_make_group, rank, hosts, device, limit)
    everyone = [range(size)]
    control = make_by("control", everyone, CONTROL_BACKEND)
    # None: all that the default group has, for tensors of the host and of devices.
    backend = None if host_tensors or not _has_device_backend(device) else DEVICE_BACKEND

    def make(label: str, divisions: Sequence[Sequence[int]], *, two_way: bool = False) -> Group:
        found = make_by(label, divisions, backend)
        # Not by ``found``: who is idle there is alone, and takes part in making the groups too.
        if not two_way or _has_device_backend(device):
            return found
        return _two_way(found, make_by(f"{label}, to lower ranks", divisions))

    all_hosts, apart = _groups_between(rank, placement, size, device, limit)
    world = World(
        rank, size, position, hosts[host], control,
        everyone=all_hosts, apart=apart, host=host, host_count=host_count,
    )  # fmt: skip
    subset_layouts = sorted({one for subset in subsets for one in (subset, flat(subset))})
    # Sorted, as each creation is collective: all ranks must come to it in one order.
    places: list[Place] = [1, *sorted({d for d in degrees if d > 1}), *subset_layouts]
    for place in places:
        layout = place
        if not isinstance(layout, Layout):
            layout = Layout(groups=size // layout, degree=layout)
        told = " in parts" if isinstance(place, Layout) else f" {place}"
        short = "" if place == 1 else told
        same = [layout.peers(member) for member in range(layout.degree)]
        if layout.degree > 1:
            groups = [layout.group(g) for g in range(layout.groups)]
            world.redistribution[place] = make(f"redistribution{told}", groups, two_way=True)
        world.gradients[place] = make(f"exchange{short}", same, two_way=place in gathered)
        world.statistics[place] = make(f"statistics{short}", same)
        if place in sharded:
            world.updated_chunks[place] = make(f"updated chunks{told}", same, two_way=True)
            world.full_gradients[place] = make(f"full gradients{told}", same)
        if place in fully_sharded:
            world.unshards[place] = make(f"unshards{told}", same, two_way=True)
    world.agreed.update(_agreed_groups(make, size, host_count, places))
    _add_host_groups(world, make, by_host)
    if crossing:
        world.crossings[range(size)] = make("redistribution", everyone, two_way=True)
    for layout in subset_layouts:
        for span in (range(size), layout.positions):
            if span not in world.crossings:
                world.crossings[span] = make("redistribution in parts", [span], two_way=True)
    return world


def checkpoint_group(world: World, timeout_s: float) -> Group:
    """All ranks, on gloo, for what the threads that write checkpoints tell each other. Collective
    over all ranks."""
    limit = timedelta(seconds=timeout_s + GRACE_S)
    group = _make_group(
        world.rank, [world.placement], torch.device("cpu"), limit, "checkpoint",
        [range(world.size)], CONTROL_BACKEND,
    )  # fmt: skip
    if group.handle is not None:
        return group
    # One rank by itself has one too: torch warns of writing without.
    default, key = dist.group.WORLD, ("checkpoint",)
    assert default is not None, "a plan was applied within it"
    known = _handles[default]
    if key not in known:
        known[key] = dist.new_group([0], timeout=limit, backend=CONTROL_BACKEND)
    return replace(group, handle=known[key])


def _groups_between(
    rank: int, placement: Sequence[int], size: int, device: torch.device, limit: timedelta
) -> tuple[Group | None, Group | None]:
    """The groups ``everyone`` and ``apart``, where hosts of ``size`` ranks train apart."""
    if len(placement) == size:
        return None, None
    make = partial(_make_group, rank, [placement], device, limit)
    places = [range(place, len(placement), size) for place in range(size)]
    everyone = make("everyone", [range(len(placement))], CONTROL_BACKEND)
    return everyone, make("hosts apart", places)


def _agreed_groups(
    make: Callable[..., Group], size: int, host_count: int, places: Sequence[Place]
) -> dict[int, Group]:
    """The groups ``agreed`` of hosts of ``size`` ranks; none where hosts do not train apart."""
    if host_count == 1:
        return {}
    degrees = [place for place in places if not isinstance(place, Layout)]
    found = {}
    for degree in degrees:
        layout = Layout(groups=size // degree, degree=degree)
        same = [layout.peers(member) for member in range(degree)]
        found[degree] = make(f"agreed {degree}", same)
    return found


def _add_host_groups(
    world: World, make: Callable[..., Group], by_host: Iterable[tuple[int, int]]
) -> None:
    """Those of gradients that are exchanged by host, which no device's streams carry."""
    for degree, each in sorted(by_host):
        if not world.gradients[degree].on_stream:
            layout = Layout(groups=world.size // degree, degree=degree)
            world.hosts[degree, each] = _host_groups(make, layout, each, world.placement)


def _host_groups(
    make: Callable[..., Group], layout: Layout, each: int, placement: Sequence[int]
) -> HostGroups:
    """Those of this rank, for a layout's peers in runs of ``each``."""
    inside, across = [], []
    for member in range(layout.degree):
        peers = list(layout.peers(member))
        # In the order in which torch numbers ranks, which is that of their parts.
        runs = [
            sorted(peers[i : i + each], key=placement.__getitem__)
            for i in range(0, len(peers), each)
        ]
        inside += runs
        across += [list(places) for places in zip(*runs, strict=True)]
    told = f" by host {layout.degree}"
    return HostGroups(
        make(f"sums{told}", inside), make(f"across{told}", across), make(f"parts{told}", inside)
    )


def flat(layout: Layout) -> Layout:
    """The same positions, each with samples of its own: what holds parameters that a divided unit
    has whole."""
    return Layout(groups=layout.size, first=layout.first)


def _has_device_backend(device: torch.device) -> bool:
    return device.type == "cuda" and DEVICE_BACKEND in str(dist.get_backend_config())


def _make_group(
    rank: int,
    hosts: Sequence[Sequence[int]],
    device: torch.device,
    limit: timedelta,
    label: str,
    divisions: Sequence[Sequence[int]],
    backend: str | None = None,
) -> Group:
    """The group of this rank among those of the positions in ``divisions`` of each of ``hosts``
    (the rank at each of its positions), or one of itself alone."""
    default = dist.group.WORLD
    assert default is not None, "World is made within a process group"
    known = _handles.setdefault(default, {})
    mine = Group((rank,), 0, None, label)
    if backend != CONTROL_BACKEND and device.type == "cuda":
        limit += timedelta(seconds=DEVICE_GRACE_S)
    for placement, positions in product(hosts, divisions):
        ranks = tuple(placement[p] for p in positions)
        key = (label, *sorted(ranks), backend, limit)
        if len(ranks) > 1 and key not in known:
            # By every rank, member or not: torch makes a group on all ranks or hangs.
            with computing_first():
                known[key] = dist.new_group(sorted(ranks), timeout=limit, backend=backend)
            if rank in ranks and _carries(known[key], device, backend):
                _connect(known[key], device)
        if rank in ranks:
            handle = known.get(key)
            on_stream = handle is not None and _carries(handle, device, backend)
            where = device if on_stream else torch.device("cpu")
            mine = Group(ranks, ranks.index(rank), handle, label, on_stream, where)
    return mine


def _two_way(higher: Group, lower: Group) -> Group:
    """One group with the process groups of both, whose pairs of ranks are connected."""
    both = replace(higher, opposite=lower.handle)
    if both.ways is not None:
        connect(*both.ways)
    return both


@contextmanager
def given_back() -> Iterator[None]:
    """Ends the groups with tensors that are made meanwhile, which nobody may use any more then: on
    GPUs each has buffers that a run by other groups would lack. Collective."""
    default = dist.group.WORLD
    assert default is not None, "groups are made within a process group"
    known = _handles.setdefault(default, {})
    before = set(known)
    try:
        yield
    finally:
        for key in [key for key in known if key not in before and CONTROL_BACKEND not in key]:
            dist.destroy_process_group(known.pop(key))


def _carries(handle: dist.ProcessGroup, device: torch.device, backend: str | None) -> bool:
    """Whether the device's streams carry what goes over a group made for that backend."""
    if backend == CONTROL_BACKEND or device.type != "cuda":
        return False
    return DEVICE_BACKEND in str(dist.get_backend_config(handle))


def _connect(handle: dist.ProcessGroup, device: torch.device) -> None:
    """Makes a new group's communicator. Collective in it."""
    # NCCL makes it with the first collective, for which the host waits: in a first backward ranks
    # may come to such waits in ways that never meet. And its memory is to be taken before it is
    # looked whether a plan has room.
    dist.all_reduce(torch.zeros(1, device=device), group=handle)
    torch.cuda.synchronize(device)


@contextmanager
def computing_first() -> Iterator[None]:
    """Threads that are started inside do not interrupt one that computes. Does nothing on systems
    without SCHED_BATCH, or where the user has chosen a scheduling class."""
    # On CPUs a library's threads wake for every packet. Each time they take the processor from the
    # thread that computes, and its caches. As batch threads (Linux's SCHED_BATCH, which needs no
    # privilege) they get their turn a few milliseconds later and find more packets, which the
    # kernel has kept for them meanwhile: a third of the switches (docs/results/exchange.md). Where
    # a processor is idle they start at once, as ever.
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
