"""Predicted against measured step times on this machine.

    OMP_NUM_THREADS=1 python benchmarks/prediction.py

Starts two ranks. They probe their links once, profile each model on both ranks at once, predict the
step of each layout from that, and then train under it. Prints a table, and as the last line one
JSON object: rows, and the median and the largest relative error |predicted - measured| / measured.
Measuring is over when predicting begins: nothing here is fitted to the steps that are predicted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

import torch
import torch.distributed as dist
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.launch.start import cores, start_process_group
from meshwright.executor.launch.train import Measured, run_steps
from meshwright.models.zoo import build
from meshwright.planner.schema.capability import degrees
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, Style, data_parallel
from meshwright.planner.schema.options import Option, tied_units
from meshwright.planner.schema.plan import Plan, Prediction, ScheduleName
from meshwright.planner.schema.profile import ModelProfile, UnitProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks
from ranks import on_this_machine
from rows import print_json, print_table

RANKS = 2
LIMIT_S = 600.0
SLICE_BYTES = 4 * 2**20
# About so long each layout trains; at least ``LEAST_STEPS`` steps, at most ``MOST_STEPS``.
RUN_S = 4.0
LEAST_STEPS, MOST_STEPS = 7, 40
# The kinds of units that the second layout divides over all ranks; linear ones in turns.
DIVIDED: dict[str, tuple[Style, ...]] = {
    "linear": ("column", "row"),
    "attention": ("pair",),
    "mlp": ("pair",),
}

HEADINGS = ("model", "batch", "layout", "schedule", "step", "error", "compute", "blocking",
            "exposed", "update", "peak")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, its global batch and optimizer, the groups of its divided units (as many as there
    are ranks for plain data parallelism, 1 for model parallelism over all of them), and whether
    gradients travel in buckets to a barrier or in slices by priority."""

    model: str
    batch: int
    optimizer: str
    groups: int
    schedule: ScheduleName = "barrier"


CASES = [
    Case("mlp", 64, "sgd", 2),
    Case("mlp", 64, "sgd", 1),
    Case("cnn-digits", 128, "adamw", 2),
    Case("cnn-digits", 128, "adamw", 1),
    Case("vgg11-32", 32, "momentum", 2),
    Case("vgg11-32", 32, "momentum", 1),
    Case("vgg11-32", 32, "momentum", 2, "priority"),
    Case("gpt-mini", 8, "adamw", 2),
    Case("gpt-mini", 8, "adamw", 1),
    Case("gpt-mini", 8, "adamw", 2, "priority"),
    Case("seq2seq-mini", 16, "adamw", 2),
    Case("seq2seq-mini", 16, "adamw", 2, "priority"),
    Case("resnet50-32", 8, "momentum", 2),
    Case("resnet50-32", 8, "momentum", 2, "priority"),
]


@dataclass(frozen=True)
class Row:
    """One layout: what was predicted and what was measured."""

    case: Case
    layout: str
    predicted: Prediction
    measured: Measured

    @property
    def error(self) -> float:
        """Relative, and negative where the step took longer than predicted."""
        return self.predicted.step_s / self.measured.step_s - 1


def decisions(profile: ModelProfile, groups: int, world_size: int) -> list[Option]:
    """Data parallelism, but for units of the kinds ``DIVIDED`` in that many groups."""
    whole, degree = Option(data_parallel(world_size)), world_size // groups
    found: list[Option] = []
    turn = 0
    for unit, ties in zip(profile.units, tied_units(profile), strict=True):
        styles = _styles(unit, degree)
        if degree == 1 or not styles or len(ties) > 1:
            found.append(whole)
            continue
        found.append(Option(Layout(groups=groups, degree=degree), styles[turn % len(styles)]))
        turn += len(styles) > 1
    return found


def _styles(unit: UnitProfile, degree: int) -> tuple[Style, ...]:
    wanted = DIVIDED.get(unit.kind, ())
    return tuple(style for style in wanted if degrees(unit, style, degree))


def _layout(plan: Plan) -> str:
    plain = data_parallel(plan.world_size)
    divided = [u for u in plan.units if u.layout != plain]
    text = f"({plain.groups}, {plain.degree})"
    if not divided:
        return text
    layout, styles = divided[0].layout, "+".join(sorted({u.style for u in divided}))
    return f"{text}, {len(divided)} at ({layout.groups}, {layout.degree}) {styles}"


def run_model(cases: Sequence[Case], cluster: Cluster) -> list[Row]:
    """The layouts of one model and batch. Collective."""
    first = cases[0]
    goal = Goal(batch=first.batch, optimizer=first.optimizer)  # type: ignore[arg-type]
    torch.manual_seed(0)
    sizes = batches_for(goal, dist.get_world_size())
    profile = profile_on_ranks(build(first.model), sizes, torch.device("cpu"), refresh=True)
    rows = []
    for case in cases:
        chosen = decisions(profile, case.groups, cluster.world_size)
        slices = {"bucket_bytes": SLICE_BYTES} if case.schedule == "priority" else {}
        plan = make_plan(
            profile, cluster, goal, chosen, schedule=case.schedule, executor=CAPABILITY, **slices
        )
        steps = int(RUN_S / max(plan.prediction.step_s, 1e-6))
        steps = min(max(steps, LEAST_STEPS), MOST_STEPS)
        torch.manual_seed(0)
        measured = run_steps(build(case.model), plan, steps)
        rows.append(Row(case, _layout(plan), plan.prediction, measured))
    return rows


def on_rank() -> list[Row]:
    """All cases. Collective."""
    cluster = cluster_of_ranks(torch.device("cpu"), refresh=True)
    rows: list[Row] = []
    for _, same in groupby(CASES, key=lambda c: (c.model, c.batch, c.optimizer)):
        cases = list(same)
        rows += run_model(cases, cluster)
        if dist.get_rank() == 0:
            for row in rows[-len(cases) :]:
                print(f"{row.case.model} {row.layout}: {row.error:+.0%}", file=sys.stderr)
    return rows


def cells(row: Row) -> tuple[object, ...]:
    """The row for people: milliseconds, predicted / measured."""
    p, m = row.predicted, row.measured
    pairs = [
        (p.compute_s - p.update_s, m.compute_s),
        (p.blocking_s, m.blocking_s),
        (p.exposed_s, m.exposed_s),
        (p.update_s, m.update_s),
    ]
    return (
        row.case.model, row.case.batch, row.layout, row.case.schedule,
        f"{1e3 * p.step_s:.1f} / {1e3 * m.step_s:.1f}", f"{row.error:+.0%}",
        *(f"{1e3 * a:.1f} / {1e3 * b:.1f}" for a, b in pairs),
        f"{max(p.peak_bytes) / 1e6:.1f} / {max(m.peak_bytes) / 1e6:.1f}",
    )  # fmt: skip


def _busy() -> str:
    """How loaded the machine was in the last five minutes: others' work stretches both figures, and
    not alike."""
    load, usable = os.getloadavg()[1], cores()
    told = f"load {load:.1f} on {usable} cores"
    if load <= max(usable, RANKS) + 1:
        return told
    return f"{told}: the machine was busy with other work, so errors say little about the model"


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """The rows for machines."""
    errors = [abs(row.error) for row in rows]
    found = [
        {
            "model": r.case.model, "layout": r.layout, "schedule": r.case.schedule,
            "predicted_s": r.predicted.step_s, "measured_s": r.measured.step_s,
        }
        for r in rows
    ]  # fmt: skip
    return {"rows": found, "median_abs_error": median(errors), "max_abs_error": max(errors)}


def main() -> None:
    """Starts the ranks, or is one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "RANK" not in os.environ:
        on_this_machine(RANKS, LIMIT_S)
        return
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    start_process_group()
    rows = on_rank()
    if dist.get_rank() == 0:
        title = "predicted / measured, ms (memory in MB)"
        print_table(title, HEADINGS, map(cells, rows), left=(0, 2), caption=_busy())
        print_json(summary_of(rows))


if __name__ == "__main__":
    main()
