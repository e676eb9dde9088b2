"""Plans for unequal hosts: made from what was measured of each, and as if all were equal.

    python benchmarks/unequal.py [--mbit 70 200 900]
    python benchmarks/unequal.py --slow 0.5

On a test bed with those links the ranks probe, profile each model, and plan twice: for the cluster
as measured, and for one in which every link has the hosts' mean. With ``--slow`` there are two
hosts with links of 1 Gbit/s, of which the second has that share of its core's time (a CPU quota);
the plans have shares of the batch by the hosts' measured times, and even ones. Both plans train in
turns. Prints a table of steps, predicted and measured (medians), and as the last line one JSON
object.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
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
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks
from ranks import joined
from rows import print_json, print_table

MODELS = (("vgg11-32", 32, "momentum"), ("gpt-mini", 8, "adamw"))
# The first is bound by its links, the second by computing.
SLOW_MODELS = (("vgg11-32", 48, "momentum"), ("gpt-mini", 12, "adamw"))
SLOW_MBIT_S = 1000.0
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


def measured(model: str, goal: Goal) -> ModelProfile:
    """The model's profile. Collective."""
    torch.manual_seed(0)
    sizes = batches_for(goal, dist.get_world_size())
    return profile_on_ranks(build(model), sizes, CPU, refresh=True)


def planned(problem: Problem) -> Plan:
    return solve(problem).checked()


def solved(problems: dict[str, Problem]) -> dict[str, Plan]:
    """The plan of each problem, the same on all ranks. Collective."""
    return {name: rank_zero_decides(partial(planned, each)) for name, each in problems.items()}


def in_turns(model: str, plans: dict[str, Plan], turns: int = TURNS) -> dict[str, list[float]]:
    """The seconds of steps under each plan, trained in turns. Collective."""
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(turns):
        for name, plan in plans.items():
            steps = int(TURN_S / plan.prediction.step_s)
            torch.manual_seed(0)
            found = run_steps(build(model), plan, min(max(steps, LEAST_STEPS), MOST_STEPS))
            taken[name].append(found.step_s)
    return taken


def rows_of(model: str, goal: Goal, clusters: dict[str, Cluster]) -> list[dict[str, Any]]:
    """Both plans of a model, trained in turns. Collective."""
    profile = measured(model, goal)
    plans = solved({n: problem_for(profile, c, goal, CAPABILITY) for n, c in clusters.items()})
    taken = in_turns(model, plans)
    same = len({decisions(plan) for plan in plans.values()}) == 1
    return [
        {
            "model": model, "links": name, "schedule": plan.schedule, "same_plan": same,
            "divided": sum(u.layout.degree > 1 for u in plan.units), "units": len(plan.units),
            "predicted_s": plan.prediction.step_s, "measured_s": median(taken[name]),
        }
        for name, plan in plans.items()
    ]  # fmt: skip


def slow_row(model: str, goal: Goal, cluster: Cluster, turns: int) -> dict[str, Any]:
    """Plans with planned and with even shares of the batch, trained in turns. Collective."""
    profile = measured(model, goal)
    problem = problem_for(profile, cluster, goal, CAPABILITY)
    plans = solved({"planned": problem, "even": replace(problem, even=True)})
    taken = {name: median(each) for name, each in in_turns(model, plans, turns).items()}
    size = profile.batches[-1]
    assert profile.step is not None
    steps = {t.nodes[0]: t.step(size) for t in profile.node_times if t.step is not None}
    return {
        "model": model, "batch": goal.batch, "shares": plans["planned"].local_batch_sizes,
        "schedule": plans["planned"].schedule,
        "faster_host": {name: profile.step(size) / step_s for name, step_s in steps.items()},
        **{f"{name}_predicted_s": plan.prediction.step_s for name, plan in plans.items()},
        **{f"{name}_measured_s": step_s for name, step_s in taken.items()},
        "times_as_fast": taken["even"] / taken["planned"],
        "predicted_over_measured": plans["planned"].prediction.step_s / taken["planned"],
    }  # fmt: skip


def unequal_speed(share: float, models: Sequence[str], turns: int, known_links: bool) -> None:
    """Shares of the batch by the speed of two hosts, of which one has ``share`` of its core."""
    if not joined(2, mbit_s=SLOW_MBIT_S, slow={1: share}):
        return
    cluster = cluster_of_ranks(CPU, refresh=not known_links)
    rows = [
        slow_row(model, Goal(batch=batch, optimizer=optimizer), cluster, turns)  # type: ignore[arg-type]
        for model, batch, optimizer in SLOW_MODELS
        if model in models
    ]
    if dist.get_rank() > 0:
        return
    headings = ("model", "batch", "shares", "even", "planned", "times as fast", "predicted")
    print_table(
        f"steps on two hosts, one of which has {share:g} of its core",
        headings,
        (
            (r["model"], r["batch"], ":".join(map(str, r["shares"])) or "even",
             f"{1e3 * r['even_measured_s']:.0f} ms", f"{1e3 * r['planned_measured_s']:.0f} ms",
             f"{r['times_as_fast']:.2f}", f"{1e3 * r['planned_predicted_s']:.0f} ms")
            for r in rows
        ),
    )  # fmt: skip
    print_json({"share": share, "mbit": SLOW_MBIT_S, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[70.0, 200.0, 900.0])
    parser.add_argument("--slow", type=float, help="the second of two hosts gets this of its core")
    names = [model for model, *_ in SLOW_MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="with --slow")
    parser.add_argument("--turns", type=int, default=TURNS, help="with --slow")
    parser.add_argument("--known-links", action="store_true", help="with --slow: as probed before")
    given = parser.parse_args()
    if given.slow is not None:
        unequal_speed(given.slow, given.models, given.turns, given.known_links)
        return
    mbit = given.mbit
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
