"""What ``shares.share_of`` reads for one layout, read for many layouts at once.

A unit's measurements are few curves, and which of their points matter for a layout depends on the
sizes measured and on the layouts only. So that is worked out once, as weights, for all units that
were measured at the same sizes, and a unit's figures are a few products of small arrays. A property
test holds it to ``share_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost.compute import Quantity
from ...schema.curve import Curve
from ...schema.layout import Layout, Style
from ...schema.profile import ShareProfile, UnitProfile

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
State = tuple[Layout, Style]


class _Read(NamedTuple):
    """How sizes are read from curves with the same x: y[left] + (y[right] - y[left]) · part, the
    slope not falling where ``beyond``, nothing where ``empty``; a single point is in proportion."""

    left: Numbers
    right: Numbers
    part: Reals
    beyond: npt.NDArray[np.bool_]
    empty: npt.NDArray[np.bool_]
    alone: bool


class _Blend(NamedTuple):
    """How degrees are read from measured ones: share · value[near] + (1 - share) · value[far], not
    under value[near] · ``perfect`` where ``beyond``."""

    near: Numbers
    far: Numbers
    share: Reals
    beyond: npt.NDArray[np.bool_]
    perfect: Reals


class Reader:
    """Reads units' curves for a list of states with so many samples each."""

    def __init__(self, states: Sequence[State], samples: Sequence[float]) -> None:
        self.states = states
        self.samples = np.array(samples, dtype=np.float64)
        self._reads: dict[tuple[float, ...], _Read] = {}
        self._blends: dict[tuple[tuple[int, ...], Style], _Blend] = {}
        styles = [style for _, style in states]
        self._of_style: dict[Style, Numbers] = {
            style: np.array([i for i, s in enumerate(styles) if s == style])
            for style in dict.fromkeys(styles)
        }

    def values(self, unit: UnitProfile, quantity: Quantity, *, divides: bool = True) -> Reals:
        """``share_of(unit, style, degree, quantity, samples, divides=divides)`` for each state."""
        found = np.zeros(len(self.states))
        for style, where in self._of_style.items():
            known: list[ShareProfile] = [
                s for s in unit.shares if s.style == style and s.degree > 1
            ]
            known.sort(key=lambda s: s.degree)
            points = [unit.whole, *known]
            table = np.stack([self._curve(quantity(p))[where] for p in points])
            degrees = tuple(p.degree for p in points)
            found[where] = self._blended(table, degrees, style, where, divides)
        return found

    def _blended(
        self, table: Reals, degrees: tuple[int, ...], style: Style, where: Numbers, divides: bool
    ) -> Reals:
        """[state] from [measured degree, state]."""
        key = degrees, style
        if key not in self._blends:
            self._blends[key] = _blend(degrees, [self.states[i][0].degree for i in where])
        blend, at = self._blends[key], np.arange(table.shape[1])
        near, far = table[blend.near, at], table[blend.far, at]
        straight: Reals = blend.share * near + (1.0 - blend.share) * far
        if len(degrees) == 1:
            return near * blend.perfect if divides else near
        lifted = np.maximum(straight, near * blend.perfect)
        return np.where(blend.beyond, lifted, straight)

    def _curve(self, curve: Curve) -> Reals:
        """The curve at each state's samples."""
        if curve.x not in self._reads:
            self._reads[curve.x] = _read(curve.x, self.samples)
        read, y = self._reads[curve.x], np.array(curve.y)
        if read.alone:
            alone: Reals = y[0] * read.part
            return alone
        rise = y[read.right] - y[read.left]
        rise = np.where(read.beyond, np.maximum(rise, 0.0), rise)
        found = np.maximum(y[read.left] + rise * read.part, 0.0)
        return np.where(read.empty, 0.0, found)


def _read(x: tuple[float, ...], sizes: Reals) -> _Read:
    places, empty = np.array(x), sizes <= 0
    none = np.zeros(len(sizes), dtype=np.int64)
    if len(x) == 1:
        part = np.where(empty, 0.0, sizes / x[0])
        return _Read(none, none, part, empty, empty, True)
    right = np.clip(np.searchsorted(places, sizes), 1, len(x) - 1)
    left = right - 1
    beyond = sizes > x[-1]
    part = (sizes - places[left]) / (places[right] - places[left])
    return _Read(left, right, part, beyond, empty, False)


def _blend(degrees: tuple[int, ...], asked: Sequence[int]) -> _Blend:
    inverse = np.array([1.0 / d for d in degrees])
    near, far, share, beyond, perfect = [], [], [], [], []
    for degree in asked:
        x = 1.0 / degree
        above = [i for i, d in enumerate(degrees) if d <= degree]
        i = above[-1]
        last = i == len(degrees) - 1
        j = i if degrees[i] == degree else (max(i - 1, 0) if last else i + 1)
        near.append(i)
        far.append(j)
        share.append(1.0 if i == j else (x - inverse[j]) / (inverse[i] - inverse[j]))
        beyond.append(last and degrees[i] != degree)
        perfect.append(x / inverse[i])
    return _Blend(
        np.array(near), np.array(far), np.array(share), np.array(beyond), np.array(perfect)
    )
