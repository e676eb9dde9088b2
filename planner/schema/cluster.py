"""Cluster: nodes, devices and what their links were measured to do."""

from typing import Literal

from .curve import Curve
from .errors import InputError
from .profile import CodedExchange
from .record import Bytes, Count, Document, Positive, Record, Seconds, Spread, check_real

Collective = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
LevelName = Literal["intra", "inter"]
HostedExchange = Literal["sharded", "fully_sharded", CodedExchange]
"""What a gradient's exchange or wire format may be other than dense and exact."""
LINK_NAMES: dict[LevelName, str] = {"inter": "between nodes", "intra": "inside nodes"}
"""What people call the links of a level."""
MOST_RANKS = 2**16
"""Clusters and plans of more ranks are refused, before anything is made for each of them."""


def check_ranks(ranks: int) -> None:
    """Raises ``InputError`` for more ranks than can be planned for."""
    if ranks > MOST_RANKS:
        raise InputError(f"{ranks} ranks cannot be planned for: ask for at most {MOST_RANKS}")


class Device(Record, frozen=True, kw_only=True):
    """A device: its name, memory, and for catalogued ones the datasheet's peak rates.

    ``host_bytes_per_s`` is one direction of its link to the host's memory, measured or declared;
    without it nothing can be offloaded. ``reserve_bytes`` is what of its memory tensors cannot
    have: a GPU's context, buffers of NCCL, workspaces of libraries, and what the allocator's blocks
    leave unused. ``relative_speed`` is how many times as fast as the device of a profile it
    computes, where the profile has no times of its node.
    """

    name: str
    memory_bytes: Bytes
    flops_per_s: Positive | None = None
    memory_bytes_per_s: Positive | None = None
    host_bytes_per_s: Positive | None = None
    reserve_bytes: Bytes = 0
    relative_speed: Positive = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reserve_bytes and self.reserve_bytes >= self.memory_bytes:
            raise ValueError(
                f"device {self.name!r} has {self.memory_bytes} bytes and a reserve of "
                f"{self.reserve_bytes}: reserve less than its memory"
            )

    @property
    def usable_bytes(self) -> int:
        """What tensors can have of its memory."""
        return self.memory_bytes - self.reserve_bytes


class Node(Record, frozen=True, kw_only=True):
    """A host and its devices; ranks are numbered through the nodes in order. ``host_memory_bytes``
    is the host's own memory where its devices have theirs and it is known: what is offloaded must
    fit in it."""

    name: str
    devices: tuple[Device, ...]
    host_memory_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.devices:
            raise ValueError(f"node {self.name!r} has no devices")


class CollectiveCurve(Record, frozen=True, kw_only=True):
    """Measured seconds of a collective among ``ranks`` ranks by size in bytes.

    The size is the full tensor's for ``all_reduce``, ``all_gather`` (gathered) and
    ``reduce_scatter`` (before scattering), what the busiest end of a link carries one way for
    ``all_to_all`` (where each rank has a link of its own, what it sends to all others together),
    and the message's for ``p2p``. ``latency_s`` and ``bytes_per_s`` are the fitted
    line: seconds = latency + bytes / bytes_per_s.
    """

    collective: Collective
    ranks: Count
    seconds: Curve
    latency_s: Seconds
    bytes_per_s: Positive


class Level(Record, frozen=True, kw_only=True):
    """The links of one level: among the devices of a node (``intra``) or between nodes (``inter``).

    ``bytes_per_s`` is one direction of one device's link (``intra``) or of one node's network
    interface, which its devices share (``inter``). ``curves`` replace the formula where measured;
    they hold at this bandwidth. Where nodes differ it is that of the slowest link, which a ring
    over all nodes must pass. ``spread`` is how far repeated collectives lay apart.
    """

    name: LevelName
    latency_s: Seconds
    bytes_per_s: Positive
    curves: tuple[CollectiveCurve, ...] = ()
    spread: Spread = 0.0


class Interference(Record, frozen=True, kw_only=True):
    """How much slower each runs while the other does: 1.0 is not at all, 2.0 half as fast."""

    compute_slowdown: Positive = 1.0
    communication_slowdown: Positive = 1.0


class ExchangeHostTime(Record, frozen=True, kw_only=True):
    """Seconds more that a GPU's host takes in a step for ``each`` parameter whose gradient is
    exchanged so than for a dense one; of a wire format, for each message."""

    exchange: HostedExchange
    each_s: Seconds


class StepOverhead(Record, frozen=True, kw_only=True):
    """Seconds that the executor's own work adds to a step, whatever the plan: ``step_s`` once, and
    in each parameter's backward ``parameter_s``, and ``byte_s`` for each byte of a gradient that is
    exchanged (it is copied into its bucket or slice and averaged). Each redistribution takes
    ``move_s`` besides its collective, and ``move_byte_s`` for each byte that the busiest member
    needs, which is put together of what it has and what arrives. Each unit (or segment) that is
    recomputed takes ``rerun_s`` besides its second forward, and each storage that is offloaded
    ``copy_s``, to the host and back. On GPUs all of it is the host's, which goes on meanwhile: the
    step is longer only where the host has more to do than the GPU. Only there it is told apart what
    each message of gradients takes (``message_s``), and what other exchanges than dense ones do
    (``exchanges``). Zero where not measured."""

    step_s: Seconds = 0.0
    parameter_s: Seconds = 0.0
    byte_s: Seconds = 0.0
    move_s: Seconds = 0.0
    move_byte_s: Seconds = 0.0
    rerun_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    message_s: Seconds = 0.0
    exchanges: tuple[ExchangeHostTime, ...] = ()

    def exchange_s(self, exchange: str) -> float:
        """The seconds more of an exchange or a wire format; zero where not measured."""
        return next((e.each_s for e in self.exchanges if e.exchange == exchange), 0.0)


class Cluster(Document, frozen=True, kw_only=True, tag="Cluster"):
    """The machines a plan is made for.

    ``overhead`` is that of the barrier's schedule, ``priority_overhead`` that of priority, which
    sends slices and updates parameter by parameter; where it was not measured the barrier's stands
    for it. ``pair_bytes_per_s`` is an optional matrix of measured bandwidths from the row's rank to
    the column's, zero on its diagonal. By it ranks are placed, and every ring and redistribution
    takes as long as its own links do. ``probe`` gives it where hosts' links differ. ``calibrated``
    says what was corrected since, by runs.
    """

    name: str
    nodes: tuple[Node, ...]
    levels: tuple[Level, ...]
    interference: Interference = Interference()
    overhead: StepOverhead = StepOverhead()
    priority_overhead: StepOverhead | None = None
    pair_bytes_per_s: tuple[tuple[float, ...], ...] = ()
    origin: Literal["measured", "described"] = "described"
    calibrated: tuple[str, ...] = ()
    software: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nodes:
            raise ValueError("a cluster needs at least one node")
        check_ranks(self.world_size)
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ValueError(f"a level is listed twice in {', '.join(names)}")
        # A single device needs no links; any two that may talk need their level described.
        if self.world_size > 1 and not self.levels:
            raise ValueError("the cluster has no links: name the bandwidth between its devices")
        if len(self.nodes) > 1 and "inter" not in names:
            raise ValueError("the cluster has several nodes and no links between them")
        if any(len(n.devices) > 1 for n in self.nodes) and "intra" not in names:
            raise ValueError("a node has several devices and no links between them")
        # Placement and redistribution divide by these rates.
        pairs, size = self.pair_bytes_per_s, self.world_size
        if pairs and {len(pairs), *map(len, pairs)} != {size}:
            raise ValueError(f"pair_bytes_per_s must be {size} by {size}, one row for each rank")
        for i, row in enumerate(pairs):
            for j, rate in enumerate(row):
                check_real(f"pair_bytes_per_s[{i}][{j}]", rate)
                if rate < 0 or (i != j and rate == 0):
                    raise ValueError(f"pair_bytes_per_s[{i}][{j}] is {rate}, expected above zero")

    def overhead_of(self, *, sliced: bool) -> StepOverhead:
        """The executor's own work where gradients travel in slices by priority, or in buckets."""
        # Not measured by priority, the barrier's is nearer than nothing.
        return self.priority_overhead if sliced and self.priority_overhead else self.overhead

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return sum(len(n.devices) for n in self.nodes)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices in rank order."""
        return tuple(d for n in self.nodes for d in n.devices)

    @property
    def spread(self) -> float:
        """How far repeated collectives lay apart on the unsteadiest level; zero where not known."""
        return max((level.spread for level in self.levels), default=0.0)

    @property
    def on_gpus(self) -> bool:
        """Whether devices have memory of their own, so that NCCL carries what they exchange."""
        return any(not device.name.startswith("cpu") for device in self.devices)

    # Ranks are numbered through the nodes in order, as torchrun numbers them.
    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node's index of each rank."""
        return tuple(i for i, n in enumerate(self.nodes) for _ in n.devices)

    @property
    def host_bytes_per_s(self) -> float | None:
        """The slowest device's rate to its host, or None where one is not known."""
        # All ranks run one plan: offloading waits for the slowest, and must be possible on each.
        rates = [d.host_bytes_per_s for d in self.devices]
        return None if None in rates else min(r for r in rates if r is not None)

    @property
    def host_memory_bytes(self) -> int | None:
        """The least of a host's memory that each of its devices has, of the hosts whose memory is
        known; None where none is."""
        known = (
            node.host_memory_bytes // len(node.devices)
            for node in self.nodes
            if node.host_memory_bytes is not None
        )
        return min(known, default=None)

    def level(self, name: LevelName) -> Level | None:
        """The level of that name, if the cluster has it."""
        return next((level for level in self.levels if level.name == name), None)
