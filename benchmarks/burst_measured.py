"""Burst parallelism with a background job on the test bed, measured.

    python benchmarks/burst_measured.py

Needs root. Builds a bed of hosts with a core each and trains each model at strong scaling (a small
global batch over all hosts): data parallel, and under its burst plan (least device time that is
predicted no slower than data parallel), each with and without a background job on every host: real
training of the same model at its best batch, paced by the executor. Systems take turns in the same
processes; a background's rate is a share of what the same program reaches in its own turns, at
ordinary priority with the foreground waiting. ``ratio`` is foreground plus background samples per
second over those of data parallel alone (the quicker of DDP and ours); ``peer_ratio`` is data
parallel's with the same background. The last line is one JSON object: rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from burst_models import CONVOLUTIONS, fresh, momentum
from exchange import on_a_bed, shown, table
from exchange_rank import set_rate, slowest
from meshwright.executor.apply import apply
from meshwright.executor.background.job import Job, background_job
from meshwright.executor.background.law import FIRST_HELD, LIMIT
from meshwright.executor.background.protocol import Settings
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.start import start_process_group
from meshwright.executor.parallel import run_of
from meshwright.models.workload import Batch
from meshwright.planner.cost.budget import idle_s, unit_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import decisions_of, make_plan
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.profiler.model import profile
from meshwright.profiler.probe import probe
from page import put_into
from torch.nn.parallel import DistributedDataParallel

MODELS = {"vgg11-32": 32, CONVOLUTIONS: 32}
"""The global batch of each."""
MBIT_S = 1000.0
BACKGROUND_BATCHES = (8, 16, 32, 64)
PROFILE_S, PROBE_S, PLAN_S = 12.0, 4.0, 10.0
RUN_IN = FIRST_HELD + 14
"""Steps before the first turn with a background: the law measures the undisturbed step, and its
share rises from a half towards the whole where nothing is wrong."""
SLICE_BYTES = 4 * 2**20
COLUMNS = (
    "model", "hosts", "batch", "mbit_s", "idle_share", "dp_samples_s", "ddp_samples_s",
    "burst_samples_s", "foreground_slowdown", "background_share", "ratio", "bounded_ratio",
    "peer_slowdown", "peer_background_share", "peer_ratio",
)  # fmt: skip


class Way(NamedTuple):
    """One way of training the foreground, live."""

    workload: Any
    model: Any
    optimizer: torch.optim.Optimizer

    def steps(self, batch: Batch, count: int) -> float:
        """Makes that many steps; seconds."""
        start = time.perf_counter()
        for _ in range(count):
            output = self.model(*batch.args, **batch.kwargs)
            self.workload.loss(output, batch.target).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - start


def by_ddp(name: str) -> Way:
    """DistributedDataParallel as it is by default. Collective."""
    workload = fresh(name)
    model = DistributedDataParallel(workload.model)
    return Way(workload, model, momentum(model.parameters()))


def by_plan(name: str, plan: Plan) -> Way:
    """Whatever ``plan`` says. Collective."""
    workload = fresh(name)
    optimizer = momentum(workload.model.parameters())
    apply(workload.model, optimizer, plan)
    return Way(workload, workload.model, optimizer)


def plans(model: ModelProfile, cluster: Cluster, batch: int) -> tuple[Plan, Plan, float]:
    """Data parallel by priority, the burst plan, and the share of device time that this leaves
    idle, as predicted."""
    goal = Goal(batch=batch, optimizer="momentum")
    plain = make_plan(
        model, cluster, goal, schedule="priority", bucket_bytes=SLICE_BYTES, executor=CAPABILITY
    )
    sparing = Goal(
        batch=batch, optimizer="momentum", objective="gpu_seconds",
        time_limit_s=plain.baseline.step_s,
    )  # fmt: skip
    burst = solve(Problem(model, cluster, sparing, CAPABILITY, any_schedule=True), "auto", PLAN_S)
    plan = burst.checked()
    costs = CostModel(model, cluster, sparing, placement=plan.placement)
    decisions = decisions_of(plan)
    idle = sum(idle_s(costs, k, o) for k, o in enumerate(decisions))
    work = sum(unit_s(costs, k, o) for k, o in enumerate(decisions)) * cluster.world_size
    return plain, plan, idle / work


def best_batch(name: str) -> int:
    """The batch at which one device trains most samples a second here."""
    rates = {}
    for size in BACKGROUND_BATCHES:
        workload = fresh(name)
        way = Way(workload, workload.model, momentum(workload.model.parameters()))
        batch = workload.make_batch(size)
        way.steps(batch, 1)
        rates[size] = size / min(way.steps(batch, 1) for _ in range(2))
    return max(rates, key=lambda size: rates[size])


class Counted:
    """A background program's samples."""

    def __init__(self, name: str, size: int, counter: Path) -> None:
        script = str(Path(__file__).with_name("burst_background.py"))
        self.command = (sys.executable, script, name, str(size), str(counter))
        self._counter = counter

    def samples(self) -> int:
        """So far; 0 before it has begun."""
        data = self._counter.read_bytes() if self._counter.exists() else b""
        return int(struct.unpack("q", data)[0]) if len(data) == 8 else 0

    def wait_for_some(self) -> None:
        """Returns when it trains."""
        while self.samples() == 0:
            time.sleep(0.05)


@contextlib.contextmanager
def alone(counted: Counted) -> Iterator[subprocess.Popen[bytes]]:
    """The program at ordinary priority, stopped, for turns of its own."""
    process = subprocess.Popen(counted.command, start_new_session=True)
    try:
        counted.wait_for_some()
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


class Rank:
    """What a rank of the bed measures of one model."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.name = asked, asked["model"]
        self.world, self.size = dist.get_world_size(), asked["batch"]
        least, more = divmod(self.size, self.world)
        torch.manual_seed(1 + dist.get_rank())
        self.batch = fresh(self.name).make_batch(least + (dist.get_rank() < more))
        self.seconds: dict[str, list[float]] = {}
        self.rates: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}

    def row(self) -> dict[str, Any]:
        """Everything in turns. Collective."""
        model = rank_zero_decides(self._profile)
        cluster = probe(budget_s=PROBE_S)
        plain, burst, idle = rank_zero_decides(lambda: plans(model, cluster, self.size))
        best = rank_zero_decides(lambda: best_batch(self.name))
        folder = Path(self.asked["folder"])
        rank = dist.get_rank()
        paced = Counted(self.name, best, folder / f"paced-{rank}")
        other = Counted(self.name, best, folder / f"alone-{rank}")
        settings = Settings(paced.command, str(folder / f"log-{rank}"), LIMIT, grace_s=1.0)
        with background_job(settings) as job, alone(other) as process:
            paced.wait_for_some()
            job.hold()
            os.environ.update(job.environment)
            ways = {"ddp": by_ddp(self.name), "dp": by_plan(self.name, plain)}
            ways["burst"] = by_plan(self.name, burst)
            self._run_in(ways, job)
            for _ in range(self.asked["rounds"]):
                self._alone(other, process)
                for key, way in ways.items():
                    self._turn(key, way)
                for key in ("burst", "dp"):
                    self._beside(key, ways[key], job, paced)
            law = job.state()
            for way in ways.values():
                if not isinstance(way.model, DistributedDataParallel):
                    run_of(way.model).finish_steps()
        narrow = [u.name for u in burst.units if u.layout.size < self.world]
        return {
            **self._figures(), "idle_share": idle, "narrowed": narrow, "background_batch": best,
            "priority": law.priority, "law_slowdown": law.slowdown,
            "disturbed_share": law.disturbed / max(law.steps, 1),
        }  # fmt: skip

    def _profile(self) -> ModelProfile:
        share = max(self.size // self.world, 1)
        return profile(
            fresh(self.name), batches=(max(share // 2, 1), share, self.size), degrees=(2,),
            optimizers=("momentum",), budget_s=PROFILE_S,
        )  # fmt: skip

    def _run_in(self, ways: dict[str, Way], job: Job) -> None:
        for key, way in ways.items():
            way.steps(self.batch, 3)
            dist.barrier()
            job.release()
            made = 5 if key == "ddp" else RUN_IN
            took = slowest(way.steps(self.batch, made))
            job.hold()
            self._counts[key] = max(5, round(self.asked["turn_s"] * made / took))

    def _turn(self, key: str, way: Way) -> None:
        """Seconds of a step, the background held. Collective."""
        dist.barrier()
        way.steps(self.batch, 1)
        took = slowest(way.steps(self.batch, self._counts[key]))
        self.seconds.setdefault(key, []).append(took / self._counts[key])

    def _beside(self, key: str, way: Way, job: Job, counted: Counted) -> None:
        """The same with the background, and its samples a second. Collective."""
        dist.barrier()
        job.release()
        way.steps(self.batch, 1)
        before, start = counted.samples(), time.perf_counter()
        took = slowest(way.steps(self.batch, self._counts[key]))
        rate = (counted.samples() - before) / (time.perf_counter() - start)
        job.hold()
        self.seconds.setdefault(f"{key}+", []).append(took / self._counts[key])
        self.rates.setdefault(key, []).append(rate)

    def _alone(self, counted: Counted, process: subprocess.Popen[bytes]) -> None:
        """The background's samples a second, while the foreground does nothing. Collective."""
        dist.barrier()
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        before, start = counted.samples(), time.perf_counter()
        time.sleep(self.asked["turn_s"])
        rate = (counted.samples() - before) / (time.perf_counter() - start)
        process.send_signal(signal.SIGSTOP)
        self.rates.setdefault("alone", []).append(rate)

    def _figures(self) -> dict[str, Any]:
        """The row. Collective."""
        s = {key: median(values) for key, values in self.seconds.items()}
        mine = {key: mean(values) for key, values in self.rates.items()}
        hosts: list[Any] = [None] * self.world
        dist.all_gather_object(hosts, mine)
        total = {key: sum(host[key] for host in hosts) for key in mine}
        share = {k: mean(h[k] / h["alone"] for h in hosts) for k in ("burst", "dp")}
        dp = self.size / min(s["ddp"], s["dp"])
        return {
            **{f"{key}_s": value for key, value in s.items()},
            "model": self.name, "hosts": self.world, "batch": self.size,
            "mbit_s": self.asked["mbit_s"],
            "dp_samples_s": dp, "ddp_samples_s": self.size / s["ddp"],
            "burst_samples_s": self.size / s["burst"],
            "foreground_slowdown": s["burst+"] / s["burst"],
            "background_share": share["burst"],
            "background_samples_s": total["burst"],
            "background_alone_samples_s": total["alone"],
            "ratio": (self.size / s["burst+"] + total["burst"]) / dp,
            "bounded_ratio": self.size / s["burst+"] / dp + share["burst"],
            "peer_slowdown": s["dp+"] / s["dp"],
            "peer_background_share": share["dp"],
            "peer_ratio": (self.size / s["dp+"] + total["dp"]) / dp,
            "peer_bounded_ratio": self.size / s["dp+"] / dp + share["dp"],
        }  # fmt: skip


def rank(asked: dict[str, Any]) -> None:
    """What each rank runs; rank 0 writes the row. Collective."""
    torch.set_num_threads(1)
    start_process_group()
    set_rate(Path(asked["folder"]), asked["mbit_s"])
    row = Rank(asked).row()
    if dist.get_rank() == 0:
        (Path(asked["folder"]) / "rows").write_text(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measured(
    models: dict[str, int] | None = None,
    *,
    hosts: int = 2,
    mbit_s: float = MBIT_S,
    turn_s: float = 10.0,
    rounds: int = 2,
) -> list[dict[str, Any]]:
    """A row for each model, given with its global batch."""
    rows = []
    for model, batch in (models or MODELS).items():
        told = {"model": model, "batch": batch, "mbit_s": mbit_s, "turn_s": turn_s,
                "rounds": rounds}  # fmt: skip
        found, _ = on_a_bed([__file__, "--rank"], told, hosts)
        rows += found
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    return table(rows, COLUMNS)


def main() -> None:
    """Measures what was asked for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch", type=int, help="the global batch, in place of each model's")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=MBIT_S)
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of a turn, about")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    models = {name: asked.batch or MODELS[name] for name in asked.models}
    rows = measured(
        models, hosts=asked.hosts, mbit_s=asked.mbit, turn_s=asked.turn, rounds=asked.rounds
    )
    for row in rows:
        print("  ".join(f"{k} {shown(v)}" for k, v in row.items()), flush=True)
    print(table_of(rows))
    if asked.markdown:
        put_into(asked.markdown, "measured", table_of(rows))
    print(json.dumps({"measured": rows}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(json.loads(sys.argv[2]))
    else:
        main()
