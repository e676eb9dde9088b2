"""Gradient exchange on the test bed: priority, DDP, FSDP2 and the planner's choice, and the bound.

    python benchmarks/exchange.py --keep rows.jsonl --markdown docs/results/exchange.md

Needs root. Builds a bed of hosts with a core each, starts a rank on every one with torchrun, and
measures each model at bandwidths where plain communication takes ``ratio`` times the compute.
Systems take turns in the same processes. With ``--keep`` rows are written to a file as they come,
and those that it has are not measured again; with ``--markdown`` all of them are put between the
page's marks. ``--wire`` compares gradients in fewer bytes instead: DDP with its hooks, ours as
bfloat16, with the loss after equal steps. ``--each 2`` puts two ranks on every host and compares
gradients that are added up there before hosts exchange them. ``--ablation`` compares the four ways
{first come first served, priority} × {whole gradients, slices}, with what the planner's simulation
says. The last line is one JSON object: rows. An efficiency (bound / measured) above 1.02 means that
the benchmark is wrong, and fails it.
"""

import gc
import operator
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import by_host
import torch.distributed as dist
import wires
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.gradients.order import Orders, SendOrder
from meshwright.executor.parallel import run_of
from meshwright.models.workload import Batch
from meshwright.planner.cost.step_time import priority_bound
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import searched
from meshwright.planner.solve.solver import solve
from meshwright.profiler.links import probe
from meshwright.profiler.model import profile
from ranks import goodput, on_a_bed, ring_bytes, run, set_rate, slowest
from rows import command_line, keep, known, markdown_of, print_json, print_row, put_into
from systems import (
    BATCHES,
    BUCKETS_MB,
    PLAN_S,
    PROBE_S,
    SLICE_BYTES,
    Jitter,
    Measured,
    System,
    UnitClock,
    by_ddp,
    by_fsdp,
    fresh,
    in_turns,
    own_batch,
    simulated,
)

TOO_GOOD = 1.02
MIB = 2**20
# A slice size that leaves every parameter whole.
WHOLE = 2**40
COLUMNS = (
    "model", "hosts", "batch", "ratio", "mbit_s", "compute_s", "ddp_default_s", "ddp_best_s",
    "fsdp_s", "priority_s", "plan_s", "bound_s", "efficiency", "exchange_processor_s",
    "ddp_jitter_s", "priority_jitter_s",
    "ddp_default / priority", "ddp_best / priority", "ddp_best / plan",
)  # fmt: skip


def timed_fsdp(measured: Measured, batch: Batch, steps: int) -> tuple[float | None, str]:
    """Seconds of a step by FSDP2, or why it does not run this model. Collective."""
    try:
        system = by_fsdp(measured)
        # One turn after one that does not count, as it is slow.
        system.turn(batch, 1)
        return slowest(system.turn(batch, steps)), ""
    # It fails alike on all ranks, so nobody waits for one that has given up.
    except (RuntimeError, ValueError, AttributeError) as error:
        return None, str(error).splitlines()[0]


def compared(
    measured: Measured, model: ModelProfile, batch: Batch, asked: dict[str, Any]
) -> dict[str, Any]:
    """DDP, FSDP2, priority, and the planner's own lossless choice for the links as ``probe``
    measures them: one row. Collective."""
    systems = {f"ddp_{mb}": by_ddp(measured, mb) for mb in BUCKETS_MB}
    systems["priority_s"] = System(measured.workload(), plan=measured.plan())
    cluster = probe(budget_s=PROBE_S)
    goal = Goal(batch=batch.size * dist.get_world_size(), optimizer="momentum")
    problem = Problem(model, cluster, goal, searched(CAPABILITY), any_schedule=True)
    plan = rank_zero_decides(lambda: solve(problem, "auto", PLAN_S).checked())
    systems["plan_s"] = System(measured.workload(), plan=plan)
    seconds = in_turns(systems, batch, asked["steps"], asked["rounds"])
    fsdp_s, failed = timed_fsdp(measured, batch, asked["steps"])
    best_ddp = min(BUCKETS_MB, key=lambda mb: seconds[f"ddp_{mb}"])
    keys = f"ddp_{best_ddp}", "priority_s"
    for key in keys:
        Jitter(systems[key].model, measured.times.step_s)
    Jitter.on = True
    shaken = in_turns({key: systems[key] for key in keys}, batch, asked["steps"], 1)
    Jitter.on = False
    return {
        "ddp_best_s": seconds[keys[0]], "ddp_default_s": seconds["ddp_25"],
        "fsdp_s": fsdp_s, "fsdp_failed": failed,
        "priority_s": seconds[keys[1]], "plan_s": seconds["plan_s"],
        "ddp_bucket_mb": best_ddp, "slice_mib": SLICE_BYTES // MIB,
        "plan_schedule": plan.schedule, "plan_slice_mib": plan.message_bytes / MIB,
        "plan_divided": sum(u.layout.degree > 1 for u in plan.units),
        "ddp_jitter_s": shaken[keys[0]], "priority_jitter_s": shaken[keys[1]],
    }  # fmt: skip


def ablated(measured: Measured, batch: Batch, asked: dict[str, Any]) -> dict[str, Any]:
    """First come, first served or by priority, whole gradients or slices: measured, predicted.
    Collective."""
    systems, row = {}, {}
    for order, size in product(("fifo", "priority"), ("whole", "slices")):
        slice_bytes = SLICE_BYTES if size == "slices" else WHOLE
        plan, urgent = measured.plan(slice_bytes), order == "priority"
        system = systems[f"{order}_{size}_s"] = System(measured.workload(), plan=plan)
        if not urgent:
            # No plan asks for first come, first served: it is what priority is measured against.
            live = run_of(system.model)
            live.priority._orders = SendOrder(
                Orders(plan, urgent=False), live.priority.grad_groups, live.control
            )
        predicted_s = simulated(measured.chain, measured.sizes, slice_bytes, urgent)
        row[f"{order}_{size}_predicted_s"] = slowest(predicted_s)
    return {**in_turns(systems, batch, asked["steps"], asked["rounds"]), **row}


def one_row(
    measured: Measured,
    model: ModelProfile | None,
    batch: Batch,
    asked: dict[str, Any],
    ratio: float,
) -> dict[str, Any]:
    """Sets the rate, measures the link and the systems. Collective."""
    sent = ring_bytes(sum(measured.sizes))
    mbit_s = 8e-6 * sent / (ratio * measured.times.step_s)
    set_rate(asked["folder"], mbit_s)
    # Measured before the systems run and after: the wire may have had other work in between.
    links = [goodput(sent) for _ in range(3)]
    measured = measured._replace(bytes_per_s=median(link.bytes_per_s for link in links))
    if model is None:
        figures = ablated(measured, batch, asked)
    else:
        row_of = compared
        if asked["wire"]:
            row_of = wires.compared_wires
        elif asked["each"] > 1:
            row_of = by_host.compared_hosts
        figures = row_of(measured, model, batch, asked)
    links += [goodput(sent) for _ in range(2)]
    # What disturbs a measurement makes a link slower: the quickest gives a bound that holds.
    bytes_per_s = max(link.bytes_per_s for link in links)
    each = asked["each"]
    there = dist.get_world_size() // each
    less = by_host.across(there, each) if there > 1 else 1.0
    bound_s, half_s, by_host_s = (
        slowest(priority_bound(measured._replace(bytes_per_s=times * bytes_per_s).chain))
        for times in (1, 2, less)
    )
    row = {
        "model": measured.name, "hosts": there, "ratio": ratio, "mbit_s": mbit_s,
        "batch": batch.size, "compute_s": measured.times.step_s,
        "goodput_mbit_s": 8e-6 * bytes_per_s, **figures, "bound_s": bound_s,
        "exchange_processor_s": sent * median(link.processor_s_per_byte for link in links),
    }  # fmt: skip
    if asked["wire"]:
        row["bf16_bound_s"], row["efficiency"] = half_s, half_s / row["bf16_s"]
    elif each > 1:
        row["by_host_bound_s"], row["efficiency"] = by_host_s, by_host_s / row["by_host_s"]
    elif model is not None:
        row["efficiency"] = bound_s / row["priority_s"]
    return row


def _profiled(name: str, size: int) -> ModelProfile:
    return profile(
        fresh(name), batches=(max(size // 2, 1), size, 2 * size), degrees=(2,),
        optimizers=("momentum",),
    )  # fmt: skip


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All rows of one model. Collective."""
    name, size = asked["model"], asked["batch"]
    batch = own_batch(name, size)
    model = None
    if not asked["ablation"]:
        # On every rank at once where ranks share a core, as they will in training.
        own = _profiled(name, size) if asked["each"] > 1 or dist.get_rank() == 0 else None
        model = rank_zero_decides(lambda: own)
    clock = UnitClock(name)
    # Computing is measured anew for each ratio: a shared machine does not stay as quick as it was.
    for ratio in asked["ratios"]:
        gc.collect()  # systems of the ratio before, which do not all fit beside the new ones
        dist.barrier()
        measured = Measured(name, clock.sizes, clock.modules, clock.times(batch), 1.0)
        yield one_row(measured, model, batch, asked, ratio)


def page_of(rows: list[dict[str, Any]]) -> str:
    """All rows, by model, and what the targets make of those of two hosts."""
    text, ordered = table_of(rows, COLUMNS)
    two = [row for row in ordered if row["hosts"] == 2]
    return f"{text}\n\n{verdict(two)}" if two else text


def table_of(
    rows: list[dict[str, Any]], columns: Sequence[str]
) -> tuple[str, list[dict[str, Any]]]:
    """All rows, by model, with how many times as fast one way is as another; and as data."""
    models = list(BATCHES)
    ordered = sorted(rows, key=lambda r: (r["hosts"], models.index(r["model"]), r["ratio"]))
    pairs = {name: name.split(" / ") for name in columns if " / " in name}
    gains = [
        {name: f"{row[f'{a}_s'] / row[f'{b}_s']:.2f}" for name, (a, b) in pairs.items()}
        for row in ordered
    ]
    return markdown_of(map(operator.or_, ordered, gains), columns), ordered


def verdict(rows: list[dict[str, Any]]) -> str:
    """The targets beside the figures."""
    found = [row["efficiency"] for row in rows]
    slower = max(row["priority_s"] / row["ddp_best_s"] for row in rows)
    equal = [row["ddp_best_s"] / row["priority_s"] for row in rows if row["ratio"] == 1.0]
    lines = [
        "Of two hosts:\n",
        f"- Efficiency (bound / measured): {median(found):.2f} in the median row (target 0.90), "
        f"{min(found):.2f} in the worst (0.80).",
        f"- Priority against the best DDP: at most {slower:.2f} times its time (1.03).",
    ]
    if equal:
        lines.append(
            f"- Where communication takes as long as compute, the best DDP takes {min(equal):.2f} "
            f"to {max(equal):.2f} times as long as priority (1.2)."
        )
    # Its linear layers have most of the parameters and little to compute: worth dividing.
    wide = [r for r in rows if r["model"] == "vgg19-32" and r["ratio"] == 4.0]
    if wide:
        gain = wide[0]["ddp_best_s"] / wide[0]["plan_s"]
        lines.append(
            f"- vgg19-32 at ratio 4: the planner's choice is {gain:.2f} times as fast (2)."
        )
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", type=int, default=1, help="ranks on a host")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--wire", action="store_true", help="gradients in fewer bytes")
    parser.add_argument("--keep", type=Path, help="a file of rows (JSON lines), to go on from")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    if asked.ablation and (asked.keep or asked.markdown):
        parser.error("--ablation prints its rows only: leave --keep and --markdown out")
    rows = known(asked.keep)
    there = {(row["model"], row["hosts"], row["ratio"]) for row in rows}
    for model in asked.models:
        ratios = [r for r in asked.ratios if (model, asked.hosts, r) not in there]
        request = {
            "model": model, "batch": BATCHES[model], "ratios": ratios,
            "steps": asked.steps, "rounds": asked.rounds, "ablation": asked.ablation,
            "wire": asked.wire, "each": asked.each,
        }  # fmt: skip
        for row in on_a_bed(__file__, request, asked.hosts, each=asked.each) if ratios else ():
            rows.append(row)
            keep(asked.keep, row)
            print_row(row)
    if asked.markdown:
        if asked.each > 1:
            put_into(asked.markdown, "host rows", table_of(rows, by_host.COLUMNS)[0])
        elif asked.wire:
            put_into(asked.markdown, "wire rows", table_of(rows, wires.COLUMNS)[0])
        else:
            put_into(asked.markdown, "rows", page_of(rows))
    print_json({"rows": rows})
    # A row may be a little quicker by noise.
    wrong = [row for row in rows if row.get("efficiency", 0.0) > TOO_GOOD]
    if wrong:
        sys.exit(f"{len(wrong)} rows are quicker than their bound: the benchmark is wrong")


if __name__ == "__main__":
    run(rank_rows, main)
