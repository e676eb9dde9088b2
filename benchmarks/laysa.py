"""Memory and sparse communication together, on the test bed: LaySA's question.

    python benchmarks/laysa.py [--models vgg16-32-narrow] [--own] [--markdown docs/results/laysa.md]
    python benchmarks/laysa.py --models resnet50-32 --predict 12 64 256 1024

Two hosts with slow links train each model densely, with memory policies only, with sparse exchange
only, with both combined naively, and by the collaborative plan. First comes the largest batch of
dense training within the budget, and the rate of the links at which its exchange takes as long as
its compute. Then every variant at that batch, with the plan that needs least memory; then each at
its own largest batch. All in one micro-batch; ``--own`` adds a table in which each variant has the
number that is best for it. Needs root and iproute2, as the test bed does. With ``--markdown`` the
page's tables are put between its marks, for the models that were run. ``--predict`` trains nothing:
it profiles in one process and prints the least memory at batches too large to train here, of sparse
exchange only and of the collaborative plan with its mirrors on the device and on a host beside it.
The last line is one JSON object: rows.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from laysa_plans import (
    COLLABORATIVE,
    DENSE,
    OURS,
    RANKS,
    RATIO,
    SPARSE,
    VARIANTS,
    Chooser,
    Chosen,
    Largest,
    Peak,
    Variant,
    largest_within,
    two_hosts,
    with_ratio,
)
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.micro import micro_batches
from meshwright.models.units.storages import peak_bytes
from meshwright.models.workload import Batch
from meshwright.planner.explain.memory_timeline import memory_timeline
from meshwright.planner.schema.plan import CLASS_NAMES, Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import save
from meshwright.profiler.model import profile
from ranks import goodput, on_a_bed, ring_bytes, run, set_rate, slowest
from rows import command_line, markdown, print_json, put_into
from systems import System, fresh, medians, own_batch
from testbed import missing

MIB = 2**20
CPU = torch.device("cpu")
TIMEOUT_S = 120.0
# The first makes what lives on, and in the later ones gradients of the step before are alive.
TRACKED_STEPS = 3
COMPUTE_STEPS = 3
PROFILE_S = 90.0
# Samples of a rank that are tried at most.
MOST = 1024
# With its own micro-batches a variant may have so many times dense training's largest batch.
OWN_MOST = 2
# A device's link to its host, for what is predicted only (PCIe 3, 16 lanes).
HOST_BYTES_PER_S = 12e9
QUICK = "collaborative quickest"
# LaySA's claims (Zhao et al., IEEE Access 2021): peak memory cut by up to 80.5%, throughput up by
# more than 150%; and what is asked of the time at equal batch.
CUT, FASTER, SLOWDOWN = 0.805, 2.5, 1.1
SINGLES = ("memory only", "sparse only")


class Training(System):
    """A model in training under a plan, on one batch, with top-k's ratio from the start."""

    def __init__(self, name: str, plan: Plan, batch: Batch, device: torch.device = CPU) -> None:
        lossy, workload = Lossy(first_ratio=RATIO, stages=0), fresh(name)
        workload.model.to(device)
        super().__init__(workload, plan=plan, timeout_s=TIMEOUT_S, lossy=lossy)
        self.batch, self.micro_batches = batch.to(device), plan.micro_batches
        self.device = device
        self.model.train()

    def parts(self, batch: Batch) -> Iterable[Batch]:
        count = self.micro_batches
        return micro_batches(self.model, batch, count) if count > 1 else (batch,)

    def peak_bytes(self) -> int:
        """The most that tensors take in the first steps, of the fullest rank. Collective."""

        def work() -> None:
            self.seconds(self.batch, TRACKED_STEPS)
            self.finish()

        tensors = [*self.batch.args, self.batch.target]
        persistent = [*self.model.parameters(), *self.model.buffers(), *tensors]
        return int(slowest(float(peak_bytes(work, persistent, self.device))))


@dataclass
class Comparison:
    """One model under all variants on this rank."""

    asked: dict[str, Any]
    chooser: Chooser

    def say(self, text: str) -> None:
        """What is going on, into the log that was asked for."""
        if dist.get_rank() == 0 and self.asked["log"]:
            with Path(self.asked["log"]).open("a") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {self.asked['model']}: {text}\n")

    def begin(self, chosen: Chosen) -> tuple[Training, int]:
        """(a training with that plan, its peak). Collective."""
        name = self.asked["model"]
        training = Training(name, self.chooser.plan(chosen), own_batch(name, chosen.batch))
        peak = training.peak_bytes()
        self.say(
            f"{chosen.batch} samples, {chosen.words}: peak {peak / 1e6:.1f} MB, "
            f"{chosen.peak_bytes / 1e6:.1f} predicted"
        )
        return training, peak

    def largest_batch(
        self, variant: Variant, parts: int = 1, most: int = MOST
    ) -> tuple[Largest, Training | None, Chosen | None]:
        """The largest batch of a variant in so many micro-batches, and its training. Collective."""
        runs: dict[int, tuple[Training, Chosen]] = {}

        def predicted(count: int) -> float:
            return self.chooser.least(variant, parts * count, parts).peak_bytes

        def run(count: int, limit_bytes: float) -> Peak:
            chosen = self.chooser.quickest(variant, parts * count, limit_bytes, parts)
            training, peak = self.begin(chosen)
            runs[count] = training, chosen
            return Peak(chosen.peak_bytes, peak)

        found = largest_within(predicted, run, self.chooser.budget_bytes, most // parts)
        if not found.batch:
            return found, None, None
        training, chosen = runs[found.batch]
        return found._replace(batch=parts * found.batch), training, chosen

    def equal(self, size: int) -> dict[str, dict[str, Any]]:
        """Every variant at one batch, with the plan that needs least memory; and the quickest
        collaborative plan within the budget. Collective."""
        trainings, found = dict[str, Training](), dict[str, dict[str, Any]]()

        def run(name: str, chosen: Chosen) -> None:
            trainings[name], peak = self.begin(chosen)
            plan = self.chooser.plan(chosen)
            self.keep(plan, name)
            found[name] = {
                "what": chosen.words, "peak_bytes": peak, "predicted_bytes": chosen.peak_bytes,
                "predicted_step_s": chosen.step_s, "classes": self.classes(plan),
            }  # fmt: skip

        for variant in VARIANTS:
            run(variant.name, self.chooser.least(variant, size))
        limit = self.chooser.budget_bytes
        # Once more where more was taken than predicted.
        for _ in range(2):
            run(QUICK, self.chooser.quickest(COLLABORATIVE, size, limit))
            if found[QUICK]["peak_bytes"] <= self.chooser.budget_bytes:
                break
            limit = int(limit * found[QUICK]["predicted_bytes"] / found[QUICK]["peak_bytes"])
        for name, step_s in self.seconds(trainings).items():
            found[name]["step_s"] = step_s
        found[OURS]["quick"] = found.pop(QUICK)
        return found

    def seconds(self, trainings: Mapping[str, Training]) -> dict[str, float]:
        """The median turn of each. Collective."""
        steps = self.asked["steps"]
        turns = {name: partial(one.turn, one.batch, steps) for name, one in trainings.items()}
        return medians(turns, self.asked["rounds"])

    def largest(self, wanted: Mapping[Variant, tuple[int, int]]) -> dict[str, dict[str, Any]]:
        """Variants in so many micro-batches at their largest batches, of so many samples at most.
        Collective."""
        trainings, found = dict[str, Training](), dict[str, dict[str, Any]]()
        for variant, (parts, most) in wanted.items():
            best, training, chosen = self.largest_batch(variant, parts, most)
            found[variant.name] = {
                "max_what": chosen.words if chosen else "does not fit", "micro_batches": parts,
                "max_batch": RANKS * best.batch, "max_peak_bytes": best.peak_bytes,
                "max_step_s": 0.0, "samples_per_s": 0.0,
            }  # fmt: skip
            if training is not None:
                trainings[variant.name] = training
            # Models and their hooks refer to each other: only the collector frees those not kept.
            gc.collect()
        for name, step_s in self.seconds(trainings).items():
            found[name]["max_step_s"] = step_s
            found[name]["samples_per_s"] = found[name]["max_batch"] / step_s
        return found

    def own_best(self, first: Mapping[str, dict[str, Any]], size: int) -> dict[str, dict[str, Any]]:
        """Every variant with the micro-batches and the batch that are predicted to be best for it;
        as at its largest batch, where it was ``first``, if that was quicker. Collective."""
        wanted = {}
        for variant in VARIANTS:
            parts, own = self.chooser.best(variant, OWN_MOST * size)
            if own and (parts > 1 or RANKS * own != first[variant.name]["max_batch"]):
                wanted[variant] = parts, own
        found = {**first, **self.largest(wanted)}
        # Predictions may be wrong: what was chosen by them may be slower than the largest batch.
        return {n: max(r, found[n], key=lambda one: one["samples_per_s"]) for n, r in first.items()}

    def keep(self, plan: Plan, name: str) -> None:
        """Writes a plan with what ``meshwright explain --memory`` needs beside it."""
        if dist.get_rank() or not self.asked["plans"]:
            return
        folder = Path(self.asked["plans"]) / f"{self.asked['model']}-{name.replace(' ', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        save(plan, folder / "plan.json")
        save(self.chooser.profile, folder / "profile.json")
        save(self.chooser.cluster, folder / "cluster.json")

    def classes(self, plan: Plan) -> dict[str, int]:
        """The bytes of each class, each at the moment at which it is largest, and together at the
        peak."""
        found = self.chooser.profile
        moments = memory_timeline(plan, found, self.chooser.cluster).timelines[0].moments
        rows = [moment.by_class() for moment in moments]
        most = {name: max(row[name] for row in rows) for name in rows[0]}
        return {**most, "total": max(moment.total for moment in moments)}

    def on_a_host(self, size: int) -> dict[str, Any]:
        """What the collaborative plan is predicted to hold where devices have a host beside them:
        nothing of it is run."""
        cluster = two_hosts(self.chooser.cluster.levels[0].bytes_per_s, HOST_BYTES_PER_S)
        other = Chooser(self.chooser.profile, cluster, self.chooser.budget_bytes)
        chosen = other.least(COLLABORATIVE, size)
        return {"what": chosen.words, "predicted_bytes": chosen.peak_bytes}


def profile_of(name: str, sizes: Sequence[int]) -> ModelProfile:
    """What is measured of a model here, with top-k's ratio."""
    found = profile(
        fresh(name), batches=sizes, degrees=(), repeats=1, optimizers=("momentum",),
        budget_s=PROFILE_S,
    )  # fmt: skip
    return with_ratio(found, RATIO)


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Everything of one model, as one row. Collective."""
    name, budget = asked["model"], asked["budget_bytes"]
    found = rank_zero_decides(lambda: profile_of(name, asked["sizes"]))
    # Any rate for now: what the largest dense batch takes does not depend on it.
    comparison = Comparison(asked, Chooser(found, two_hosts(1e8), budget))
    comparison.say("profiled")
    best, training, _ = comparison.largest_batch(DENSE)
    if training is None:
        raise SystemExit(f"{name} does not fit into {budget} bytes densely: give it more")
    del training
    # Links are as slow as computing alone: a plain step, without any exchange.
    system, batch = System(fresh(name)), own_batch(name, best.batch)
    taken_s = slowest(median([system.step(batch) for _ in range(COMPUTE_STEPS + 1)][1:]))
    sent = ring_bytes(found.parameter_bytes)
    mbit_s = 8e-6 * sent / taken_s
    set_rate(asked["folder"], mbit_s)
    rate = median(goodput(sent).bytes_per_s for _ in range(3))
    comparison.chooser = Chooser(found, two_hosts(rate), budget)
    comparison.say(
        f"compute {taken_s:.3f} s, {mbit_s:.0f} Mbit/s, {8e-6 * rate:.0f} of them goodput"
    )
    equal = comparison.equal(best.batch)
    gc.collect()
    first = comparison.largest(dict.fromkeys(VARIANTS, (1, MOST)))
    gc.collect()
    own = comparison.own_best(first, best.batch) if asked["own"] else {}
    yield {
        "model": name, "budget_bytes": budget, "parameter_bytes": found.parameter_bytes,
        "batch": RANKS * best.batch, "compute_s": taken_s, "mbit_s": mbit_s,
        "goodput_mbit_s": 8e-6 * rate, "host": comparison.on_a_host(best.batch),
        "rows": [{"model": name, "variant": v, **equal[v], **first[v]} for v in equal],
        "own": [{"model": name, "variant": v, **row} for v, row in own.items()],
    }  # fmt: skip


def table(columns: Mapping[str, Callable[[Mapping[str, Any]], object]], rows: Any) -> str:
    """The rows as Markdown; a column has a heading, and what it shows of a row."""
    return markdown(list(columns), ([show(row) for show in columns.values()] for row in rows))


def mb(count: float) -> str:
    """Bytes in millions."""
    return f"{count / 1e6:.1f}"


MAIN = {
    "variant": lambda r: r["variant"],
    "what": lambda r: r["what"],
    "peak MB": lambda r: mb(r["peak_bytes"]),
    "predicted": lambda r: mb(r["predicted_bytes"]),
    "step s": lambda r: f"{r['step_s']:.3f}",
    "largest batch": lambda r: r["max_batch"],
    "peak MB there": lambda r: mb(r["max_peak_bytes"]),
    "step s there": lambda r: f"{r['max_step_s']:.3f}",
    "samples/s": lambda r: f"{r['samples_per_s']:.2f}",
}
OWN = {
    "variant": lambda r: r["variant"],
    "micro-batches": lambda r: r["micro_batches"],
    "batch": lambda r: r["max_batch"],
    "peak MB": lambda r: mb(r["max_peak_bytes"]),
    "samples/s": lambda r: f"{r['samples_per_s']:.2f}",
}


class Gains(NamedTuple):
    """Of the collaborative plan, one model: peak memory below each peer at equal batch, its time
    there over dense's (with least memory, and as the quickest that keeps the budget), and its
    throughput at its largest batch over peers'."""

    cut: dict[str, float]
    slowdown: float
    quick_slowdown: float
    over_best: float
    over_worst: float
    over_dense: float


def gains(rows: Sequence[Mapping[str, Any]]) -> Gains:
    """The gains from a model's rows, one of each variant. A peer that cannot train at all within
    the budget makes no samples."""
    of = {row["variant"]: row for row in rows}
    ours, dense = of[OURS], of["dense"]
    rates = [of[name]["samples_per_s"] for name in SINGLES]
    return Gains(
        cut={n: 1 - ours["peak_bytes"] / r["peak_bytes"] for n, r in of.items() if n != OURS},
        slowdown=ours["step_s"] / dense["step_s"],
        quick_slowdown=ours["quick"]["step_s"] / dense["step_s"],
        over_best=ours["samples_per_s"] / max(rates),
        over_worst=ours["samples_per_s"] / min(rates) if min(rates) else float("inf"),
        over_dense=ours["samples_per_s"] / dense["samples_per_s"],
    )


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The targets beside the figures of one model."""
    found = gains(rows)
    cuts = ", ".join(
        f"{100 * abs(cut):.1f}% {'below' if cut >= 0 else 'above'} {name}"
        for name, cut in found.cut.items()
    )
    return "\n".join(
        [
            f"- Peak memory of the collaborative plan at equal batch: {cuts} (the claim: up to "
            f"{CUT:.1%} below a single strategy).",
            f"- Its step there takes {found.slowdown:.2f} times dense's, and as the quickest plan "
            f"within the budget {found.quick_slowdown:.2f} times (at most {SLOWDOWN}).",
            f"- Its throughput at its largest batch: {found.over_best:.2f} times the best single "
            f"strategy's, {found.over_worst:.2f} times the worst's, {found.over_dense:.2f} times "
            f"dense's (the claim: up to {FASTER}).",
        ]
    )


def page(found: Mapping[str, Any]) -> str:
    """A model's tables and what they say of the targets."""
    intro = (
        f"Budget {mb(found['budget_bytes'])} MB for each rank; parameters "
        f"{mb(found['parameter_bytes'])} MB. Dense training's largest batch is {found['batch']}, "
        f"which computes for {found['compute_s']:.3f} s: links of {found['mbit_s']:.0f} Mbit/s "
        f"({found['goodput_mbit_s']:.0f} measured). Seconds are medians of {found['rounds']} turns "
        f"of {found['steps']} timed steps."
    )
    quick = next(row["quick"] for row in found["rows"] if "quick" in row)
    used = [n for n in CLASS_NAMES if any(row["classes"][n] for row in found["rows"])]
    classes = [
        (row["variant"], *(mb(row["classes"][name]) for name in (*used, "total")))
        for row in found["rows"]
    ]
    parts = [
        f"## {found['model']}",
        intro,
        f"At a batch of {found['batch']}, the plan that needs least memory; then at each variant's "
        "own largest batch:",
        table(MAIN, found["rows"]),
        f"At the batch of the first columns the quickest collaborative plan within the budget "
        f"({quick['what']}) takes {mb(quick['peak_bytes'])} MB "
        f"({mb(quick['predicted_bytes'])} predicted) and {quick['step_s']:.3f} s a step.",
        "At their largest batches: "
        + "; ".join(f"{r['variant']}: {r['max_what']}" for r in found["rows"])
        + ".",
        verdict(found["rows"]),
        f"Where devices have a host beside them, {found['host']['what']} is predicted to take "
        f"{mb(found['host']['predicted_bytes'])} MB at the equal batch (not run here).",
        "Predicted MB by class at the equal batch, each at the moment at which it is largest "
        "(`explain --memory` has all moments):",
        markdown(("variant", *(CLASS_NAMES[name] for name in used), "at the peak"), classes),
    ]
    if found["own"]:
        parts += [
            "Each with the number of micro-batches and the batch (up to twice the equal one) that "
            "are predicted to be best for it, or as at its largest batch where that was quicker:",
            table(OWN, found["own"]),
        ]
    return "\n\n".join(parts) + "\n"


class Case(NamedTuple):
    """A model's budget for each rank, and the batches of a rank at which it is profiled."""

    budget_mib: int
    sizes: tuple[int, int]


CASES = {"resnet50-32": Case(400, (2, 8)), "vgg16-32-narrow": Case(96, (64, 192))}


def predict(model: str, batches: Sequence[int]) -> list[dict[str, Any]]:
    """The least bytes of a rank at each batch of both hosts; nothing is run."""
    found = profile_of(model, CASES[model].sizes)
    # Any rate: what needs least memory does not depend on it.
    device = Chooser(found, two_hosts(1e8), 2**40)
    with_host = Chooser(found, two_hosts(1e8, HOST_BYTES_PER_S), 2**40)
    rows, lines = [], []
    for batch in batches:
        size = batch // RANKS
        sparse = device.least(SPARSE, size).peak_bytes
        ours, host = (c.least(COLLABORATIVE, size).peak_bytes for c in (device, with_host))
        cuts = [f"{1 - b / sparse:.0%}" for b in (ours, host)]
        lines.append([batch, mb(sparse), mb(ours), cuts[0], mb(host), cuts[1]])
        rows.append(
            {"model": model, "batch": batch, "sparse_bytes": sparse, "collaborative_bytes": ours,
             "host_mirror_bytes": host}
        )  # fmt: skip
    head = ("batch", "sparse only MB", "collaborative MB", "below", "mirrors on a host MB", "below")
    print(markdown(head, lines), flush=True)
    return rows


def measure(model: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model, whose tables are printed."""
    case = CASES[model]
    request = {
        "model": model, "budget_bytes": MIB * (asked.budget_mib or case.budget_mib),
        "sizes": case.sizes, "steps": asked.steps, "rounds": asked.rounds, "own": asked.own,
        "plans": str(asked.plans.resolve()) if asked.plans else "",
        "log": str(asked.log.resolve()) if asked.log else "",
    }  # fmt: skip
    (found,) = on_a_bed(__file__, request)
    part = page({**found, "steps": asked.steps, "rounds": asked.rounds})
    print(part, flush=True)
    put_into(asked.markdown, model, part)
    return found["rows"]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--budget-mib", type=int, help="of each rank, instead of the model's own")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--own", action="store_true", help="also with each one's own micro-batches")
    parser.add_argument("--predict", type=int, nargs="+", help="batches whose memory is predicted")
    parser.add_argument("--markdown", type=Path, help="puts the tables into that page")
    parser.add_argument("--plans", type=Path, help="a folder for plans, profiles and clusters")
    parser.add_argument("--log", type=Path, help="what is going on is written there")
    asked = parser.parse_args()
    if not asked.predict and (reason := missing()) is not None:
        sys.exit(reason)
    rows = []
    for model in asked.models:
        rows += predict(model, asked.predict) if asked.predict else measure(model, asked)
    print_json({"rows": rows})


if __name__ == "__main__":
    run(rank_rows, main)
