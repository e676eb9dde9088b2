"""Local steps against dense exchange: what they train to, and the step that is predicted of them.

    python benchmarks/local_steps.py [--only accuracy|times] [--markdown PAGE]

Two hosts of the test bed, which needs root and iproute2. On fast links: test accuracy on the digits
over three seeds, and the test loss of a small language model, after equal numbers of steps and on
the way there, with dense exchange and with local steps, evaluated with the parameters that hosts
have agreed on. On slow links: the plan that ``--allow-local-steps`` gives by what is measured
there, its predicted step and the measured one, beside dense exchange. Prints tables, and as the
last line one JSON object. With ``--markdown`` the page's parts are put between its marks.
"""

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from lossy import BATCH, OPTIMIZERS, SEEDS, SLICE_BYTES, TEXT_BATCH, batches, say
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.train import share_of
from meshwright.executor.parallel import agreed_state_dict, run_of
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.models.zoo import build
from meshwright.planner.cost.fragments import first_units
from meshwright.planner.schema.goal import Goal, make_goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.local_steps import MIXING, LocalSteps
from meshwright.planner.schema.plan import Plan, UnitPlan
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.profiler.links import probe
from meshwright.profiler.model import profile
from meshwright.profiler.overhead import plan_by_hand
from ranks import on_a_bed, run, set_rate, slowest
from rows import command_line, markdown, print_json, print_table, put_into
from systems import PLAN_S, PROBE_S, System
from testbed import missing

FAST_MBIT_S = 10_000.0
SLOW_MBIT_S = (50.0, 20.0)
# Multiples of 32, so that every round is a whole one.
STEPS, TEXT_STEPS = 224, 384
LOOKS = 4
"""So often a model is evaluated on its way."""
TEXT_TEST = 512
DENSE_STEPS, ROUNDS = 6, 3
PROFILED, PROFILE_S = (16, 32, 64), 15.0
"""Batch sizes of a rank; the last is its part of a step."""


class Way(NamedTuple):
    """Dense exchange (no ``inner_steps``), or local steps."""

    inner_steps: int = 0
    fragments: int = 1
    delay: int = 0
    average: bool = False
    """Whether the average is taken as it is, with no outer momentum."""

    def __str__(self) -> str:
        if not self.inner_steps:
            return "dense"
        parts = f", {self.fragments} fragments, {self.delay} late" if self.fragments > 1 else ""
        plain = ", plain average" if self.average else ""
        return f"local {self.inner_steps}{parts}{plain}"


WAYS = (
    Way(), Way(8), Way(8, 4, 2), Way(8, average=True), Way(32), Way(32, 4, 8),
    Way(32, average=True),
)  # fmt: skip


class Training(System):
    """A workload in training on this rank, from a seed. Collective."""

    def __init__(self, name: str, way: Way, *, batch: int = BATCH, seed: int = 0) -> None:
        torch.manual_seed(seed)
        workload = build(name)
        found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
        units = [
            UnitPlan(
                name=spec.name, kind=spec.kind, modules=spec.modules,
                batched_inputs=spec.batched_inputs, batch_dims=spec.batch_dims,
                layout=data_parallel(dist.get_world_size()),
            )
            for spec in found.units
        ]  # fmt: skip
        goal = Goal(batch=batch, batch_statistics="local")
        plan = plan_by_hand(units, goal, "priority", SLICE_BYTES, "benchmark")
        if way.inner_steps:
            plan = apart(plan, way, workload.model)
        make = OPTIMIZERS[name.partition("-")[0]]
        super().__init__(workload, make, plan, timeout_s=120)
        self.model.train()

    def parts(self, batch: Batch) -> tuple[Batch, ...]:
        return (share_of(batch, run_of(self.model)),)

    @torch.no_grad()
    def score(self, test: Batch) -> tuple[float, float]:
        """(loss, share that is right) of a test set, with the parameters that hosts agree on."""
        state = agreed_state_dict(self.model)
        alone = build(self.workload.name)
        alone.model.load_state_dict(state)
        alone.model.eval()
        outputs = alone.model(*test.args, **test.kwargs)
        return float(alone.loss(outputs, test.target)), float(alone.accuracy(outputs, test.target))


def apart(plan: Plan, way: Way, model: torch.nn.Module) -> Plan:
    """The plan with local steps."""
    sizes = [
        sum(p.numel() for path in unit.modules for p in model.get_submodule(path).parameters())
        for unit in plan.units
    ]
    local = LocalSteps(
        hosts=plan.world_size, inner_steps=way.inner_steps, delay=way.delay,
        fragments=first_units(sizes, way.fragments), mixing=MIXING if way.delay else 1.0,
        **({"outer_lr": 1.0, "outer_momentum": 0.0} if way.average else {}),
    )  # fmt: skip
    return msgspec.structs.replace(plan, local_steps=local)


def curve(training: Training, drawn: list[Batch], test: Batch) -> list[tuple[float, float]]:
    """(loss, share that is right) on the way, the last at the end. Collective."""
    found, each = [], len(drawn) // LOOKS
    for number, batch in enumerate(drawn):
        training.step(batch)
        if (number + 1) % each == 0:
            found.append(training.score(test))
    return found


def digits() -> dict[str, list[list[tuple[float, float]]]]:
    """The curves of all seeds. Collective."""
    data = build("cnn-digits").data
    train, test = data("train"), data("test")
    found: dict[str, list[list[tuple[float, float]]]] = {str(way): [] for way in WAYS}
    for seed in range(SEEDS):
        drawn = batches(train, BATCH, STEPS, seed)
        for way in WAYS:
            training = Training("cnn-digits", way, seed=seed)
            found[str(way)].append(curve(training, drawn, test))
            say(f"seed {seed} {way}: {found[str(way)][-1]}")
    return found


def text() -> dict[str, list[tuple[float, float]]]:
    """The curve of a small language model. Collective."""
    data = build("gpt-tiny").data
    test, drawn = data("test"), batches(data("train"), TEXT_BATCH, TEXT_STEPS)
    found = {}
    for way in WAYS:
        training = Training("gpt-tiny", way, batch=TEXT_BATCH)
        found[str(way)] = curve(training, drawn, test.slice(0, min(TEXT_TEST, test.size)))
        say(f"text {way}: {found[str(way)]}")
    return found


def planned(problem: Problem) -> Plan:
    return solve(problem, "auto", PLAN_S).checked()


def timed(folder: str, mbit_s: float) -> dict[str, Any]:
    """What is predicted of the plans with and without local steps, and measured. Collective."""
    set_rate(folder, mbit_s)
    model = rank_zero_decides(
        lambda: profile(
            build("cnn-digits"), batches=PROFILED, optimizers=("momentum",), budget_s=PROFILE_S
        )
    )
    cluster = probe(budget_s=PROBE_S)
    row: dict[str, Any] = {"mbit_s": mbit_s}
    for name, allowed in (("together", False), ("apart", True)):
        goal = make_goal(BATCH, optimizer="momentum", allow_local_steps=allowed)
        problem = problem_for(model, cluster, goal, CAPABILITY)
        plan = rank_zero_decides(partial(planned, problem))
        local = plan.local_steps
        system = System(build("cnn-digits"), OPTIMIZERS["cnn"], plan, timeout_s=300)
        drawn = batches(build("cnn-digits").data("train"), BATCH, 12)
        # In the first round nothing is under way at its beginning, as there is in all others.
        length = local.inner_steps if local else DENSE_STEPS
        steps = length * (ROUNDS if local else 1)
        for number in range(length if local else 2):
            system.step(part_of(drawn[number % len(drawn)], system))
        system.finish()
        dist.barrier()
        start = time.perf_counter()
        for number in range(steps):
            system.step(part_of(drawn[number % len(drawn)], system))
        system.finish()
        taken_s = slowest(time.perf_counter() - start) / steps
        row |= {
            f"{name}_predicted_s": plan.prediction.step_s, f"{name}_measured_s": taken_s,
            f"{name}_low_s": plan.prediction.low_s, f"{name}_high_s": plan.prediction.high_s,
        }  # fmt: skip
        if allowed:
            row["local_steps"] = None if local is None else msgspec.to_builtins(local)
            row["ddp_predicted_s"] = plan.baseline.step_s
    say(str(row))
    return row


def part_of(batch: Batch, system: System) -> Batch:
    return share_of(batch, run_of(system.model))


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each part as one row. Collective."""
    if asked["only"] in ("", "accuracy"):
        yield {"digits": digits(), "text": text()}
    if asked["only"] in ("", "times"):
        yield {"timed": [timed(asked["folder"], rate) for rate in SLOW_MBIT_S]}


CURVES = (
    "exchange", *(f"digits, loss at {STEPS * (i + 1) // LOOKS}" for i in range(LOOKS)),
    "accuracy, 3 seeds", *(f"text, loss at {TEXT_STEPS * (i + 1) // LOOKS}" for i in range(LOOKS)),
)  # fmt: skip
TIMES = (
    "Mbit/s", "exchange in every step: predicted ms", "measured", "local steps: inner steps",
    "fragments", "late", "predicted ms", "measured", "measured / predicted", "times as fast",
)  # fmt: skip


def curve_lines(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each way: mean losses over seeds, final accuracies, text losses."""
    lines = []
    for way in map(str, WAYS):
        seeds = found["digits"][way]
        losses = [mean(seed[i][0] for seed in seeds) for i in range(LOOKS)]
        lines.append(
            (
                way, *(f"{loss:.3f}" for loss in losses),
                " ".join(f"{seed[-1][1]:.1%}" for seed in seeds),
                *(f"{loss:.3f}" for loss, _ in found["text"][way]),
            )
        )  # fmt: skip
    return lines


def time_lines(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each rate."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        local = row["local_steps"] or {}
        predicted, measured = row["apart_predicted_s"], row["apart_measured_s"]
        lines.append(
            (
                f"{row['mbit_s']:.0f}", f"{1e3 * row['together_predicted_s']:.0f}",
                f"{1e3 * row['together_measured_s']:.0f}", str(local.get("inner_steps", "none")),
                str(len(local.get("fragments", ()))), str(local.get("delay", "")),
                f"{1e3 * predicted:.1f}", f"{1e3 * measured:.1f}", f"{measured / predicted:.2f}",
                f"{row['together_measured_s'] / measured:.1f}",
            )
        )  # fmt: skip
    return lines


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--markdown", type=Path, help="puts the results into that page")
    parser.add_argument("--only", choices=("", "accuracy", "times"), default="")
    asked = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(reason)
    result: dict[str, Any] = {}
    for row in on_a_bed(__file__, {"only": asked.only}, mbit_s=FAST_MBIT_S):
        result |= row
    tables = {}
    if "digits" in result:
        tables["accuracy"] = CURVES, curve_lines(result)
    if "timed" in result:
        tables["times"] = TIMES, time_lines(result["timed"])
    for name, (head, lines) in tables.items():
        print_table(name, head, lines)
        put_into(asked.markdown, name, markdown(head, lines))
        kept = {k: v for k, v in result.items() if (k == "timed") == (name == "times")}
        put_into(asked.markdown, f"last line, {name}", f"```json\n{json.dumps(kept)}\n```")
    print_json(result)


if __name__ == "__main__":
    run(rank_rows, main)
