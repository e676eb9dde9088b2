"""Predicted against measured peak memory of a step.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--models mlp gpt-mini] [--policies keep sharded]
        [--keep rows.jsonl] [--markdown docs/results/memory.md]

Starts two ranks. Each model is profiled once, at batch sizes around those that are run; then it is
trained for a few steps under every policy that the executor has, with two batches and two
optimizers, and the bytes of live tensors are counted (on CUDA the allocator's). Prints a table,
with the most resident memory of the process beside, and as the last line one JSON object: rows, and
the median and the largest relative error |predicted - measured| / measured. With ``--keep`` rows
are written to a file as they come, and those that it has already are not run again, so that the
whole can be run in pieces. ``--markdown`` puts all of them between that page's marks. ``--mbit-s``
starts the ranks on hosts of the test bed with links as slow as that.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.train import run_steps
from meshwright.models.zoo import build
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import OPTIMIZERS, Goal, OptimizerName
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.plan import LOSSY, MIRRORS, ScheduleName
from meshwright.planner.schema.profile import ModelProfile, UnitProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.model import profile
from ranks import joined
from rows import command_line, keep, known, markdown, print_json, print_table, put_into

RANKS = 2
MODELS = ("mlp", "cnn-digits", "vgg11-32", "resnet50-32", "gpt-mini", "seq2seq-mini")
# Global batches; a rank gets 4 or 16 samples.
BATCHES = (8, 32)
# The sizes profiled, so that what runs lies between them.
MEASURED = (2, 8, 32)
TRAINED_WITH: tuple[OptimizerName, ...] = ("momentum", "adamw")
SLICE_BYTES = 2**20
# What a lossy exchange sends, where the profile has measured that.
RATIO = 0.1
# The targets: of the median error, and of the worst.
WITHIN, BEYOND = 0.02, 0.05
LARGEST = 10


@dataclass(frozen=True)
class Policy:
    """One way in which the executor treats memory, of all units alike as far as they can."""

    name: str
    schedule: ScheduleName = "barrier"
    memory: str = "keep"
    exchange: str = "dense"
    feedback: str = "residual"
    early: bool = False
    optimizers: tuple[OptimizerName, ...] = TRAINED_WITH

    def option(self, unit: UnitProfile) -> Option:
        """The decision for a unit: plain where it has nothing that the policy could be about."""
        plain = Option(data_parallel(RANKS))
        if unit.modules and unit.whole.saved(1) > 0:
            plain = plain._replace(memory=self.memory)
        if not unit.parameters:
            return plain
        if self.exchange not in LOSSY:
            plain = plain._replace(exchange=self.exchange)
        # A unit of biases and norms alone has no fidelity: it is always sent whole.
        for measured in (f for f in unit.fidelity if f.exchange == self.exchange):
            ratio = min(measured.ratios, key=lambda r: abs(r - RATIO))
            plain = plain._replace(exchange=self.exchange, ratio=ratio, feedback=self.feedback)
        return plain._replace(early_release=self.early)


def policies() -> Iterator[Policy]:
    """All that the executor says it runs."""
    yield Policy("keep")
    yield Policy("priority", "priority")
    for memory in CAPABILITY.memory:
        # A CPU has no other memory to put it into.
        if memory == "offload" and not torch.cuda.is_available():
            continue
        if memory != "keep":
            yield Policy(memory, memory=memory)
            yield Policy(f"{memory}, sharded", "priority", memory=memory, exchange="sharded")
            yield Policy(f"{memory}, mirror", "priority", memory=memory, exchange="topk",
                         feedback="mirror", optimizers=("momentum",))  # fmt: skip
    for exchange in CAPABILITY.exchange:
        if exchange != "dense":
            yield Policy(exchange, "priority", exchange=exchange)
    for feedback in CAPABILITY.feedback:
        # The residual is among the exchanges above, and a CPU's mirror on the host is a mirror.
        if feedback == "residual" or (feedback == "host_mirror" and not torch.cuda.is_available()):
            continue
        linear = tuple(o for o in TRAINED_WITH if feedback not in MIRRORS or OPTIMIZERS[o].linear)
        yield Policy(f"topk, {feedback}", "priority", exchange="topk", feedback=feedback,
                     optimizers=linear)  # fmt: skip
    if CAPABILITY.early_release:
        yield Policy("early release", "priority", early=True)


@dataclass(frozen=True)
class Row:
    """One run: bytes of the rank that has most."""

    model: str
    policy: str
    batch: int
    optimizer: str
    predicted_bytes: int
    measured_bytes: int
    resident_bytes: int

    @property
    def error(self) -> float:
        """Relative, and negative where more was used than predicted."""
        return self.predicted_bytes / self.measured_bytes - 1


def run(
    model: str, found: ModelProfile, policy: Policy, batch: int, optimizer: OptimizerName
) -> Row:
    """One run. Collective."""
    here = Device(name="here", memory_bytes=2**40, host_bytes_per_s=1e10)
    # Any: memory does not depend on how quick the links are.
    link = Level(name="intra", latency_s=1e-4, bytes_per_s=1e9)
    node = Node(name="here", devices=(here,) * RANKS)
    slices: dict[str, Any] = {"message_bytes": SLICE_BYTES} if policy.schedule == "priority" else {}
    plan = make_plan(
        found,
        Cluster(name="here", nodes=(node,), levels=(link,)),
        Goal(batch=batch, optimizer=optimizer, allow_lossy=True),
        [policy.option(unit) for unit in found.units],
        schedule=policy.schedule,
        executor=CAPABILITY,
        **slices,
    )
    torch.manual_seed(0)
    workload = build(model)
    workload.model.to(device())
    # Linux then begins a new count of the most resident memory; other systems have none.
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if clear.exists():
        clear.write_text("5")
    measured = run_steps(workload, plan, 1)
    lines = status.read_text().splitlines() if status.exists() else []
    resident = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    peaks = max(plan.prediction.peak_bytes), max(measured.peak_bytes)
    return Row(model, policy.name, batch, optimizer, *peaks, *(resident or [0]))


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def profiled(model: str) -> ModelProfile:
    """Rank 0's profile: what matters here does not depend on others. Collective."""

    def measure() -> ModelProfile:
        torch.manual_seed(0)
        return profile(build(model), batches=MEASURED, device=device(), repeats=1, degrees=())

    return rank_zero_decides(measure)


def on_rank(asked: argparse.Namespace) -> list[Row]:
    """All rows, of which those that were not known are run. Collective."""
    rows = [Row(**row) for row in known(asked.keep)]
    there = {(row.model, row.policy, row.batch, row.optimizer) for row in rows}
    chosen = [p for p in policies() if p.name in asked.policies or not asked.policies]
    for model in asked.models:
        wanted = [
            (policy, batch, optimizer)
            for policy in chosen
            for batch, optimizer in product(BATCHES, policy.optimizers)
            if (model, policy.name, batch, optimizer) not in there
        ]
        # Nothing is profiled where all rows are known.
        if not wanted:
            continue
        found = profiled(model)
        for policy, batch, optimizer in wanted:
            rows.append(row := run(model, found, policy, batch, optimizer))
            if dist.get_rank() == 0:
                line = f"{model} {policy.name} {batch} {optimizer}: {row.error:+.1%}"
                print(line, file=sys.stderr)
                keep(asked.keep, asdict(row))
    return rows


HEADINGS = ("model", "policy", "batch", "optimizer", "predicted MB", "measured MB", "error")


def cells(row: Row) -> tuple[object, ...]:
    return (
        row.model, row.policy, row.batch, row.optimizer, f"{row.predicted_bytes / 1e6:.2f}",
        f"{row.measured_bytes / 1e6:.2f}", f"{row.error:+.1%}",
    )  # fmt: skip


def page_of(rows: list[Row]) -> str:
    """What all rows say beside the targets, by model, by policy, and the worst of them."""
    errors = [abs(r.error) for r in rows]
    resident = [r.resident_bytes // 2**20 for r in rows]
    of = {model: [r for r in rows if r.model == model] for model in MODELS}
    of = {model: mine for model, mine in of.items() if mine}
    by_model = []
    for model, mine in of.items():
        megabytes = [r.measured_bytes / 1e6 for r in mine]
        typical = median(abs(r.error) for r in mine)
        span = f"{min(megabytes):.1f} to {max(megabytes):.1f}"
        by_model.append((model, len(mine), span, f"{typical:.2%}", f"{worst(mine):+.1%}"))
    by_policy = []
    for policy in dict.fromkeys(r.policy for r in rows):
        own = [[r for r in mine if r.policy == policy] for mine in of.values()]
        by_policy.append((policy, *(f"{100 * worst(few):+.1f}" if few else "" for few in own)))
    largest = sorted(rows, key=lambda r: -abs(r.error))[:LARGEST]
    return "\n\n".join(
        [
            f"**{len(rows)} rows: median error {median(errors):.2%}, worst {max(errors):.1%}** "
            f"(targets: {WITHIN:.0%} and {BEYOND:.0%}); {sum(e <= WITHIN for e in errors)} rows "
            f"are within {WITHIN:.0%}, {sum(e > BEYOND for e in errors)} beyond {BEYOND:.0%}. "
            f"Resident sets: {min(resident)} to {max(resident)} MiB.",
            markdown(("model", "rows", "measured MB", "median error", "worst"), by_model),
            "The largest error of each policy (a mirror takes SGD only), in %:",
            markdown(("policy", *of), by_policy),
            f"The {len(largest)} largest errors:",
            markdown(HEADINGS, map(cells, largest)),
        ]
    )


def worst(rows: list[Row]) -> float:
    """The error that is furthest from nothing, with its sign."""
    return max((r.error for r in rows), key=abs)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--policies", nargs="+", default=[])
    parser.add_argument("--keep", type=lambda name: Path(name).resolve())
    parser.add_argument("--markdown", type=lambda name: Path(name).resolve())
    parser.add_argument(
        "--mbit-s", type=float, help="on hosts of a test bed whose links carry so much (needs root)"
    )
    asked = parser.parse_args()
    if not joined(RANKS, mbit_s=asked.mbit_s):
        return
    rows = on_rank(asked)
    if dist.get_rank() == 0:
        lines = [(*cells(row), f"{row.resident_bytes / 1e6:.0f}") for row in rows]
        print_table("peak bytes of a rank", (*HEADINGS, "resident MB"), lines)
        put_into(asked.markdown, "rows", page_of(rows))
        errors = [abs(row.error) for row in rows]
        found = {"median_abs_error": median(errors), "max_abs_error": max(errors)}
        print_json({"rows": [asdict(row) for row in rows], **found})


if __name__ == "__main__":
    main()
