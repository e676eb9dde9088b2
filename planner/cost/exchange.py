"""What the exchange of gradients costs under each policy, in buckets or in slices."""

from __future__ import annotations

from functools import cached_property
from math import ceil, inf

from ..schema.layout import Layout
from ..schema.options import Option
from ..schema.profile import ModelProfile
from .collectives import (
    Fabric,
    Rings,
    all_gather_s,
    all_reduce_s,
    groups_of,
    peers_of,
    reduce_scatter_s,
    rings,
)
from .compute import shard_bytes
from .step_time import LINKS
from .structure import Structure
from .unit_cost import OnLink

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NUMBER_BYTES = 4
"""Of the number that says where a picked gradient element belongs (int32)."""


class Exchanges(Structure):
    """The gradient exchange of a profile's units over a fabric. Gradients travel in buckets of
    ``bucket_bytes``, or with ``sliced`` unit by unit in slices of at most that. Parameters that are
    whole only while they are used are gathered twice in each of ``micro_batches``."""

    micro_batches = 1

    def __init__(
        self, profile: ModelProfile, fabric: Fabric, bucket_bytes: int, sliced: bool
    ) -> None:
        super().__init__(profile)
        self.fabric, self.bucket_bytes, self.sliced = fabric, bucket_bytes, sliced
        self._gradients: dict[tuple[int, Option], tuple[tuple[int, int], ...]] = {}
        self._exchanges: dict[tuple[Layout, str, float], OnLink] = {}
        self._rings: dict[tuple[Layout, str], Rings] = {}

    def gradients(self, k: int, option: Option) -> tuple[tuple[int, int], ...]:
        """(undivided, a member's payload) bytes of the gradients of unit ``k`` that travel, in the
        order of backward."""
        key = (k, option)
        if key not in self._gradients:
            unit, layout = self.profile.units[k], option.layout
            trained = [p for p in self.owned[k] if p.trainable and layout.groups > 1]
            shards = [shard_bytes(unit, option.style, layout.degree, (p,)) for p in trained]
            self._gradients[key] = tuple(
                (p.bytes, self.payload_bytes(option, shard))
                for p, shard in zip(reversed(trained), reversed(shards), strict=True)
            )
        return self._gradients[key]

    def closes_bucket(self, k: int, option: Option) -> bool:
        """Whether a gradient of the unit is larger than a bucket: it has one to itself, and what
        its layout has open before is sent as it is. Not where gradients travel in slices."""
        return self._overflowing[k] and option.layout.groups > 1

    @cached_property
    def _overflowing(self) -> tuple[bool, ...]:
        """For each unit whether it has a gradient larger than a bucket; asked for every plan that a
        search looks at."""
        most = inf if self.sliced else self.bucket_bytes
        return tuple(any(p.trainable and p.bytes > most for p in own) for own in self.owned)

    def payload_bytes(self, option: Option, trained_bytes: int) -> int:
        """Bytes that a member has of the tensor exchanged: its gradient, the part that is not
        dropped, or the values and numbers (four bytes each) that all groups picked."""
        groups = option.layout.groups
        if groups == 1:
            return 0
        if option.exchange == "topk":
            element = ELEMENT_BYTES.get(self.profile.dtype, 4)
            return ceil(groups * option.ratio * trained_bytes * (1 + NUMBER_BYTES / element))
        return ceil(option.ratio * trained_bytes) if option.lossy else trained_bytes

    def exchange(self, option: Option, payload_bytes: float) -> OnLink:
        """The exchange of a payload over the groups, all members' at the same time: an all-reduce;
        a reduce-scatter and an all-gather where it is sharded, and where parameters are too an
        all-gather before each forward and each backward; an all-gather of what was picked."""
        key = (option.layout, option.exchange, payload_bytes)
        if key not in self._exchanges:
            self._exchanges[key] = self._exchange(option, payload_bytes)
        return self._exchanges[key]

    def _exchange(self, option: Option, payload_bytes: float) -> OnLink:
        ring = self.ring(option.layout, "peers")
        link, part = LINKS.index(ring.level), (ring.ranks - 1) / ring.ranks
        if option.exchange == "topk":
            seconds = all_gather_s(self.fabric, ring, payload_bytes)
            return OnLink(seconds, link, part * payload_bytes)
        if option.shards:
            gathers = 2 * self.micro_batches if option.gathers else 1
            seconds = reduce_scatter_s(self.fabric, ring, payload_bytes)
            seconds += gathers * all_gather_s(self.fabric, ring, payload_bytes)
            return OnLink(seconds, link, (1 + gathers) * part * payload_bytes)
        seconds = all_reduce_s(self.fabric, ring, payload_bytes)
        return OnLink(seconds, link, 2 * part * payload_bytes)

    def exchanged(self, option: Option, payload_bytes: int) -> tuple[OnLink, float]:
        """(a unit's exchange, seconds of one slice). In buckets, gradients smaller than one share
        it with others, and with them the latency; slices are the unit's own."""
        if not payload_bytes:
            return OnLink(), 0.0
        if self.sliced:
            pieces = ceil(payload_bytes / self.bucket_bytes)
            one = self.exchange(option, payload_bytes / pieces)
            return OnLink(one.seconds * pieces, one.link, one.sent_bytes * pieces), one.seconds
        part = min(payload_bytes / self.bucket_bytes, 1.0)
        full = self.exchange(option, payload_bytes / part)
        return OnLink(full.seconds * part, full.link, full.sent_bytes * part), 0.0

    def ring(self, layout: Layout, which: str) -> Rings:
        """The rings over a layout's ``groups``, over its ``peers``, or over ``all`` positions."""
        key = (layout, which)
        if key not in self._rings:
            rows = peers_of(layout) if which == "peers" else groups_of(layout)
            self._rings[key] = rings(self.fabric, rows.reshape(1, -1) if which == "all" else rows)
        return self._rings[key]
