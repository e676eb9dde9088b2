"""Burst parallelism and background jobs: simulated on up to 1,024 A100, measured on a test bed.

Simulated: for each network, number of devices and link, with one global batch for all of them:

- data parallelism alone, with its best schedule, buckets and micro-batches;
- data parallelism with a background in its gaps, and data parallelism on some of the devices with
  backgrounds alone on the others (the peers of what follows);
- a burst plan alone, and with the background in its gaps. Convolutions divide the batch only; other
  layers may be divided over the devices of a group too (--batch-only: nothing but the batch).

The background is the same network at its best batch on one device. The burst plan is chosen with it
in mind (``burst_choice.py``), among plans whose step beside the background is no longer
than that of data parallelism alone. All rates are of the steady state by simulation.

    python benchmarks/burst.py [--part simulated|measured|both] [--markdown FILE] [--batch-only]

With ``--markdown`` the tables are put between that page's marks.
"""

import argparse
import time
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import deeppool
import msgspec
from burst_choice import (
    ROUNDING,
    DataParallel,
    Shared,
    best_data_parallel,
    burst_with_background,
    candidates,
    shared,
)
from meshwright.models.zoo import build
from meshwright.planner.cost.collectives import ring_steps
from meshwright.planner.multiplex.jobs import (
    Assumptions,
    BackgroundJob,
    best_background,
    foreground,
    shared_device_model,
)
from meshwright.planner.multiplex.report import report
from meshwright.planner.multiplex.simulation import simulate_cluster
from meshwright.planner.schema.capability import Capability
from meshwright.planner.schema.cluster import Cluster, CollectiveCurve, Device
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.options import Decisions
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.problem import Problem
from meshwright.profiler.estimate import estimate, load_table
from rows import command_line, markdown, markdown_of, print_json, put_into

RANKS = (8, 64, 256, 1024)
BATCH = 1024
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
TRANSFORMER, DEVICE = "gpt-small", "a100-sxm-80gb"
OPTIMIZERS = {"vgg16": "sgd", "wide_resnet101_2": "sgd", TRANSFORMER: "adamw"}
MEMORY_BYTES = 80 * 2**30
# Seconds of each search, and of narrowing under changed assumptions, of which there are many.
LIMIT_S, BRIEF_S = 1.0, 0.3
SIMULATED_STEPS = 20
# Of DeepPool's abstract: cluster throughput over data parallelism's.
TARGET = 2.2
STYLES = ("none", "column", "row", "pair")
# What is assumed of sharing, one thing changed at a time.
SENSITIVITY = {
    "as above": Assumptions(),
    "background at half its speed": Assumptions(idle_speed=0.5, communicating_speed=0.4),
    "no background while the foreground communicates": Assumptions(communicating_speed=0.0),
    "pieces of 0.5 ms": Assumptions(piece_s=500e-6),
    "pieces of 2 ms": Assumptions(piece_s=2e-3),
    "switches of 100 µs": Assumptions(switch_s=100e-6),
    "foreground slowed by 10%": Assumptions(slowdown=1.10),
    "foreground not slowed": Assumptions(slowdown=1.0),
    "half speed, 0.5 ms, 10% together": Assumptions(
        slowdown=1.10, piece_s=500e-6, idle_speed=0.5, communicating_speed=0.4
    ),
}


class Partition(NamedTuple):
    """The cluster divided: data parallelism on some devices, backgrounds on the others alone."""

    devices: int
    step_s: float
    samples_per_s: float
    share: float


def tree_curve(ranks: int, latency_s: float, bytes_per_s: float) -> CollectiveCurve:
    """All-reduce as the quicker of a ring and two binary trees."""
    # NCCL has both. A ring's latency alone, 2 (n - 1) hops, would make data parallelism look bad on
    # a thousand devices.
    hops = 2 * (ranks - 1).bit_length()
    tree = hops * latency_s, 2 / bytes_per_s
    steps = ring_steps("all_reduce", ranks)
    ring = steps * latency_s, steps / ranks / bytes_per_s
    cross = (ring[0] - tree[0]) / (tree[1] - ring[1])
    sizes = sorted({1.0, max(cross, 2.0), max(cross, 2.0) * 1024})
    seconds = tuple(min(a + b * x for a, b in (tree, ring)) for x in sizes)
    return CollectiveCurve(
        collective="all_reduce", ranks=ranks, seconds=Curve(x=tuple(sizes), y=seconds),
        latency_s=latency_s, bytes_per_s=bytes_per_s,
    )  # fmt: skip


def cluster_of(ranks: int, bytes_per_s: float) -> Cluster:
    """The devices of the DeepPool benchmark, with trees for their all-reduce too."""
    plain = deeppool.cluster_of(ranks, bytes_per_s, MEMORY_BYTES)
    level = plain.levels[0]
    counts = [2**i for i in range(1, ranks.bit_length()) if 2**i <= ranks]
    curves = tuple(tree_curve(n, level.latency_s, bytes_per_s) for n in counts)
    return msgspec.structs.replace(plain, levels=(msgspec.structs.replace(level, curves=curves),))


def profile_of(name: str, global_statistics: bool = False) -> ModelProfile:
    """A published table, or the estimate for the transformer, of which there is none."""
    if name == TRANSFORMER:
        return estimate(build(name), DEVICE)
    table = load_table(name)
    if global_statistics:
        return table
    # As DeepPool has it, the network normalises over the samples that a device has, whatever they
    # are. The executor asks for the whole batch's, so that a burst trains what data parallelism
    # would.
    units = (msgspec.structs.replace(u, batch_statistics=False) for u in table.units)
    return msgspec.structs.replace(table, units=tuple(units))


def capability(styles: tuple[str, ...]) -> Capability:
    """Bursts of whole layers, as DeepPool's, or layers divided in these styles too."""
    return Capability(
        styles=styles, memory=("keep",), exchange=("dense",), idle_positions=True,
        early_release=False, micro_batches=True, priority=True,
    )  # fmt: skip


class Asked(NamedTuple):
    """A case to be planned: the foreground's problem on shared devices, its background, data
    parallelism on devices of its own and in the memory of shared ones, and the plans to choose
    from."""

    shared: Problem
    background: BackgroundJob
    plain: DataParallel
    within: DataParallel
    partition: Partition
    tried: dict[Decisions, str]


def ask(
    name: str, profile: ModelProfile, ranks: int, bytes_per_s: float, styles: tuple[str, ...]
) -> Asked:
    """The peers and the candidates of a case."""
    device = Device(name="A100", memory_bytes=MEMORY_BYTES)
    background = best_background(profile, device, OPTIMIZERS[name])
    times = tuple(m for m in MICRO_BATCHES if m == 1 or m * ranks <= BATCH)
    whole = tuple(
        Pin(unit=u.name, never_styles=STYLES[1:]) for u in profile.units if u.kind == "conv"
    )
    goal = Goal(
        batch=BATCH, optimizer=OPTIMIZERS[name], batch_statistics="global", micro_batches=times,
        pins=whole,
    )  # fmt: skip
    alone = Problem(
        profile, cluster_of(ranks, bytes_per_s), goal, capability(styles), schedule="priority",
        tie_tolerance=0.0,
    )  # fmt: skip
    plain = best_data_parallel(alone)
    # Beside a background the foreground has the memory that this leaves; alone it has all of it.
    left = MEMORY_BYTES - background.peak_bytes
    narrow = msgspec.structs.replace(goal, memory_limit_bytes=left)
    within = best_data_parallel(replace(alone, goal=narrow))
    # ``candidates`` asks for one number of micro-batches: the one that suits data parallelism.
    shared = replace(
        alone,
        goal=msgspec.structs.replace(narrow, micro_batches=(within.model.micro_batches,)),
        message_bytes=within.model.message_bytes,
    )
    tried = candidates(shared, Assumptions(), plain.step_s, LIMIT_S)
    # The foreground on a power of two of the devices, and backgrounds on all others.
    parts = [plain_on(name, profile, 2**i, bytes_per_s) for i in range(ranks.bit_length() - 1)]
    divided = best_partition([*filter(None, parts), plain], background, ranks)
    return Asked(shared, background, plain, within, divided, tried)


# Every larger cluster asks for the smaller ones again.
@cache
def plain_on(
    name: str, profile: ModelProfile, ranks: int, bytes_per_s: float
) -> DataParallel | None:
    """Data parallelism alone on so many devices, None where it does not fit."""
    times = tuple(m for m in MICRO_BATCHES if m == 1 or m * ranks <= BATCH)
    goal = Goal(batch=BATCH, optimizer=OPTIMIZERS[name], micro_batches=times)
    try:
        return best_data_parallel(
            Problem(profile, cluster_of(ranks, bytes_per_s), goal, capability(STYLES[:1]))
        )
    except InputError:
        return None


def best_partition(parts: list[DataParallel], background: BackgroundJob, ranks: int) -> Partition:
    """The division that makes most of the cluster, its foreground no slower than data parallelism
    on all devices (the last of ``parts``). Nothing is shared, so nothing is slowed."""
    found = []
    for part in parts:
        used = part.model.world_size
        if part.step_s <= parts[-1].step_s:
            both = part.samples_per_s + (ranks - used) * background.samples_per_s
            found.append(Partition(used, part.step_s, both, 1 - used / ranks))
    return max(found, key=lambda each: each.samples_per_s)


def solved(
    name: str, asked: Asked, link: str, given: Assumptions, narrowing_s: float = LIMIT_S
) -> dict[str, Any]:
    """The row of a case: the peers and the best burst, with the cluster simulated for it. All but
    the first have a background. ``ratio`` is samples of both over those of data parallelism alone;
    ``bounded_ratio`` is the foreground's speed over data parallelism's, plus the background's share
    of its own speed alone."""
    start = time.perf_counter()
    model, burst = burst_with_background(
        asked.shared, asked.tried, asked.background, given, asked.plain.step_s, narrowing_s
    )
    schedule, limit_s = asked.shared.schedule, asked.plain.step_s * ROUNDING
    # The peer: data parallelism with the background in its gaps, with what suits it best in the
    # memory that is left. Its step may get longer.
    within = asked.within
    slower = shared_device_model(within.model, given.slowdown)
    how = within.schedule, asked.background, given
    plain = shared("data parallel", slower, within.model.baseline, *how)
    if plain.step_s <= limit_s and plain.samples_per_s > burst.samples_per_s:
        burst, model, schedule = plain, within.model, within.schedule
    elif burst.step_s > limit_s:
        # Nothing is as fast as data parallelism on its own.
        model, schedule = asked.plain.model, asked.plain.schedule
        alone = ("data parallel", model.baseline, asked.plain.step_s, 0.0)
        burst = Shared(*alone, asked.plain.samples_per_s, 0.0, copies=0)
    slowdown = given.slowdown if burst.copies is None else 1.0
    job = foreground(name, model, burst.decisions, schedule, slowdown)
    job = job._replace(data_parallel_samples_s=asked.plain.samples_per_s)
    behind = asked.background._replace(copies=burst.copies)
    backgrounds = () if burst.copies == 0 else (behind,)
    horizon_s = SIMULATED_STEPS * burst.step_s
    run = report(simulate_cluster(model.world_size, (job,), backgrounds, given, horizon_s))
    plain_s, partition = asked.plain.step_s, asked.partition
    background = sum(b.samples_per_s for b in run.backgrounds)
    share = background / (asked.background.samples_per_s * model.world_size)
    return {
        "model": name, "devices": model.world_size, "batch": BATCH, "link": link,
        "dp_samples_s": asked.plain.samples_per_s,
        "dp_with_background_samples_s": plain.foreground_samples_s,
        "burst_alone_samples_s": BATCH / job.unshared.step_s,
        "burst_samples_s": burst.foreground_samples_s,
        "background_samples_s": background,
        "background_share": share,
        "ratio": (burst.foreground_samples_s + background) / asked.plain.samples_per_s,
        "bounded_ratio": plain_s / burst.step_s + share,
        "dp_with_background_ratio": plain.samples_per_s / asked.plain.samples_per_s,
        "dp_with_background_bounded_ratio": plain_s / plain.step_s + plain.share,
        "partition_ratio": partition.samples_per_s / asked.plain.samples_per_s,
        "partition_bounded_ratio": plain_s / partition.step_s + partition.share,
        "partition_devices": partition.devices,
        "background_batch": asked.background.batch,
        "plan": burst.how + (", no background" if burst.copies == 0 else ""),
        "slower": burst.step_s > limit_s,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


# Headings, and what stands under each: a field of a row and its format; samples per second.
COLUMNS = {
    "model": ("model", ""), "devices": ("devices", ","), "link": ("link", ""),
    "DP alone": ("dp_samples_s", ",.0f"), "DP + bg": ("dp_with_background_samples_s", ",.0f"),
    "burst alone": ("burst_alone_samples_s", ",.0f"), "burst beside": ("burst_samples_s", ",.0f"),
    "bg": ("background_samples_s", ",.0f"), "share": ("background_share", ".2f"),
    "ratio": ("ratio", ".2f"), "bounded": ("bounded_ratio", ".2f"),
    "DP + bg ratio": ("dp_with_background_ratio", ".2f"),
    "DP + bg bounded": ("dp_with_background_bounded_ratio", ".2f"),
    "partition ratio": ("partition_ratio", ".2f"),
    "partition bounded": ("partition_bounded_ratio", ".2f"),
    "on": ("partition_devices", ","), "plan": ("plan", ""),
}  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    return [format(row[name], how) for name, how in COLUMNS.values()]


def main() -> int:
    """Both parts as asked; fails where a simulated foreground is slower than it may be."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=("simulated", "measured", "both"), default="both")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--models", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument(
        "--links", nargs="+", default=list(deeppool.LINKS), choices=list(deeppool.LINKS)
    )
    parser.add_argument(
        "--batch-only", action="store_true", help="divide nothing but the batch, as DeepPool"
    )
    parser.add_argument(
        "--global-statistics", action="store_true", help="bursts normalise over the whole batch"
    )
    asked = parser.parse_args()
    result: dict[str, Any] = {"simulated": [], "measured": []}
    code = 0
    if asked.part != "measured":
        result["simulated"], code = run_simulated(asked)
    if asked.part != "simulated":
        from burst_measured import COLUMNS as MEASURED_COLUMNS
        from burst_measured import measured

        result["measured"] = measured()
        put_into(asked.markdown, "measured", markdown_of(result["measured"], MEASURED_COLUMNS))
    print_json(result)
    return code


def run_simulated(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Runs and prints the simulated part, under the assumptions as they stand and on the most
    devices under the others, and which cases miss the target; exit code 1 where a foreground is
    slower than data parallelism."""
    begun, rows, others = time.perf_counter(), [], []
    styles = STYLES[:1] if asked.batch_only else STYLES
    for name, count, link in product(asked.models, asked.ranks, asked.links):
        start = time.perf_counter()
        profile = profile_of(name, asked.global_statistics)
        case = ask(name, profile, count, deeppool.LINKS[link], styles)
        rows.append(row := solved(name, case, link, Assumptions()))
        row["seconds"] = time.perf_counter() - start
        print(f"{' | '.join(cells(row))} | {row['seconds']:.1f} s", flush=True)
        if count == max(asked.ranks):
            others.append({what: solved(name, case, link, given, BRIEF_S)
                           for what, given in SENSITIVITY.items()})  # fmt: skip
    # Ratio and bounded form on the most devices, by what is assumed.
    names = [f"{c['as above']['model']}, {c['as above']['link']}" for c in others]
    lines = [
        (what, *(f"{c[what]['ratio']:.2f} ({c[what]['bounded_ratio']:.2f})" for c in others))
        for what in SENSITIVITY
    ]
    assumed = markdown(("assumed", *names), lines)
    text = markdown(list(COLUMNS), map(cells, rows), (0, 2, 16))
    print(f"{text}\n\n{assumed}\n\n{time.perf_counter() - begun:.0f} s")
    put_into(asked.markdown, "simulated", text)
    put_into(asked.markdown, "sensitivity", assumed)
    for row in rows:
        if row["slower"]:
            print(f"SLOWER than data parallelism: {cells(row)}")
        if row["devices"] == max(RANKS) and row["ratio"] < TARGET:
            print(f"BELOW {TARGET}: {cells(row)}")
    return rows, int(any(row["slower"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
