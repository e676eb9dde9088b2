"""What a rank knows of gradients that others exchange, as it has nothing of their parameters.

All ranks order all slices alike, so a rank that a unit leaves idle counts the unit's slices too, at
the size that they have where they are. Their turn passes without a message.
"""

from __future__ import annotations

from ...planner.plan import SHARDING
from .slices import Parcel, Slice


class AbsentSlice(Slice):
    """A slice that travels elsewhere."""

    @property
    def bytes(self) -> int:
        """What a member has of it there."""
        first, parts = self.entries[0], self.cut.parts
        width = first.parameter.element_size()
        sizes = [-(-entry.full_numel // entry.degree) for entry in self.entries]
        if first.exchange not in SHARDING:
            return sum(sizes) * width // parts
        assert first.layout is not None, "only such ranks are idle"
        peers = first.layout.groups
        chunks = [-(-size // peers) for size in sizes]
        share = [c * (self.cut.part + 1) // parts - c * self.cut.part // parts for c in chunks]
        return sum(share) * peers * width // 2

    @property
    def sent_bytes(self) -> int:
        """Nothing."""
        return 0


class AbsentParcel(Parcel):
    """A parcel that travels elsewhere."""

    made_of = AbsentSlice
