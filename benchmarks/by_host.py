"""Hosts with several ranks each: gradients exchanged flat, and added up on each host first."""

from typing import Any

import msgspec
import torch.distributed as dist
from meshwright.models.workload import Batch
from meshwright.planner.explain.compare import with_wire
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from systems import BUCKETS_MB, Measured, System, by_ddp, in_turns, planned

COLUMNS = (
    "model", "hosts", "ranks", "batch", "ratio", "mbit_s", "compute_s", "ddp_best_s", "priority_s",
    "by_host_s", "by_host_bf16_s", "plan_s", "plan_by_host", "bound_s", "by_host_bound_s",
    "efficiency", "priority / by_host", "ddp_best / by_host", "ddp_best / by_host_bf16",
    "ddp_best / plan",
)  # fmt: skip


def across(hosts: int, ranks: int) -> float:
    """How many times as much a ring through all ranks of all hosts sends over a host's link as
    exchange by host does."""
    world = hosts * ranks
    return ((world - 1) / world) / ((hosts - 1) / hosts)


def by_host(plan: Plan, ranks: int) -> Plan:
    """The plan with all gradients added up on hosts of so many ranks."""
    units = tuple(msgspec.structs.replace(unit, peers_per_host=ranks) for unit in plan.units)
    return msgspec.structs.replace(plan, units=units)


def compared_hosts(
    measured: Measured, model: ModelProfile, batch: Batch, asked: dict[str, Any]
) -> dict[str, Any]:
    """DDP, priority flat, by host and by host with only the crossing rounded, and the planner's
    lossless choice: one row. Collective."""
    systems = {f"ddp_{mb}": by_ddp(measured, mb) for mb in BUCKETS_MB}
    plan, ranks = measured.plan(), asked["each"]
    systems["priority_s"] = System(measured.workload(), plan=plan)
    share = 1 / across(dist.get_world_size() // ranks, ranks)
    exact, half = (measured.plan(share=part * share) for part in (1.0, 0.5))
    systems["by_host_s"] = System(measured.workload(), plan=by_host(exact, ranks))
    rounded = with_wire(by_host(half, ranks), "bf16")
    systems["by_host_bf16_s"] = System(measured.workload(), plan=rounded)
    goal = Goal(batch=batch.size * dist.get_world_size(), optimizer="momentum")
    chosen = planned(model, goal)
    systems["plan_s"] = System(measured.workload(), plan=chosen)
    seconds = in_turns(systems, batch, asked["steps"], asked["rounds"])
    best_ddp = min(BUCKETS_MB, key=lambda mb: seconds[f"ddp_{mb}"])
    names = "priority_s", "by_host_s", "by_host_bf16_s", "plan_s"
    return {
        "ranks": ranks, "ddp_best_s": seconds[f"ddp_{best_ddp}"], "ddp_bucket_mb": best_ddp,
        **{name: seconds[name] for name in names},
        "plan_schedule": chosen.schedule, "plan_predicted_s": chosen.prediction.step_s,
        "plan_by_host": sum(unit.peers_per_host > 1 for unit in chosen.units),
        "plan_divided": sum(unit.layout.degree > 1 for unit in chosen.units),
    }  # fmt: skip
