"""How far a measurement is that goes through several stages, as the share of its time."""

import time
from collections.abc import Callable, Mapping

from ..executor.launch.progress import Step

# What a bar counts in: thousandths of all.
PARTS = 1000


class StageProgress:
    """Tells ``report`` how far the stages are, which come in the order of ``expected_s``, the
    seconds that each is expected to take. What a stage turns out to take replaces that as it goes
    on, so that no slow stage leaves the bar at its end."""

    def __init__(
        self,
        report: Step | None,
        expected_s: Mapping[str, float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._report, self._clock, self._left_s = report, clock, dict(expected_s)
        self._start = self._began = self._last = clock()
        self._shown, self._stage = 0.0, ""

    def at(self, stage: str, share: float, what: str | None = None) -> None:
        """That this share of a stage is over, and all of those before it."""
        now = self._clock()
        if stage != self._stage:
            self._left_s.pop(self._stage, None)
            # It went on from where the one before it was left.
            self._stage, self._began = stage, self._last
        self._last = now
        spent_s = now - self._began
        # As it went so far it goes on.
        known = share > 0 and spent_s > 0
        rest_s = spent_s * (1 / share - 1) if known else self._left_s[stage]
        rest_s += sum(s for name, s in self._left_s.items() if name != stage)
        done_s = now - self._start
        self._tell(done_s / max(done_s + rest_s, 1e-9), what or stage)

    def end(self, what: str) -> None:
        """That all is over."""
        self._tell(1.0, what)

    def _tell(self, share: float, what: str) -> None:
        # A bar that goes back confuses more than one that waits.
        self._shown = max(self._shown, share)
        if self._report is not None:
            self._report(int(PARTS * self._shown), PARTS, what)
