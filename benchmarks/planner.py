"""How long planning takes, and how close to the best possible: GPT-like models on growing clusters.

Every unit has times of its own (nothing is marked as repeated), every memory and exchange policy is
allowed, memory is short enough to matter. Each row runs in a process of its own, whose peak memory
is the row's. On a machine shared with others seconds count their work too; CPU seconds do not.
``gap`` is 1 - bound / objective, as the solver proved it.

    python benchmarks/planner.py            all rows
    python benchmarks/planner.py 100 64     one row
    python benchmarks/planner.py 100 64 4194304,16777216     that may choose among slice sizes
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve, solvers
from rows import print_json, print_table
from synthetic import cluster_of, gpt_like

ROWS = ((100, 64), (200, 64), (400, 256), (1000, 1024))
SAMPLES_PER_RANK = 4
# Short enough to matter: the devices have 80.
MEMORY_GIB = 40.0
# At 1 MiB the latency of an all-reduce over 128 nodes is twenty times what its bytes take.
SLICE_BYTES = 4 * 2**20


def row(units: int, ranks: int, slice_bytes: tuple[int, ...] = ()) -> dict[str, Any]:
    """One row, measured in this process; ``slice_bytes`` may be chosen from."""
    goal = Goal(
        batch=SAMPLES_PER_RANK * ranks, optimizer="adamw", allow_lossy=True, min_fidelity=0.9,
        slice_bytes=slice_bytes,
    )  # fmt: skip
    problem = Problem(
        profile=gpt_like(units), cluster=cluster_of(ranks, memory_gib=MEMORY_GIB), goal=goal,
        capability=EVERYTHING, schedule="priority", bucket_bytes=SLICE_BYTES,
    )  # fmt: skip
    # Importing the solvers is no part of planning.
    solvers()
    start, busy = time.perf_counter(), time.process_time()
    result = solve(problem, "lagrangian")
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "units": units,
        "ranks": ranks,
        "solver": result.solver,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "gap": None if result.gap is None else round(result.gap, 6),
        "peak_rss_mib": round(peak, 1),
        "objective_s": result.objective_s,
        "speedup": result.plan.speedup if result.plan else None,
    }


def main() -> None:
    if len(sys.argv) > 2:
        sizes = tuple(int(a) for a in sys.argv[3].split(",")) if len(sys.argv) > 3 else ()
        rows = [row(int(sys.argv[1]), int(sys.argv[2]), sizes)]
    else:
        rows = []
        for units, ranks in ROWS:
            command = [sys.executable, __file__, str(units), str(ranks)]
            # A process of its own: the peak of a process that has planned before is not the row's.
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            rows += json.loads(done.stdout.splitlines()[-1])["rows"]
    gaps = ["none" if r["gap"] is None else f"{100 * r['gap']:.3f}%" for r in rows]
    lines = [
        (r["units"], r["ranks"], r["solver"], f"{r['seconds']:.2f}", f"{r['cpu_seconds']:.2f}", gap,
         f"{r['peak_rss_mib']:.0f}")
        for r, gap in zip(rows, gaps, strict=True)
    ]  # fmt: skip
    headings = ("units", "ranks", "solver", "seconds", "of CPU", "gap", "peak MiB")
    print_table("planning", headings, lines)
    print_json({"rows": rows})


if __name__ == "__main__":
    main()
