"""Work that ranks do for a verb: what it is, starting it here, and doing it there.

The starting process writes a ``Task`` and the documents that it needs into a folder and starts
``python -m meshwright.executor.launch.tasks FOLDER`` on every rank; rank 0 leaves the answer there.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from ...planner.schema.plan import Plan
from ...planner.schema.precision import Precision
from ...planner.schema.record import Count, Record, load, save
from ...planner.schema.report import RunReport
from ..notes import note, show_warnings_as_notes
from .progress import Step, progress

if TYPE_CHECKING:
    import torch

    from .losses import LossComparison
    from .processes import Ranks
    from .verify import Verification

TaskName = Literal["probe", "profile", "verify", "losses", "train"]
# Measuring is the profiler's, which imports this package: so work is named, not imported.
WORK: dict[TaskName, str] = {
    "probe": "meshwright.profiler.sessions:probe_task",
    "profile": "meshwright.profiler.sessions:profile_task",
    "verify": "meshwright.executor.launch.tasks:verify_task",
    "losses": "meshwright.executor.launch.tasks:losses_task",
    "train": "meshwright.executor.launch.tasks:train_task",
}
TASK, PLAN, ANSWER = "task.json", "plan.json", "answer.json"
RecordT = TypeVar("RecordT", bound=Record)


class CheckpointSettings(Record, frozen=True, kw_only=True):
    """The ``folder`` in which a training keeps checkpoints, one after ``every`` so many steps.
    ``restarted``: the launcher has started the ranks before, and they were lost."""

    folder: str
    every: Count
    restarted: bool = False


class Task(Record, frozen=True, kw_only=True):
    """What the ranks are to do, and those options that apply to it."""

    name: TaskName
    target: str = ""
    batches: tuple[int, ...] = ()
    precision: Precision | None = None
    dtype: Literal["float64", "float32", "own"] = "float64"
    batch: int | None = None
    steps: int = 30
    seeds: int = 3
    timeout_s: float | None = None
    refresh: bool = True
    keeping: CheckpointSettings | None = None


def run_task(
    task: Task, ranks: Ranks, answer: type[RecordT], plan: Plan | None = None
) -> RecordT | None:
    """Starts ranks for a task and returns rank 0's answer; None where rank 0 is on another host or
    gave no answer.

    Raises the first failing rank's error.
    """
    from .processes import run_ranks
    from .worker import STDOUT_TO_STDERR

    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        save(task, folder / TASK)
        if plan is not None:
            save(plan, folder / PLAN)
        # Whatever a model prints, stdout is this process's own: it may be for machines.
        quiet = ranks.telling({STDOUT_TO_STDERR: "1"})
        run_ranks(["-m", f"{__package__}.tasks", name], quiet, folder)
        found = folder / ANSWER
        return load(answer, found) if found.exists() else None


def run_here(task: Task, answer: type[RecordT], plan: Plan) -> RecordT:
    """The same with all ranks of ``plan`` on this host, within the task's time limit."""
    from .processes import Ranks

    ranks = Ranks(nproc=plan.world_size, timeout_s=task.timeout_s)
    found = run_task(task, ranks, answer, plan)
    assert found is not None, "rank 0 is here"
    return found


def do(folder: Path) -> None:
    """Does the folder's task on this rank: a function of the task, its folder and the device, which
    returns the answer."""
    # Here and below, so that a command which only names a task starts without torch.
    from ..comm.watchdog import time_limit
    from .start import start_process_group

    task = load(Task, folder / TASK)
    module, _, function = WORK[task.name].partition(":")
    work = getattr(importlib.import_module(module), function)
    device = start_process_group(time_limit(task.timeout_s))
    answer = work(task, folder, device)
    # All ranks have the answer, and one file of it is enough.
    if answer is not None and os.environ["RANK"] == "0":
        save(answer, folder / ANSWER)


def rank_zero_bar(title: str) -> AbstractContextManager[Step]:
    """A bar that rank 0 shows."""
    return progress(title, show=os.environ["RANK"] == "0")


def rank_zero_note(text: str) -> None:
    """A note, from rank 0 alone."""
    if os.environ["RANK"] == "0":
        note(text)


def verify_task(task: Task, folder: Path, device: torch.device) -> Verification:
    from ...models.target import planned, try_out
    from .verify import verify_on_ranks

    plan = load(Plan, folder / PLAN)
    chosen = planned(plan.target, plan.precision)
    try_out(chosen)
    with rank_zero_bar(f"verifying {plan.target}") as step:
        return verify_on_ranks(
            plan, chosen, dtype=task.dtype, batch=task.batch, device=device,
            timeout_s=task.timeout_s, progress=step,
        )  # fmt: skip


def losses_task(task: Task, folder: Path, device: torch.device) -> LossComparison:
    from ...models.target import planned, try_out
    from .losses import compare_losses_on_ranks

    plan = load(Plan, folder / PLAN)
    try_out(planned(plan.target, plan.precision))
    with rank_zero_bar(f"training {plan.target}") as step:
        return compare_losses_on_ranks(
            plan, lambda seed: planned(plan.target, plan.precision, seed=seed), steps=task.steps,
            seeds=task.seeds, device=device, timeout_s=task.timeout_s, progress=step,
        )  # fmt: skip


def train_task(task: Task, folder: Path, device: torch.device) -> RunReport | None:
    from ...models.target import planned, try_out
    from ..checkpoint.checkpoint import checkpoint
    from ..parallel import run_of
    from .attribution import check_mean
    from .report import report_of_training
    from .scalars import given_scalars
    from .timeline import record_timeline
    from .train import (
        WARM_UP,
        LaunchedStep,
        accuracy,
        begin_training,
        drawing,
        run_range,
        scaler_for,
        steps_left,
    )  # fmt: skip
    from .training_progress import TrainingProgress, progress_asked

    plan = load(Plan, folder / PLAN)
    chosen = planned(plan.target, plan.precision)
    size = try_out(chosen)
    check_mean(chosen, (size,))
    chosen, optimizer = begin_training(chosen, plan, device, task.timeout_s)
    record_timeline(chosen.model, optimizer)
    draw = drawing(chosen, plan.goal.batch)
    scaler = scaler_for(chosen)
    # The steps to be measured, or where a training is kept and goes on, those of it in all.
    kept, numbers = None, range(WARM_UP + task.steps)
    if task.keeping is not None:
        kept = checkpoint(
            task.keeping.folder, chosen.model, optimizer, scaler=scaler, every=task.keeping.every
        )
        numbers = steps_left(kept, task.steps, rank_zero_note, restarted=task.keeping.restarted)
        if not numbers:
            kept.close()
            return None
    run = run_of(chosen.model)
    shown = TrainingProgress(run, device) if progress_asked() else None
    scalars = given_scalars(run)

    def launched(number: int, step: LaunchedStep) -> None:
        if shown is not None:
            shown.launched(step)
        if scalars is not None:
            scalars.stepped(number, step)

    if shown is not None:
        shown.begin(numbers.start, numbers.stop)
    measured = run_range(
        chosen, plan, numbers, optimizer=optimizer, draw=draw, scaler=scaler, kept=kept,
        launched=launched,
    )  # fmt: skip
    if shown is not None:
        shown.end()
    if scalars is not None:
        scalars.close()
    if measured is None:
        return None
    return report_of_training(plan, measured, accuracy(chosen, device))


if __name__ == "__main__":
    show_warnings_as_notes(rank_zero_note)
    do(Path(sys.argv[1]))
