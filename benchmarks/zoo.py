"""Models that were not written here, profiled, planned and trained beside a single process.

    OMP_NUM_THREADS=1 python benchmarks/zoo.py [--models llama vit] [--sample 20 --seed 1]
        [--jobs 2] [--keep rows.jsonl] [--markdown docs/results/zoo.md]

Every architecture of transformers that can be made small by its configuration, the smallest model
of each family of timm, and torchvision's classifiers (``zoo_models.py``, ``zoo_vision.py``; of the
packages that are installed) are built with random weights and given to two ranks: units are found
and profiled, a plan is made for a slow link, and three steps under that plan are compared with one
process (as ``meshwright verify`` does), then three more under a plan that divides every unit that
can be divided. Peak memory under both is predicted and measured. A model has a time limit for all
of it. ``--jobs`` models are tried at once, as most of the time one rank of two computes. Prints a
row for each, and last a JSON object with the counts of each verdict:

- ``right``: equal to one process by the yardstick of the precision that the model computes in;
- ``explained``: not equal, and the verdict says why no plan could be, or a model that is random is
  equal in the mean, within its own spread;
- ``refused``: one sentence of ours says why this model, or this plan of it, cannot be;
- ``wrong``: not equal; ``error``: anything else was raised; ``hang``: the limit passed;
- ``unbuilt``: what is set small in its configuration does not make a model that trains by itself,
  or none that is small and quick enough for this benchmark.

With ``--keep`` rows are written to a file as they come, and those that it has are not run again.
"""

import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from meshwright import Goal, MeshwrightError, Plan, Workload, plan
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.train import run_steps
from meshwright.executor.launch.verify import verify_on_ranks
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option, tied_units
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.planner.solve.unit_options import all_options
from meshwright.profiler.model import profile
from rows import command_line, keep, known, markdown, print_json, print_row, put_into
from zoo_models import architectures, from_transformers, try_training
from zoo_vision import from_vision, vision_models

RANKS = 2
BATCH = 8
MEASURED = (2, 4, 8)
COLLECTIVE_S = 60.0
LOST = "Connection closed"
# The targets: of all models those that train right or are told why not, and those of which half the
# parameters may be divided; of all peaks those predicted within so much.
TRAINED, DIVISIBLE, PEAKS, WITHIN = 0.97, 0.85, 0.90, 0.05
HALF = 0.5

Row = dict[str, Any]


class Limits(NamedTuple):
    """The models that are tried: of at most so many parameters in their own sizes, and whose
    forward and backward of two samples take at most so many seconds. What does not end in
    ``limit_s`` counts as a hang."""

    parameters: int
    step_s: float
    limit_s: float = 480.0


# More parameters, several times over on two ranks, are more memory than a small machine has; and
# what is slow takes most of a sample's time and tells no more.
ALL, QUICK = Limits(150_000_000, 3.0), Limits(30_000_000, 0.5)


def cluster() -> Cluster:
    """Two hosts with so slow a link that dividing pays."""
    here = Device(name="cpu", memory_bytes=2**40)
    link = Level(name="inter", latency_s=1e-4, bytes_per_s=1e7)
    nodes = tuple(Node(name=f"host-{i}", devices=(here,)) for i in range(RANKS))
    return Cluster(name="slow", nodes=nodes, levels=(link,))


def divided(found: ModelProfile) -> Plan:
    """The plan that divides every unit that can be divided and is not tied to another. Batch
    statistics are those of the whole batch, or units that have some could not be divided."""
    goal = Goal(batch=BATCH, batch_statistics="global")
    model = CostModel(found, cluster(), goal)
    chosen, whole = [], Option(data_parallel(RANKS))
    options, ties = all_options(model, CAPABILITY), tied_units(found)
    for own, tied in zip(options, ties, strict=True):
        shares = [o for o in own if o.layout.degree == RANKS and o == Option(o.layout, o.style)]
        chosen.append(shares[0] if shares and len(tied) == 1 else whole)
    return make_plan(found, cluster(), goal, chosen, executor=CAPABILITY)


def divisible(found: ModelProfile, used: set[str]) -> float:
    """Of the bytes of parameters that are ``used``, those in units that can be divided."""
    sizes = [
        (p.bytes, bool(unit.splits)) for unit in found.units for p in unit.parameters
        if p.shared in used
    ]  # fmt: skip
    return sum(size for size, splits in sizes if splits) / max(sum(size for size, _ in sizes), 1)


def trained_parameters(workload: Workload) -> set[str]:
    """Those that get a gradient: of several models in one (text, images, sound) a batch may use
    only one."""
    try_training(workload, keep=True)
    return {name for name, p in workload.model.named_parameters() if p.grad is not None}


def tried(build: Callable[[], Workload], tell: Callable[[Row], None]) -> None:
    """All that is tried of one model; rank 0 tells what comes of it, as it comes. Collective."""

    def measured() -> tuple[ModelProfile, Plan, Plan]:
        found = profile(
            build(), batches=MEASURED, device=torch.device("cpu"), repeats=1, degrees=(RANKS,)
        )
        used = trained_parameters(build())
        tell({"units": len(found.units), "divisible": divisible(found, used)})
        return found, plan(found, cluster(), Goal(batch=BATCH)), divided(found)

    tell({"stage": "profile"})
    _, *plans = rank_zero_decides(measured)
    for which, made in zip(("chosen", "divided"), plans, strict=True):
        tell({"stage": which, f"{which}_units": sum(u.layout.degree > 1 for u in made.units)})
        tell({which: _verdict(made, build())})
        tell({"stage": f"{which} memory"})
        torch.manual_seed(0)
        used = max(run_steps(build(), made, 1).peak_bytes)
        tell({f"{which}_peak": max(made.prediction.peak_bytes) / used - 1})
    tell({"stage": "done"})


def _verdict(made: Plan, workload: Workload) -> Row:
    found = verify_on_ranks(made, workload, timeout_s=COLLECTIVE_S)
    worst = max(found.deviations, key=lambda d: d.of_allowed)
    right = found.passed and not found.draws
    spread = f"equal within its own spread (random: {found.random})"
    return {
        "verdict": "right" if right else "explained" if found.passed or found.cause else "wrong",
        "cause": spread if found.passed and found.draws else found.cause,
        "of_allowed": worst.of_allowed,
        "worst": "" if found.passed else worst.worst,
        "notes": list(found.notes),
    }


def model_of(name: str, limits: Limits) -> Workload:
    """The workload of a name, whichever package it is from."""
    return from_vision(name, limits.parameters) if "/" in name else from_transformers(name)


def on_rank(rank: int, folder: str, name: str, limits: Limits, pipe: Connection) -> None:
    """One rank's part, in a process of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what a model prints
        os.dup2(null, stream)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    failed = _tried_alone(rank, folder, name, limits, pipe)
    if failed:
        pipe.send({"failed": failed})
    pipe.close()
    os._exit(0)


def _tried_alone(rank: int, folder: str, name: str, limits: Limits, pipe: Connection) -> Row | None:
    """What the rank failed with."""
    build = partial(model_of, name, limits)
    try:
        took_s = _step_s(build())
    except Exception as error:
        return {"verdict": "unbuilt", "why": _said(error)}
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = timedelta(seconds=limits.limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    if rank_zero_decides(lambda: took_s) > limits.step_s:
        why = f"two samples take {took_s:.1f} s: {limits.step_s:g} s at most are run here"
        return {"verdict": "unbuilt", "why": why}
    try:
        tried(build, pipe.send if rank == 0 else lambda part: None)
    except MeshwrightError as error:
        return {"verdict": "refused", "why": str(error)}
    except Exception as error:
        return {"verdict": "error", "why": _said(error), "trace": traceback.format_exc()[-3000:]}
    return None


def _step_s(workload: Workload) -> float:
    start = time.perf_counter()
    try_training(workload)
    return time.perf_counter() - start


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


class Trial:
    """A model that is being tried: its ranks, and what they have told so far."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.start, self.limit_s = time.perf_counter(), limits.limit_s
        self.until = self.start + self.limit_s
        self.row: Row = {"model": name}
        self.folder = tempfile.TemporaryDirectory(prefix="zoo-")
        self.pipes, self.ranks = [], []
        fork = multiprocessing.get_context("fork")
        for rank in range(RANKS):
            ours, theirs = fork.Pipe(duplex=False)
            given = (rank, self.folder.name, name, limits, theirs)
            process = fork.Process(target=on_rank, args=given)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def hear(self, ready: Collection[object]) -> bool:
        """Takes in what ranks say; whether the model is done with."""
        for pipe in [pipe for pipe in self.pipes if pipe in ready]:
            try:
                self._take(pipe.recv())
            except EOFError:
                self.pipes.remove(pipe)
        if self.pipes and time.perf_counter() > self.until:
            self.row["failed"] = {"verdict": "hang", "why": f"no end after {self.limit_s:.0f} s"}
            return True
        return not self.pipes

    def _take(self, part: Row) -> None:
        self.row.update({name: value for name, value in part.items() if name != "failed"})
        # One rank may say no more than that the other is gone.
        if "failed" in part and LOST in self.row.get("failed", {}).get("why", LOST):
            self.row["failed"] = part["failed"]

    def end(self) -> None:
        """Leaves no process behind."""
        self.row["seconds"] = round(time.perf_counter() - self.start, 1)
        for process in self.ranks:
            process.kill()
            process.join()
        self.folder.cleanup()


def rows_of(names: Sequence[str], limits: Limits, jobs: int) -> Generator[Row, None, None]:
    """What came of each model, so many tried at once, as they end."""
    left, running = iter(names), list[Trial]()
    try:
        while True:
            while len(running) < jobs and (name := next(left, None)) is not None:
                running.append(Trial(name, limits))
            if not running:
                return
            rest_s = min(trial.until for trial in running) - time.perf_counter()
            ready = wait([pipe for trial in running for pipe in trial.pipes], max(rest_s, 0.0))
            for trial in [trial for trial in running if trial.hear(ready)]:
                running.remove(trial)
                trial.end()
                yield trial.row
    finally:
        for trial in running:
            trial.end()


WORST = ("wrong", "explained", "right")


def verdict(row: Row) -> str:
    """One word for a model: that of the worse of its two plans."""
    if "failed" in row:
        return row["failed"]["verdict"]
    both = [row[which]["verdict"] for which in ("chosen", "divided") if which in row]
    return min(both, key=WORST.index) if row.get("stage") == "done" else "error"


def why(row: Row) -> str:
    """What is wrong with a model, in its own words or ours."""
    if "failed" in row:
        return f"{row.get('stage', 'build')}: {row['failed']['why']}"
    plans = (row.get(which, {}) for which in ("chosen", "divided"))
    return next((p["cause"] or p["worst"] for p in plans if p.get("verdict") != "right"), "")


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """What all rows say beside the targets."""
    built = [row for row in rows if verdict(row) != "unbuilt"]
    units = [row["divisible"] for row in built if "divisible" in row]
    peaks = [abs(row[p]) for row in built for p in ("chosen_peak", "divided_peak") if p in row]
    good = sum(verdict(row) in ("right", "explained") for row in built)
    told = good + sum(verdict(row) == "refused" for row in built)
    return {
        "models": len(built),
        "verdicts": dict(Counter(map(verdict, rows))),
        "trained": good / max(len(built), 1),
        "told": told / max(len(built), 1),
        "divisible": sum(share >= HALF for share in units) / max(len(units), 1),
        "peaks": sum(error <= WITHIN for error in peaks) / max(len(peaks), 1),
        "median_peak_error": median(peaks) if peaks else 0.0,
    }


def page_of(rows: Sequence[Row]) -> str:
    """The figures, then a row for each model."""
    found = figures(rows)
    words = (
        f"**{found['models']} models: {found['trained']:.1%} train under both plans, right or "
        f"with an explanation (target {TRAINED:.0%}), {found['told']:.1%} with those that are "
        f"refused in a sentence; of {found['divisible']:.1%} half of the "
        f"parameters or more can be divided (target {DIVISIBLE:.0%}); {found['peaks']:.1%} of the "
        f"peaks are predicted within {WITHIN:.0%} (target {PEAKS:.0%}).** Verdicts: "
        + ", ".join(f"{count} {name}" for name, count in sorted(found["verdicts"].items()))
        + "."
    )
    headings = ("model", "units", "divisible", "verdict", "peak", "peak, divided", "why")
    cells = [
        (
            row["model"],
            row.get("units", ""),
            f"{row['divisible']:.0%}" if "divisible" in row else "",
            verdict(row),
            *(f"{row[p]:+.0%}" if p in row else "" for p in ("chosen_peak", "divided_peak")),
            why(row).replace("|", "/").replace("\n", " ")[:200],
        )
        for row in sorted(rows, key=lambda row: row["model"])
        if verdict(row) != "unbuilt"
    ]
    return f"{words}\n\n{markdown(headings, cells, left=(0, 3, 6))}"


def names_here() -> list[str]:
    """All models of the packages that are installed. They are imported here, once for all ranks:
    torchvision before transformers, which imports it."""
    vision = vision_models()
    import transformers

    transformers.logging.set_verbosity_error()
    return [*sorted(architectures()), *vision]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+")
    parser.add_argument(
        "--sample", type=int, help="so many of them, drawn by the seed, and none large or slow"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="so many models at once")
    parser.add_argument("--patience", type=float, default=1, help="so many times all time limits")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    here = names_here()
    names = asked.models or here
    most = asked.sample or len(names)
    if asked.sample:
        random.Random(asked.seed).shuffle(names)
    rows = known(asked.keep)
    there = {row["model"] for row in rows}
    usual = QUICK if asked.sample else ALL
    limits = usual._replace(
        step_s=usual.step_s * asked.patience, limit_s=usual.limit_s * asked.patience
    )
    new = rows_of([name for name in names if name not in there], limits, asked.jobs)
    with closing(new):
        while sum(verdict(row) != "unbuilt" for row in rows) < most and (row := next(new, None)):
            rows.append(row)
            keep(asked.keep, row)
            shown = {"units": row.get("units", 0), "divisible": row.get("divisible", 0.0)}
            shown = {"verdict": verdict(row), **shown, "why": why(row)[:150]}
            print_row({"model": row["model"], **shown})
    put_into(asked.markdown, "rows", page_of(rows))
    print_json(figures(rows))


if __name__ == "__main__":
    main()
