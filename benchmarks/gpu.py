"""Predicted against measured steps and peaks on one device: what is kept, recomputed, offloaded.

    python benchmarks/gpu.py [--models vgg16 llama-1b] [--turns 2] [--keep rows.jsonl]
        [--markdown docs/results/gpu.md]

On the GPU that torch sees, else on the CPU with small models and without offload, which shows only
that the benchmark itself works. Each model is profiled, planned with one memory policy in all its
units, and trained under that plan, in turns. Prints a table (milliseconds and MB; on a GPU what the
allocator reserved as well), and as the last line one JSON object: rows, the median and the largest
relative error of steps and of peaks. Nothing is fitted to what is predicted. With ``--keep`` rows
are written to a file as they come, and those that it has already are not run again. The Llama needs
the extra ``hf``.
"""

import copy
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.setups import device_name
from meshwright.executor.launch.start import start_process_group
from meshwright.executor.launch.train import Measured, begin_training, run_steps
from meshwright.models.target import workload
from meshwright.models.workload import Batch, Workload
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import MemoryPolicy, Plan, Prediction
from meshwright.profiler.model import profile as measure
from meshwright.profiler.sessions import batches_for, cluster_of_ranks
from prediction import TURNS, Way, error_of, plan_of, row_of, summary
from rows import Row, command_line, keep, known, markdown, print_json, print_table, put_into
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 20
HEADINGS = ("model", "memory", "step", "within", "error", "peak", "error", "reserved", "error")


class Model(NamedTuple):
    """A model (a workload's name, or a factory of this file) with its batch and optimizer, and the
    precision that it computes in (none: as it is)."""

    name: str
    batch: int
    optimizer: str
    precision: str | None = None

    @property
    def goal(self) -> Goal:
        return Goal(batch=self.batch, optimizer=self.optimizer)  # type: ignore[arg-type]

    def workload(self) -> Workload:
        """Equally initialised each time, on the device."""
        made = built(self)
        return replace(made, model=copy.deepcopy(made.model).to(here()))


@cache
def built(model: Model) -> Workload:
    """On the host, where it takes no memory from what is measured."""
    name = f"{Path(__file__).resolve()}:llama_1b" if model.name == "llama-1b" else model.name
    return workload(name, precision=model.precision)


ON_GPUS = (
    Model("vgg16", 64, "momentum"),
    Model("resnet50", 64, "momentum"),
    Model("gpt-small", 8, "adamw", "bf16-mixed"),
    Model("llama-1b", 4, "adamw", "bf16-mixed"),
)
ON_CPUS = (Model("vgg11-32", 16, "momentum"), Model("gpt-tiny", 16, "adamw"))


def llama_1b() -> Workload:
    """A Llama with 1.1 billion parameters: the sizes of TinyLlama (Zhang et al., arXiv 2401.02385),
    random weights, sequences of 2,048 symbols."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
        use_cache=False,
    )  # fmt: skip

    def make_batch(size: int) -> Batch:
        symbols = torch.randint(config.vocab_size, (size, 2049))
        return Batch((symbols[:, :-1].contiguous(),), symbols[:, 1:].contiguous())

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    with here():  # random numbers are quicker there
        model: nn.Module = LlamaForCausalLM(config)
    return Workload("llama-1b", model.cpu(), make_batch, loss)


def here() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def policies() -> tuple[MemoryPolicy, ...]:
    """What the executor can do with feature maps here."""
    known_here = CAPABILITY.memory
    return known_here if here().type == "cuda" else tuple(p for p in known_here if p != "offload")


def rows_of(model: Model, wanted: Sequence[MemoryPolicy], turns: int) -> Iterator[dict[str, Any]]:
    """The rows of one model, under each memory policy."""
    device, cluster = here(), cluster_of_ranks(here(), refresh=True)
    predicted: dict[MemoryPolicy, list[Prediction]] = {policy: [] for policy in wanted}
    measured: dict[MemoryPolicy, list[Measured]] = {policy: [] for policy in wanted}
    plans: dict[MemoryPolicy, Plan] = {}
    for _ in range(turns):
        sizes = batches_for(model.goal, 1)
        # One device divides nothing.
        profile = measure(model.workload(), batches=sizes, degrees=(), device=device)
        for policy in wanted:
            plans[policy] = plan_of(profile, cluster, model.goal, Way(memory=policy))
            predicted[policy].append(plans[policy].prediction)
            let_go()
            measured[policy].append(trained(model.workload(), plans[policy]))
    for policy in wanted:
        name = f"{model.name}, {policy}"
        row = row_of(name, plans[policy], predicted[policy], measured[policy])
        ours, theirs = predicted[policy][0].reserved_bytes, measured[policy][0].reserved_bytes
        yield {
            **row, "model": model.name, "memory": policy, "device": device_name(device),
            "predicted_reserved": max(ours, default=None), "measured_reserved": theirs,
        }  # fmt: skip


def trained(workload: Workload, plan: Plan) -> Measured:
    """Steps under the plan on one batch, which is on the device: what it takes to draw samples is
    not what is predicted."""
    workload, optimizer = begin_training(workload, plan, here())
    batch = workload.make_batch(plan.goal.batch).to(here())
    return run_steps(workload, plan, STEPS, optimizer=optimizer, draw=lambda step: batch)


def let_go() -> None:
    """Frees what was measured before, which would count to the next training's memory: models and
    their hooks refer to each other."""
    gc.collect()
    if here().type == "cuda":
        torch.cuda.empty_cache()


def memory_error(row: Row, what: str) -> float | None:
    """Of ``bytes`` or ``reserved``: relative, and negative where more was used than predicted."""
    predicted, measured = row[f"predicted_{what}"], row[f"measured_{what}"]
    return None if predicted is None or measured is None else float(predicted / measured - 1)


def cells(row: Row) -> tuple[object, ...]:
    """The row for people: milliseconds and MB, predicted / measured."""

    def both(what: str) -> tuple[str, str]:
        error = memory_error(row, what)
        if error is None:
            return "", ""
        names = f"predicted_{what}", f"measured_{what}"
        return " / ".join(f"{row[name] / 1e6:.1f}" for name in names), f"{error:+.1%}"

    return (
        row["model"], row["memory"],
        f"{1e3 * row['predicted_s']:.1f} / {1e3 * row['measured_s']:.1f}",
        f"{1e3 * row['low_s']:.1f} to {1e3 * row['high_s']:.1f}", f"{error_of(row):+.1%}",
        *both("bytes"), *both("reserved"),
    )  # fmt: skip


def report(rows: Sequence[Row], page: Path | None) -> None:
    """The table, what the rows come to, and all of them for machines."""
    found = summary(rows)
    text = (
        f"On {', '.join(sorted({row['device'] for row in rows}))}: steps are off by "
        f"{found['median_abs_error']:.1%} in the median and {found['max_abs_error']:.1%} at most"
    )
    for what, words in (("bytes", "peaks"), ("reserved", "what is reserved")):
        errors = [abs(e) for e in (memory_error(row, what) for row in rows) if e is not None]
        if errors:
            found |= {f"median_{what}_error": median(errors), f"max_{what}_error": max(errors)}
            text += f", {words} by {median(errors):.1%} and {max(errors):.1%}"
    print_table("predicted / measured, ms and MB", HEADINGS, map(cells, rows))
    print(f"{text}.")
    put_into(page, "rows", f"{markdown(HEADINGS, map(cells, rows), left=(0, 1))}\n\n{text}.")
    print_json({"rows": list(rows), **found})


def main() -> None:
    parser = command_line(__doc__)
    every = ON_GPUS if here().type == "cuda" else ON_CPUS
    parser.add_argument("--models", nargs="+", default=[model.name for model in every],
                        help="of the models that are measured on such a device")  # fmt: skip
    parser.add_argument("--turns", type=int, default=TURNS, help="of profiling and training")
    parser.add_argument("--keep", type=Path, help="a file of rows (JSON lines), to go on from")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    strange = sorted({*asked.models} - {model.name for model in every})
    if strange:
        names = ", ".join(model.name for model in every)
        sys.exit(f"no model here is named {', '.join(strange)}: name some of {names}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_process_group()
    rows = known(asked.keep)
    there = {row["case"] for row in rows}
    for model in (model for model in every if model.name in asked.models):
        wanted = [policy for policy in policies() if f"{model.name}, {policy}" not in there]
        for row in rows_of(model, wanted, asked.turns) if wanted else ():
            rows.append(row)
            keep(asked.keep, row)
            print(f"{row['case']}: {error_of(row):+.1%}", file=sys.stderr)
    report(rows, asked.markdown)


if __name__ == "__main__":
    main()
