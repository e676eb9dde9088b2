"""Predicted against measured step times, on the test bed.

    python benchmarks/prediction.py --keep rows.jsonl --markdown docs/results/prediction.md

Needs root. On beds of two and of four hosts the ranks probe their links at each rate, profile each
model, predict the step of each case from that, and train under it; all of this in turns, since a
machine does not stay as quick as it was. Figures are means over the turns. Prints a table, and as
the last line one JSON object: rows, the median and the largest relative error
|predicted - measured| / measured, and the share of measured steps inside their intervals. Nothing
is fitted to the steps that are predicted.

With ``--keep`` rows are written to a file as they come, and those that it has are not measured
again; ``--cases`` takes those whose name contains one of the words. ``--ranking`` instead runs ten
plans of each of three models and compares their order with the predicted one.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.launch.start import cores
from meshwright.executor.launch.train import Measured, run_steps
from meshwright.executor.optimizer.kinds import optimizer_for
from meshwright.models.workload import Workload
from meshwright.models.zoo import build
from meshwright.planner.schema.capability import degrees
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, Style, data_parallel
from meshwright.planner.schema.options import Option, tied_units
from meshwright.planner.schema.plan import (
    ExchangePolicy,
    MemoryPolicy,
    Plan,
    Prediction,
    ScheduleName,
)
from meshwright.planner.schema.profile import ModelProfile, UnitProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks
from ranks import on_a_bed, run, set_rate, slowest
from rows import Row, command_line, keep, known, markdown, print_json, print_table, put_into
from scipy.stats import spearmanr

CPU = torch.device("cpu")
SLICE_BYTES = 4 * 2**20
TURNS = 2
# About so long each case trains in a turn; at least ``LEAST_STEPS`` steps, at most ``MOST_STEPS``.
TURN_S = 2.0
LEAST_STEPS, MOST_STEPS = 5, 30
# The mean step of a lossy exchange is of so many, after others.
LOSSY_STEPS = 10
# The kinds of units that are divided; linear ones in turns by columns and by rows.
DIVIDED: dict[str, tuple[Style, ...]] = {
    "linear": ("column", "row"),
    "attention": ("pair",),
    "mlp": ("pair",),
}
# Of what a lossy exchange sends: the share that profiles measure for dropping.
DROPPED = 0.5
SLOW, MIDDLE, FAST = 200.0, 400.0, 1000.0
HEADINGS = ("case", "step", "within", "error", "compute", "blocking", "exposed", "update",
            "waiting", "peak")  # fmt: skip


class Model(NamedTuple):
    """A model with its global batch and optimizer, and whether its repeated blocks are compiled."""

    name: str
    batch: int
    optimizer: str
    compiled: bool = False

    @property
    def goal(self) -> Goal:
        return Goal(batch=self.batch, optimizer=self.optimizer)  # type: ignore[arg-type]

    def workload(self) -> Workload:
        """Equally initialised each time."""
        torch.manual_seed(0)
        workload = build(self.name)
        if self.compiled:
            for block in workload.model.get_submodule("h").children():
                block.compile()
        return workload


class Way(NamedTuple):
    """How it is trained: divided over groups of ``degree`` members (1: data parallel), by which
    schedule, in how many micro-batches, and with what memory and exchange policy."""

    degree: int = 1
    schedule: ScheduleName = "barrier"
    micro_batches: int = 1
    memory: MemoryPolicy = "keep"
    exchange: ExchangePolicy = "dense"

    def __str__(self) -> str:
        words = [f"divided by {self.degree}" if self.degree > 1 else "data parallel", self.schedule]
        words += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        words += [self.memory] * (self.memory != "keep")
        words += [self.exchange] * (self.exchange != "dense")
        return ", ".join(words)


class Case(NamedTuple):
    """A model on so many hosts with links of ``mbit_s``, trained one way."""

    model: Model
    hosts: int
    mbit_s: float
    way: Way

    def __str__(self) -> str:
        name = self.model.name + " compiled" * self.model.compiled
        return f"{name}, {self.hosts} hosts at {self.mbit_s:g} Mbit/s, {self.way}"


CNN = Model("cnn-digits", 128, "adamw")
VGG = Model("vgg11-32", 32, "momentum")
GPT = Model("gpt-mini", 8, "adamw")
SEQ = Model("seq2seq-mini", 16, "adamw")
RESNET = Model("resnet50-32", 8, "momentum")
BY_PRIORITY = Way(schedule="priority")
CASES = [
    Case(CNN, 2, FAST, Way()),
    Case(CNN, 2, FAST, Way(2)),
    Case(VGG, 2, FAST, Way()),
    Case(VGG, 2, FAST, Way(2)),
    Case(VGG, 2, SLOW, BY_PRIORITY),
    Case(VGG, 2, SLOW, Way(2, "priority")),
    Case(VGG, 2, SLOW, Way(schedule="priority", exchange="dropped")),
    Case(GPT, 2, FAST, Way()),
    Case(GPT, 2, FAST, Way(2)),
    Case(GPT, 2, SLOW, BY_PRIORITY),
    Case(GPT, 2, SLOW, Way(micro_batches=2)),
    Case(GPT, 2, SLOW, Way(memory="recompute")),
    Case(SEQ, 2, FAST, Way()),
    Case(SEQ, 2, SLOW, BY_PRIORITY),
    Case(RESNET, 2, FAST, Way()),
    Case(RESNET, 2, SLOW, BY_PRIORITY),
    Case(VGG, 4, MIDDLE, Way()),
    Case(VGG, 4, MIDDLE, Way(2)),
    Case(VGG, 4, MIDDLE, Way(4, "priority")),
    Case(GPT, 4, MIDDLE, BY_PRIORITY),
    Case(GPT, 4, MIDDLE, Way(2)),
    Case(GPT._replace(compiled=True), 2, FAST, Way()),
    Case(GPT._replace(compiled=True), 2, FAST, Way(2)),
    Case(GPT._replace(compiled=True), 2, SLOW, BY_PRIORITY),
]
RANKED = (VGG, GPT, SEQ)
# Beside the planner's own choice.
WAYS = (
    Way(),
    BY_PRIORITY,
    Way(2),
    Way(2, "priority"),
    Way(micro_batches=2),
    Way(2, micro_batches=2),
    Way(memory="recompute"),
    Way(2, memory="recompute"),
    Way(schedule="priority", exchange="sharded"),
)


def option_of(unit: UnitProfile, way: Way, style: Style | None, ranks: int) -> Option:
    """What a unit does; it is divided in ``style`` where there is one."""
    if style is not None:
        layout = Layout(groups=ranks // way.degree, degree=way.degree)
        return Option(layout, style, memory=way.memory)
    whole = Option(data_parallel(ranks))
    if unit.fixed:
        return whole
    if way.exchange == "dropped" and unit.kept("dropped", DROPPED) is not None:
        return whole._replace(exchange="dropped", ratio=DROPPED)
    if way.exchange == "sharded" and unit.parameters:
        return whole._replace(exchange="sharded")
    return whole._replace(memory=way.memory)


def decisions(profile: ModelProfile, way: Way, ranks: int) -> list[Option]:
    """Each unit's part in that way of training."""
    found: list[Option] = []
    turn = 0
    for unit, ties in zip(profile.units, tied_units(profile), strict=True):
        styles = [s for s in DIVIDED.get(unit.kind, ()) if degrees(unit, s, way.degree)]
        style = None
        if way.degree > 1 and styles and len(ties) == 1:
            style = styles[turn % len(styles)]
            turn += len(styles) > 1
        found.append(option_of(unit, way, style, ranks))
    return found


def plan_of(profile: ModelProfile, cluster: Cluster, goal: Goal, way: Way) -> Plan:
    slices: dict[str, Any] = {"message_bytes": SLICE_BYTES} if way.schedule == "priority" else {}
    chosen = decisions(profile, way, cluster.world_size)
    return make_plan(
        profile, cluster, goal, chosen, way.micro_batches, schedule=way.schedule,
        executor=CAPABILITY, **slices,
    )  # fmt: skip


def layout_of(plan: Plan) -> str:
    """The plan's layouts in words: data parallelism, and how many units have another."""
    plain = data_parallel(plan.world_size)
    divided = [u for u in plan.units if u.layout != plain]
    text = f"({plain.groups}, {plain.degree})"
    if not divided:
        return text
    layout, styles = divided[0].layout, "+".join(sorted({u.style for u in divided}))
    return f"{text}, {len(divided)} at ({layout.groups}, {layout.degree}) {styles}"


def trained(workload: Workload, plan: Plan) -> Measured:
    """Steps under the plan. Collective."""
    optimizer = optimizer_for(plan.goal.optimizer, workload.model.parameters())
    # What lossy exchange sends from the beginning is what it is planned to send.
    apply(workload.model, optimizer, plan, lossy=Lossy(stages=0))
    # A large layer is sent in one step and left out in the next, and hosts that train apart send
    # something in some steps: what is predicted is the mean over so many, after as many before.
    cycle = LOSSY_STEPS if any(unit.lossy for unit in plan.units) else 0
    if plan.local_steps is not None:
        cycle = plan.local_steps.inner_steps
    steps = min(max(int(TURN_S / max(plan.prediction.step_s, 1e-6)), LEAST_STEPS), MOST_STEPS)
    ends: list[float] = []
    found = run_steps(
        workload, plan, max(steps, 2 * cycle), optimizer=optimizer,
        progress=lambda done, total: ends.append(time.perf_counter()),
    )  # fmt: skip
    if not cycle:
        return found
    step_s = slowest((ends[-1] - ends[-1 - cycle]) / cycle)
    exposed_s = max(found.exposed_s + step_s - found.step_s, 0.0)
    return msgspec.structs.replace(found, step_s=step_s, exposed_s=exposed_s)


def row_of(
    name: str, plan: Plan, predicted: Sequence[Prediction], measured: Sequence[Measured]
) -> dict[str, Any]:
    """The means over turns."""

    def mean(records: Sequence[Any], field: str) -> float:
        return fmean(getattr(record, field) for record in records)

    parts = ("compute_s", "blocking_s", "exposed_s", "update_s")
    ours = {part: mean(predicted, part) for part in (*parts, "waiting_s")}
    ours["compute_s"] -= ours["update_s"]  # measured apart
    return {
        "case": name, "model": plan.target, "layout": layout_of(plan), "schedule": plan.schedule,
        "predicted_s": mean(predicted, "step_s"), "measured_s": mean(measured, "step_s"),
        "low_s": mean(predicted, "low_s"), "high_s": mean(predicted, "high_s"),
        "predicted": ours, "measured": {part: mean(measured, part) for part in parts},
        "predicted_bytes": max(predicted[0].peak_bytes),
        "measured_bytes": max(measured[0].peak_bytes),
        "steps": [m.step_s for m in measured], "load": os.getloadavg()[0],
    }  # fmt: skip


def links_at(asked: dict[str, Any], rates: Sequence[float]) -> dict[float, Cluster]:
    """What is probed at each rate. Collective."""
    found = {}
    for mbit_s in rates:
        set_rate(asked["folder"], mbit_s)
        found[mbit_s] = cluster_of_ranks(CPU, refresh=True)
    return found


def profiled(model: Model) -> ModelProfile:
    """Collective."""
    sizes = batches_for(model.goal, dist.get_world_size())
    return profile_on_ranks(model.workload(), sizes, CPU, refresh=True)


def case_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the cases asked for, all of them of one number of hosts. Collective."""
    cases = [CASES[i] for i in asked["cases"]]
    links = links_at(asked, sorted({case.mbit_s for case in cases}))
    for model, group in groupby(cases, key=lambda case: case.model):
        same = list(group)
        predicted: dict[Case, list[Prediction]] = {case: [] for case in same}
        measured: dict[Case, list[Measured]] = {case: [] for case in same}
        plans = {}
        for _ in range(TURNS):
            profile = profiled(model)
            for case in same:
                plan = plans[case] = plan_of(profile, links[case.mbit_s], model.goal, case.way)
                set_rate(asked["folder"], case.mbit_s)
                predicted[case].append(plan.prediction)
                measured[case].append(trained(model.workload(), plan))
        for case in same:
            yield row_of(str(case), plans[case], predicted[case], measured[case])


def ranked_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ten plans of one model, the planner's choice first. Collective."""
    model, mbit_s = RANKED[asked["ranked"]], asked["mbit_s"]
    links = links_at(asked, [mbit_s])[mbit_s]
    profile = profiled(model)
    problem = problem_for(profile, links, model.goal, CAPABILITY)
    plans = {"the planner's choice": rank_zero_decides(lambda: solve(problem).checked())}
    plans |= {str(way): plan_of(profile, links, model.goal, way) for way in WAYS}
    taken: dict[str, list[Measured]] = {name: [] for name in plans}
    for _ in range(TURNS):
        for name, plan in plans.items():
            taken[name].append(trained(model.workload(), plan))
    for name, plan in plans.items():
        yield row_of(name, plan, [plan.prediction], taken[name])


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return ranked_rows(asked) if "ranked" in asked else case_rows(asked)


def error_of(row: Row) -> float:
    """Relative, and negative where the step took longer than predicted."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def cells(row: Row) -> tuple[object, ...]:
    """The row for people: milliseconds, predicted / measured."""
    p, m = row["predicted"], row["measured"]
    return (
        f"{row['case']}: {row['layout']}",
        f"{1e3 * row['predicted_s']:.1f} / {1e3 * row['measured_s']:.1f}",
        f"{1e3 * row['low_s']:.1f} to {1e3 * row['high_s']:.1f}",
        f"{error_of(row):+.1%}",
        *(f"{1e3 * p[part]:.1f} / {1e3 * m[part]:.1f}" for part in m),
        f"{1e3 * p['waiting_s']:.1f}",
        f"{row['predicted_bytes'] / 1e6:.1f} / {row['measured_bytes'] / 1e6:.1f}",
    )


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """What the rows come to."""
    errors = [abs(error_of(row)) for row in rows]
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    return {
        "median_abs_error": median(errors), "max_abs_error": max(errors), "inside": fmean(inside),
    }  # fmt: skip


def rank_correlation(rows: Sequence[Row]) -> float:
    """Spearman's, of the predicted and the measured order; equal figures share their ranks."""
    predicted, measured = ([row[name] for row in rows] for name in ("predicted_s", "measured_s"))
    return float(spearmanr(predicted, measured).statistic)


def ranking(asked: Any) -> None:
    """Runs ten plans of each model, and compares the orders."""
    found = []
    for number, model in enumerate(RANKED):
        if asked.cases and not any(word in model.name for word in asked.cases):
            continue
        rows = on_a_bed(__file__, {"ranked": number, "mbit_s": SLOW})
        best_s = min(row["measured_s"] for row in rows)
        one = {
            "model": model.name, "rows": rows, "rank_correlation": rank_correlation(rows),
            "choice_over_best": rows[0]["measured_s"] / best_s - 1,
        }  # fmt: skip
        found.append(one)
        rows = sorted(rows, key=lambda row: row["measured_s"])
        print_table(f"{model.name}, quickest first, ms", HEADINGS, map(cells, rows))
        correlation, over = one["rank_correlation"], one["choice_over_best"]
        text = (
            f"{model.name}: rank correlation {correlation:.2f}; the planner's choice is {over:.1%} "
            "over the quickest"
        )
        print(text)
        part = f"{markdown(HEADINGS, map(cells, rows))}\n\n{text}"
        put_into(asked.markdown, f"ranking {model.name}", part)
    print_json({"models": found})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cases", nargs="+", help="only those whose name contains one of these")
    parser.add_argument("--ranking", action="store_true", help="the order of ten plans instead")
    parser.add_argument("--keep", type=Path, help="a file of rows (JSON lines), to go on from")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    if asked.ranking:
        ranking(asked)
        return
    rows = known(asked.keep)
    there = {row["case"] for row in rows}
    wanted = [
        (number, case)
        for number, case in enumerate(CASES)
        if str(case) not in there and any(word in str(case) for word in asked.cases or [""])
    ]
    for hosts, group in groupby(wanted, key=lambda pair: pair[1].hosts):
        numbers = [number for number, _ in group]
        for row in on_a_bed(__file__, {"cases": numbers}, hosts):
            rows.append(row)
            keep(asked.keep, row)
            print(f"{row['case']}: {error_of(row):+.1%}", file=sys.stderr)
    if not rows:
        sys.exit(
            f"no case is named {', '.join(asked.cases)}: cases are {'; '.join(map(str, CASES))}"
        )
    report(rows, asked.markdown)


def report(rows: Sequence[Row], page: Path | None) -> None:
    """The table, what the rows come to, and all of them for machines."""
    print_table("predicted / measured, ms (peak memory in MB)", HEADINGS, map(cells, rows))
    found, load = summary(rows), max(row["load"] for row in rows)
    text = (
        f"{len(rows)} cases: median error {found['median_abs_error']:.1%}, largest "
        f"{found['max_abs_error']:.1%}, {found['inside']:.0%} of the measured steps inside their "
        f"intervals; load up to {load:.1f} on {cores()} cores, the ranks' own included"
    )
    print(text)
    put_into(page, "rows", f"{markdown(HEADINGS, map(cells, rows))}\n\n{text}")
    print_json({"rows": rows, **found})


if __name__ == "__main__":
    run(rank_rows, main)
