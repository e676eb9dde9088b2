"""Takes from a plan the devices that a background would use better: descent on cluster throughput.

The solvers know a step's seconds and its device-seconds. What a cluster makes with a background in
the gaps is a quotient of both, N / T + r · (W · T - U) / T (see ``choose``), with a limit on T.
From a plan that keeps the limit, runs of neighbouring units are given another number of devices, as
long as that helps by formula.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from ..budget import unit_s
from ..capability import Capability
from ..cost import CostModel
from ..layout import Layout
from ..memory import MemoryModel
from ..options import Decisions, Option, allowed
from ..plan import ScheduleName
from ..search import Point, Space

RUNS = (1, 2, 4, 8, 16)
"""Lengths of runs of units that change together."""
BETTER = 1 + 1e-6


class Worth(NamedTuple):
    """What a plan is worth: samples per second of foreground and background on all devices, by
    formula; -1 for one that takes too long or does not fit."""

    samples_per_s: float

    def beats(self, other: Worth) -> bool:
        """Whether this is better by more than rounding."""
        return self.samples_per_s > other.samples_per_s * BETTER + 1e-12


def worth(point: Point, background_samples_s: float, limit_s: float) -> Worth:
    """The worth of the decisions at which a point stands."""
    model, step_s = point.model, point.step_s()
    if step_s > limit_s or point.peak() > point.limit_bytes or step_s <= 0:
        return Worth(-1.0)
    used_s = sum(o.layout.size * unit_s(model, k, o) for k, o in enumerate(point.decisions))
    idle_s = model.world_size * step_s - used_s
    return Worth((model.goal.batch + background_samples_s * idle_s) / step_s)


def narrowed(
    model: CostModel,
    capability: Capability,
    start: Decisions,
    schedule: ScheduleName,
    background_samples_s: float,
    limit_s: float,
    time_limit_s: float,
) -> Decisions:
    """The best of the plans that one change after another leads to from ``start``: every change is
    the first found that helps, until none does or the time is over. ``background_samples_s`` is
    what an idle device makes."""
    deadline = time.perf_counter() + time_limit_s
    point = Point(Space(model, capability), MemoryModel(model), schedule)
    point.move_to(start)
    best, again = worth(point, background_samples_s, limit_s), True
    while again:
        again = False
        for run, width in _changes(model):
            if time.perf_counter() > deadline:
                return point.taken()
            before = point.set(_on(model, capability, run, width))
            found = worth(point, background_samples_s, limit_s) if before else best
            if found.beats(best):
                best, again = found, True
            else:
                point.set(before.items())
    return point.taken()


def _changes(model: CostModel) -> Iterator[tuple[range, int]]:
    """(units, devices): long runs first, and few devices first."""
    units = len(model.profile.units)
    for length in reversed(RUNS):
        for first in range(max(units - length, 0) + 1):
            for power in range(model.world_size.bit_length()):
                yield range(first, min(first + length, units)), 2**power


def _on(
    model: CostModel, capability: Capability, run: range, width: int
) -> list[tuple[int, Option]]:
    """Units of a run, each with those tied to it, on so many devices; those that may not be so stay
    as they are."""
    option = Option(Layout(groups=width))
    rules = model.goal, capability, model.world_size
    return [
        (u, option)
        for k in run
        if all(allowed(model.profile.units[u], option, *rules) for u in model.ties[k])
        for u in model.ties[k]
    ]
