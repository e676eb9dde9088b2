"""One rank of ``lossy.py``: trains under dense and lossy exchanges, and prints what rank 0 found.

    torchrun … lossy_ranks.py PART, a JSON object on the last line

``accuracy``: test accuracy on the digits, and the seconds of computing. ``text``: the loss of a
small language model. ``time``: the mean step under each exchange, in rounds that take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.launch.start import start_process_group
from meshwright.executor.launch.train import share_of
from meshwright.executor.parallel import run_of
from meshwright.models.units.discover import Discovery, discover
from meshwright.models.workload import Batch, Workload
from meshwright.models.zoo import build
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.plan import ExchangePolicy, Plan, Prediction, Provenance, UnitPlan
from torch import nn

BATCH, EPOCHS, SEEDS = 128, 20, 3
RATE, MOMENTUM = 0.005, 0.9
"""At 0.02 the dense exchange trains as well, and dropping a layer for ten steps diverges."""
TEXT_BATCH, TEXT_STEPS, TEXT_RATE = 32, 400, 1e-3
ROUNDS, ROUND_STEPS = 3, 24
SLICE_BYTES = 2**20
_NOTHING = Prediction(
    step_s=0.0,
    compute_s=0.0,
    blocking_s=0.0,
    exposed_s=0.0,
    update_s=0.0,
    exchange_s=0.0,
    wire_bytes=0,
    peak_bytes=(),
    gpu_seconds=0.0,
    samples_per_s=0.0,
)


class Way(NamedTuple):
    """How every unit's gradients are exchanged."""

    exchange: ExchangePolicy
    ratio: float

    def __str__(self) -> str:
        return self.exchange if self.exchange == "dense" else f"{self.exchange} {self.ratio:g}"


WAYS = (
    Way("dense", 1.0),
    Way("dropped", 0.17),
    Way("dropped", 0.1),
    Way("topk", 0.05),
    Way("topk", 0.01),
)


def plan_of(found: Discovery, batch: int, way: Way) -> Plan:
    """Data parallelism by priority with that exchange for all units."""
    world = dist.get_world_size()
    units = tuple(
        UnitPlan(
            name=spec.name,
            kind=spec.kind,
            modules=spec.modules,
            batched_inputs=spec.batched_inputs,
            layout=data_parallel(world),
            exchange=way.exchange,
            exchange_ratio=way.ratio,
        )
        for spec in found.units
    )
    return Plan(
        target="benchmark",
        model="benchmark",
        world_size=world,
        goal=Goal(batch=batch, batch_statistics="local"),
        placement=tuple(range(world)),
        bucket_bytes=SLICE_BYTES,
        schedule="priority",
        units=units,
        prediction=_NOTHING,
        baseline=_NOTHING,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )


@dataclass
class Training:
    """A workload in training on this rank."""

    workload: Workload
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(name: str, way: Way, batch: int, seed: int, lossy: Lossy) -> Training:
        """The workload of that name, with random numbers from that seed."""
        torch.manual_seed(seed)
        workload = build(name)
        found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
        parameters = workload.model.parameters()
        optimizer: torch.optim.Optimizer
        if name.startswith("gpt"):
            optimizer = torch.optim.AdamW(parameters, lr=TEXT_RATE)
        else:
            optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
        apply(workload.model, optimizer, plan_of(found, batch, way), timeout_s=60, lossy=lossy)
        workload.model.train()
        return Training(workload, optimizer)

    @property
    def model(self) -> nn.Module:
        """The model, with its plan."""
        return self.workload.model

    def step(self, whole: Batch) -> None:
        """One step on this rank's share."""
        mine = share_of(whole, run_of(self.model))
        self.workload.loss(self.model(*mine.args, **mine.kwargs), mine.target).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Applies what is pending."""
        run_of(self.model).finish_steps()

    @torch.no_grad()
    def score(self, test: Batch) -> tuple[float, float]:
        """(loss, share that is right) of a test set."""
        self.model.eval()
        outputs = self.model(*test.args, **test.kwargs)
        right = self.workload.accuracy
        assert right is not None
        found = float(self.workload.loss(outputs, test.target)), float(right(outputs, test.target))
        self.model.train()
        return found


def batches(data: Batch, size: int, steps: int, seed: int) -> list[Batch]:
    """Batches of shuffled epochs, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Batch] = []
    while len(found) < steps:
        order = torch.randperm(data.size, generator=generator)
        found += [data.take(part) for part in order.split(size) if len(part) == size]
    return found[:steps]


def accuracy(say: bool) -> dict[str, object]:
    """Accuracies of all seeds, and the seconds of computing. Collective."""
    digits = build("cnn-digits")
    assert digits.data is not None
    train, test = digits.data("train"), digits.data("test")
    steps = EPOCHS * (train.size // BATCH)
    right: dict[str, list[float]] = {str(way): [] for way in WAYS}
    for seed in range(SEEDS):
        drawn = batches(train, BATCH, steps, seed)
        for way in WAYS:
            training = Training.of("cnn-digits", way, BATCH, seed, Lossy(stage_backwards=12))
            for batch in drawn:
                training.step(batch)
            right[str(way)].append(training.score(test)[1])
            if say:
                print(f"seed {seed} {way}: {right[str(way)][-1]:.4f}", file=sys.stderr)
    return {"right": right, "compute_s": compute_s(train)}


def text(say: bool) -> dict[str, float]:
    """The test loss of a small language model after the same steps. Collective."""
    workload = build("gpt-tiny")
    assert workload.data is not None
    train, test = workload.data("train"), workload.data("test")
    drawn = batches(train, TEXT_BATCH, TEXT_STEPS, 0)
    found = {}
    for way in WAYS:
        training = Training.of("gpt-tiny", way, TEXT_BATCH, 0, Lossy())
        for batch in drawn:
            training.step(batch)
        found[str(way)] = training.score(test.slice(0, min(512, test.size)))[0]
        if say:
            print(f"text {way}: {found[str(way)]:.4f}", file=sys.stderr)
    return found


def compute_s(train: Batch) -> float:
    """A step without any exchange, on the slowest rank."""
    training = Training.of("cnn-digits", WAYS[0], BATCH, 0, Lossy())
    drawn = batches(train, BATCH, 12, 0)
    taken = []
    for batch in drawn:
        start = time.perf_counter()
        with training.model.no_sync():  # type: ignore[operator]
            training.step(batch)
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor([median(taken[2:])], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def times(say: bool) -> list[dict[str, object]]:
    """The mean step, wait and wire bytes under each exchange, medians of the rounds. Collective."""
    digits = build("cnn-digits")
    assert digits.data is not None
    train = digits.data("train")
    drawn = batches(train, BATCH, ROUND_STEPS, 0)
    # The warm-up of top-k is over, and dropping beyond its first backward, which sends all.
    ready = {way: Training.of("cnn-digits", way, BATCH, 0, Lossy(stages=0)) for way in WAYS}
    for training in ready.values():
        for batch in drawn[:3]:
            training.step(batch)
        training.finish()
    rounds: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        for way, training in ready.items():
            rounds[way].append(one_round(training, drawn))
            if say:
                print(f"round {number} {way}: {rounds[way][-1]}", file=sys.stderr)
    rows: list[dict[str, object]] = []
    for way, found in rounds.items():
        step_s, waited_s, sent_bytes = (median(column) for column in zip(*found, strict=True))
        row = {"way": str(way), "step_s": step_s, "waited_s": waited_s, "wire_bytes": sent_bytes}
        rows.append(row)
    return rows


def one_round(training: Training, drawn: list[Batch]) -> tuple[float, float, float]:
    """(seconds, seconds waited, bytes sent) of a mean step."""
    run = run_of(training.model)
    dist.barrier()
    start, waited, sent = time.perf_counter(), run.gradients.exposed_s, run.meter.sent_bytes
    for batch in drawn:
        training.step(batch)
    training.finish()
    dist.barrier()
    taken = time.perf_counter() - start, run.gradients.exposed_s - waited
    return tuple(v / len(drawn) for v in (*taken, run.meter.sent_bytes - sent))  # type: ignore[return-value]


def main() -> None:
    """Is one rank."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    start_process_group()
    first = dist.get_rank() == 0
    found = {"accuracy": accuracy, "text": text, "time": times}[sys.argv[1]](first)
    if first:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
