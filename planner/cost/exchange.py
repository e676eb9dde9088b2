"""What the exchange of gradients costs under each policy, in buckets or in slices."""

from collections.abc import Sequence
from functools import cached_property
from math import ceil, inf, prod
from typing import NamedTuple

import numpy as np

from ..schema.layout import Layout
from ..schema.options import Option, cuts
from ..schema.plan import ExchangePolicy, WireFormat
from ..schema.profile import ModelProfile, ParameterProfile
from .collectives import (
    Fabric,
    Rings,
    all_to_all_s,
    collective_s,
    groups_of,
    peers_of,
    ring_steps,
    rings,
    run_on_host,
)
from .compute import shard_bytes
from .step_time import LINKS, OnLink
from .structure import Structure

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
WIRE_BYTES: dict[WireFormat, int] = {"bf16": 2}
# In eight bits each run of so many elements is scaled by its largest, a float32 that goes along.
INT8_BLOCK = 256
INT8_BYTES = 1 + 4 / INT8_BLOCK
# What travels so that every rank gets what each of the others has sent.
GATHERED: tuple[ExchangePolicy, ...] = ("topk", "int8")
# Thin matrices travel in 32 bits at least: their sums are not rounded as gradients may be.
THIN_BYTES = 4
# The number that says where a chosen gradient element belongs is an int32. A parameter with more
# elements than that can number is sent whole.
NUMBER_BYTES = 4
MOST_NUMBERED = 2**31 - 1


def sent_whole(dims: int, numel: int, *, of_norm: bool) -> bool:
    """Whether a lossy exchange sends a parameter whole."""
    # Biases, scales and what normalises are few elements, and training is sensitive to them.
    return dims <= 1 or of_norm or not 0 < numel <= MOST_NUMBERED


def matrix_sides(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a parameter's gradient as the matrix that low rank sends."""
    rows = shape[0]
    return rows, prod(shape) // max(rows, 1)


Sides = Sequence[tuple[int, int]]
"""The rows and columns of several matrices."""


def thin_share(sides: Sides, rank: int) -> float:
    """The share of all elements of a unit's matrices that thin matrices of that rank have, in the
    mean of the two that take turns. No matrix has a rank above its sides."""
    thin = sum(min(rank, rows, columns) * (rows + columns) / 2 for rows, columns in sides)
    return thin / max(sum(rows * columns for rows, columns in sides), 1)


def thin_rank(sides: Sides, ratio: float) -> int:
    """The rank, the same for all matrices of a unit, whose thin matrices have the share of elements
    that is next to ``ratio``; 1 at least."""
    most = max((min(each) for each in sides), default=1)
    rank, share = 1, thin_share(sides, 1)
    while rank < most and (share + (more := thin_share(sides, rank + 1))) / 2 <= ratio:
        rank, share = rank + 1, more
    return rank


def wire_share(wire: WireFormat, element_bytes: int) -> float:
    """The bytes that travel for each byte of a gradient whose elements have ``element_bytes``."""
    return min(WIRE_BYTES.get(wire, element_bytes) / element_bytes, 1.0)


def message_kind(
    layout: Layout,
    exchange: ExchangePolicy,
    ratio: float,
    wire: WireFormat = "exact",
    peers_per_host: int = 1,
    *,
    early_release: bool,
) -> Option:
    """What gradients have in common that may share a message: the layout among whose groups they
    are averaged, and how. The executor tells types and devices apart besides."""
    # Thin matrices travel alike, whatever share of their matrices they are.
    ratio = 1.0 if exchange == "low_rank" else ratio
    return Option(
        layout, exchange=exchange, ratio=ratio, wire=wire, peers_per_host=peers_per_host,
        early_release=early_release,
    )  # fmt: skip


# Below this a gradient is copied into a pack: a copy of that size and back takes about 20 µs, a
# message of its own some 200 µs (gloo, two cores, torch 2.13).
PACKED_BYTES = 128 * 1024


def packed(size_bytes: int, message_bytes: int) -> bool:
    """Whether a gradient is copied into a pack, not sent from where it lies."""
    return size_bytes < min(PACKED_BYTES, message_bytes)


# Thin matrices are made, and their messages have latencies, in which so many times as many of their
# bytes as of dense gradients are worth being waited for together.
THIN_COUNT = 4
# What is packed is updated together. So that this takes no memory to speak of, a gradient counts as
# at least such a part of itself: 4 MiB of them fill a pack.
LEAST_COUNT = 1 / 32


def packed_bytes(option: Option, shared_bytes: int, *, whole: bool) -> int:
    """The size by which gradients of several units are packed into one message, of one that is
    exchanged by ``option``, with its own ratio."""
    if option.exchange != "low_rank" or whole or option.early_release:
        return shared_bytes
    return min(ceil(max(THIN_COUNT * option.ratio, LEAST_COUNT) * shared_bytes), shared_bytes)


class Gradient(NamedTuple):
    """One parameter's gradient on its way, by its canonical name; ``kind`` as ``message_kind`` has
    it.

    ``full_bytes`` is its size undivided, ``shared_bytes`` a member's share, the same for all
    members, ``payload_bytes`` what a member has of the tensor exchanged, ``packed_bytes`` what it
    counts where several are packed. ``whole`` says that a lossy exchange does not send it in
    part."""

    name: str
    unit: int
    kind: Option
    full_bytes: int
    shared_bytes: int
    payload_bytes: int
    packed_bytes: int
    whole: bool


class Exchanges(Structure):
    """The gradient exchange of a profile's units over a fabric. Messages are buckets of at most
    ``message_bytes``, or with ``sliced`` slices of at most that, unit by unit. Parameters that are
    whole only while they are used are gathered twice in each of ``micro_batches``."""

    def __init__(
        self,
        profile: ModelProfile,
        fabric: Fabric,
        micro_batches: int,
        message_bytes: int,
        sliced: bool,
    ) -> None:
        super().__init__(profile)
        self.fabric, self.micro_batches = fabric, micro_batches
        self.message_bytes, self.sliced = message_bytes, sliced
        self._gradients: dict[tuple[int, Option], tuple[Gradient, ...]] = {}
        self._exchanges: dict[tuple[Layout, str, str, int, float], OnLink] = {}
        self._peers_per_host: dict[Layout, int] = {}
        self._rings: dict[tuple[Layout, str, int], Rings] = {}

    def gradients(self, k: int, option: Option) -> tuple[Gradient, ...]:
        """The gradients of unit ``k`` that other ranks have too, in the order of backward."""
        key = (k, option)
        if key not in self._gradients:
            trained = [p for p in reversed(self.owned[k]) if p.trainable]
            found = (self._gradient(k, option, p) for p in trained)
            self._gradients[key] = tuple(g for g in found if g.kind.layout.groups > 1)
        return self._gradients[key]

    def _gradient(self, k: int, option: Option, parameter: ParameterProfile) -> Gradient:
        unit, layout, each = self.profile.units[k], option.layout, option.peers_per_host
        if layout.degree > 1 and cuts(unit, option)[parameter.shared] is None:
            # What a style leaves whole is the same on all members: they are peers of each other.
            layout, each = Layout(groups=layout.size, degree=1, first=layout.first), 1
        kind = message_kind(
            layout, option.exchange, option.ratio, option.wire, each,
            early_release=option.early_release,
        )  # fmt: skip
        whole = self.sends_whole(k, parameter)
        size = shard_bytes(unit, option.style, option.layout.degree, (parameter,))
        own = kind._replace(ratio=option.ratio)
        payload, packed = self.payload_bytes(own, size), packed_bytes(own, size, whole=whole)
        return Gradient(parameter.shared, k, kind, parameter.bytes, size, payload, packed, whole)

    def sends_whole(self, k: int, parameter: ParameterProfile) -> bool:
        """Whether a lossy exchange sends a parameter of unit ``k`` whole."""
        shape = parameter.shape
        of_norm = self.profile.units[k].kind == "norm"
        return sent_whole(len(shape), prod(shape), of_norm=of_norm)

    def closes_bucket(self, k: int, option: Option) -> bool:
        """Whether a gradient of the unit is larger than a bucket: it has one to itself, and what
        its layout has open before is sent as it is."""
        return self._overflowing[k] and option.layout.groups > 1

    @cached_property
    def last_trained(self) -> int:
        """The last unit that owns a parameter to train: before its backward, which comes first of
        those, there is no weight gradient. -1 where nothing is trained."""
        trained = (k for k, own in enumerate(self.owned) if any(p.trainable for p in own))
        return max(trained, default=-1)

    @cached_property
    def _overflowing(self) -> tuple[bool, ...]:
        # Asked for every plan that a search looks at. Slices are no buckets: none closes one.
        most = inf if self.sliced else self.message_bytes
        return tuple(any(p.trainable and p.bytes > most for p in own) for own in self.owned)

    def payload_bytes(self, option: Option, trained_bytes: int) -> int:
        """Bytes that a member has of the tensor exchanged: its gradient, the part that is not
        dropped, the values and numbers (four bytes each) that all groups chose, all groups'
        gradients in eight bits, or a thin matrix."""
        groups = option.layout.groups
        if groups == 1:
            return 0
        if option.exchange == "topk":
            each = 1 + NUMBER_BYTES / self.element_bytes
            return ceil(groups * option.ratio * trained_bytes * each)
        if option.exchange == "int8":
            return ceil(groups * trained_bytes * self.int8_share)
        if option.exchange == "low_rank":
            return ceil(option.ratio * trained_bytes * self.thin_bytes_share)
        # Of a rounded gradient too it is its own bytes, by which messages are cut.
        return ceil(option.ratio * trained_bytes) if option.lossy else trained_bytes

    def exchange(self, option: Option, payload_bytes: float) -> OnLink:
        """The exchange of a payload over the groups, all members' at the same time: an all-reduce,
        by host where ``peers_per_host`` says so; a reduce-scatter and an all-gather where it is
        sharded, and where parameters are too an all-gather before each forward and each backward;
        an all-gather of what was chosen."""
        key = (
            option.layout, option.exchange, option.wire, option.peers_per_host, payload_bytes,
        )  # fmt: skip
        if key not in self._exchanges:
            self._exchanges[key] = self._exchange(option, payload_bytes)
        return self._exchanges[key]

    def _exchange(self, option: Option, payload_bytes: float) -> OnLink:
        if option.shards:
            way, back = self.sharded_exchange(option, payload_bytes)
            seconds, sent_bytes = way.seconds + back.seconds, way.sent_bytes + back.sent_bytes
            return OnLink(seconds, way.link, sent_bytes)
        ring = self.ring(option.layout, "peers")
        link, part = LINKS.index(ring.level), ring_steps("all_gather", ring.ranks) / ring.ranks
        if option.exchange in GATHERED:
            seconds = collective_s(self.fabric, ring, "all_gather", payload_bytes)
            return OnLink(seconds, link, part * payload_bytes)
        sent_bytes = payload_bytes * self.wire_share(option.wire)
        if option.peers_per_host > 1:
            return self._by_host_exchange(option, payload_bytes)
        seconds = collective_s(self.fabric, ring, "all_reduce", sent_bytes)
        return OnLink(seconds, link, ring_steps("all_reduce", ring.ranks) / ring.ranks * sent_bytes)

    def sharded_exchange(self, option: Option, payload_bytes: float) -> tuple[OnLink, OnLink]:
        """The two ways of a sharded exchange: of gradients to those who own elements, and of
        parameters to all."""
        ring = self.ring(option.layout, "peers")
        link, part = LINKS.index(ring.level), ring_steps("all_gather", ring.ranks) / ring.ranks
        sent_bytes = payload_bytes * self.wire_share(option.wire)
        gathers = 2 * self.micro_batches if option.gathers else 1
        scatter_s = self._scatter_s(option, ring, sent_bytes)
        gather_s = gathers * collective_s(self.fabric, ring, "all_gather", payload_bytes)
        return (
            OnLink(scatter_s, link, part * sent_bytes),
            OnLink(gather_s, link, part * gathers * payload_bytes),
        )

    def _scatter_s(self, option: Option, ring: Rings, sent_bytes: float) -> float:
        """Peers send each other their parts of a gradient and add up what comes. A GPU's library
        does that in a ring; rounded gradients are sent to each peer, and so are all on CPUs."""
        fabric, level = self.fabric, self.fabric.level(ring.level)
        measured = any(curve.collective == "reduce_scatter" for curve in level.curves)
        # On CPUs what a probe has timed is what is done; inside a host nothing is shared.
        known = option.wire == "exact" if fabric.cluster.on_gpus else measured
        if known or ring.level == "intra":
            return collective_s(fabric, ring, "reduce_scatter", sent_bytes)
        sets = fabric.node_of[peers_of(option.layout)]
        counts = np.stack([np.bincount(row, minlength=len(fabric.cluster.nodes)) for row in sets])
        crossing = int((counts * (ring.ranks - counts)).sum(axis=0).max())
        return all_to_all_s(level, ring.ranks - 1, crossing * sent_bytes / ring.ranks)

    def _by_host_exchange(self, option: Option, payload_bytes: float) -> OnLink:
        """Peers on a host reduce-scatter a payload among them, all-reduce each its part with those
        of other hosts, and gather the sums."""
        inside, across = (
            self.ring(option.layout, which, option.peers_per_host) for which in ("host", "hosts")
        )
        part_bytes = payload_bytes / inside.ranks * self.wire_share(option.wire)
        across_s = collective_s(self.fabric, across, "all_reduce", part_bytes)
        inside_s = sum(
            collective_s(self.fabric, inside, name, payload_bytes)
            for name in ("reduce_scatter", "all_gather")
        )
        sent = 2 * ring_steps("all_gather", inside.ranks) / inside.ranks * payload_bytes
        sent += ring_steps("all_reduce", across.ranks) / across.ranks * part_bytes
        # What slices do inside hosts lies beside the crossing of others: the longer one counts.
        return OnLink(max(across_s, inside_s), LINKS.index(across.level), sent)

    def peers_per_host(self, layout: Layout) -> int:
        """How many peers on one host should add up a dense gradient before hosts exchange it; 1
        where that cannot be or is predicted to take as long."""
        # Asked for every unit that may have the layout.
        if layout not in self._peers_per_host:
            self._peers_per_host[layout] = self._quicker_by_host(layout)
        return self._peers_per_host[layout]

    def _quicker_by_host(self, layout: Layout) -> int:
        cluster = self.fabric.cluster
        if not self.sliced or layout.size < cluster.world_size or cluster.on_gpus:
            return 1
        each = run_on_host(self.fabric, peers_of(layout))
        if each == 1:
            return 1
        flat_s, by_host_s = (
            self.exchange(Option(layout, peers_per_host=n), self.message_bytes).seconds
            for n in (1, each)
        )
        return each if by_host_s < flat_s else 1

    @property
    def thin_bytes_share(self) -> float:
        """The bytes of an element of a thin matrix for each of the gradient's."""
        return max(THIN_BYTES / self.element_bytes, 1.0)

    @property
    def int8_share(self) -> float:
        """The bytes of a message in eight bits for each of the gradient's."""
        return INT8_BYTES / self.element_bytes

    def wire_share(self, wire: WireFormat) -> float:
        """The bytes of a gradient that travel for each of its own."""
        return wire_share(wire, self.element_bytes)

    @property
    def element_bytes(self) -> int:
        """Of one element of a gradient."""
        return ELEMENT_BYTES.get(self.profile.dtype, 4)

    def exchanged(self, option: Option, payload_bytes: int) -> tuple[OnLink, float]:
        """(a unit's exchange, seconds of one slice, zero in buckets)."""
        if not payload_bytes:
            return OnLink(), 0.0
        if self.sliced:
            # Equal pieces, so that one figure is the time of any slice.
            slices = ceil(payload_bytes / self.message_bytes)
            one = self.exchange(option, payload_bytes / slices)
            return OnLink(one.seconds * slices, one.link, one.sent_bytes * slices), one.seconds
        # Gradients smaller than a bucket share it with others, and with them the latency.
        part = min(payload_bytes / self.message_bytes, 1.0)
        full = self.exchange(option, payload_bytes / part)
        return OnLink(full.seconds * part, full.link, full.sent_bytes * part), 0.0

    def codings(self, k: int, option: Option) -> float:
        """How many times a member chooses, rounds and packs of unit ``k`` for a step: once for each
        gradient that travels in part, in eight bits for each of its slices, or for each message
        that is rounded whole."""
        if not option.lossy:
            return self.own_messages(k, option)
        apart = [g.shared_bytes for g in self.gradients(k, option) if not g.whole]
        return self._sliced(apart) if option.exchange == "int8" else len(apart)

    def own_messages(self, k: int, option: Option) -> float:
        """How many messages carry the gradients of unit ``k`` in a step, one way: as
        ``simulate.slicing`` cuts them, with its part of those that units share."""
        found = self.gradients(k, option)
        apart = [g for g in found if option.lossy and not g.whole]
        whole = self._in_packs([g.shared_bytes for g in found if not option.lossy or g.whole])
        if option.exchange == "low_rank":
            return whole + min(sum(g.packed_bytes for g in apart) / PACKED_BYTES, 1.0)
        if option.exchange == "topk":
            return whole + len(apart)
        return whole + self._sliced([g.shared_bytes for g in apart])

    def own_gathers(self, k: int, option: Option) -> float:
        """How many messages carry its parameters once, to all who own a part of them: on a device's
        streams large ones are gathered whole."""
        return self._in_packs([g.shared_bytes for g in self.gradients(k, option)], whole=True)

    def _sliced(self, sizes: Sequence[int]) -> int:
        return sum(ceil(size / self.message_bytes) for size in sizes)

    def _in_packs(self, sizes: Sequence[int], *, whole: bool = False) -> float:
        """The messages of gradients of those sizes, of which small ones share some; ``whole``:
        large ones are not cut."""
        shared_bytes = min(PACKED_BYTES, self.message_bytes) if self.sliced else self.message_bytes
        if not self.sliced or sum(sizes) <= shared_bytes:
            return sum(sizes) / shared_bytes
        large = [size for size in sizes if not packed(size, self.message_bytes)]
        small_bytes = sum(sizes) - sum(large)
        cut = len(large) if whole else self._sliced(large)
        return cut + ceil(small_bytes / self.message_bytes)

    def ring(self, layout: Layout, which: str, each: int = 1) -> Rings:
        """The rings over a layout's ``peers``, or over ``all`` positions; of ``each`` peers on a
        ``host``, or of those in one place of all ``hosts``."""
        key = (layout, which, each)
        if key not in self._rings:
            rows = peers_of(layout)
            if which == "all":
                rows = groups_of(layout).reshape(1, -1)
            elif which == "host":
                rows = rows.reshape(-1, each)
            elif which == "hosts":
                by_place = rows.reshape(len(rows), -1, each).swapaxes(1, 2)
                rows = np.ascontiguousarray(by_place).reshape(-1, rows.shape[1] // each)
            self._rings[key] = rings(self.fabric, rows)
        return self._rings[key]
