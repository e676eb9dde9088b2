"""What one unit holds while others work.

Where a unit's parameters are whole only while they are used, they are so from the moment at which
the unit before it is at work until the one after it is; with units between that have no such
parameters (a ReLU, an addition in the model's own code) these work beside them. In backward the
gradients of the unit after these are on their way as well. ``gathering`` counts what is whole at
units that have parameters themselves, whatever their neighbours' exchange; this counts the rest.

An offloaded unit's feature maps are called back as soon as backward is at the offloaded unit after
it in forward order, and are there while that and whatever stands between them work.

A unit takes these bytes by its own decision, so the points of the timeline stay sums over units: a
point gets a multiple of a figure of each unit that stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .gathering import own_bytes, whole_after, whole_before
from .step_time import Vector
from .structure import Structure

Whose = Literal["whole", "underway", "away"]
"""The fields of ``UnitBytes`` that count elsewhere."""
Point = Literal["beside_forward", "beside_backward"]


class Beside(NamedTuple):
    """At the ``point`` of unit ``at[i]`` unit ``of[i]`` has ``times[i]`` its ``figure``."""

    point: Point
    figure: Whose
    at: npt.NDArray[np.int64]
    of: npt.NDArray[np.int64]
    times: Vector

    def added(self, values: Vector) -> Vector:
        """For each unit what others have at its point, of their ``values`` of the figure."""
        return _sums(self.at, self.times * values[self.of], len(values))

    def returned(self, prices: Vector) -> Vector:
        """For each unit what one byte of its figure costs, at the ``prices`` of the points."""
        return _sums(self.of, self.times * prices[self.at], len(prices))


def _sums(where: npt.NDArray[np.int64], values: Vector, count: int) -> Vector:
    return np.asarray(np.bincount(where, weights=values, minlength=count), dtype=np.float64)


def besides(structure: Structure) -> tuple[Beside, ...]:
    """Who stands beside whom in a model, whatever is decided."""
    found: dict[tuple[Point, Whose], list[tuple[int, int, float]]] = {}
    for point, figure, at, of, times in (*_whole(structure), *_away(structure)):
        found.setdefault((point, figure), []).append((at, of, times))
    return tuple(
        Beside(point, figure, *(np.array(v) for v in zip(*entries, strict=True)))
        for (point, figure), entries in found.items()
    )


Entry = tuple[Point, Whose, int, int, float]


def _whole(structure: Structure) -> Iterator[Entry]:
    """Units without parameters of their own, between the nearest ones that have some. Nothing is
    called for in forward before the first of these is reached."""
    last: int | None = None
    for at in range(len(structure.profile.units)):
        if own_bytes(structure, at):
            last = at
            continue
        before, after = whole_before(structure, at), whole_after(structure, at)
        if last is not None:
            yield "beside_forward", "whole", at, last, 1.0
            if after is not None:
                yield "beside_forward", "whole", at, after, 1.0
        if before is not None:
            yield "beside_backward", "whole", at, before, 1.0
        if after is not None:
            yield "beside_backward", "underway", at, after, 1.0
            beyond = whole_after(structure, after)
            if beyond is not None:
                yield "beside_backward", "underway", at, beyond, 1.0


def _away(structure: Structure) -> Iterator[Entry]:
    """What comes back early, to the next unit that may be offloaded and to all before that."""
    waiting: int | None = None
    for at, unit in enumerate(structure.profile.units):
        if waiting is not None:
            yield "beside_backward", "away", at, waiting, 1.0
        if not unit.fixed and unit.whole.saved(1.0) > 0:
            waiting = at
