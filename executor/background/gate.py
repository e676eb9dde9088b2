"""When a background job runs, moment by moment: in the foreground's gaps first."""

# A share of the time is spent where it hurts least: the lower half of it on gaps (the foreground's
# rank waits, and is expected to go on waiting), the upper half on all other times, in which the
# background gets what its lowest priority leaves it. Shares between are pieces of a short period.

import enum
from collections.abc import Callable
from typing import NamedTuple

from .law import START_SHARE
from .protocol import Usage

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


class GapChoice(NamedTuple):
    """Whether the background runs, and until when that is so unless something happens; where it
    does not, why."""

    runs: bool
    until_s: float
    why: Hold | None = None


def opening(now_s: float, share: float, gap: Gap | None) -> GapChoice:
    """Whether the background runs at ``now_s`` with that share of the time (0 to 1)."""
    inside, outside = min(1.0, 2 * share), max(0.0, 2 * share - 1)
    # A share below the first one was cut by the limit.
    if gap is None or now_s >= gap.closes_s:
        return _in_pieces(now_s, outside, Hold.GAP if share >= START_SHARE else Hold.LIMIT)
    found = _in_pieces(now_s, inside, Hold.LIMIT)
    return found._replace(until_s=min(found.until_s, gap.closes_s))


def _in_pieces(now_s: float, part: float, why: Hold) -> GapChoice:
    """The first ``part`` of every period; ``why`` it is no more."""
    if part <= 0 or part >= 1:
        return GapChoice(part > 0, FOREVER, None if part > 0 else why)
    phase_s = now_s % PERIOD_S
    turn_s = part * PERIOD_S
    runs = phase_s < turn_s
    left_s = (turn_s if runs else PERIOD_S) - phase_s
    return GapChoice(runs, now_s + max(left_s, SHORTEST_S), None if runs else why)


class RunTimes:
    """Adds up the time from ``began_s`` on, from one turn of the pacer to the next. Before the
    first turn the job runs freely."""

    def __init__(self, began_s: float) -> None:
        self.open_s = 0.0
        """Seconds that the job was let run, beside a foreground or not."""
        self._last_s = began_s
        self._now = GapChoice(True, FOREVER)
        self._attached = False
        self._during_steps_s = self._during_steps_open_s = 0.0
        self._during_steps_cpu_s = self._cpu_before_s = 0.0
        self._stops = 0
        self._stopped_s: dict[str, float] = {}

    def turned(
        self, now_s: float, found: GapChoice, attached: bool, cpu_s: Callable[[], float]
    ) -> None:
        """From now on it is ``found``, and a foreground is there or not. ``cpu_s`` measures what
        the job has used, which is asked where a foreground comes or goes."""
        passed_s = now_s - self._last_s
        open_s = passed_s if self._now.runs else 0.0
        self.open_s += open_s
        if self._attached:
            self._during_steps_s += passed_s
            self._during_steps_open_s += open_s
            if (why := self._now.why) is not None:
                self._stopped_s[why] = self._stopped_s.get(why, 0.0) + passed_s
        self._stops += attached and self._now.runs and not found.runs
        if attached != self._attached:
            used_s = cpu_s()
            self._during_steps_cpu_s = self.during_steps(used_s).cpu_s
            self._cpu_before_s = used_s
        self._last_s, self._now, self._attached = now_s, found, attached

    def during_steps(self, cpu_s: float) -> Usage:
        """What it has had beside foregrounds, where it has used ``cpu_s`` in all so far."""
        since_s = max(cpu_s - self._cpu_before_s, 0.0) if self._attached else 0.0
        return Usage(
            seconds=self._during_steps_s,
            open_s=self._during_steps_open_s,
            cpu_s=self._during_steps_cpu_s + since_s,
            stops=self._stops,
            stopped_s=dict(self._stopped_s),
        )
