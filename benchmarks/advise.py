"""What ``advise`` says against what each of its ways reaches, on two hosts of the test bed.

    python benchmarks/advise.py --keep rows.jsonl [--markdown page.md]

Needs root. For each model and link the ranks probe the link and profile the model, ``advise`` names
the ways, the command beside each way makes its plan, and all ways train in turns: those plans,
DistributedDataParallel, and one device by itself. A row holds the samples per second of each way,
predicted and measured. Prints a table, how far the way that ``advise`` puts first is behind the
quickest and how well the gains are predicted, and as the last line one JSON object. With ``--keep``
rows are written to a file as they come, and those that it has are not measured again.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from meshwright import advise
from meshwright.cli.app import run as command
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.optimizer.kinds import optimizer_for
from meshwright.models.workload import Batch
from meshwright.planner.explain.advice import Advice, Way
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import load, save
from prediction import CNN, GPT, SEQ, VGG, Model, links_at, profiled, trained
from ranks import on_a_bed, run, set_rate, slowest
from rows import Row, command_line, keep, known, markdown, print_json, print_table, put_into
from systems import System
from torch.nn.parallel import DistributedDataParallel

MODELS = (CNN, VGG, GPT, SEQ)
LINKS_MBIT_S = (100.0, 400.0, 2000.0)
TURNS, STEPS = 3, 5
# A first choice that is so near to the quickest way is as good.
NEAR = 0.05
HEADINGS = ("model", "Mbit/s", "way", "samples/s", "gain", "error of the gain")


def plan_of(way: Way, folder: Path, model: Model) -> Plan:
    """Made by the command that ``advise`` prints beside the way."""
    out = folder / "plan.json"
    # The last of an option that is there twice counts: a way may have another batch.
    asked = [
        "plan", str(folder / "profile.json"), "--cluster", str(folder / "cluster.json"),
        "--batch", str(model.batch), "--optimizer", model.optimizer, *(way.options or ()),
        "--json", "--out", str(out),
    ]  # fmt: skip
    if code := command(asked):
        raise SystemExit(f"{' '.join(asked)}: exit code {code}")
    return load(Plan, out, "plan")


def asked_for(
    model: Model, profile: ModelProfile, cluster: Cluster
) -> tuple[Advice, dict[str, Plan]]:
    """What is advised, and the plans of those ways that have one."""
    found = advise(profile, cluster, model.goal)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(profile, folder / "profile.json")
        save(cluster, folder / "cluster.json")
        return found, {
            way.name: plan_of(way, folder, model)
            for way in found.ways
            if way.samples_per_s is not None and way.options is not None
        }


def alone(model: Model) -> System:
    workload = model.workload()
    return System(workload, partial(optimizer_for, model.optimizer))


def by_ddp(model: Model) -> System:
    """Collective."""
    system = alone(model)
    system.model = DistributedDataParallel(system.model)
    return system


def turn_alone(model: Model, batch: Batch) -> float:
    """Seconds of a step of the whole batch on rank 0, while the other ranks have nothing to do.
    Collective."""
    mine = alone(model).turn(batch, STEPS) if dist.get_rank() == 0 else 0.0
    return slowest(mine)


def turn_by_ddp(model: Model, batch: Batch) -> float:
    """Seconds of a step, of the slowest rank. Collective."""
    each = batch.size // dist.get_world_size()
    own = batch.slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    return slowest(by_ddp(model).turn(own, STEPS))


def turns_of(
    model: Model, advice: Advice, plans: dict[str, Plan]
) -> dict[str, Callable[[], float]]:
    """What measures a step of each way. Collective calls."""
    batch = model.workload().make_batch(model.batch)
    turns: dict[str, Callable[[], float]] = {}
    for way in advice.ways:
        if way.name in plans:
            turns[way.name] = partial(_planned, model, plans[way.name])
        elif way.samples_per_s is not None:
            turns[way.name] = partial(turn_alone if way.ranks == 1 else turn_by_ddp, model, batch)
    return turns


def _planned(model: Model, plan: Plan) -> float:
    return trained(model.workload(), plan).step_s


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one model at the links asked for. Collective."""
    model = MODELS[asked["model"]]
    for mbit_s in asked["links"]:
        cluster = links_at(asked, [mbit_s])[mbit_s]
        profile = profiled(model)
        advice, plans = rank_zero_decides(partial(asked_for, model, profile, cluster))
        set_rate(asked["folder"], mbit_s)
        taken: dict[str, list[float]] = {}
        for _ in range(TURNS):
            for name, turn in turns_of(model, advice, plans).items():
                dist.barrier()
                taken.setdefault(name, []).append(turn())
        batches = {way.name: way.batch for way in advice.ways}
        yield {
            "model": model.name, "mbit_s": mbit_s,
            "predicted": {way.name: way.samples_per_s for way in advice.ways},
            "why": {way.name: way.why for way in advice.ways if way.why},
            "measured": {name: batches[name] / median(s) for name, s in taken.items()},
        }  # fmt: skip


DDP = "data parallel (DDP)"


def judged(row: Row) -> dict[str, Any]:
    """How far the first choice is behind the quickest way, and the gain of each way over
    DistributedDataParallel: (predicted, measured)."""
    measured, predicted = row["measured"], row["predicted"]
    first = max(measured, key=lambda name: predicted[name])
    gains = {
        name: (predicted[name] / predicted[DDP], measured[name] / measured[DDP])
        for name in measured if name != DDP
    }  # fmt: skip
    behind = 1 - measured[first] / max(measured.values())
    return {"first": first, "behind": behind, "gains": gains}


def cells(row: Row) -> Iterator[tuple[object, ...]]:
    """A line for each way, predicted / measured."""
    found, best = judged(row), max(row["measured"].values())
    for name, measured in sorted(row["measured"].items(), key=lambda pair: -pair[1]):
        predicted = row["predicted"][name]
        marks = " (first choice)" * (name == found["first"]) + " (quickest)" * (measured == best)
        gain = found["gains"].get(name)
        yield (
            row["model"], f"{row['mbit_s']:g}", name + marks,
            f"{predicted:.1f} / {measured:.1f}",
            f"{gain[0]:.2f} / {gain[1]:.2f}" if gain else "1",
            f"{gain[0] / gain[1] - 1:+.1%}" if gain else "",
        )  # fmt: skip


def report(rows: Sequence[Row], page: Path | None) -> None:
    lines = [line for row in rows for line in cells(row)]
    found = [judged(row) for row in rows]
    near = sum(one["behind"] <= NEAR for one in found)
    errors = [abs(ours / theirs - 1) for one in found for ours, theirs in one["gains"].values()]
    text = (
        f"The first choice is within {NEAR:.0%} of the quickest way in {near} of {len(rows)} rows, "
        f"{max(one['behind'] for one in found):.1%} behind at most; the gains over "
        f"DistributedDataParallel are predicted within {median(errors):.1%} in the median."
    )
    print_table("predicted / measured", HEADINGS, lines)
    print(text)
    put_into(page, "rows", f"{markdown(HEADINGS, lines, left=(0, 2))}\n\n{text}")
    print_json({"rows": rows, "near": near, "median_gain_error": median(errors)})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS])
    parser.add_argument("--links", nargs="+", type=float, default=LINKS_MBIT_S, help="Mbit/s")
    parser.add_argument("--keep", type=Path, help="a file of rows (JSON lines), to go on from")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    rows = known(asked.keep)
    there = {(row["model"], row["mbit_s"]) for row in rows}
    for number, model in enumerate(MODELS):
        links = [mbit_s for mbit_s in asked.links if (model.name, mbit_s) not in there]
        if model.name in asked.models and links:
            for row in on_a_bed(__file__, {"model": number, "links": links}):
                rows.append(row)
                keep(asked.keep, row)
    report(rows, asked.markdown)


if __name__ == "__main__":
    run(rank_rows, main)
