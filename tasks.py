"""Work that ranks do for a verb: what it is, starting it here, and doing it there.

The starting process writes a ``Task`` and the documents that it needs into a folder and starts
``python -m meshwright.tasks FOLDER`` on every rank; rank 0 leaves the answer in the folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from .planner.nouns.cluster import Cluster
from .planner.nouns.noun import Noun, load, save
from .planner.nouns.plan import Plan
from .planner.nouns.profile import ModelProfile
from .screen import Step, progress

if TYPE_CHECKING:
    import torch

    from .executor.launch import Ranks
    from .executor.report import RunReport
    from .executor.verify import Verification

TaskName = Literal["probe", "profile", "verify", "train"]
TASK, PLAN, ANSWER = "task.json", "plan.json", "answer.json"
LEARNING_RATE = 1e-3
"""Of a training without a script: what Adam's authors recommend (Kingma & Ba, 2015)."""
NounT = TypeVar("NounT", bound=Noun)


class Task(Noun, frozen=True, kw_only=True):
    """What the ranks are to do, and those options that apply to it."""

    name: TaskName
    target: str = ""
    batches: tuple[int, ...] = ()
    dtype: Literal["float64", "float32"] = "float64"
    batch: int | None = None
    steps: int = 30
    timeout_s: float | None = None
    refresh: bool = True


def run_task(
    task: Task, ranks: Ranks, answer: type[NounT], plan: Plan | None = None
) -> NounT | None:
    """Starts ranks for a task and returns rank 0's answer; None on a host that has no rank 0.

    Raises the first failing rank's error.
    """
    from .executor.launch import run_ranks
    from .executor.worker import STDOUT_TO_STDERR

    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        save(task, folder / TASK)
        if plan is not None:
            save(plan, folder / PLAN)
        # Whatever a model prints, stdout is this process's own.
        quiet = ranks.telling({STDOUT_TO_STDERR: "1"})
        run_ranks(["-m", f"{__package__}.tasks", name], quiet, folder)
        found = folder / ANSWER
        return load(answer, found) if found.exists() else None


def do(folder: Path) -> None:
    """Does the folder's task on this rank."""
    from .executor.ranks.watch import time_limit
    from .executor.start import start_process_group

    task = load(Task, folder / TASK)
    work: dict[TaskName, Callable[[Task, Path, torch.device], Noun]] = {
        "probe": _probe,
        "profile": _profile,
        "verify": _verify,
        "train": _train,
    }
    device = start_process_group(time_limit(task.timeout_s))
    answer = work[task.name](task, folder, device)
    if os.environ["RANK"] == "0":
        save(answer, folder / ANSWER)


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Step]:
    """Rank 0's bar."""
    with progress(title, show=os.environ["RANK"] == "0") as step:
        yield step


def _probe(task: Task, folder: Path, device: torch.device) -> Cluster:
    from .measure import cluster_of_ranks

    with _bar("probing") as step:
        return cluster_of_ranks(device, step, refresh=task.refresh)


def _profile(task: Task, folder: Path, device: torch.device) -> ModelProfile:
    from .measure import profile_on_ranks
    from .targets import workload

    with _bar(f"profiling {task.target}") as step:
        return profile_on_ranks(
            workload(task.target), task.batches or None, device, step, refresh=task.refresh
        )


def _verify(task: Task, folder: Path, device: torch.device) -> Verification:
    from .executor.verify import verify_on_ranks
    from .targets import planned, try_out

    plan = load(Plan, folder / PLAN)
    chosen = planned(plan.target)
    try_out(chosen)
    with _bar(f"verifying {plan.target}") as step:
        return verify_on_ranks(
            plan,
            chosen,
            dtype=task.dtype,
            batch=task.batch,
            device=device,
            timeout_s=task.timeout_s,
            progress=step,
        )


def _train(task: Task, folder: Path, device: torch.device) -> RunReport:
    from .executor.apply import apply
    from .executor.report import report_of_training
    from .executor.train import optimizer_for, run_steps
    from .feeding import accuracy, drawing
    from .targets import planned, try_out

    plan = load(Plan, folder / PLAN)
    chosen = planned(plan.target)
    try_out(chosen)
    model = chosen.model.to(device)
    optimizer = optimizer_for(plan.goal, model.parameters(), LEARNING_RATE)
    apply(model, optimizer, plan, timeout_s=task.timeout_s)
    with _bar(f"training {plan.target}") as step:
        measured = run_steps(
            chosen,
            plan,
            task.steps,
            optimizer=optimizer,
            draw=drawing(chosen, plan.goal.batch),
            progress=lambda done, total: step(done, total, ""),
        )
    return report_of_training(plan, measured, accuracy(chosen, device))


if __name__ == "__main__":
    do(Path(sys.argv[1]))
