"""The largest batch and its throughput within a budget of a GPU's memory: LaySA's question there.

    python benchmarks/gpu_batch.py [--models vgg16 resnet50] [--budget 8192]
        [--markdown docs/results/gpu.md]

Two ranks share the GPU, over NCCL 2.30 or later, and each has the budget. Without a GPU they are
processes over gloo with a small model and a small budget, which shows only that the benchmark
itself works. Every variant of ``benchmarks/laysa.py`` (dense, memory policies only, sparse exchange
only, both naively, the collaborative plan) gets the largest batch whose plan keeps the budget, as
measured, and all then train in turns. Prints a table, and as the last line one JSON object: rows.
"""

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_pair import ON_CPUS, RANKS, ROUNDS, STEPS, joined_on_a_device, turn
from laysa import MIB, MOST, Training
from laysa_plans import RATIO, VARIANTS, Chooser, Chosen, Peak, Variant, largest_within, with_ratio
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.comm.setups import device_name
from meshwright.executor.launch.start import local_device
from meshwright.profiler.model import profile
from meshwright.profiler.sessions import cluster_of_ranks
from rows import command_line, markdown, print_json, print_table, put_into
from systems import fresh, medians, own_batch

ON_GPUS, BUDGET_MIB = ("vgg16", "resnet50"), 8192
CPU_BUDGET_MIB = 48
SIZES, CPU_SIZES = (8, 16), (32, 64)
HEADINGS = ("model", "plan", "batch", "samples/s", "peak, MB", "what it does")


class Trainings:
    """One model within a budget on this rank's device."""

    def __init__(self, name: str, budget_bytes: int, device: torch.device) -> None:
        sizes = SIZES if device.type == "cuda" else CPU_SIZES
        found = rank_zero_decides(
            lambda: profile(
                fresh(name), batches=sizes, degrees=(), optimizers=("momentum",), device=device
            )
        )
        self.name, self.device = name, device
        cluster = cluster_of_ranks(device, refresh=True)
        self.chooser = Chooser(with_ratio(found, RATIO), cluster, budget_bytes)

    def row_of(self, variant: Variant) -> tuple[dict[str, Any], Training | None]:
        """A variant's largest batch, and its training there. Collective."""
        runs: dict[int, tuple[Training, Chosen]] = {}

        def run(count: int, limit_bytes: float) -> Peak:
            chosen = self.chooser.quickest(variant, count, limit_bytes)
            batch = own_batch(self.name, count)
            training = Training(self.name, self.chooser.plan(chosen), batch, self.device)
            runs[count] = training, chosen
            return Peak(chosen.peak_bytes, training.peak_bytes())

        def predicted(count: int) -> float:
            return self.chooser.least(variant, count).peak_bytes

        budget = self.chooser.budget_bytes
        found = largest_within(predicted, run, budget, MOST)
        training, chosen = runs.get(found.batch, (None, None))
        row = {
            "model": self.name, "variant": variant.name, "device": device_name(self.device),
            "budget_bytes": budget, "batch": RANKS * found.batch, "peak_bytes": found.peak_bytes,
            "predicted_bytes": chosen.peak_bytes if chosen else 0,
            "what": chosen.words if chosen else "does not fit", "samples_per_s": 0.0,
        }  # fmt: skip
        runs.clear()
        # Models and their hooks refer to each other: only the collector frees those not kept.
        gc.collect()
        return row, training

    def rows(self) -> list[dict[str, Any]]:
        """Of all variants. Collective."""
        found, turns = [], {}
        for variant in VARIANTS:
            row, training = self.row_of(variant)
            found.append(row)
            if training is not None:
                turns[variant.name] = partial(turn, training, training.batch, self.device, STEPS)
        for name, step_s in medians(turns, ROUNDS).items():
            row = next(row for row in found if row["variant"] == name)
            row["samples_per_s"] = row["batch"] / step_s
        return found


def report(rows: Sequence[dict[str, Any]], page: Path | None) -> None:
    """The table, and all rows for machines."""
    lines = [
        (
            row["model"], row["variant"], row["batch"], f"{row['samples_per_s']:.1f}",
            f"{row['predicted_bytes'] / 1e6:.1f} / {row['peak_bytes'] / 1e6:.1f}", row["what"],
        )
        for row in rows
    ]  # fmt: skip
    title = f"two ranks on {rows[0]['device']}, {rows[0]['budget_bytes'] / 1e6:.1f} MB each"
    print_table(f"{title} (peak: predicted / measured)", HEADINGS, lines)
    put_into(page, "batch", markdown(HEADINGS, lines, left=(0, 1, 5)))
    print_json({"rows": list(rows)})


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=ON_GPUS if on_gpu else ON_CPUS,
                        help="reference workloads, such as vgg16")  # fmt: skip
    parser.add_argument("--budget", type=int, help="of each rank, in MiB",
                        default=BUDGET_MIB if on_gpu else CPU_BUDGET_MIB)  # fmt: skip
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    if not joined_on_a_device():
        return
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        rows += Trainings(name, asked.budget * MIB, local_device()).rows()
    if dist.get_rank() == 0:
        report(rows, asked.markdown)


if __name__ == "__main__":
    main()
