"""The demo: everything on this machine, with a small network on real pictures of digits."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import RenderableType

from .. import api
from ..executor.launch.processes import Ranks, new_folder
from ..executor.launch.tasks import Task, run_task
from ..executor.launch.train import WARM_UP
from ..executor.launch.training_progress import PROGRESS_VARIABLE
from ..executor.launch.verify import Verification
from ..models import target as targets
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError, RunError
from ..planner.schema.goal import make_goal
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import Record, Seconds, save
from ..planner.schema.report import RunReport
from ..planner.solve.evaluate import make_plan
from .render.comparisons import SURPRISING, measured_rows, verification_table
from .render.documents import cluster_table, decision_table, gain, prediction_table, units_table
from .render.table import filled_table

TARGET = "cnn-digits"
RANKS = 2
BATCH = 128
# Ten passes over the 1437 pictures: twice what reaches 95% of the test pictures in one process.
STEPS = 110
# What the training must reach, or the demo has failed.
ACCURACY = 0.9
# For each part: far more than it takes, so that nothing hangs for ever.
TIMEOUT_S = 300.0

RecordT = TypeVar("RecordT", bound=Record)
Say = Callable[[RenderableType], None]


class DemoReport(Record, frozen=True, kw_only=True):
    """What came out: the plan's run and data parallelism's, each predicted and measured."""

    folder: str
    seconds: Seconds
    verification: Verification
    planned: RunReport
    data_parallel: RunReport


def demo(folder: str | Path | None = None, *, say: Say = lambda text: None) -> DemoReport:
    """Profiles, probes, plans, verifies and trains ``cnn-digits`` on two processes of this machine.

    Its files are kept in ``folder`` (new; by default under ``runs``); ``say`` is given the tables
    as they come. Raises ``RunError`` where the equality or the accuracy is missed.
    """
    start = time.perf_counter()
    data = targets.workload(TARGET).data
    assert data is not None, "the demo's network is trained on real pictures"
    # Asked for before a minute of measuring: what brings the pictures may be missing.
    try:
        data("test")
    except ValueError as error:
        raise InputError(str(error)) from None
    if folder is None:
        kept = new_folder("demo")
    else:
        kept = Path(folder)
        try:
            kept.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {folder}: {error.strerror}") from None
    say(f"The files of this run are kept in {kept}.")
    devices = "GPUs" if torch.cuda.device_count() >= RANKS else "CPU processes"
    say(f"1. The links between {RANKS} {devices} (meshwright probe)")
    cluster = _run(Task(name="probe"), Cluster)
    say(cluster_table(cluster))
    say(f"2. What {TARGET} takes on each of them (meshwright profile {TARGET} --ranks {RANKS})")
    share = BATCH // RANKS
    sizes = (share // 2, share, 2 * share)
    profile = _run(Task(name="profile", target=TARGET, batches=sizes), ModelProfile)
    say(units_table(profile))
    say(f"3. How to train it with {BATCH} samples a step (meshwright plan)")
    goal = make_goal(BATCH, optimizer="adamw")
    plan, plain = api.plan(profile, cluster, goal), make_plan(profile, cluster, goal)
    for part in (decision_table(plan), prediction_table(plan), f"{gain(plan)}."):
        say(part)
    documents = {"cluster": cluster, "profile": profile, "plan": plan, "data-parallel": plain}
    # Before the training: what it was made from is there even where that fails.
    for name, document in documents.items():
        save(document, kept / f"{name}.json")
    say("4. The plan's training equals one process's (meshwright verify)")
    verification = _run(Task(name="verify"), Verification, plan)
    say(verification_table(verification))
    say(
        f"5. {STEPS} steps on scikit-learn's digits, after {WARM_UP} to warm up: planned, then "
        "data parallel (meshwright launch)"
    )
    titled = {}
    for title, chosen in (("planned", plan), ("data parallel", plain)):
        say(f"{title}:")
        titled[title] = _run(Task(name="train", steps=STEPS), RunReport, chosen)
    runs = tuple(titled.values())
    took = time.perf_counter() - start
    report = DemoReport(
        folder=str(kept),
        seconds=took,
        verification=verification,
        planned=runs[0],
        data_parallel=runs[1],
    )
    save(report, kept / "demo.json")
    rows: list[tuple[str, ...]] = []
    for title, run in titled.items():
        rows += [(f"{title}: {what.strip()}", *rest) for what, *rest in measured_rows(run)]
        rows.append((f"{title}: test accuracy", "", _percent(run), ""))
    headings = ("", "predicted", "measured", "ratio")
    say(filled_table(f"{TARGET} on {RANKS} ranks, {STEPS} steps", headings, rows))
    for title, run in titled.items():
        if run.surprising:
            say(f"{title}: {SURPRISING}")
    say(_side_by_side(*runs))
    # Judged at the end, when all files are kept: they show what went wrong.
    if not verification.passed:
        raise RunError(f"training under the plan differs from one process's: see {kept}")
    if (runs[0].accuracy or 0.0) <= ACCURACY:
        raise RunError(
            f"training under the plan reached {_percent(runs[0])} of the test pictures, "
            f"expected more than {ACCURACY:.0%}: see {kept}"
        )
    say(f"Equal to one process, and {_percent(runs[0])} of the test pictures right. {took:.0f} s.")
    return report


def _run(task: Task, answer: type[RecordT], plan: Plan | None = None) -> RecordT:
    ranks = Ranks(nproc=RANKS, timeout_s=TIMEOUT_S, environment={PROGRESS_VARIABLE: "1"})
    found = run_task(task, ranks, answer, plan)
    assert found is not None, "rank 0 is here"
    return found


def _side_by_side(planned: RunReport, plain: RunReport) -> str:
    """How long the plan's step was measured to take beside data parallelism's, and what was
    predicted."""
    predicted = planned.predicted.step_s / plain.predicted.step_s
    measured = planned.measured.step_s / plain.measured.step_s
    return (
        f"A step of the plan was measured to take {measured:.2f} times as long as one of data "
        f"parallelism; {predicted:.2f} times was predicted."
    )


def _percent(run: RunReport) -> str:
    return "-" if run.accuracy is None else f"{100 * run.accuracy:.1f}%"
