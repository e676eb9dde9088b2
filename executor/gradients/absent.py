"""What a rank knows of gradients that others exchange, as it has nothing of their parameters.

All ranks order all slices alike, so a rank that a unit leaves idle counts the unit's slices too, at
the size that they have where they are. Their turn passes without a message.
"""

from __future__ import annotations

from .slices import GradGroup, Slice


class AbsentSlice(Slice):
    """A slice that travels elsewhere."""

    @property
    def bytes(self) -> int:
        """About what a member has of it there."""
        return self.shared_bytes

    @property
    def sent_bytes(self) -> int:
        """Nothing."""
        return 0


class AbsentGradGroup(GradGroup):
    """A parcel that travels elsewhere."""

    made_of = AbsentSlice
    absent = True
