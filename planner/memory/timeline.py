"""What a rank holds at each point of a step.

The points are each unit's forward in order, each unit's backward in reverse, and the update. Alive
are, in bytes:

    weights        shards and buffers, always; divided over the groups where the parameters are
                   sharded too (``gathering`` says what is whole while units work)
    optimizer      its state, always, divided over the groups where the exchange is sharded
    residuals      what a lossy exchange has not sent (see ``feedback``), always
    gradients      of weights, from a unit's backward to the end of the step, by priority to its
                   own update in the next forward; with micro-batches always, since the last
                   micro-batch adds to those of the others
    feature_maps   what units behind have made and backward needs, until their own backward is over:
                   all of it (keep), their output (recompute), nothing (offload)
    map_gradients  gradients of feature maps and what else the unit at work needs in backward; with
                   early release, and with feedback in place or in mirrors, its weight gradients
                   too, which are gone when it has finished. As weight gradients leave at the end
                   of a unit's backward: what that takes for a moment, and the gradients of feature
                   maps on their way to units before
    buffers        in flight: what a redistribution receives, the part of open buckets that is not
                   filled yet, a new gradient until it is copied into its bucket or added, and
                   copies of gradients that travel
    workspace      temporaries of the unit at work, of its update, and those of its feature maps
                   that are only there meanwhile (recompute, offload); and what other units have
                   there while it works (``beside``), those of its segment among them (``inside``)

How long a gradient lives depends on the wire, so it counts to the end of the step, and under
priority to its unit's next forward, whatever its exchange. The figures are additive: a unit's
choice adds bytes to each point, and a plan holds their sum (open buckets aside). The point of a
unit's backward is the fuller of two: while it is at work, and as its gradients leave, when its own
feature maps are gone. That of the last unit of a segment is the fullest of three: all of the
segment runs again before its backward begins.
What the framework itself takes (allocator slack, a CUDA context) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.segment_memory import Inside
from ..cost.step_time import Vector
from ..cost.unit_bytes import FIELD, STANDING
from ..schema.peak import CLASS_NAMES, Moment, Phase

Table = npt.NDArray[np.float64]


class MemoryPoint(NamedTuple):
    """Bytes alive at one point, by class; ``unit`` is the index of the unit at work."""

    unit: int
    phase: Phase
    weights: float = 0.0
    optimizer: float = 0.0
    residuals: float = 0.0
    gradients: float = 0.0
    feature_maps: float = 0.0
    map_gradients: float = 0.0
    buffers: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All bytes alive."""
        return sum(self[2:])


def moment_of(point: MemoryPoint, names: Sequence[str]) -> Moment:
    """The point with its unit's name, in whole bytes."""
    held = {name: round(max(float(getattr(point, name)), 0.0)) for name in CLASS_NAMES}
    return Moment(unit=names[point.unit], phase=point.phase, **held)


@dataclass(frozen=True)
class Holding:
    """What the units of one position hold: ``table`` [field of ``UnitBytes``, unit], and for each
    unit ``received``, the largest tensor that a redistribution brings, and what others have there
    while it works (``beside_forward``, ``beside_backward``).

    ``buckets_bytes`` is the most that buckets being filled may take together, of which a unit that
    works has closed ``closed_bytes``; gradients are views of these. ``sliced`` gradients have none,
    and are applied as the next forward needs them; ``together`` says that the update's temporaries
    are those of all units at once.
    """

    table: Table
    received: Vector
    beside_forward: Vector
    beside_backward: Vector
    segments: Inside
    buckets_bytes: float
    closed_bytes: Vector
    sliced: bool
    together: bool

    def __getitem__(self, name: str) -> Vector:
        """A field of ``UnitBytes`` by unit."""
        found: Vector = self.table[FIELD[name]]
        return found

    @property
    def units(self) -> range:
        """Their numbers."""
        return range(self.table.shape[1])


class _Alive(NamedTuple):
    """By unit what lives as its backward is reached: feature maps (forward has them too), weight
    gradients, copies of later units' that travel, and open buckets' unfilled parts (``opened``
    before anything of the unit's own); ``pending`` and ``coming`` are the gradients and copies that
    are there in its forward, ``renewing`` what lives while the unit is updated."""

    maps: Vector
    gradients: Vector
    travelling: Vector
    unfilled: Vector
    opened: Vector
    pending: Vector
    coming: Vector
    renewing: Vector

    def working(self, held: Holding) -> Vector:
        """By unit what lives while its backward is at work, beside what always does."""
        found: Vector = (
            self.maps + self.gradients + self.travelling + self.unfilled + held.received
            + held["workspace"] + held["map_gradients"] + held["fresh"] - held["spared"]
            + held.beside_backward + held.segments.made
        )  # fmt: skip
        return found

    def leaving(self, held: Holding) -> Vector:
        """By unit what lives as its gradients leave, beside what always does."""
        found: Vector = (
            self.maps - held["saved"] + self.gradients + self.travelling + held["travelling"]
            + held["leaving"] + held.beside_backward + held.segments.made
        )  # fmt: skip
        return found

    def running_again(self, held: Holding, micro_batches: int) -> Vector:
        """By unit what lives while the segment that it ends runs again, beside what always does;
        nothing where it ends none."""
        own = held["gradients"] if micro_batches == 1 else 0.0
        found: Vector = (
            self.maps + self.gradients - own + self.travelling + self.opened
            + held.beside_backward + held.segments.again
        )  # fmt: skip
        return np.where(held.segments.again > 0, found, 0.0)


def _alive(held: Holding, micro_batches: int) -> _Alive:
    own, copies, renewed = held["gradients"], held["travelling"], held["renewed"]
    maps = held["saved"].cumsum()
    to_come = held["exchanged"].cumsum()
    opened = np.minimum(to_come, held.buckets_bytes)
    unfilled = np.minimum(to_come - held["exchanged"], held.buckets_bytes - held.closed_bytes)
    many, every = micro_batches > 1, float(own.sum() + copies.sum())
    gradients = np.full_like(maps, own.sum()) if many else _from(own)
    travelling, none = _from(copies) - copies, np.zeros_like(maps)
    pending, coming = gradients if many else none, none
    if held.sliced:  # in the next forward, before the unit's own feature maps
        renewing = maps - held["saved"] + held.segments.entering + _from(own + copies) + renewed
        if not many:
            pending, coming = _from(own) - own, travelling
    else:
        renewing = every + (np.full_like(maps, renewed.sum()) if held.together else renewed)
    return _Alive(maps, gradients, travelling, unfilled, opened, pending, coming, renewing)


def _from(values: Vector) -> Vector:
    """For each unit the sum of its own and later units' values."""
    found: Vector = values[::-1].cumsum()[::-1]
    return found


def timeline(held: Holding, micro_batches: int) -> list[MemoryPoint]:
    """What a position holds at each point of a step's last micro-batch, and at the update."""
    alive = _alive(held, micro_batches)
    ways = np.stack([
        alive.working(held), alive.leaving(held), alive.running_again(held, micro_batches)
    ])  # fmt: skip
    points = [_forward(held, alive, k) for k in held.units]
    for k in reversed(held.units):
        way = int(ways[:, k].argmax())
        points.append(
            _running_again(held, alive, k, micro_batches)
            if way == 2
            else (_backward, _leaving)[way](held, alive, k)
        )
    return [*points, _update(held, alive)]


def _point(held: Holding, unit: int, phase: Phase, **bytes_: float) -> MemoryPoint:
    standing = held.table[:STANDING].sum(axis=1)
    return MemoryPoint(unit, phase, *standing.tolist(), **{k: float(v) for k, v in bytes_.items()})


def _forward(held: Holding, alive: _Alive, k: int) -> MemoryPoint:
    return _point(
        held, k, "forward",
        gradients=alive.pending[k],
        feature_maps=alive.maps[k],
        buffers=held.received[k] + alive.coming[k],
        workspace=held["workspace"][k] + held.beside_forward[k] + held.segments.entering[k],
    )  # fmt: skip


def _backward(held: Holding, alive: _Alive, k: int) -> MemoryPoint:
    buffers = alive.unfilled[k] + alive.travelling[k] + held["fresh"][k] + held.received[k]
    spared = min(held["spared"][k], held["saved"][k])
    return _point(
        held, k, "backward",
        gradients=alive.gradients[k] - (held["spared"][k] - spared),
        feature_maps=alive.maps[k] - spared,
        map_gradients=held["map_gradients"][k],
        buffers=buffers,
        workspace=held["workspace"][k] + held.beside_backward[k] + held.segments.made[k],
    )  # fmt: skip


def _leaving(held: Holding, alive: _Alive, k: int) -> MemoryPoint:
    return _point(
        held, k, "backward",
        gradients=alive.gradients[k],
        feature_maps=alive.maps[k] - held["saved"][k],
        map_gradients=held["leaving"][k],
        buffers=alive.travelling[k] + held["travelling"][k],
        workspace=held.beside_backward[k] + held.segments.made[k],
    )  # fmt: skip


def _running_again(held: Holding, alive: _Alive, k: int, micro_batches: int) -> MemoryPoint:
    own = held["gradients"][k] if micro_batches == 1 else 0.0
    arriving = held["arriving"][k]
    return _point(
        held, k, "backward",
        gradients=alive.gradients[k] - own,
        feature_maps=alive.maps[k],
        map_gradients=arriving,
        buffers=alive.travelling[k] + alive.opened[k],
        workspace=held.beside_backward[k] + held.segments.again[k] - arriving,
    )  # fmt: skip


def _update(held: Holding, alive: _Alive) -> MemoryPoint:
    """The update that takes most."""
    k = int(alive.renewing.argmax())
    later = slice(k, None) if held.sliced else slice(None)
    every = held.together or slice(k, k + 1)
    return _point(
        held, k, "update",
        gradients=held["gradients"][later].sum(),
        feature_maps=held["saved"][:k].sum() if held.sliced else 0.0,
        buffers=held["travelling"][later].sum(),
        workspace=held["renewed"][every].sum() + (held.segments.entering[k] if held.sliced else 0),
    )  # fmt: skip


def peak_bytes(held: Holding, micro_batches: int) -> tuple[float, int]:
    """(the largest total of the timeline, the unit at work there), without making the table."""
    most = np.maximum(*fullest_bytes(held, micro_batches))
    k = int(most.argmax())
    return float(most[k]), k


def fullest_bytes(held: Holding, micro_batches: int) -> tuple[Vector, Vector]:
    """For each unit the largest total of its forward and backward, and that of its update."""
    alive = _alive(held, micro_batches)
    always = held.table[:STANDING].sum()
    work = alive.maps + held["workspace"] + held.received
    forward = alive.pending + alive.coming + work + held.beside_forward + held.segments.entering
    backward = np.maximum(alive.working(held), alive.leaving(held))
    backward = np.maximum(backward, alive.running_again(held, micro_batches))
    return always + np.maximum(forward, backward), always + alive.renewing
