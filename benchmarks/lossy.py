"""Exchanges that send a part, against the dense one, on two hosts with slow links.

    python benchmarks/lossy.py [--only times] [--markdown docs/results/lossy.md]

Trains ``cnn-digits`` on the digits by priority exchange: dense, rounded to bfloat16 and to eight
bits, with layers dropped, and with top-k, all in one run. First on fast links: test accuracy after
the same number of epochs over three seeds, the loss of a small language model, and the seconds of
computing. Then on links so slow that the dense exchange takes about eight times the computing: the
time of a step, what is predicted of it from a profile and probed links, how much of it the ranks
wait for gradients, and the bytes on the wire. Needs root and iproute2, as the test bed does.
Prints a table, and as the last line one JSON object. With ``--markdown`` the page's parts are put
between its marks.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.launch.train import share_of
from meshwright.executor.parallel import run_of
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.models.zoo import build
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.plan import ExchangePolicy, UnitPlan, WireFormat
from meshwright.planner.schema.profile import FidelityProfile, UnitProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.overhead import plan_by_hand
from meshwright.profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks
from msgspec.structs import replace
from ranks import on_a_bed, run, set_rate, slowest
from rows import command_line, markdown, print_json, print_table, put_into
from systems import System
from testbed import missing

FAST_MBIT_S = 10_000.0
# The dense exchange takes so many times the computing.
EXPOSED = 8.0
# Of ``cnn-digits``; two ranks send as many in a ring.
GRADIENT_BYTES = 4 * 1_635_274
# What is asked of layer dropping: both cuts, and the accuracy lost at most.
COMMUNICATION, STEP, ACCURACY = 0.81, 0.70, 0.01
BATCH, EPOCHS, SEEDS = 128, 20, 3
# At 0.02 the dense exchange trains as well, and dropping a layer for ten steps diverges.
RATE, MOMENTUM = 0.005, 0.9
TEXT_BATCH, TEXT_STEPS, TEXT_RATE = 32, 400, 1e-3
ROUNDS, ROUND_STEPS = 3, 24
SLICE_BYTES = 2**20
CPU = torch.device("cpu")


class Exchange(NamedTuple):
    """How every unit's gradients are exchanged."""

    policy: ExchangePolicy
    ratio: float = 1.0
    wire: WireFormat = "exact"

    def __str__(self) -> str:
        if self.wire != "exact":
            return self.wire
        return self.policy if self.ratio == 1.0 else f"{self.policy} {self.ratio:g}"


EXCHANGES = (
    Exchange("dense"),
    Exchange("dense", wire="bf16"),
    Exchange("int8"),
    Exchange("dropped", 0.17),
    Exchange("dropped", 0.1),
    Exchange("topk", 0.05),
    Exchange("topk", 0.01),
    Exchange("low_rank", 0.01),
)


class Training(System):
    """A workload in training on this rank, with random numbers from a seed. Collective."""

    def __init__(
        self, name: str, exchange: Exchange, lossy: Lossy, *, batch: int = BATCH, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        workload = build(name)
        found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
        units = (
            UnitPlan(
                name=spec.name, kind=spec.kind, modules=spec.modules,
                batched_inputs=spec.batched_inputs, batch_dims=spec.batch_dims,
                layout=data_parallel(dist.get_world_size()),
                exchange=exchange.policy, exchange_ratio=exchange.ratio, wire=exchange.wire,
            )
            for spec in found.units
        )  # fmt: skip
        goal = Goal(batch=batch, batch_statistics="local")
        plan = plan_by_hand(units, goal, "priority", SLICE_BYTES, "benchmark")
        make = OPTIMIZERS[name.partition("-")[0]]
        super().__init__(workload, make, plan, timeout_s=60, lossy=lossy)
        self.model.train()

    def parts(self, batch: Batch) -> tuple[Batch, ...]:
        return (share_of(batch, run_of(self.model)),)

    def train(self, drawn: list[Batch]) -> None:
        for batch in drawn:
            self.step(batch)

    @torch.no_grad()
    def score(self, test: Batch) -> tuple[float, float]:
        """(loss, share that is right) of a test set."""
        self.model.eval()
        outputs = self.model(*test.args, **test.kwargs)
        self.model.train()
        loss, accuracy = self.workload.loss, self.workload.accuracy
        return float(loss(outputs, test.target)), float(accuracy(outputs, test.target))


OPTIMIZERS = {
    "gpt": lambda p: torch.optim.AdamW(p, lr=TEXT_RATE),
    "cnn": lambda p: torch.optim.SGD(p, lr=RATE, momentum=MOMENTUM),
}


def batches(data: Batch, size: int, steps: int, seed: int = 0) -> list[Batch]:
    """Batches of shuffled epochs, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Batch] = []
    while len(found) < steps:
        order = torch.randperm(data.size, generator=generator)
        found += [data.take(part) for part in order.split(size) if len(part) == size]
    return found[:steps]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr)


def accuracies() -> dict[str, list[float]]:
    """Test accuracy on the digits under each exchange, for all seeds. Collective."""
    data = build("cnn-digits").data
    train, test = data("train"), data("test")
    steps = EPOCHS * (train.size // BATCH)
    right: dict[str, list[float]] = {str(exchange): [] for exchange in EXCHANGES}
    for seed in range(SEEDS):
        drawn = batches(train, BATCH, steps, seed)
        for exchange in EXCHANGES:
            training = Training("cnn-digits", exchange, Lossy(stage_backwards=12), seed=seed)
            training.train(drawn)
            right[str(exchange)].append(training.score(test)[1])
            say(f"seed {seed} {exchange}: {right[str(exchange)][-1]:.4f}")
    return right


def text_losses() -> dict[str, float]:
    """The test loss of a small language model after the same steps. Collective."""
    data = build("gpt-tiny").data
    test, drawn = data("test"), batches(data("train"), TEXT_BATCH, TEXT_STEPS)
    found = {}
    for exchange in EXCHANGES:
        training = Training("gpt-tiny", exchange, Lossy(), batch=TEXT_BATCH)
        training.train(drawn)
        found[str(exchange)] = training.score(test.slice(0, min(512, test.size)))[0]
        say(f"text {exchange}: {found[str(exchange)]:.4f}")
    return found


def compute_seconds() -> float:
    """A step without any exchange, on the slowest rank. Collective."""
    training = Training("cnn-digits", EXCHANGES[0], Lossy())
    drawn = batches(build("cnn-digits").data("train"), BATCH, 12)
    taken = []
    apart: Any = training.model.no_sync
    for batch in drawn:
        # Without it the exchange would be in the step, on fast links as well.
        with apart():
            taken.append(training.step(batch))
    return slowest(median(taken[2:]))


def times() -> list[dict[str, Any]]:
    """The mean step, wait and wire bytes under each exchange, medians of the rounds. Collective."""
    drawn = batches(build("cnn-digits").data("train"), BATCH, ROUND_STEPS)
    # The warm-up of top-k is over, and dropping beyond its first backward, which sends all.
    ready = {e: Training("cnn-digits", e, Lossy(stages=0)) for e in EXCHANGES}
    for training in ready.values():
        training.train(drawn[:3])
        training.finish()
    rounds: dict[Exchange, list[tuple[float, ...]]] = {e: [] for e in EXCHANGES}
    for number in range(ROUNDS):
        for exchange, training in ready.items():
            rounds[exchange].append(one_round(training, drawn))
            say(f"round {number} {exchange}: {rounds[exchange][-1]}")
    names = ("step_s", "waited_s", "wire_bytes")
    return [
        {"way": str(e), **dict(zip(names, map(median, zip(*found, strict=True)), strict=True))}
        for e, found in rounds.items()
    ]


def one_round(training: Training, drawn: list[Batch]) -> tuple[float, ...]:
    """(seconds, seconds waited, bytes sent) of a mean step. Collective."""
    run = run_of(training.model)

    def reading() -> tuple[float, float, int]:
        dist.barrier()
        return time.perf_counter(), run.gradients.exposed_s, run.meter.sent_bytes

    before = reading()
    training.train(drawn)
    training.finish()
    return tuple((b - a) / len(drawn) for a, b in zip(before, reading(), strict=True))


def _with_ratios(unit: UnitProfile) -> UnitProfile:
    """The unit as if the ratios that are used here were among those whose fidelity profiles
    measure. The time of a step does not depend on what is kept."""
    asked = (
        FidelityProfile(exchange=e.policy, ratios=(e.ratio,), kept=(1.0,))
        for e in EXCHANGES if e.ratio < 1
    )  # fmt: skip
    return replace(unit, fidelity=(*unit.fidelity, *asked))


def predictions() -> dict[str, float]:
    """Seconds of a mean step under each exchange, from a profile and from links as they are now.
    Collective."""
    goal = Goal(batch=BATCH, batch_statistics="local", optimizer="momentum")
    torch.manual_seed(0)
    sizes = batches_for(goal, dist.get_world_size())
    profile = profile_on_ranks(build("cnn-digits"), sizes, CPU, refresh=True)
    profile = replace(profile, units=tuple(map(_with_ratios, profile.units)))
    links = cluster_of_ranks(CPU, refresh=True)
    whole = data_parallel(dist.get_world_size())
    found = {}
    for e in EXCHANGES:
        sent = Option(whole, exchange=e.policy, ratio=e.ratio, wire=e.wire)
        chosen = [sent if unit.parameters else Option(whole) for unit in profile.units]
        plan = make_plan(
            profile, links, goal, chosen, schedule="priority", message_bytes=SLICE_BYTES,
            executor=CAPABILITY,
        )  # fmt: skip
        found[str(e)] = plan.prediction.step_s
    return found


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Everything, as one row. Collective."""
    # On fast links first: what is trained to does not depend on them.
    trained: dict[str, Any] = (
        {} if asked["only"] else {"right": accuracies(), "losses": text_losses()}
    )
    found = {**trained, "compute_s": compute_seconds()}
    mbit_s = 8e-6 * GRADIENT_BYTES / (EXPOSED * found["compute_s"])
    set_rate(asked["folder"], mbit_s)
    # Before and after, as the machine does not stay as quick as it was.
    before, timed, after = predictions(), times(), predictions()
    predicted = {way: mean((before[way], after[way])) for way in before}
    yield {**found, "mbit_s": mbit_s, "timed": timed, "predicted": predicted}


TIMES = ("exchange", "step ms", "cut", "predicted", "waiting ms", "cut", "wire MB", "cut")
TRAINED = ("test accuracy, 3 seeds", "against dense", "text loss")


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each exchange from what the ranks found: a mean step on slow links, what is cut off
    the dense exchange's bytes, seconds of waiting and of the step, and what it trains to."""
    dense, trained = found["timed"][0], "right" in found
    cuts = {"wire_cut": "wire_bytes", "waited_cut": "waited_s", "step_cut": "step_s"}
    return [
        {
            **row,
            **{cut: 1 - row[name] / dense[name] for cut, name in cuts.items()},
            "predicted_s": found["predicted"][row["way"]],
            "accuracy": found["right"][row["way"]] if trained else (),
            "text_loss": found["losses"][row["way"]] if trained else None,
        }
        for row in found["timed"]
    ]


def gained(row: dict[str, Any], dense: dict[str, Any]) -> float:
    return mean(row["accuracy"]) - mean(dense["accuracy"])


def cells(row: dict[str, Any], dense: dict[str, Any]) -> tuple[str, ...]:
    times = (
        row["way"],
        f"{1e3 * row['step_s']:.1f}",
        f"{row['step_cut']:.0%}",
        f"{1e3 * row['predicted_s']:.1f} ({row['predicted_s'] / row['step_s'] - 1:+.1%})",
        f"{1e3 * row['waited_s']:.1f}",
        f"{row['waited_cut']:.0%}",
        f"{row['wire_bytes'] / 1e6:.3f}",
        f"{row['wire_cut']:.0%}",
    )
    if not row["accuracy"]:
        return times
    return (
        *times,
        " ".join(f"{a:.1%}" for a in row["accuracy"]),
        f"{100 * gained(row, dense):+.1f} points",
        f"{row['text_loss']:.3f}",
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--markdown", type=Path, help="puts the results into that page")
    parser.add_argument("--only", choices=("times",), help="train nothing to its end")
    asked = parser.parse_args()
    if asked.only and asked.markdown:
        parser.error("the page has what is trained to as well: leave --only or --markdown out")
    if (reason := missing()) is not None:
        sys.exit(reason)
    (found,) = on_a_bed(__file__, {"only": asked.only}, mbit_s=FAST_MBIT_S)
    compute_s, mbit_s, rows = found["compute_s"], found["mbit_s"], rows_of(found)
    lines = [cells(row, rows[0]) for row in rows]
    title = f"computing {1e3 * compute_s:.1f} ms, links of {mbit_s:.0f} Mbit/s"
    if asked.only:
        print_table(title, TIMES, lines)
        print_json({"compute_s": compute_s, "mbit_s": mbit_s, "rows": rows})
        return
    reached = [
        row["way"]
        for row in rows
        if min(row["wire_cut"], row["waited_cut"]) >= COMMUNICATION
        and row["step_cut"] >= STEP
        and gained(row, rows[0]) >= -ACCURACY
    ]
    result = {"compute_s": compute_s, "mbit_s": mbit_s, "rows": rows, "reached": reached}
    head = (*TIMES, *TRAINED)
    print_table(title, head, lines)
    put_into(
        asked.markdown,
        "table",
        f"A step without any exchange takes {1e3 * compute_s:.1f} ms; the links have "
        f"{mbit_s:.0f} Mbit/s, so\nthat the dense exchange takes about eight times that.\n\n"
        f"{markdown(head, lines)}\n\n"
        "At least 81% less communication (bytes, and waiting), 70% less time for a step, and "
        "accuracy within\none point of dense: "
        f"{', '.join(f'`{name}`' for name in reached) or 'none'}.",
    )
    put_into(asked.markdown, "last line", f"```json\n{json.dumps(result)}\n```")
    print_json(result)


if __name__ == "__main__":
    run(rank_rows, main)
