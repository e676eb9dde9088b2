"""What each rank of ``laysa.py`` runs: one model under every variant, in turns.

First the largest batch of dense training within the budget, and the rate of the links at which its
exchange takes as long as its compute. Then every variant at that batch, with the plan that needs
least memory; then each at its own largest batch; then, if asked for, each with its own best number
of micro-batches. Rank 0 writes what was found as one line.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from exchange_rank import fresh, goodput, momentum, set_rate, slowest
from laysa_figures import Held, Settled, settled
from laysa_plans import (
    OURS,
    RANKS,
    RATIO,
    VARIANTS,
    Chooser,
    Chosen,
    Variant,
    two_hosts,
    with_ratio,
)
from meshwright.executor.apply import apply
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.launch.start import start_process_group
from meshwright.executor.memory.peak import peak_bytes
from meshwright.executor.micro import micro_batches
from meshwright.executor.parallel import run_of
from meshwright.models.workload import Batch
from meshwright.planner.explain.memory_timeline import memory_timeline
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import save
from meshwright.profiler.model import profile

TIMEOUT_S = 120.0
TRACKED_STEPS = 3
"""The first makes what lives on, and in the later ones gradients of the step before are alive."""
ALONE_STEPS = 3
PROFILE_S = 90.0
MOST = 1024
"""Samples of a rank that are tried at most."""
OWN_MOST = 2
"""With its own micro-batches a variant may have so many times dense training's largest batch."""
HOST_BYTES_PER_S = 12e9
"""A device's link to its host, for what is predicted only (PCIe 3, 16 lanes)."""


QUICK = "collaborative quickest"


def named(name: str) -> Variant:
    """The variant of that name."""
    return next(variant for variant in VARIANTS if variant.name == name)


class Training:
    """A model in training under a plan, on one batch, with top-k's ratio from the start."""

    def __init__(self, name: str, plan: Plan, batch: Batch) -> None:
        self.workload, self.batch, self.parts = fresh(name), batch, plan.micro_batches
        self.model = self.workload.model
        self.optimizer = momentum(self.model.parameters())
        apply(
            self.model, self.optimizer, plan, timeout_s=TIMEOUT_S,
            lossy=Lossy(first_ratio=RATIO, stages=0),
        )  # fmt: skip
        self.model.train()

    def step(self) -> float:
        """One step; when it ended."""
        whole = self.parts == 1
        for part in [self.batch] if whole else micro_batches(self.model, self.batch, self.parts):
            value = self.workload.loss(self.model(*part.args, **part.kwargs), part.target)
            value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter()

    def finish(self) -> None:
        """Applies what is pending."""
        run_of(self.model).finish_steps()

    def peak_bytes(self) -> int:
        """The most that tensors take in the first steps, of the fullest rank. Collective."""

        def work() -> None:
            for _ in range(TRACKED_STEPS):
                self.step()
            self.finish()

        tensors = [*self.batch.args, self.batch.target]
        standing = [*self.model.parameters(), *self.model.buffers(), *tensors]
        return int(slowest(float(peak_bytes(work, standing, torch.device("cpu")))))

    def turn(self, steps: int) -> float:
        """Seconds of a step in the steady state, of the slowest rank. Collective."""
        dist.barrier()
        ends = [self.step() for _ in range(steps + 1)]
        self.finish()
        return slowest((ends[-1] - ends[0]) / steps)


def timed(trainings: Mapping[str, Training], steps: int, rounds: int) -> dict[str, float]:
    """The median of each training's turns. Collective."""
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(rounds):
        for name, training in trainings.items():
            taken[name].append(training.turn(steps))
    return {name: median(values) for name, values in taken.items()}


@dataclass
class Bench:
    """One model under all variants on this rank."""

    asked: dict[str, Any]
    chooser: Chooser

    @property
    def name(self) -> str:
        """The model's."""
        return str(self.asked["model"])

    def say(self, text: str) -> None:
        """What is going on, into the log that was asked for."""
        if dist.get_rank() == 0 and self.asked["log"]:
            with Path(self.asked["log"]).open("a") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {self.name}: {text}\n")

    def batch(self, size: int) -> Batch:
        """This rank's samples, the same for every variant."""
        workload = fresh(self.name)
        torch.manual_seed(1 + dist.get_rank())
        return workload.make_batch(size)

    def begin(self, chosen: Chosen) -> tuple[Training, int]:
        """(a training with that plan, its peak). Collective."""
        training = Training(self.name, self.chooser.plan(chosen), self.batch(chosen.batch))
        peak = training.peak_bytes()
        self.say(
            f"{chosen.batch} samples, {chosen.words}: peak {peak / 1e6:.1f} MB, "
            f"{chosen.peak_bytes / 1e6:.1f} predicted"
        )
        return training, peak

    def settle(
        self, variant: Variant, parts: int = 1, most: int = MOST
    ) -> tuple[Settled, Training | None, Chosen | None]:
        """The largest batch of a variant in so many micro-batches, and its training. Collective."""
        runs: dict[int, tuple[Training, Chosen]] = {}

        def predicted(count: int) -> float:
            return self.chooser.least(variant, parts * count, parts).peak_bytes

        def run(count: int, limit_bytes: float) -> Held:
            chosen = self.chooser.quickest(variant, parts * count, limit_bytes, parts)
            training, peak = self.begin(chosen)
            runs[count] = training, chosen
            return Held(chosen.peak_bytes, peak)

        found = settled(predicted, run, self.chooser.budget_bytes, most // parts)
        if not found.batch:
            return found, None, None
        training, chosen = runs[found.batch]
        return found._replace(batch=parts * found.batch), training, chosen

    # -- tables --------------------------------------------------------------------------------

    def equal(self, size: int) -> dict[str, dict[str, Any]]:
        """Every variant at one batch, with the plan that needs least memory; and the quickest
        collaborative plan within the budget. Collective."""
        trainings, found = dict[str, Training](), dict[str, dict[str, Any]]()

        def run(name: str, chosen: Chosen) -> None:
            trainings[name], peak = self.begin(chosen)
            plan = self.chooser.plan(chosen)
            self.keep(plan, name)
            found[name] = {
                "what": chosen.words,
                "peak_bytes": peak,
                "predicted_bytes": chosen.peak_bytes,
                "predicted_step_s": chosen.step_s,
                "classes": self.classes(plan),
            }

        for variant in VARIANTS:
            run(variant.name, self.chooser.least(variant, size))
        limit = self.chooser.budget_bytes
        for _ in range(2):  # once more where more was taken than predicted
            run(QUICK, self.chooser.quickest(named(OURS), size, limit))
            if found[QUICK]["peak_bytes"] <= self.chooser.budget_bytes:
                break
            limit = int(limit * found[QUICK]["predicted_bytes"] / found[QUICK]["peak_bytes"])
        for name, step_s in timed(trainings, self.asked["steps"], self.asked["rounds"]).items():
            found[name]["step_s"] = step_s
        found[OURS]["quick"] = found.pop(QUICK)
        return found

    def at_largest(self) -> dict[str, dict[str, Any]]:
        """Every variant at its own largest batch. Collective."""
        trainings, found = dict[str, Training](), dict[str, dict[str, Any]]()
        for variant in VARIANTS:
            best, training, chosen = self.settle(variant)
            found[variant.name] = _row(best, chosen)
            if training is not None:
                trainings[variant.name] = training
            gc.collect()
        self._time(trainings, found)
        return found

    def own_best(
        self, first: Mapping[str, Mapping[str, Any]], size: int
    ) -> dict[str, dict[str, Any]]:
        """Every variant with the micro-batches and the batch that are predicted to be best for it;
        as at its largest batch where that was quicker. Collective."""
        trainings, found = dict[str, Training](), dict[str, dict[str, Any]]()
        for variant in VARIANTS:
            found[variant.name] = {**first[variant.name], "micro_batches": 1}
            parts, own = self.chooser.best(variant, OWN_MOST * size)
            if not own or (parts == 1 and RANKS * own == first[variant.name]["max_batch"]):
                continue
            best, training, chosen = self.settle(variant, parts, own)
            if training is not None:
                found[variant.name] = {**_row(best, chosen), "micro_batches": parts}
                trainings[variant.name] = training
            gc.collect()
        self._time(trainings, found)
        for name in trainings:  # predictions may be wrong
            if found[name]["samples_per_s"] < first[name]["samples_per_s"]:
                found[name] = {**first[name], "micro_batches": 1}
        return found

    def _time(self, trainings: Mapping[str, Training], found: dict[str, dict[str, Any]]) -> None:
        for name, step_s in timed(trainings, self.asked["steps"], self.asked["rounds"]).items():
            found[name]["max_step_s"] = step_s
            found[name]["samples_per_s"] = found[name]["max_batch"] / step_s

    # -- plans ---------------------------------------------------------------------------------

    def keep(self, plan: Plan, name: str) -> None:
        """Writes a plan, its profile and its cluster, for ``meshwright explain --memory``."""
        if dist.get_rank() or not self.asked["plans"]:
            return
        folder = Path(self.asked["plans"]) / f"{self.name}-{name.replace(' ', '-')}"
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
        rate = self.chooser.cluster.levels[0].bytes_per_s
        cluster = two_hosts(rate, HOST_BYTES_PER_S)
        other = Chooser(self.chooser.profile, cluster, self.chooser.budget_bytes)
        chosen = other.least(named(OURS), size)
        return {"what": chosen.words, "predicted_bytes": chosen.peak_bytes}


def _row(best: Settled, chosen: Chosen | None) -> dict[str, Any]:
    return {
        "max_what": chosen.words if chosen else "does not fit",
        "max_batch": RANKS * best.batch,
        "max_peak_bytes": best.peak_bytes,
        "max_step_s": 0.0,
        "samples_per_s": 0.0,
    }


def alone_s(name: str, batch: Batch) -> float:
    """Seconds of a step without any exchange, of the slowest rank. Collective."""
    workload = fresh(name)
    optimizer = momentum(workload.model.parameters())
    taken = []
    for _ in range(ALONE_STEPS + 1):
        start = time.perf_counter()
        value = workload.loss(workload.model(*batch.args, **batch.kwargs), batch.target)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - start)
    return slowest(median(taken[1:]))


def profile_of(name: str, sizes: Sequence[int]) -> ModelProfile:
    """What is measured of a model here, with top-k's ratio."""
    found = profile(
        fresh(name), batches=sizes, degrees=(), repeats=1, optimizers=("momentum",),
        budget_s=PROFILE_S,
    )  # fmt: skip
    return with_ratio(found, RATIO)


def found_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything of one model. Collective."""
    name, budget = asked["model"], asked["budget_bytes"]
    found = rank_zero_decides(lambda: profile_of(name, asked["sizes"]))
    bench = Bench(asked, Chooser(found, two_hosts(1e8), budget))
    bench.say("profiled")
    best, training, _ = bench.settle(VARIANTS[0])
    if training is None:
        raise SystemExit(f"{name} does not fit into {budget} bytes densely: give it more")
    del training
    compute_s = alone_s(name, bench.batch(best.batch))
    weights = found.parameter_bytes
    sent = 2 * (RANKS - 1) / RANKS * weights
    mbit_s = 8e-6 * sent / compute_s
    set_rate(Path(asked["folder"]), mbit_s)
    rate = median(goodput(int(sent)).bytes_per_s for _ in range(3))
    bench.chooser = Chooser(found, two_hosts(rate), budget)
    bench.say(f"compute {compute_s:.3f} s, {mbit_s:.0f} Mbit/s, {8e-6 * rate:.0f} of them goodput")
    equal = bench.equal(best.batch)
    gc.collect()
    first = bench.at_largest()
    gc.collect()
    own = bench.own_best(first, best.batch) if asked["own"] else {}
    return {
        "model": name, "budget_bytes": budget, "parameter_bytes": weights,
        "batch": RANKS * best.batch, "compute_s": compute_s, "mbit_s": mbit_s,
        "goodput_mbit_s": 8e-6 * rate, "host": bench.on_a_host(best.batch),
        "rows": [{"model": name, "variant": v, **equal[v], **first[v]} for v in equal],
        "own": [{"model": name, "variant": v, **row} for v, row in own.items()],
    }  # fmt: skip


def main() -> None:
    """One model. Collective."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    start_process_group()
    found = found_of(asked)
    if dist.get_rank() == 0:
        (Path(asked["folder"]) / "rows").write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
