"""Against DeepPool's greedy search on DeepPool's own layer times (A100): time and device-seconds.

For each network, number of devices, batch and link, the greedy search is run under amplification
limits from 1.1 to 16. Each of its plans is a point: seconds of a step and device-seconds, by the
same cost model as ours (bursts start and end at a batch spread over all devices, and what is moved
is paid for). For each point two questions are asked of our planner: the fastest plan that uses no
more device-seconds, and the fewest device-seconds at no more time.

    python benchmarks/deeppool.py TABLES [--markdown FILE] [--ranks 8 16] [--batches 32]

TABLES is the folder of the published tables (vgg16.json, wide_resnet101_2.json). With
``--markdown`` the results are put between that page's marks.
"""

import time
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from meshwright.planner.explain.front import SolvedPoint, cheapest_within, within
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layer_times import profile_of_table
from meshwright.planner.schema.options import Decisions
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.heuristic.bursts import LIMITS, greedy
from meshwright.planner.solve.problem import Problem
from rows import command_line, markdown, print_json, put_into

NETWORKS = ("vgg16", "wide_resnet101_2")
RANKS = (8, 16, 32, 64)
BATCHES = (16, 32, 64)
LINKS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9, "300 GB/s": 300e9}
SLICE_BYTES = 2**20
LIMIT_S = 10.0
# Shares below this are rounding.
EQUAL = 1e-6


class Comparison(NamedTuple):
    """One greedy plan, and ours at its device-seconds and at its time."""

    case: str
    limit: float
    greedy_s: float
    greedy_gpu_s: float
    faster: SolvedPoint | None
    cheaper: SolvedPoint | None

    @property
    def holds(self) -> bool:
        """Whether ours is never worse."""
        if self.faster is None or self.cheaper is None:
            return False
        quick = self.faster.step_s <= self.greedy_s * (1 + EQUAL)
        return quick and self.cheaper.gpu_seconds <= self.greedy_gpu_s * (1 + EQUAL)


def cluster_of(ranks: int, bytes_per_s: float, memory_bytes: int = 80 * 10**9) -> Cluster:
    """Devices that are all as far from one another: of one node at 300 GB/s, else each alone."""
    device = Device(name="A100", memory_bytes=memory_bytes)
    inside = bytes_per_s >= 100e9
    nodes = (
        (Node(name="node", devices=(device,) * ranks),)
        if inside
        else tuple(Node(name=f"node{i}", devices=(device,)) for i in range(ranks))
    )
    latency = 5e-6 if inside else 2e-5
    level = Level(name="intra" if inside else "inter", latency_s=latency, bytes_per_s=bytes_per_s)
    return Cluster(name=f"{ranks} devices", nodes=nodes, levels=(level,))


def problem(profile: ModelProfile, ranks: int, batch: int, bytes_per_s: float) -> Problem:
    """The problem of one case."""
    # With statistics over the whole batch bursts train what data parallelism does.
    problem = Problem(
        profile=profile, cluster=cluster_of(ranks, bytes_per_s), capability=EVERYTHING,
        goal=Goal(batch=batch, optimizer="sgd", batch_statistics="global"),
        schedule="priority", message_bytes=SLICE_BYTES, tie_tolerance=0.0,
    )  # fmt: skip
    return problem.placed()


def compare(case: str, asked: Problem) -> list[Comparison]:
    """Every different greedy plan of a case against ours."""
    model = asked.cost_model()
    plans: dict[Decisions, Any] = {}
    # A plan that two limits lead to counts once.
    for limit in LIMITS:
        plans.setdefault(greedy(model, limit), limit)
    found = []
    for decisions, limit in plans.items():
        theirs = choice(model, decisions, asked.schedule)
        fast = within(asked, theirs.gpu_seconds, "lagrangian", LIMIT_S)
        cheap = cheapest_within(asked, theirs.step_s, "lagrangian", LIMIT_S)
        found.append(Comparison(case, limit, theirs.step_s, theirs.gpu_seconds, fast, cheap))
    return found


HEADINGS = (
    "case", "limit", "greedy ms", "GPU·ms", "ours, faster ms", "speed-up", "gap",
    "ours, cheaper GPU·ms", "saved", "gap",
)  # fmt: skip


def cells(row: Comparison) -> tuple[object, ...]:
    return (
        row.case, f"{row.limit:g}", f"{1e3 * row.greedy_s:.3f}", f"{1e3 * row.greedy_gpu_s:.2f}",
        f"{1e3 * row.faster.step_s:.3f}", f"{row.greedy_s / row.faster.step_s:.2f}",
        f"{100 * (row.faster.result.gap or 0):.1f}%", f"{1e3 * row.cheaper.gpu_seconds:.2f}",
        f"{100 * (1 - row.cheaper.gpu_seconds / row.greedy_gpu_s):.0f}%",
        f"{100 * (row.cheaper.result.gap or 0):.1f}%",
    )  # fmt: skip


def main() -> int:
    """Runs the comparison; fails if one greedy plan is better than ours."""
    parser = command_line(__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    asked = parser.parse_args()
    start, rows = time.perf_counter(), []
    for network in NETWORKS:
        path = asked.tables / f"{network}.json"
        profile = profile_of_table(path.read_bytes(), path.name)
        for ranks, batch, link in product(asked.ranks, asked.batches, LINKS):
            case = f"{network}, {ranks} devices, batch {batch}, {link}"
            found = compare(case, problem(profile, ranks, batch, LINKS[link]))
            print(f"{case}: {len(found)} greedy plans", flush=True)
            rows += found
    worse = [r for r in rows if not r.holds]
    for r in worse:
        print(f"WORSE: {r.case}, limit {r.limit:g}")
    fast = [r.greedy_s / r.faster.step_s for r in rows if r.faster]
    cheap = [r.greedy_gpu_s / r.cheaper.gpu_seconds for r in rows if r.cheaper]
    result = {
        "comparisons": len(rows),
        "never_worse": len(rows) - len(worse),
        "speedup_geomean": geometric_mean(fast) if fast else None,
        "speedup_most": max(fast, default=None),
        "gpu_seconds_ratio_geomean": geometric_mean(cheap) if cheap else None,
        "seconds": round(time.perf_counter() - start, 1),
    }
    if asked.markdown:
        page = (
            f"{len(rows)} comparisons (a greedy plan that two limits share is one); in "
            f"{result['never_worse']} of them ours is\nnever slower at the same device-seconds and "
            "never uses more at the same time. Geometric\n"
            f"means: {result['speedup_geomean']:.1f} times as fast, "
            f"{result['gpu_seconds_ratio_geomean']:.1f} times fewer device-seconds. "
            f"All of it took {result['seconds'] / 60:.0f} minutes.\n\n"
        )
        put_into(asked.markdown, "comparisons", page + markdown(HEADINGS, map(cells, rows)))
    print_json(result)
    return int(bool(worse))


if __name__ == "__main__":
    raise SystemExit(main())
