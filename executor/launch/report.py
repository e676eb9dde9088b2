"""Predicted beside measured: what a run reports, and how a user's own script is measured.

A script is measured between optimizer steps, from hooks: it need not know. Each rank keeps its own
figures and leaves them in the launcher's folder when it ends, because a collective at that point
could wait for a rank that has gone.
"""

import atexit
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import nn

from ...models.units.storages import release_workspaces
from ...models.workload import device_of
from ...planner.schema.plan import Plan
from ...planner.schema.record import Count, Record, load, save
from ...planner.schema.report import BackgroundFigures, Figures, RunReport, predicted_figures
from ..background.protocol import State
from ..parallel import run_of
from ..step_clock import UNREAD, StepMoments, clock_of
from .scalars import given_writer
from .train import Measured, reserved_at_most, typical_of

# The file of the plan that ``auto_parallelize`` is to apply.
PLAN_VARIABLE = "MESHWRIGHT_PLAN"
# The folder that ranks leave their figures in.
REPORT_VARIABLE = "MESHWRIGHT_REPORT"
# Steps at the beginning that are not counted: memory is first allocated, caches are cold.
WARM_UP = 3


class RankFigures(Record, frozen=True, kw_only=True):
    """One rank's figures over the ``steps`` that were counted."""

    steps: Count
    figures: Figures


def background_figures(state: State, limit: float) -> BackgroundFigures:
    """The figures that a report has of a background job which was held to that limit."""
    usage = state.during_steps

    def part(seconds: float, of_s: float) -> float:
        return min(seconds / of_s, 1.0) if of_s else 0.0

    return BackgroundFigures(
        open_share=part(state.open_s, state.seconds),
        cpu_s=state.cpu_s,
        during_steps_s=usage.seconds,
        during_steps_open_share=part(usage.open_s, usage.seconds),
        during_steps_cpu_s=usage.cpu_s,
        stops=usage.stops,
        stopped_shares={str(why): part(s, usage.seconds) for why, s in usage.stopped_s.items()},
        steps=state.steps,
        slowdown=state.slowdown,
        undisturbed_s=state.undisturbed_s,
        limit=limit,
        ended=state.ended,
    )


def report_of_script(plan: Plan, ranks: Iterable[RankFigures]) -> RunReport:
    """The report of a script's run from what its ranks have left."""
    found = list(ranks)
    # A step ends when the slowest rank's does. Its parts are of that rank, so that they add up.
    slowest = max((rank.figures for rank in found), key=lambda figures: figures.step_s)
    peaks = [rank.figures.peak_bytes for rank in found]
    fullest = max((peak for peak in peaks if peak is not None), default=None)
    reserved = [rank.figures.reserved_bytes for rank in found]
    most = max((each for each in reserved if each is not None), default=None)
    figures = msgspec.structs.replace(slowest, peak_bytes=fullest, reserved_bytes=most)
    return _report(plan, min(rank.steps for rank in found), figures)


def report_of_training(plan: Plan, measured: Measured, accuracy: float | None) -> RunReport:
    """The report of a training that ``run_steps`` measured."""
    figures = Figures(
        step_s=measured.step_s,
        blocking_s=measured.blocking_s,
        exposed_s=measured.exposed_s,
        drawing_s=measured.drawing_s,
        peak_bytes=max(measured.peak_bytes, default=0),
        reserved_bytes=measured.reserved_bytes,
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


class _RunFigures:
    """The figures of one model's steps, until they are asked for."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        run = run_of(model)
        self._typical = typical_of(run.whole_plan)
        self._device = device_of(model)
        self._steps: list[StepMoments] = []
        self._known: list[tuple[float, float, float]] = []
        """The seconds of those before."""
        self._run = run
        self._writer = given_writer(run.whole_plan, run.world.rank)
        # The latest step, and its number.
        self._latest: tuple[int, StepMoments] | None = None
        clock_of(run, model, optimizer).listeners.append(self._stepped)

    def _stepped(self, step: StepMoments) -> None:
        # Of the step before: on a device's streams this one may still be going on.
        self.write_latest()
        self._latest = self._run.steps_done - 1, step
        self._steps.append(step)
        if self._device.type == "cuda" and len(self._known) + len(self._steps) == WARM_UP:
            torch.cuda.reset_peak_memory_stats(self._device)
        if len(self._steps) == UNREAD:
            self._read()

    def _read(self) -> None:
        self._known += [step.seconds() for step in self._steps]
        self._steps = []

    def write_latest(self) -> None:
        """Scalars of the latest step, once, where they are asked for."""
        if self._writer is not None and self._latest is not None:
            number, step = self._latest
            self._writer.write(number, step.seconds()[0])
        self._latest = None

    def figures(self) -> RankFigures | None:
        """What is typical of the steps after the warm-up; None where too few were made."""
        self._read()
        first = min(WARM_UP, max(len(self._known) - 1, 0))  # of a short run the last step counts
        steps = self._known[first:]
        if not steps:
            return None
        step_s, blocking_s, exposed_s = map(self._typical, zip(*steps, strict=True))
        peak = None
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            peak = most - release_workspaces(self._device)
        figures = Figures(
            step_s=step_s, blocking_s=blocking_s, exposed_s=exposed_s, peak_bytes=peak,
            reserved_bytes=reserved_at_most(self._device),
        )  # fmt: skip
        return RankFigures(steps=len(steps), figures=figures)


def record_run(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Measures the steps of ``model`` from now on where the launcher asked for it; when the process
    ends its figures are left in the launcher's folder."""
    folder = os.environ.get(REPORT_VARIABLE)
    if not folder:
        return
    recorder = _RunFigures(model, optimizer)

    def leave() -> None:
        recorder.write_latest()
        found = recorder.figures()
        if found is not None:
            save(found, Path(folder) / f"figures-{os.environ.get('RANK', '0')}.json")

    atexit.register(leave)


def given_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The plan that a script names, or the launcher for it; None where there is none. Where both
    name one for the same model it is the launcher's, whose prediction is reported: rank 0 warns."""
    own = load(Plan, plan, "plan") if isinstance(plan, str | Path) else plan
    file = os.environ.get(PLAN_VARIABLE)
    if file is None:
        return own
    launched = load(Plan, file, "plan")
    # A script may train a second model, by a plan that no launcher knows.
    if own is not None and own.model != launched.model:
        return own
    if own not in (None, launched) and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            "the script names another plan than the launched one, which is applied: launch with "
            "the script's, or leave it out there",
            stacklevel=5,
        )
    return launched
