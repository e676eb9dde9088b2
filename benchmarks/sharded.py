"""Sharded exchange on the test bed, beside dense exchange by priority and FSDP2.

    python benchmarks/sharded.py --models gpt-mini --optimizers momentum adamw

Needs root. Two hosts with a core each, all systems in the same processes, in turns. ``waiting`` is
sharded exchange whose ``step()`` returns when the last gather has been issued, as it must on NCCL.
``predicted`` are the planner's simulations with the times measured here. The last line is one JSON
object: rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from exchange import BATCHES, LIMIT_S, START_MBIT_S, serve_rates, shown
from exchange_parts import Parts, Times
from exchange_rank import (
    MIB,
    Found,
    System,
    Turns,
    by_fsdp,
    fresh,
    goodput,
    plan_of,
    set_rate,
    slowest,
)
from meshwright.executor.apply import apply
from meshwright.executor.parallel import run_of
from meshwright.executor.sharded import ShardedParcel
from meshwright.executor.start import start_process_group
from meshwright.planner.plan import Plan
from meshwright.planner.schedule import Message, Step, work_of
from meshwright.planner.simulate import simulate
from meshwright.planner.slices import cut
from meshwright.planner.step import LINKS
from meshwright.planner.variants import with_exchange
from meshwright.testbed import Bed
from meshwright.units.discover import discover

SLICE_BYTES = 4 * MIB
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True),
}


def planned(found: Found, plan: Plan, optimizer: str) -> System:
    """A model under ``plan``. Collective."""
    system = System(fresh(found.name), found.times.step_s)
    system.optimizer = OPTIMIZERS[optimizer](system.model.parameters())
    apply(system.model, system.optimizer, plan)
    system.finish = run_of(system.model).finish_steps
    return system


def waiting(found: Found, plan: Plan, optimizer: str) -> System:
    """The same, whose steps wait until the last gather has been issued. Collective."""
    system = planned(found, plan, optimizer)
    exchange, step = run_of(system.model).priority, system.optimizer.step
    assert exchange is not None

    def wait() -> None:
        step()
        for parcel in exchange.parcels:
            if isinstance(parcel, ShardedParcel) and parcel.trip is not None:
                parcel.trip.wait_for(parcel)

    system.optimizer.step = wait  # type: ignore[method-assign]
    return system


def state_bytes(system: System) -> int:
    """Of the optimizer's state on this rank."""
    system.optimizer.state_dict()
    values = [v for state in system.optimizer.state.values() for v in state.values()]
    values = [getattr(v, "_local_tensor", v) for v in values if isinstance(v, torch.Tensor)]
    return sum(v.numel() * v.element_size() for v in values if v.ndim)


def predicted(found: Found, *, sharded: bool) -> float:
    """A step as the planner simulates it."""
    world, chain, messages = dist.get_world_size(), found.chain, []
    if sharded:
        chain.update_s[:] /= world
    for k in reversed(range(len(found.parts.sizes))):
        for piece in cut([found.parts.sizes[k]], SLICE_BYTES):
            seconds = float(chain.exchange_s[1][k]) / piece.parts
            messages.append(Message((k,), LINKS[1], seconds, k))
    return simulate(Step(work_of(chain, 1, "priority"), tuple(messages), "priority")).step_s


def row_of(found: Found, batch: Any, asked: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """All systems in turns. Collective."""
    dense = plan_of(found, SLICE_BYTES)
    sharded = with_exchange(dense, "sharded")
    systems = {
        "dense": planned(found, dense, optimizer),
        "sharded": planned(found, sharded, optimizer),
        "waiting": waiting(found, sharded, optimizer),
    }
    if asked["fsdp"]:
        systems["fsdp"] = by_fsdp(found)
        systems["fsdp"].optimizer = OPTIMIZERS[optimizer](systems["fsdp"].model.parameters())
    seconds = Turns(found, batch, asked["steps"], asked["rounds"]).measure(systems)
    return {
        **{f"{key}_s": value for key, value in seconds.items()},
        **{f"{key}_state_bytes": state_bytes(system) for key, system in systems.items()},
        "dense_predicted_s": slowest(predicted(found, sharded=False)),
        "sharded_predicted_s": slowest(predicted(found, sharded=True)),
    }


def alone(name: str, batch: Any, units: Any, optimizer: str) -> tuple[Parts, Times]:
    """Compute alone, with that optimizer. Collective."""
    system = System(fresh(name), 0.0)
    system.optimizer = OPTIMIZERS[optimizer](system.model.parameters())
    parts = Parts(system, units)
    return parts, parts.times(batch, slowest)


def rank(asked: dict[str, Any]) -> None:
    """What each rank runs; rank 0 writes a row for each optimizer and ratio. Collective."""
    torch.set_num_threads(1)
    start_process_group()
    folder, name = Path(asked["folder"]), asked["model"]
    workload = fresh(name)
    torch.manual_seed(1 + dist.get_rank())
    batch = workload.make_batch(asked["batch"])
    units = discover(workload.model, workload.make_batch(2)).units
    for optimizer in asked["optimizers"]:
        parts, times = alone(name, batch, units, optimizer)
        for ratio in asked["ratios"]:
            mbit_s = 8e-6 * sum(parts.sizes) / (ratio * times.step_s)
            set_rate(folder, mbit_s)
            rate = median(goodput(sum(parts.sizes)) for _ in range(3))
            figures = row_of(Found(name, parts, times, rate, None), batch, asked, optimizer)
            row = {
                "model": name, "optimizer": optimizer, "ratio": ratio, "mbit_s": mbit_s,
                "compute_s": times.step_s, "update_s": times.update_s, **figures,
            }  # fmt: skip
            if dist.get_rank() == 0:
                with (folder / "rows").open("a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measure(model: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A model's rows, on a bed of its own. Exits where the ranks failed."""
    with tempfile.TemporaryDirectory(prefix="sharded-") as name, Bed(2, START_MBIT_S) as bed:
        folder, over = Path(name), threading.Event()
        threading.Thread(target=serve_rates, args=(bed, folder, over), daemon=True).start()
        told = {**vars(asked), "folder": name, "model": model, "batch": BATCHES[model] // 2}
        try:
            done = bed.launch([__file__, "--rank", json.dumps(told)], timeout_s=LIMIT_S)
        finally:
            over.set()
        if any(d.returncode for d in done):
            sys.exit("\n".join(d.stderr[-3000:] for d in done))
        return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


def main() -> None:
    """Measures what was asked for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=["gpt-mini"])
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["adamw"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0])
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--fsdp", action="store_true", help="measures FSDP2 as well")
    asked = parser.parse_args()
    rows = [row for model in asked.models for row in measure(model, asked)]
    for row in rows:
        print("  ".join(f"{k} {shown(v)}" for k, v in row.items()), flush=True)
    print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(json.loads(sys.argv[2]))
    else:
        main()
