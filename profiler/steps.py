"""Whole steps and their parts, in turns: what a device takes for each unit, and on a GPU what its
host takes to issue it.

[Note: Host and device]
A host issues operators and goes on; a GPU does them later, in order. In a run of steps the slower
of both sets the pace, and an event before and one behind a small operator tell how long the device
waited for its host rather than how long it worked. So there are four kinds of steps in turns:

- several, one after another as in training, whose pace is that of the slower one;
- one that begins on an idle device, by the host's clock: what the host takes, unless it has more to
  issue than the driver lets wait, and is held up by the device;
- one with marks, at each of which the host waits for the device and so never meets it: how that is
  shared among units, and with what the marks cost an upper bound on it;
- one with marks, at each of which the device is kept busy for somewhat longer than the host then
  takes for what follows: its operators are all there when the device comes to them, and events tell
  what the device takes for them.

Where the device set the pace its parts are scaled to that: a GPU that works all the time has a
lower clock than one that has just idled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from ..executor.comm.moments import now, seconds_between
from ..models.compiled import CompiledRegions, ancestors
from ..models.spec import UnitSpec
from ..models.workload import Batch
from .collectives import synchronise
from .timing import Loss, StepTimes, Timeline, longer, plain_step

IN_A_ROW = 3
"""Steps that are issued one after another; the first is not counted."""
PACED = 1.1
"""A device sets the pace of steps that take so many times as long as the host's part in them."""


@dataclass
class StepMeter:
    """Steps of a model on one batch, plain and with marks; the first of each warms up."""

    model: nn.Module
    units: Sequence[UnitSpec]
    batch: Batch
    loss: Loss
    device: torch.device
    whole_s: list[float] = field(default_factory=list, init=False)
    _marked: list[StepTimes] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # Anew for each size, so that graphs are of this one, as in training, and not of any.
        parts = ancestors(name for unit in self.units for name in unit.modules)
        self._whole, self._parts = CompiledRegions(self.model), CompiledRegions(self.model, parts)

    @property
    def compiles(self) -> bool:
        """Whether a part of the model is compiled."""
        return bool(len(self._whole))

    def turn(self) -> float:
        """One step of each kind; the seconds that they took."""
        self.model.zero_grad()
        with self._whole:
            self.whole_s.append(plain_step(self.model, self.batch, self.loss, self.device))
        self._marked.append(self._with_marks()[0])
        return self.whole_s[-1] + self._marked[-1].total

    def _with_marks(
        self, ahead_s: Sequence[float] = (), *, apart: bool = False
    ) -> tuple[StepTimes, list[float]]:
        """A step's times, and what the host took between its marks."""
        self.model.zero_grad()
        marks = Timeline(self.model, self.units, self.device, ahead_s, apart=apart)
        with self._parts, marks:
            return marks.step(self.batch, self.loss), marks.issued_s()

    @property
    def repeated_s(self) -> list[float]:
        """Whole steps, without those that warm up."""
        return self.whole_s[1:]

    def times(self) -> StepTimes:
        """Each node's median, scaled so that they add up to the step without marks."""
        marked, step_s = self._marked[1:], median(self.repeated_s)
        return StepTimes(*_scaled(_medians([(s.forward, s.backward) for s in marked]), step_s))


@dataclass
class StreamMeter(StepMeter):
    """The same on a GPU. See [Note: Host and device]."""

    _issued_s: list[float] = field(default_factory=list, init=False)
    _issued: list[StepTimes] = field(default_factory=list, init=False)

    def turn(self) -> float:
        start_s = time.perf_counter()
        with self._whole:
            self.whole_s += self._paced_s()
            self._issued_s.append(self._issuing_s())
        if not self._issued and self.compiles:
            self._with_marks()  # compiles the parts, for which no device has to be kept busy
        issued, between_s = self._with_marks(apart=True)
        self._issued.append(issued)
        self._marked.append(self._with_marks([longer(seconds) for seconds in between_s])[0])
        synchronise(self.device)
        return time.perf_counter() - start_s

    def _paced_s(self) -> list[float]:
        """Seconds of each step of a few, the first left out."""
        ends = []
        for _ in range(IN_A_ROW):
            self._step()
            ends.append(now(self.device))
        return [seconds_between(a, b) for a, b in pairwise(ends)]

    @property
    def repeated_s(self) -> list[float]:
        return self.whole_s[IN_A_ROW - 1 :]

    def _issuing_s(self) -> float:
        """What the host takes for a step that nothing keeps waiting."""
        synchronise(self.device)
        start_s = time.perf_counter()
        self._step()
        return time.perf_counter() - start_s

    def _step(self) -> None:
        self.model.zero_grad()
        output = self.model(*self.batch.args, **self.batch.kwargs)
        self.loss(output, self.batch.target).backward()  # type: ignore[no-untyped-call]

    def times(self) -> StepTimes:
        """Medians of what the device takes and of what the host takes."""
        pace_s = median(self.repeated_s)
        marked, issued = self._marked[1:], self._issued[1:]
        parts = _medians([(s.forward, s.backward) for s in marked])
        alone_s = sum(sum(part.values()) for part in parts)
        by_host = _medians([(s.issued_forward, s.issued_backward) for s in issued])
        host_s = min(median(self._issued_s[1:]), sum(sum(part.values()) for part in by_host))
        device_s = pace_s if pace_s > PACED * host_s else min(alone_s, pace_s)
        return StepTimes(*_scaled(parts, device_s), *_scaled(by_host, host_s))


_Passes = tuple[dict[str, float], dict[str, float]]
"""Seconds of each node's forward and backward."""


def _medians(steps: Sequence[_Passes]) -> _Passes:
    def of_nodes(rows: Sequence[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: median(row.get(name, 0.0) for row in rows) for name in names}

    return of_nodes([forward for forward, _ in steps]), of_nodes([back for _, back in steps])


def _scaled(passes: _Passes, step_s: float) -> _Passes:
    """The passes so that they add up to a step."""
    forward, backward = passes
    factor = step_s / max(sum(forward.values()) + sum(backward.values()), 1e-12)
    return (
        {node: seconds * factor for node, seconds in forward.items()},
        {node: seconds * factor for node, seconds in backward.items()},
    )
