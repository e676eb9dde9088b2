"""What a background does in the gaps that a foreground leaves on a device.

A gap is a longest stretch in which the foreground does not compute. The background gets its device
back ``switch_s`` after the gap begins, then runs pieces one after another, each ``piece_s`` of its
own time, slower while the foreground communicates; it starts none that would not end in the gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor
from typing import NamedTuple

import msgspec

from .jobs import Assumptions
from .timeline import Timeline

# A piece that passes the end of its gap by this share of itself still fits: sums of floats.
ROUNDING = 1e-9

Interval = tuple[float, float]


class Filled(NamedTuple):
    """A gap with ``pieces`` of a background in it, at work from ``start_s`` to ``end_s``."""

    gap: Interval
    start_s: float
    end_s: float
    pieces: int

    @property
    def background_s(self) -> float:
        """Seconds of the gap in which the background runs."""
        return self.end_s - self.start_s


def gaps(computing: Sequence[Interval], start_s: float, end_s: float) -> Iterator[Interval]:
    """What ``computing`` (in order, apart) leaves between ``start_s`` and ``end_s``."""
    at = start_s
    for low, high in computing:
        if high <= start_s or low >= end_s:
            continue
        if low > at:
            yield at, low
        at = max(at, min(high, end_s))
    if end_s > at:
        yield at, end_s


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as few intervals, in order and apart."""
    found: list[Interval] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        elif high > low:
            found.append((low, high))
    return found


def fill(gap: Interval, communicating: Sequence[Interval], given: Assumptions) -> Filled:
    """What a background does in one gap, in which ``communicating`` (in order, apart, of this gap
    or of more) says when its device takes part in communication."""
    start_s = min(gap[0] + given.switch_s, gap[1])
    stretches = list(_speeds((start_s, gap[1]), communicating, given))
    own_s = sum((high - low) * speed for low, high, speed in stretches)
    pieces = floor(own_s / given.piece_s + ROUNDING)
    if not pieces:
        return Filled(gap, start_s, start_s, 0)
    return Filled(gap, start_s, _reached(stretches, pieces * given.piece_s), pieces)


def _speeds(
    gap: Interval, communicating: Sequence[Interval], given: Assumptions
) -> Iterator[tuple[float, float, float]]:
    """(from, to, speed of the background) through a gap."""
    at = gap[0]
    for low, high in communicating:
        low, high = max(low, at), min(high, gap[1])
        if high <= low:
            continue
        if low > at:
            yield at, low, given.idle_speed
        yield low, high, given.communicating_speed
        at = high
    if gap[1] > at:
        yield at, gap[1], given.idle_speed


def _reached(stretches: Iterable[tuple[float, float, float]], own_s: float) -> float:
    """When so many seconds of its own time are done, at the latest at the end of the gap."""
    end_s = 0.0
    for low, high, speed in stretches:
        done = (high - low) * speed
        if speed > 0 and own_s <= done:
            return min(low + own_s / speed, high)
        own_s, end_s = own_s - done, high
    return end_s


def undisturbed(given: Assumptions) -> Assumptions:
    """The assumptions for devices on which a foreground never computes: there are no gaps there
    that a background would have to begin anew in."""
    return msgspec.structs.replace(given, idle_speed=1.0)


def background_share(kind: Timeline, step_s: float, given: Assumptions) -> float:
    """The share of its speed alone that a background has in the gaps of a step that goes on and on;
    a gap at the step's end continues in the next. On devices that never compute no piece is cut
    off."""
    talking = merged((b.start_s, b.end_s) for b in kind.communicating)
    if not kind.computing:
        speeds = _speeds((0.0, step_s), talking, undisturbed(given))
        return sum((high - low) * speed for low, high, speed in speeds) / step_s
    turn_s = kind.computing[0].start_s
    computing = [(b.start_s, b.end_s) for b in kind.computing]
    again = [(low + step_s, high + step_s) for low, high in talking]
    both = merged([*talking, *again])
    found = (fill(gap, both, given).pieces for gap in gaps(computing, turn_s, turn_s + step_s))
    return sum(found) * given.piece_s / step_s
