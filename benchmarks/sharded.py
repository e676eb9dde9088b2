"""Sharded exchange on the test bed, beside dense exchange by priority and FSDP2.

    python benchmarks/sharded.py --models gpt-mini --optimizers momentum adamw

Needs root. Two hosts with a core each, all systems in the same processes, in turns. ``waiting`` is
sharded exchange whose ``step()`` returns when the last gather has been issued, as it must on NCCL;
``fully`` shards the parameters too, as FSDP2 does; ``weight_bytes`` are a rank's between steps.
``predicted`` are the planner's simulations with the times measured here. The last line is one JSON
object: rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from exchange import BATCHES, on_a_bed, shown
from exchange_parts import Parts, Times
from exchange_rank import (
    SLICE_BYTES,
    Found,
    Optimizing,
    System,
    Turns,
    by_fsdp,
    by_plan,
    fresh,
    goodput,
    momentum,
    plan_of,
    set_rate,
    simulated,
    slowest,
)
from meshwright.executor.gradients.fully_sharded import FullyShardedGradGroup
from meshwright.executor.gradients.pending import bare
from meshwright.executor.gradients.sharded import ShardedGradGroup
from meshwright.executor.launch.start import start_process_group
from meshwright.executor.parallel import is_parallel, run_of
from meshwright.models.units.discover import discover
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import SHARDING, ExchangePolicy, Plan

OPTIMIZERS: dict[str, Optimizing] = {
    "momentum": momentum,
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True),
}


def waiting(found: Found, plan: Plan, optimizing: Optimizing) -> System:
    """A model under ``plan`` whose steps wait until the last gather has been issued. Collective."""
    system = by_plan(found, plan, optimizing)
    exchange, step = run_of(system.model).priority, system.optimizer.step
    assert exchange is not None

    def wait() -> None:
        step()
        for grad_group in exchange.grad_groups:
            if isinstance(grad_group, ShardedGradGroup) and grad_group.pipeline is not None:
                grad_group.pipeline.wait_for(grad_group)

    system.optimizer.step = wait  # type: ignore[method-assign]
    return system


def state_bytes(system: System) -> int:
    """Of the optimizer's state on this rank."""
    system.optimizer.state_dict()
    values = [v for state in system.optimizer.state.values() for v in state.values()]
    values = [getattr(v, "_local_tensor", v) for v in values if isinstance(v, torch.Tensor)]
    return sum(v.numel() * v.element_size() for v in values if v.ndim)


def weight_bytes(system: System) -> int:
    """Of parameters on this rank between steps."""
    local = [bare(getattr(p, "_local_tensor", p)) for p in system.model.parameters()]
    held = sum(p.untyped_storage().nbytes() for p in local)
    exchange = run_of(system.model).priority if is_parallel(system.model) else None
    grad_groups = exchange.grad_groups if exchange is not None else ()
    fully = [p for p in grad_groups if isinstance(p, FullyShardedGradGroup)]
    return held + sum(c.untyped_storage().nbytes() for p in fully for c in p.chunks.values())


def predicted(found: Found, policy: ExchangePolicy = "dense") -> float:
    """A step as the planner simulates it."""
    chain = found.chain
    if policy in SHARDING:
        chain.update_s[:] /= dist.get_world_size()
    if policy == "fully_sharded":
        chain.exchange_s[:] *= 1.5  # a gather more, of what is a reduce-scatter and a gather
    return simulated(chain, found.parts.sizes, SLICE_BYTES)


def row_of(found: Found, batch: Any, asked: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """All systems in turns. Collective."""
    dense = plan_of(found, SLICE_BYTES)
    sharded, fully = (with_exchange(dense, policy) for policy in SHARDING)
    optimizing = OPTIMIZERS[optimizer]
    systems = {
        "dense": by_plan(found, dense, optimizing),
        "sharded": by_plan(found, sharded, optimizing),
        "waiting": waiting(found, sharded, optimizing),
        "fully": by_plan(found, fully, optimizing),
    }
    if asked["fsdp"]:
        systems["fsdp"] = by_fsdp(found, optimizing)
    seconds = Turns(found, batch, asked["steps"], asked["rounds"]).measure(systems)
    return {
        **{f"{key}_s": value for key, value in seconds.items()},
        **{f"{key}_state_bytes": state_bytes(system) for key, system in systems.items()},
        **{f"{key}_weight_bytes": weight_bytes(system) for key, system in systems.items()},
        "dense_predicted_s": slowest(predicted(found)),
        "sharded_predicted_s": slowest(predicted(found, "sharded")),
        "fully_predicted_s": slowest(predicted(found, "fully_sharded")),
    }


def alone(name: str, batch: Any, units: Any, optimizer: str) -> tuple[Parts, Times]:
    """Compute alone, with that optimizer. Collective."""
    parts = Parts(System(fresh(name), 0.0, OPTIMIZERS[optimizer]), units)
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
            rate = median(goodput(sum(parts.sizes)).bytes_per_s for _ in range(3))
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
    """A model's rows."""
    told = {**vars(asked), "model": model, "batch": BATCHES[model] // 2}
    rows, _ = on_a_bed([__file__, "--rank"], told, 2)
    return rows


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
