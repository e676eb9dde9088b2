"""One point of a step's memory timeline: how many bytes of which class are alive."""

from __future__ import annotations

from typing import Literal

from .record import Bytes, Record

Phase = Literal["forward", "backward", "update"]

CLASS_NAMES = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "residuals": "residuals",
    "gradients": "weight gradients",
    "feature_maps": "feature maps",
    "map_gradients": "feature map gradients",
    "buffers": "buffers in flight",
    "workspace": "workspace",
}
"""The classes of memory, and what people call them."""


class Moment(Record, frozen=True, kw_only=True):
    """Bytes alive at one point of a step, by class, while ``unit`` is at work."""

    unit: str
    phase: Phase
    weights: Bytes
    optimizer: Bytes
    residuals: Bytes
    gradients: Bytes
    feature_maps: Bytes
    map_gradients: Bytes
    buffers: Bytes
    workspace: Bytes

    @property
    def total(self) -> int:
        """All bytes alive."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, int]:
        """Bytes by class, in the order of ``CLASS_NAMES``."""
        return {name: getattr(self, name) for name in CLASS_NAMES}

    @property
    def largest(self) -> str:
        """The class that takes most, in words."""
        held = self.by_class()
        return CLASS_NAMES[max(held, key=lambda name: held[name])]
