"""What one unit holds, in bytes: the figures of memory that its decision amounts to."""

from __future__ import annotations

from typing import NamedTuple


class UnitBytes(NamedTuple):
    """What one unit holds on a position, in bytes.

    ``residual`` is what a lossy exchange has not sent, ``travelling`` the copies of gradients that
    live until their exchange has been waited for, ``map_gradients`` those of feature maps while the
    unit's backward is at work, ``fresh`` new gradients that are not kept as they are,
    ``spared`` what of its gradients and feature maps is never there together,
    ``exchanged`` the part of gradients that travels in buckets, and ``renewed`` the temporaries of
    its parameters' update. ``leaving`` is what there is besides when its gradients leave, at the
    end of its backward: copies, what a choice among them takes, gradients of feature maps.
    ``again`` are feature maps that are made again in backward; of a unit in a segment ``given`` is
    what enters it and nobody else keeps, and ``arriving`` the gradients of feature maps that are
    there as its backward begins (see ``inside``).
    ``whole``, ``underway`` and ``away`` count where other units work (see ``beside``): parameters
    that are whole only while they are used, their gradients on their way, and feature maps that
    come back early.
    """

    weights: float = 0.0
    optimizer: float = 0.0
    residual: float = 0.0
    gradients: float = 0.0
    travelling: float = 0.0
    saved: float = 0.0
    map_gradients: float = 0.0
    fresh: float = 0.0
    spared: float = 0.0
    workspace: float = 0.0
    exchanged: float = 0.0
    leaving: float = 0.0
    renewed: float = 0.0
    again: float = 0.0
    given: float = 0.0
    arriving: float = 0.0
    whole: float = 0.0
    underway: float = 0.0
    away: float = 0.0

    @property
    def figures(self) -> tuple[float, ...]:
        """The same in the order of ``OWN``: what always stands together, then the other fields."""
        return sum(self[:STANDING]), *self[STANDING:]

    def released(self) -> UnitBytes:
        """With gradients that are applied and gone when the unit's backward has finished."""
        own = self.gradients + self.travelling
        return self._replace(
            map_gradients=self.map_gradients + self.gradients,
            leaving=self.leaving + own + self.renewed,
            gradients=0.0,
            travelling=0.0,
            exchanged=0.0,
            renewed=0.0,
        )


STANDING = 3
"""The first so many fields (weights, optimizer, residual) are there at every point of a step."""
OWN = ("standing", *UnitBytes._fields[STANDING:])
"""The names of ``UnitBytes.figures``."""
FIELD = {name: i for i, name in enumerate(UnitBytes._fields)}
"""The number of each field, as tables of units have them in their rows."""
