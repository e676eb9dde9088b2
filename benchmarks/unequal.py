"""Plans for hosts of unequal links: made from what was measured of each, and as if all were equal.

    python benchmarks/unequal.py [--mbit 70 200 900]

On a test bed with those links the ranks probe, profile each model, and plan twice: for the cluster
as measured, and for one in which every link has the hosts' mean. Both plans train in turns. Prints
a table of steps, predicted and measured (medians), and as the last line one JSON object.
"""

import argparse
import time
from functools import partial
from statistics import mean, median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.train import run_steps
from meshwright.models.zoo import build
from meshwright.planner.explain.what_if import with_bandwidth
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks
from ranks import joined
from rows import print_json, print_table

MODELS = (("vgg11-32", 32, "momentum"), ("gpt-mini", 8, "adamw"))
TURNS = 3
# About so long each plan trains in a turn.
TURN_S, LEAST_STEPS, MOST_STEPS = 5.0, 3, 25
CPU = torch.device("cpu")


def equal_links(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """The cluster if every link between its hosts had that rate."""
    level = cluster.level("inter")
    assert level is not None
    alike = msgspec.structs.replace(cluster, pair_bytes_per_s=())
    return with_bandwidth(alike, "inter", bytes_per_s - level.bytes_per_s)


def decisions(plan: Plan) -> tuple[object, ...]:
    """All that decides how a plan trains."""
    units = tuple((u.layout, u.style, u.memory, u.exchange, u.feedback) for u in plan.units)
    return plan.schedule, plan.message_bytes, plan.micro_batches, plan.placement, units


def planned(problem: Problem) -> Plan:
    return solve(problem).checked()


def rows_of(model: str, goal: Goal, clusters: dict[str, Cluster]) -> list[dict[str, Any]]:
    """Both plans of a model, trained in turns. Collective."""
    torch.manual_seed(0)
    sizes = batches_for(goal, dist.get_world_size())
    profile = profile_on_ranks(build(model), sizes, CPU, refresh=True)
    plans: dict[str, Plan] = {}
    for name, cluster in clusters.items():
        problem = problem_for(profile, cluster, goal, CAPABILITY)
        plans[name] = rank_zero_decides(partial(planned, problem))
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(TURNS):
        for name, plan in plans.items():
            steps = int(TURN_S / plan.prediction.step_s)
            torch.manual_seed(0)
            found = run_steps(build(model), plan, min(max(steps, LEAST_STEPS), MOST_STEPS))
            taken[name].append(found.step_s)
    same = len({decisions(plan) for plan in plans.values()}) == 1
    return [
        {
            "model": model, "links": name, "schedule": plan.schedule, "same_plan": same,
            "divided": sum(u.layout.degree > 1 for u in plan.units), "units": len(plan.units),
            "predicted_s": plan.prediction.step_s, "measured_s": median(taken[name]),
        }
        for name, plan in plans.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[70.0, 200.0, 900.0])
    mbit = parser.parse_args().mbit
    if not joined(len(mbit), mbit_s=mbit):
        return
    start = time.monotonic()
    cluster = cluster_of_ranks(CPU, refresh=True)
    probe_s = time.monotonic() - start
    clusters = {"as measured": cluster, "equal": equal_links(cluster, mean(mbit) * 1e6 / 8)}
    rows = []
    for model, batch, optimizer in MODELS:
        rows += rows_of(model, Goal(batch=batch, optimizer=optimizer), clusters)  # type: ignore[arg-type]
    if dist.get_rank() > 0:
        return
    headings = ("model", "planned for links", "plan", "divided", "predicted", "measured")
    print_table(
        f"steps on hosts with links of {', '.join(f'{m:g}' for m in mbit)} Mbit/s",
        headings,
        (
            (r["model"], r["links"], "the same" if r["same_plan"] else "its own",
             f"{r['divided']} of {r['units']}", f"{1e3 * r['predicted_s']:.0f} ms",
             f"{1e3 * r['measured_s']:.0f} ms")
            for r in rows
        ),
    )  # fmt: skip
    print_json({"mbit": mbit, "probe_s": probe_s, "rows": rows})


if __name__ == "__main__":
    main()
