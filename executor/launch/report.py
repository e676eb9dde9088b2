"""Predicted beside measured: what a run reports, and how a user's own script is measured.

A script is measured between optimizer steps, from hooks: it need not know. Each rank keeps its own
figures and leaves them in the launcher's folder when it ends, because a collective at that point
could wait for a rank that has gone.
"""

from __future__ import annotations

import atexit
import os
import statistics
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ...planner.schema.goal import BACKGROUND_LIMIT
from ...planner.schema.plan import Plan, Prediction
from ...planner.schema.record import (
    Bytes,
    Count,
    Index,
    Record,
    Seconds,
    Share,
    Slowdown,
    load,
    save,
)
from ..background.protocol import State
from ..comm.steps import after_each_step
from ..parallel import run_of
from .train import Measured

# The file of the plan that ``auto_parallelize`` is to apply.
PLAN_VARIABLE = "MESHWRIGHT_PLAN"
# The folder that ranks leave their figures in.
REPORT_VARIABLE = "MESHWRIGHT_REPORT"
# Steps at the beginning that are not counted: memory is first allocated, caches are cold.
WARM_UP = 3


class Figures(Record, frozen=True, kw_only=True):
    """What a step takes on the busiest rank. None: not measured (``peak_bytes`` of a script on a
    CPU, where nothing counts what is alive). ``exposed_s`` is gradient exchange that nothing hid,
    ``blocking_s`` redistribution and the collectives inside units. A predicted step lies between
    ``low_s`` and ``high_s`` nine times in ten."""

    step_s: Seconds
    blocking_s: Seconds | None = None
    exposed_s: Seconds | None = None
    peak_bytes: Bytes | None = None
    low_s: Seconds | None = None
    high_s: Seconds | None = None


class RankFigures(Record, frozen=True, kw_only=True):
    """One rank's figures over the ``steps`` that were counted."""

    steps: Count
    figures: Figures


class BackgroundFigures(Record, frozen=True, kw_only=True):
    """What a background job on this host has had when the foreground ended, and cost it.

    It was let run for ``open_share`` of the time and used ``cpu_s`` of processors. While the
    foreground made its steps, for ``beside_s``, these were ``beside_open_share`` and
    ``beside_cpu_s``; it was stopped ``stops`` times then, and held for ``held_shares`` of that
    time: to ``learn`` the steps' undisturbed time, to keep the ``limit``, for want of a ``gap``,
    and while the foreground did something ``else`` than steps. Over ``steps`` of the foreground,
    those included in which it was held, a step took ``slowdown`` times ``undisturbed_s``; up to
    ``limit`` times was allowed. ``ended`` says how it ended, if it had.
    """

    open_share: Share
    cpu_s: Seconds
    beside_s: Seconds
    beside_open_share: Share
    beside_cpu_s: Seconds
    stops: Index
    held_shares: dict[str, Share]
    steps: Index
    slowdown: float
    undisturbed_s: Seconds
    limit: Slowdown = BACKGROUND_LIMIT
    ended: str = ""


class RunReport(Record, frozen=True, kw_only=True):
    """A run's end: predicted, measured, and what data parallelism was predicted to take.

    ``loss`` of the last step and ``accuracy`` on test data (0 to 1) where the plan's own workload
    was trained and has some.
    """

    target: str
    world_size: Count
    steps: Count
    predicted: Figures
    measured: Figures
    data_parallel: Figures
    loss: float | None = None
    accuracy: float | None = None
    background: BackgroundFigures | None = None

    @property
    def surprising(self) -> bool:
        """Whether the measured step is outside of the predicted interval."""
        low, high = self.predicted.low_s, self.predicted.high_s
        # Beside a background job, steps are longer on purpose.
        if low is None or high is None or self.background is not None:
            return False
        return not low <= self.measured.step_s <= high


def background_figures(state: State, limit: float) -> BackgroundFigures:
    """The figures that a report has of a background job which was held to that limit."""
    beside = state.beside

    def part(seconds: float, of_s: float) -> float:
        return min(seconds / of_s, 1.0) if of_s else 0.0

    return BackgroundFigures(
        open_share=part(state.open_s, state.seconds),
        cpu_s=state.cpu_s,
        beside_s=beside.seconds,
        beside_open_share=part(beside.open_s, beside.seconds),
        beside_cpu_s=beside.cpu_s,
        stops=beside.stops,
        held_shares={str(why): part(s, beside.seconds) for why, s in beside.held_s.items()},
        steps=state.steps,
        slowdown=state.slowdown,
        undisturbed_s=state.undisturbed_s,
        limit=limit,
        ended=state.ended,
    )


def predicted_figures(prediction: Prediction) -> Figures:
    """A prediction's figures as far as they are measured too."""
    return Figures(
        step_s=prediction.step_s,
        blocking_s=prediction.blocking_s,
        exposed_s=prediction.exposed_s,
        peak_bytes=max(prediction.peak_bytes, default=0),
        low_s=prediction.low_s,
        high_s=prediction.high_s,
    )


def report_of_script(plan: Plan, ranks: Iterable[RankFigures]) -> RunReport:
    """The report of a script's run from what its ranks have left."""
    found = list(ranks)
    # A step ends when the slowest rank's does, so each figure is the largest.
    largest: dict[str, Any] = {}
    for name in Figures.__struct_fields__:
        values = [getattr(rank.figures, name) for rank in found]
        largest[name] = max((v for v in values if v is not None), default=None)
    return _report(plan, min(rank.steps for rank in found), Figures(**largest))


def report_of_training(plan: Plan, measured: Measured, accuracy: float | None) -> RunReport:
    """The report of a training that ``run_steps`` measured."""
    figures = Figures(
        step_s=measured.step_s,
        blocking_s=measured.blocking_s,
        exposed_s=measured.exposed_s,
        peak_bytes=max(measured.peak_bytes, default=0),
    )
    made = _report(plan, measured.steps, figures)
    return msgspec.structs.replace(made, loss=measured.losses[-1], accuracy=accuracy)


def _report(plan: Plan, steps: int, measured: Figures) -> RunReport:
    return RunReport(
        target=plan.target,
        world_size=plan.world_size,
        steps=steps,
        predicted=predicted_figures(plan.prediction),
        measured=measured,
        data_parallel=predicted_figures(plan.baseline),
    )


class _Recorder:
    """Notes the time and the waits at the end of every optimizer step of one model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._run = run_of(model)
        # (time, seconds waited in redistribution, seconds waited for gradients), each up to then.
        self._seen: list[tuple[float, float, float]] = []
        after_each_step(model.parameters(), optimizer, self._stepped)

    def _stepped(self, _: torch.optim.Optimizer) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self._seen) == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
        waited_s = self._run.meter.seconds, self._run.gradients.exposed_s
        self._seen.append((time.perf_counter(), *waited_s))

    def figures(self) -> RankFigures | None:
        """Medians over the steps after the warm-up; None where too few were made."""
        first = min(WARM_UP, max(len(self._seen) - 2, 0))  # of a short run the last step counts
        steps = [
            [later - earlier for earlier, later in zip(before, after, strict=True)]
            for before, after in pairwise(self._seen[first:])
        ]
        if not steps:
            return None
        step_s, blocking_s, exposed_s = map(statistics.median, zip(*steps, strict=True))
        on_cpu = not torch.cuda.is_available()
        peak = None if on_cpu else torch.cuda.max_memory_allocated()
        figures = Figures(
            step_s=step_s, blocking_s=blocking_s, exposed_s=exposed_s, peak_bytes=peak
        )
        return RankFigures(steps=len(steps), figures=figures)


def record_run(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Measures the steps of ``model`` from now on where the launcher asked for it; when the process
    ends its figures are left in the launcher's folder."""
    folder = os.environ.get(REPORT_VARIABLE)
    if not folder:
        return
    recorder = _Recorder(model, optimizer)

    def leave() -> None:
        found = recorder.figures()
        if found is not None:
            save(found, Path(folder) / f"figures-{os.environ.get('RANK', '0')}.json")

    atexit.register(leave)


def given_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The plan that a script names, or the launcher for it; None where there is none."""
    source = plan if plan is not None else os.environ.get(PLAN_VARIABLE)
    if source is None or isinstance(source, Plan):
        return source
    return load(Plan, source, "plan")
