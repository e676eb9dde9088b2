"""What the steps of a user's own loop take, told at the end of each optimizer step.

From hooks, so that the loop need not know. Nothing waits for the device: its moments are read by
whoever is told, when they have come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ..models.workload import device_of
from .comm.moments import Moment, now, seconds_between
from .comm.steps import after_each_step
from .comm.stream_waits import StreamWaitTimes

if TYPE_CHECKING:
    from .run import Run


class StepMoments(NamedTuple):
    """A step of this rank: when it began and ended, the seconds for which the host waited in
    redistribution and for gradients, and what held the device's stream."""

    start: Moment
    end: Moment
    blocking_s: float
    exposed_s: float
    held: StreamWaitTimes

    def seconds(self) -> tuple[float, float, float]:
        """The step, and its waits in redistribution and for gradients. Waits for the device."""
        return (
            seconds_between(self.start, self.end),
            self.blocking_s + self.held.blocking_s,
            self.exposed_s + self.held.exposed_s,
        )


UNREAD = 1000
"""So many steps are kept as moments before their seconds are read, for which a host waits for its
device: on one a step leaves many events."""


class StepClock:
    """Tells its ``listeners`` of every step, from the end of one optimizer step to that of the
    next."""

    def __init__(self, run: Run, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.listeners: list[Callable[[StepMoments], None]] = []
        self._run, self._device = run, device_of(model)
        self._before: tuple[Moment, float, float] | None = None
        run.watch.stream_waits.begin()
        after_each_step(model.parameters(), optimizer, self._stepped)

    def _stepped(self, _: Optimizer) -> None:
        self._run.steps_done += 1
        at = now(self._device), self._run.meter.seconds, self._run.exposed_s
        held, before = self._run.watch.stream_waits.take(), self._before
        self._before = at
        if before is None:
            return
        step = StepMoments(before[0], at[0], at[1] - before[1], at[2] - before[2], held)
        for listener in self.listeners:
            listener(step)


def clock_of(run: Run, model: nn.Module, optimizer: Optimizer | None) -> StepClock:
    """The one that tells of this run's steps."""
    # One for all who listen: what has held a stream can be taken once.
    if run.step_clock is None:
        run.step_clock = StepClock(run, model, optimizer)
    return run.step_clock
