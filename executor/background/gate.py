"""When a background job runs, moment by moment: in the foreground's gaps first.

A share of the time is spent where it hurts least: the lower half of it on gaps (the foreground's
rank waits, and is expected to go on waiting), the upper half on all other times, in which the
background gets what its lowest priority leaves it. Shares between are pieces of a short period.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from .law import START_SHARE

PERIOD_S = 0.02
"""Pieces of gaps are cut from periods of this length: a switch costs the pacer some 100 µs of
processor (measured by ``benchmarks/burst_signals.py``), two of them 1% of a period."""
LEAD_S = 0.001
"""The background stops so long before a gap is expected to end, so that the rank finds the
processor free when its data arrives."""
SHORTEST_S = 1e-4
"""No piece is shorter: it would not be worth the two switches."""
FOREVER = float("inf")


class Gap(NamedTuple):
    """A wait of the foreground that began at ``since_s`` and is expected to take ``expected_s``."""

    since_s: float
    expected_s: float

    @property
    def closes_s(self) -> float:
        """When the background must be out of the way."""
        return self.since_s + self.expected_s - LEAD_S


class Hold(enum.StrEnum):
    """Why the background is held: to ``LEARN`` what the foreground's steps take without it, to keep
    the ``LIMIT``, because there is no ``GAP`` and its share is for gaps, or while the foreground
    does something ``ELSE`` than steps."""

    LEARN = "learn"
    LIMIT = "limit"
    GAP = "gap"
    ELSE = "else"


class Opening(NamedTuple):
    """Whether the background runs, and until when that is so unless something happens; where it
    does not, why."""

    runs: bool
    until_s: float
    why: Hold | None = None


def opening(now_s: float, share: float, gap: Gap | None) -> Opening:
    """Whether the background runs at ``now_s`` with that share of the time (0 to 1)."""
    inside, outside = min(1.0, 2 * share), max(0.0, 2 * share - 1)
    # A share below the first one was cut by the limit.
    if gap is None or now_s >= gap.closes_s:
        return _in_pieces(now_s, outside, Hold.GAP if share >= START_SHARE else Hold.LIMIT)
    found = _in_pieces(now_s, inside, Hold.LIMIT)
    return found._replace(until_s=min(found.until_s, gap.closes_s))


def _in_pieces(now_s: float, part: float, why: Hold) -> Opening:
    """The first ``part`` of every period; ``why`` it is no more."""
    if part <= 0 or part >= 1:
        return Opening(part > 0, FOREVER, None if part > 0 else why)
    phase_s = now_s % PERIOD_S
    turn_s = part * PERIOD_S
    runs = phase_s < turn_s
    left_s = (turn_s if runs else PERIOD_S) - phase_s
    return Opening(runs, now_s + max(left_s, SHORTEST_S), None if runs else why)
