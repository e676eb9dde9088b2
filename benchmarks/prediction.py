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
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.launch.start import cores
from meshwright.executor.launch.train import run_steps
from meshwright.models.workload import Workload
from meshwright.models.zoo import build
from meshwright.planner.schema.capability import degrees
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, Style, data_parallel
from meshwright.planner.schema.options import Option, tied_units
from meshwright.planner.schema.plan import Plan, ScheduleName
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks
from ranks import joined
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


class Case(NamedTuple):
    """A model, its global batch and optimizer, the groups of its divided units (as many as there
    are ranks for plain data parallelism, 1 for model parallelism over all of them), whether
    gradients travel in buckets to a barrier or in slices by priority, and whether its repeated
    blocks are compiled."""

    model: str
    batch: int
    optimizer: str
    groups: int
    schedule: ScheduleName = "barrier"
    compiled: bool = False


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
    Case("gpt-mini", 8, "adamw", 2, compiled=True),
    Case("gpt-mini", 8, "adamw", 1, compiled=True),
    Case("gpt-mini", 8, "adamw", 2, "priority", compiled=True),
    Case("seq2seq-mini", 16, "adamw", 2),
    Case("seq2seq-mini", 16, "adamw", 2, "priority"),
    Case("resnet50-32", 8, "momentum", 2),
    Case("resnet50-32", 8, "momentum", 2, "priority"),
]


def decisions(profile: ModelProfile, groups: int, world_size: int) -> list[Option]:
    """Data parallelism, but for units of the kinds ``DIVIDED`` in that many groups."""
    whole, degree = Option(data_parallel(world_size)), world_size // groups
    found: list[Option] = []
    turn = 0
    for unit, ties in zip(profile.units, tied_units(profile), strict=True):
        styles = [s for s in DIVIDED.get(unit.kind, ()) if degrees(unit, s, degree)]
        if degree == 1 or not styles or len(ties) > 1:
            found.append(whole)
            continue
        found.append(Option(Layout(groups=groups, degree=degree), styles[turn % len(styles)]))
        turn += len(styles) > 1
    return found


def workload_of(case: Case) -> Workload:
    """The case's workload, equally initialised each time."""
    torch.manual_seed(0)
    workload = build(case.model)
    for block in workload.model.get_submodule("h") if case.compiled else ():
        block.compile()
    return workload


def layout_of(plan: Plan) -> str:
    """The plan's layouts in words: data parallelism, and how many units have another."""
    plain = data_parallel(plan.world_size)
    divided = [u for u in plan.units if u.layout != plain]
    text = f"({plain.groups}, {plain.degree})"
    if not divided:
        return text
    layout, styles = divided[0].layout, "+".join(sorted({u.style for u in divided}))
    return f"{text}, {len(divided)} at ({layout.groups}, {layout.degree}) {styles}"


def rows_of(cases: list[Case], cluster: Cluster) -> list[dict[str, Any]]:
    """The layouts of one model and batch, predicted and measured. Collective."""
    first = cases[0]
    goal = Goal(batch=first.batch, optimizer=first.optimizer)
    sizes = batches_for(goal, dist.get_world_size())
    profile = profile_on_ranks(workload_of(first), sizes, torch.device("cpu"), refresh=True)
    rows = []
    for case in cases:
        chosen = decisions(profile, case.groups, cluster.world_size)
        slices = {"bucket_bytes": SLICE_BYTES} if case.schedule == "priority" else {}
        plan = make_plan(
            profile, cluster, goal, chosen, schedule=case.schedule, executor=CAPABILITY, **slices
        )
        steps = int(RUN_S / max(plan.prediction.step_s, 1e-6))
        measured = run_steps(workload_of(case), plan, min(max(steps, LEAST_STEPS), MOST_STEPS))
        row = {"case": case, "layout": layout_of(plan)}
        rows.append({**row, "predicted": plan.prediction, "measured": measured})
    return rows


def error_of(row: dict[str, Any]) -> float:
    """Relative, and negative where the step took longer than predicted."""
    return row["predicted"].step_s / row["measured"].step_s - 1


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    """The row for people: milliseconds, predicted / measured."""
    case, p, m = row["case"], row["predicted"], row["measured"]
    pairs = [
        (p.compute_s - p.update_s, m.compute_s),
        (p.blocking_s, m.blocking_s),
        (p.exposed_s, m.exposed_s),
        (p.update_s, m.update_s),
    ]
    return (
        case.model + ", compiled" * case.compiled, case.batch, row["layout"], case.schedule,
        f"{1e3 * p.step_s:.1f} / {1e3 * m.step_s:.1f}", f"{error_of(row):+.0%}",
        *(f"{1e3 * a:.1f} / {1e3 * b:.1f}" for a, b in pairs),
        f"{max(p.peak_bytes) / 1e6:.1f} / {max(m.peak_bytes) / 1e6:.1f}",
    )  # fmt: skip


def main() -> None:
    if not joined(RANKS, LIMIT_S):
        return
    cluster = cluster_of_ranks(torch.device("cpu"), refresh=True)
    rows = []
    for _, same in groupby(CASES, key=lambda c: (c.model, c.batch, c.optimizer, c.compiled)):
        for row in rows_of(list(same), cluster):
            rows.append(row)
            if dist.get_rank() == 0:
                print(f"{row['case'].model} {row['layout']}: {error_of(row):+.0%}", file=sys.stderr)
    if dist.get_rank() > 0:
        return
    print_table("predicted / measured, ms (memory in MB)", HEADINGS, map(cells, rows))
    # Others' work on the machine stretches both figures, and not alike.
    load, usable = os.getloadavg()[1], cores()
    busy = load > max(usable, RANKS) + 1
    print(
        f"load {load:.1f} on {usable} cores in the last five minutes"
        + ": the machine was busy with other work, so errors say little about the model" * busy
    )
    found = [
        {
            "model": r["case"].model, "compiled": r["case"].compiled, "layout": r["layout"],
            "schedule": r["case"].schedule,
            "predicted_s": r["predicted"].step_s, "measured_s": r["measured"].step_s,
        }
        for r in rows
    ]  # fmt: skip
    errors = [abs(error_of(row)) for row in rows]
    print_json({"rows": found, "median_abs_error": median(errors), "max_abs_error": max(errors)})


if __name__ == "__main__":
    main()
