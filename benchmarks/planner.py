"""How long planning takes, and how close to the best possible: GPT-like models on growing clusters.

Feature maps are those of attention and feed-forward layers in 16-bit numbers; the fidelity of lossy
exchange is drawn for each unit. Every memory and exchange policy is allowed. On a machine shared
with others seconds count their work too; CPU seconds do not.
``gap`` is 1 - bound / objective, as the solver proved it.

    python benchmarks/planner.py            all rows
    python benchmarks/planner.py 100 64     one row
    python benchmarks/planner.py 100 64 4194304,16777216     that may choose among slice sizes
"""

import json
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.curve import ZERO, Curve, proportional
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Style
from meshwright.planner.schema.profile import (
    CompressionRate,
    EdgeProfile,
    FidelityProfile,
    ModelProfile,
    ParameterProfile,
    ShareProfile,
    SplitProfile,
    UnitKind,
    UnitProfile,
    UpdateRate,
)
from meshwright.planner.solve.lagrangian.solver import LagrangianSolver
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from rows import print_json, print_table

ROWS = ((100, 64), (200, 64), (400, 256), (1000, 1024))
SAMPLES_PER_RANK = 4
# Short enough to matter: the devices themselves have 80.
MEMORY_GIB = 40.0
# At 1 MiB the latency of an all-reduce over 128 nodes is twenty times what its bytes take.
SLICE_BYTES = 4 * 2**20

# GPT-2's vocabulary, rounded up to a multiple of 64.
WIDTH, TOKENS, VOCABULARY = 2048, 1024, 50304
# Bytes of a number: bfloat16.
NUMBER = 2
# Times are a roofline's, with a fixed part for launching kernels.
FLOPS_PER_S = 150e12
LAUNCH_S = 2e-5
BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
DEGREES = (2, 4, 8)


def gpt_like(units: int, seed: int = 0) -> ModelProfile:
    """A chain of ``units`` units between the model's input and output."""
    draw = random.Random(seed)
    nothing = ShareProfile(
        style="none", degree=1, forward=ZERO, backward=ZERO, saved=ZERO, gradient=ZERO,
        workspace=ZERO, parameter_bytes=0,
    )  # fmt: skip
    table = VOCABULARY * WIDTH
    every = [UnitProfile(name="input", kind="input", shares=(nothing,))]
    every.append(_unit(draw, "embedding", "embedding", table, 2 * WIDTH, 0.1, ("row",)))
    for i in range(units - 2):
        if i % 2 == 0:
            weights, kind, saved, flops = 4 * WIDTH * WIDTH, "attention", 7.0, 4 * TOKENS * WIDTH
        else:
            weights, kind, saved, flops = 8 * WIDTH * WIDTH, "mlp", 10.0, 0
        every.append(
            _unit(draw, f"{kind}{i}", kind, weights, 2 * weights + flops, saved, ("pair",))
        )
    every.append(_unit(draw, "head", "linear", table, 2 * table, 1.0, ("column", "row")))
    every.append(UnitProfile(name="output", kind="output", shares=(nothing,)))
    edges = []
    for a, b in pairwise(every):
        features = VOCABULARY if b.kind == "output" else WIDTH
        # A sample's tokens are 8-byte numbers, and have no gradient.
        size = 8.0 * TOKENS if a.kind == "input" else float(NUMBER * TOKENS * features)
        back = 0.0 if a.kind == "input" else size
        edges.append(
            EdgeProfile(source=a.name, target=b.name, bytes_per_sample=size,
                        gradient_bytes_per_sample=back, features=features)
        )  # fmt: skip
    return ModelProfile(
        target=f"gpt-like-{units}",
        model=f"{units:016x}",
        device="A100-like",
        device_type="cuda",
        dtype="bfloat16",
        batches=tuple(int(b) for b in BATCHES),
        units=tuple(every),
        edges=tuple(edges),
        updates=(UpdateRate(optimizer="adamw", seconds_per_byte=4e-12),),
        compression=(
            CompressionRate(exchange="topk", seconds_per_byte=2e-11),
            CompressionRate(exchange="dropped", seconds_per_byte=2e-12),
        ),
        origin="estimated",
    )


def cluster_of(ranks: int, gbit_per_s: float = 100.0, memory_gib: float = 80.0) -> Cluster:
    """Nodes of eight devices, 300 GB/s inside, one network interface each."""
    device = Device(name="A100-like", memory_bytes=int(memory_gib * 2**30), host_bytes_per_s=25e9)
    return Cluster(
        name=f"{ranks} devices",
        nodes=tuple(Node(name=f"node{i}", devices=(device,) * 8) for i in range(ranks // 8)),
        levels=(
            Level(name="intra", latency_s=4e-6, bytes_per_s=300e9),
            Level(name="inter", latency_s=1.2e-5, bytes_per_s=gbit_per_s / 8 * 1e9),
        ),
    )


def _unit(
    draw: random.Random,
    name: str,
    kind: UnitKind,
    weights: int,
    flops_per_token: float,
    saved: float,
    styles: tuple[Style, ...],
) -> UnitProfile:
    """``saved`` is what stays for backward, as a multiple of the unit's input."""
    # Of its own for every unit: no two are alike, and nothing can be gained by treating them as
    # repeated.
    forward = flops_per_token * TOKENS / FLOPS_PER_S * draw.uniform(0.7, 1.3)
    backward = 2 * forward * draw.uniform(0.9, 1.1)
    maps = NUMBER * TOKENS * WIDTH
    keep = maps * saved * draw.uniform(0.9, 1.1)

    def seconds(per_sample: float, degree: int) -> Curve:
        # Kernels are launched whatever is divided, and each part of a division is less efficient.
        return Curve(x=BATCHES, y=tuple(LAUNCH_S + per_sample * b / degree**0.95 for b in BATCHES))

    divisions: list[tuple[Style, int]] = [("none", 1), *((s, d) for s in styles for d in DEGREES)]
    shares = tuple(
        ShareProfile(
            style=style,
            degree=degree,
            forward=seconds(forward, degree),
            backward=seconds(backward, degree),
            # A member keeps more than its part: inputs of columns are whole on all of them.
            saved=proportional(keep / degree**0.8),
            gradient=proportional(3.0 * maps / degree**0.5),
            workspace=proportional(1.0 * maps),
            parameter_bytes=NUMBER * weights // degree,
        )
        for style, degree in divisions
    )
    weight = f"{name}.weight"
    return UnitProfile(
        name=name,
        kind=kind,
        modules=(name,),
        batched_inputs=(0,),
        parameters=(
            ParameterProfile(name=weight, shared=weight, shape=(weights,), bytes=NUMBER * weights),
        ),
        splits=tuple(
            SplitProfile(
                style=style,
                parts=32 if style == "pair" else WIDTH,
                uneven=False,
                features=WIDTH,
                sharded=((weight, 0),),
            )
            for style in styles
        ),
        shares=shares,
        fidelity=(
            FidelityProfile(exchange="dropped", ratios=(0.25, 0.5), kept=(0.25, 0.5)),
            FidelityProfile(
                exchange="topk",
                ratios=(0.001, 0.01, 0.1),
                kept=(draw.uniform(0.05, 0.2), draw.uniform(0.25, 0.5), draw.uniform(0.7, 0.9)),
            ),
        ),
        gradient_energy=draw.uniform(0.5, 1.5),
    )


def row(units: int, ranks: int, slice_bytes: tuple[int, ...] = ()) -> dict[str, Any]:
    """One row, measured in this process; ``slice_bytes`` may be chosen from."""
    goal = Goal(
        batch=SAMPLES_PER_RANK * ranks, optimizer="adamw", allow_lossy=True, min_fidelity=0.9,
        slice_bytes=slice_bytes,
    )  # fmt: skip
    problem = Problem(
        profile=gpt_like(units), cluster=cluster_of(ranks, memory_gib=MEMORY_GIB), goal=goal,
        capability=EVERYTHING, schedule="priority", message_bytes=SLICE_BYTES,
    )  # fmt: skip
    start, busy = time.perf_counter(), time.process_time()
    result = solve(problem, LagrangianSolver.name)
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
