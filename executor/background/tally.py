"""Where a background job's time goes: let run or held, for which reason, and beside whom."""

from __future__ import annotations

from collections.abc import Callable

from .gate import FOREVER, Opening
from .settings import Beside


class Tally:
    """Adds up the time from ``began_s`` on, from one turn of the pacer to the next. Before the
    first turn the job runs freely."""

    def __init__(self, began_s: float) -> None:
        self.open_s = 0.0
        """Seconds that the job was let run, beside a foreground or not."""
        self._last_s = began_s
        self._now = Opening(True, FOREVER)
        self._attached = False
        self._beside_s = self._beside_open_s = 0.0
        self._beside_cpu_s = self._cpu_before_s = 0.0
        self._stops = 0
        self._held_s: dict[str, float] = {}

    def turned(
        self, now_s: float, found: Opening, attached: bool, cpu_s: Callable[[], float]
    ) -> None:
        """From now on it is ``found``, and a foreground is there or not. ``cpu_s`` measures what
        the job has used, which is asked where a foreground comes or goes."""
        self._add(now_s - self._last_s)
        self._stops += attached and self._now.runs and not found.runs
        if attached != self._attached:
            used_s = cpu_s()
            self._beside_cpu_s = self.beside(used_s).cpu_s
            self._cpu_before_s = used_s
        self._last_s, self._now, self._attached = now_s, found, attached

    def _add(self, passed_s: float) -> None:
        open_s = passed_s if self._now.runs else 0.0
        self.open_s += open_s
        if not self._attached:
            return
        self._beside_s += passed_s
        self._beside_open_s += open_s
        if (why := self._now.why) is not None:
            self._held_s[why] = self._held_s.get(why, 0.0) + passed_s

    def beside(self, cpu_s: float) -> Beside:
        """What it has had beside foregrounds, where it has used ``cpu_s`` in all so far."""
        since_s = max(cpu_s - self._cpu_before_s, 0.0) if self._attached else 0.0
        return Beside(
            seconds=self._beside_s,
            open_s=self._beside_open_s,
            cpu_s=self._beside_cpu_s + since_s,
            stops=self._stops,
            held_s=dict(self._held_s),
        )
