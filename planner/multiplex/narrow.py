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

from ..cost.budget import unit_s
from ..cost.cost import CostModel
from ..memory.unit_memory import MemoryModel
from ..schema.capability import Capability
from ..schema.layout import Layout
from ..schema.options import Decisions, Option, allowed
from ..schema.plan import ScheduleName
from ..solve.heuristic.space import Point, Space

RUNS = (1, 2, 4, 8, 16)
"""Lengths of runs of units that change together."""
BETTER = 1e-6
"""A share of the samples per second below which a gain is rounding."""


CHEAP = 1e-3
"""A change that adds less than this share of the step counts as if it added that."""


class Worth(NamedTuple):
    """What a plan is worth: samples per second of foreground and background on all devices, by
    formula; -1 for one that takes too long or does not fit. And its step."""

    samples_per_s: float
    step_s: float


def worth(point: Point, background_samples_s: float, limit_s: float) -> Worth:
    """The worth of the decisions at which a point stands."""
    model, step_s = point.model, point.step_s()
    if step_s > limit_s or point.peak() > point.limit_bytes or step_s <= 0:
        return Worth(-1.0, step_s)
    used_s = sum(o.layout.size * unit_s(model, k, o) for k, o in enumerate(point.decisions))
    idle_s = model.world_size * step_s - used_s
    return Worth((model.goal.batch + background_samples_s * idle_s) / step_s, step_s)


def narrowed(
    model: CostModel,
    capability: Capability,
    start: Decisions,
    schedule: ScheduleName,
    background_samples_s: float,
    limit_s: float,
    time_limit_s: float,
) -> Decisions:
    """The plan that one change after another leads to from ``start``, until none helps or the time
    is over: each time the one that gains most for what it adds to the step, of which there is only
    so much. ``background_samples_s`` is what an idle device makes."""
    deadline = time.perf_counter() + time_limit_s
    point = Point(Space(model, capability), MemoryModel(model), schedule)
    point.move_to(start)
    best = worth(point, background_samples_s, limit_s)
    while True:
        most, chosen = 0.0, None
        for run, width in _changes(model):
            change = _on(model, capability, run, width)
            before = point.set(change)
            if not before:
                continue
            found = worth(point, background_samples_s, limit_s)
            point.set(before.items())
            gain = _gain(best, found)
            if gain > most:
                most, chosen = gain, change
            if time.perf_counter() > deadline:
                break
        if chosen is None:
            return point.taken()
        point.set(chosen)
        best = worth(point, background_samples_s, limit_s)


def _gain(old: Worth, new: Worth) -> float:
    """Samples per second gained for each second added to the step; 0 where none are."""
    gained = new.samples_per_s - old.samples_per_s
    if gained <= BETTER * abs(old.samples_per_s):
        return 0.0
    return gained / max(new.step_s - old.step_s, CHEAP * old.step_s)


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
