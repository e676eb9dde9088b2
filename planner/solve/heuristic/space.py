"""A point in the space of decisions, with its score kept up to date as units change.

The score is (bytes over the limit, seconds of a step by formula): feasibility first, then time.
Changing one unit touches its own figures and the entries of the units after it; the formulas then
run over arrays, so that thousands of changes are tried in a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...cost.budget import gpu_seconds, overdrawn
from ...cost.compute import busiest_samples
from ...cost.cost import CostModel
from ...cost.step_time import barrier_step, priority_step
from ...memory.timeline import peak_bytes
from ...memory.unit_memory import MemoryModel
from ...schema.capability import Capability
from ...schema.layout import Layout
from ...schema.options import Decisions, Option, ties_agree
from ...simulate.schedule import ScheduleName, bucketed_s
from ..choices import layouts_of, unit_options
from ..evaluate import limits_bytes

ROUNDING = 1e-9
BETTER = 1 - 1e-6
"""A change must save a millionth of the step: rounding is no reason to change a layout."""


class Score(NamedTuple):
    """Bytes over the limit (0 where all limits are kept), then seconds of the objective."""

    over_bytes: float
    step_s: float

    def beats(self, other: Score) -> bool:
        """Whether this is better by more than rounding."""
        if self.over_bytes != other.over_bytes:
            return self.over_bytes < other.over_bytes
        return self.step_s < other.step_s * BETTER


class Candidate(NamedTuple):
    """Decisions and their score by formula."""

    score: Score
    decisions: Decisions


def score_of(
    model: CostModel, decisions: Sequence[Option], over_bytes: float, step_s: float
) -> Score:
    """The score of a plan; other limits that it goes over count as if they were memory's, and the
    objective may be device-seconds."""
    over = overdrawn(model, decisions, step_s)
    if over > ROUNDING:
        over_bytes += over * min(limits_bytes(model.cluster, model.goal, model.placement))
    if model.goal.objective == "gpu_seconds":
        step_s = gpu_seconds(model, decisions, step_s)
    return Score(over_bytes, step_s)


class Space:
    """What may be chosen for each unit of a cost model."""

    def __init__(self, model: CostModel, capability: Capability) -> None:
        self.model, self.capability = model, capability
        self.layouts = layouts_of(model, capability)
        self.home = model.baseline[0]

    @cached_property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        """The options of each unit by itself."""
        units = range(len(self.model.profile.units))
        return tuple(unit_options(self.model, k, self.capability) for k in units)

    @cached_property
    def _have(self) -> tuple[frozenset[Option], ...]:
        return tuple(frozenset(row) for row in self.options)

    @cached_property
    def start(self) -> Decisions:
        """Plain data parallelism, as far as every unit may have it; else its first option, and for
        tied units the first that all of them may have."""
        chosen = list(self.model.baseline)
        for k, options in enumerate(self.options):
            ties = self.model.ties[k]
            if k != ties[0] or all(chosen[u] in self.options[u] for u in ties):
                continue
            fitting = (found for o in options if (found := self.tied(k, o)) is not None)
            for u, option in next(fitting, {}).items():
                chosen[u] = option
        return tuple(chosen)

    def tied(self, k: int, option: Option) -> dict[int, Option] | None:
        """The options of all units tied to ``k`` if it takes ``option``; None if they cannot."""
        if option not in self._have[k]:
            return None
        units, profiles = self.model.ties[k], self.model.profile.units
        chosen = {k: option}
        if len(units) == 1:
            return chosen
        for other in units:
            if other == k:
                continue
            fitting = (
                o
                for o in self.options[other]
                if o.layout == option.layout
                and ties_agree((profiles[k], profiles[other]), (option, o))
            )
            found = next(fitting, None)
            if found is None:
                return None
            chosen[other] = found
        return chosen if ties_agree([profiles[u] for u in chosen], list(chosen.values())) else None


class Point:
    """Decisions and their score. The rank judged for memory is one that is in the fullest group of
    every layout: where all ranks take part, such as the one at position 0; else no rank is fuller.
    """

    def __init__(self, space: Space, memory: MemoryModel, schedule: ScheduleName) -> None:
        self.space, self.model, self.memory = space, space.model, memory
        self.schedule = schedule
        self.limit_bytes = min(
            limits_bytes(self.model.cluster, self.model.goal, self.model.placement)
        )
        self.decisions: list[Option] = list(space.start)
        self.chain = self.model.chain(self.decisions)
        self._samples: dict[Layout, int] = {}
        units = range(len(self.decisions))
        self.table = np.array([self._memory(k) for k in units], dtype=np.float64).T
        self.received = np.array([self._received(k) for k in units])
        self.evaluations = 0

    def samples(self, layout: Layout) -> int:
        """Samples of the fullest group."""
        if layout not in self._samples:
            self._samples[layout] = busiest_samples(self.model.counts, layout)
        return self._samples[layout]

    def _memory(self, k: int) -> tuple[float, ...]:
        option = self.decisions[k]
        return self.memory.unit(k, option, self.samples(option.layout)).column

    def _received(self, k: int) -> float:
        return self.memory.received(k, self.decisions, self.samples(self.decisions[k].layout))

    def set(self, changes: Iterable[tuple[int, Option]]) -> dict[int, Option]:
        """Makes changes; returns what was there before, by which they are undone."""
        before = {}
        for k, option in changes:
            if self.decisions[k] != option:
                before[k] = self.decisions[k]
                self.decisions[k] = option
        entries = set(before)
        for k in before:
            self.model.write_unit(self.chain, k, self.decisions[k])
            self.table[:, k] = self._memory(k)
            entries.update(self.model.entered_after[k])
        for k in entries:
            self.model.write_entry(self.chain, k, self.decisions)
            self.received[k] = self._received(k)
        return before

    def move_to(self, decisions: Sequence[Option]) -> None:
        """Takes all of the decisions."""
        self.set(enumerate(decisions))

    def score(self) -> Score:
        """The score where the point stands."""
        self.evaluations += 1
        step = self.step_s()
        over = max(self.peak() - self.limit_bytes, 0.0)
        return score_of(self.model, self.decisions, over, step)

    def step_s(self) -> float:
        """The step by formula: of the buckets as they leave, or of priority."""
        if self.schedule == "priority":
            return priority_step(self.chain, self.model.micro_batches)
        chain = self.chain._replace(exchange_s=bucketed_s(self.model, self.decisions))
        return barrier_step(chain, self.model.micro_batches)

    def peak(self) -> float:
        """Peak bytes of the rank judged."""
        return peak_bytes(self.memory.joined(self.table, self.received, self.decisions))[0]

    def taken(self) -> Decisions:
        """The decisions as they stand."""
        return tuple(self.decisions)
