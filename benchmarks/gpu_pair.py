"""Gradients by priority against DistributedDataParallel, on two ranks that share one GPU over NCCL.

    python benchmarks/gpu_pair.py [--models resnet50-32 gpt-mini] [--markdown docs/results/gpu.md]

NCCL from 2.30 on lets ranks share a GPU. Without one the ranks are processes over gloo with a small
model, which shows only that the benchmark itself works. Systems take turns in the same processes:
DDP with several sizes of buckets, and plain data parallelism in buckets, in slices by priority, and
sharded. The two ranks divide the device's computing, and what travels crosses its own memory: it is
the order of things that is compared here, not a network. Prints a table of milliseconds, and as the
last line one JSON object: rows.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshwright.executor.comm.moments import now, seconds_between
from meshwright.executor.comm.setups import device_name
from meshwright.executor.launch.devices import SHARING
from meshwright.executor.launch.start import local_device
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.plan import ExchangePolicy, Plan, ScheduleName, UnitPlan
from meshwright.profiler.overhead import plan_by_hand
from ranks import joined
from rows import command_line, markdown, print_json, print_table, put_into
from systems import BATCHES, BUCKETS_MB, SLICE_BYTES, WARM_UP, System, fresh, medians, own_batch
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, ROUNDS = 2, 10, 5
ON_CPUS = ("cnn-digits",)
CPU_BATCH = 16
OURS: tuple[tuple[str, ScheduleName, ExchangePolicy], ...] = (
    ("buckets", "barrier", "dense"),
    ("priority", "priority", "dense"),
    ("sharded", "priority", "sharded"),
)


def plan_for(name: str, schedule: ScheduleName, exchange: ExchangePolicy) -> Plan:
    """Plain data parallelism of the model's units."""
    workload = fresh(name)
    units = (
        UnitPlan(
            name=unit.name, kind="other", modules=unit.modules, layout=data_parallel(RANKS),
            exchange=exchange if unit.modules else "dense",
        )
        for unit in discover(workload.model, workload.make_batch(2)).units
        if unit.modules
    )  # fmt: skip
    goal = Goal(batch=RANKS, optimizer="momentum")
    return plan_by_hand(units, goal, schedule, SLICE_BYTES, "benchmark")


def system(name: str, device: torch.device, plan: Plan | None, bucket_mb: int = 25) -> System:
    """The model on the device, under a plan or by DDP."""
    workload = fresh(name)
    workload.model.to(device)
    made = System(workload, plan=plan)
    if plan is None:
        made.model = DistributedDataParallel(made.model, bucket_cap_mb=bucket_mb)
    return made


def turn(one: System, batch: Batch, device: torch.device, steps: int) -> float:
    """Seconds of a step, by the device's time."""
    one.step(batch)
    start = now(device)
    one.seconds(batch, steps)
    one.finish()
    return seconds_between(start, now(device)) / steps


def row_of(name: str, device: torch.device) -> dict[str, Any]:
    """Seconds of a step by each system. Collective."""
    batch = own_batch(name, BATCHES.get(name, CPU_BATCH)).to(device)
    systems = {f"ddp {mb}": system(name, device, None, mb) for mb in BUCKETS_MB}
    systems |= {
        key: system(name, device, plan_for(name, schedule, exchange))
        for key, schedule, exchange in OURS
    }
    for one in systems.values():
        turn(one, batch, device, WARM_UP)
    turns = {key: partial(turn, one, batch, device, STEPS) for key, one in systems.items()}
    return {"model": name, "device": device_name(device), **medians(turns, ROUNDS)}


def report(rows: Sequence[dict[str, Any]], page: Path | None) -> None:
    """The table in milliseconds, and all rows for machines."""
    keys = [key for key in rows[0] if key not in ("model", "device")]
    lines = [(row["model"], *(f"{1e3 * row[key]:.2f}" for key in keys)) for row in rows]
    headings = ("model", *keys)
    print_table(f"ms of a step, two ranks on {rows[0]['device']}", headings, lines)
    put_into(page, "pair", markdown(headings, lines, left=(0,)))
    print_json({"rows": list(rows)})


def joined_on_a_device() -> bool:
    """As ``ranks.joined``: two ranks, which share the GPU where there is one."""
    if torch.cuda.is_available():
        os.environ |= {SHARING: "1", "NCCL_NVLS_ENABLE": "0"}
    return joined(RANKS)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=tuple(BATCHES) if on_gpu else ON_CPUS,
                        help="reference workloads of which a batch is known here")  # fmt: skip
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    if not joined_on_a_device():
        return
    rows = [row_of(name, local_device()) for name in asked.models]
    if dist.get_rank() == 0:
        report(rows, asked.markdown)


if __name__ == "__main__":
    main()
