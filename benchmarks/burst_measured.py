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

import contextlib
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from meshwright.executor.background.job import background_job
from meshwright.executor.background.law import FIRST_HELD, LIMIT
from meshwright.executor.background.protocol import Settings
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.planner.cost.budget import idle_s, unit_s
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import decisions_of, make_plan
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.profiler.links import probe
from meshwright.profiler.model import profile
from ranks import on_a_bed, run, set_rate, slowest
from rows import command_line, markdown_of, print_json, print_row, put_into
from systems import CONVOLUTIONS, SLICE_BYTES, System, fresh, own_batch
from torch.nn.parallel import DistributedDataParallel

# The global batch of each.
MODELS = {"vgg11-32": 32, CONVOLUTIONS: 32}
MBIT_S = 1000.0
BACKGROUND_BATCHES = (8, 16, 32, 64)
PROFILE_S, PROBE_S, PLAN_S = 12.0, 4.0, 10.0
# Steps before the first turn with a background: the law measures the undisturbed step, and its
# share rises from a half towards the whole where nothing is wrong.
RUN_IN = FIRST_HELD + 14
COLUMNS = (
    "model", "hosts", "batch", "mbit_s", "idle_share", "dp_samples_s", "ddp_samples_s",
    "burst_samples_s", "foreground_slowdown", "background_share", "ratio", "bounded_ratio",
    "peer_slowdown", "peer_background_share", "peer_ratio",
)  # fmt: skip


def plans(model: ModelProfile, cluster: Cluster, batch: int) -> tuple[Plan, Plan, float]:
    """Data parallel by priority, the burst plan, and the share of device time that this leaves
    idle, as predicted."""
    goal = Goal(batch=batch, optimizer="momentum")
    plain = make_plan(
        model, cluster, goal, schedule="priority", message_bytes=SLICE_BYTES, executor=CAPABILITY
    )
    limit_s = plain.baseline.step_s
    sparing = msgspec.structs.replace(goal, objective="gpu_seconds", time_limit_s=limit_s)
    problem = Problem(model, cluster, sparing, CAPABILITY, any_schedule=True)
    plan = solve(problem, "auto", PLAN_S).checked()
    costs, decisions = problem.cost_model(placement=plan.placement), decisions_of(plan)
    idle = sum(idle_s(costs, k, o) for k, o in enumerate(decisions))
    work = sum(unit_s(costs, k, o) for k, o in enumerate(decisions)) * cluster.world_size
    return plain, plan, idle / work


def best_batch(name: str) -> int:
    """The batch at which one device trains most samples a second here."""
    rates = {}
    for size in BACKGROUND_BATCHES:
        system = System(fresh(name))
        batch = system.workload.make_batch(size)
        system.step(batch)
        rates[size] = size / min(system.step(batch) for _ in range(2))
    return max(rates, key=lambda size: rates[size])


def train_in_background(name: str, size: int, counter: Path) -> None:
    """Trains until it is told to end; the file ``counter`` holds the samples trained on as eight
    bytes."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    torch.set_num_threads(1)
    system = System(fresh(name))
    batch = system.workload.make_batch(size)
    counter.write_bytes(bytes(8))
    with counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
        done = 0
        while not signals:
            system.step(batch)
            done += size
            shared[:] = struct.pack("q", done)


class Background:
    """A background program, and its samples."""

    def __init__(self, name: str, size: int, counter: Path) -> None:
        self.command = (sys.executable, __file__, "--background", name, str(size), str(counter))
        self._counter = counter

    def samples(self) -> int:
        """So far; 0 before it has begun."""
        data = self._counter.read_bytes() if self._counter.exists() else b""
        return int(struct.unpack("q", data)[0]) if len(data) == 8 else 0

    def wait_for_some(self) -> None:
        while self.samples() == 0:
            time.sleep(0.05)

    @contextlib.contextmanager
    def by_itself(self) -> Iterator[subprocess.Popen[bytes]]:
        """The program at ordinary priority, stopped, for turns of its own."""
        process = subprocess.Popen(self.command, start_new_session=True)
        try:
            self.wait_for_some()
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
        self.batch = own_batch(self.name, least + (dist.get_rank() < more))
        self.seconds: dict[str, list[float]] = {}
        self.rates: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}

    def row(self) -> dict[str, Any]:
        """Everything in turns. Collective."""
        share = max(self.size // self.world, 1)
        sizes = max(share // 2, 1), share, self.size
        model = rank_zero_decides(
            lambda: profile(
                fresh(self.name), batches=sizes, degrees=(2,), optimizers=("momentum",),
                budget_s=PROFILE_S,
            )
        )  # fmt: skip
        cluster = probe(budget_s=PROBE_S)
        plain, burst, idle = rank_zero_decides(lambda: plans(model, cluster, self.size))
        best = rank_zero_decides(lambda: best_batch(self.name))
        folder, rank = Path(self.asked["folder"]), dist.get_rank()
        paced = Background(self.name, best, folder / f"paced-{rank}")
        other = Background(self.name, best, folder / f"alone-{rank}")
        settings = Settings(paced.command, str(folder / f"log-{rank}"), LIMIT, grace_s=1.0)
        with background_job(settings) as job, other.by_itself() as process:
            paced.wait_for_some()
            # Nothing of it may run while the systems are made and warm up.
            job.hold()
            # The systems made from here on find the job by the environment.
            os.environ.update(job.environment)
            systems = {"ddp": System(fresh(self.name)), "dp": System(fresh(self.name), plan=plain)}
            systems["burst"] = System(fresh(self.name), plan=burst)
            systems["ddp"].model = DistributedDataParallel(systems["ddp"].model)
            for key, system in systems.items():
                system.seconds(self.batch, 3)
                dist.barrier()
                job.release()
                # Plain DDP tells the law nothing: there is nothing to run in.
                made = 5 if key == "ddp" else RUN_IN
                took = slowest(system.seconds(self.batch, made))
                job.hold()
                self._counts[key] = max(5, round(self.asked["turn_s"] * made / took))
            for _ in range(self.asked["rounds"]):
                self._alone(other, process)
                for key, system in systems.items():
                    dist.barrier()
                    self._turn(key, key, system)
                for key in ("burst", "dp"):
                    dist.barrier()
                    job.release()
                    self._turn(f"{key}+", key, systems[key], paced)
                    job.hold()
            law = job.state()
            for system in systems.values():
                system.finish()
        narrow = [u.name for u in burst.units if u.layout.size < self.world]
        return {
            **self._figures(), "idle_share": idle, "narrowed": narrow, "background_batch": best,
            "priority": law.priority, "law_slowdown": law.slowdown,
            "disturbed_share": law.disturbed / max(law.steps, 1),
        }  # fmt: skip

    def _turn(
        self, name: str, key: str, system: System, background: Background | None = None
    ) -> None:
        """Seconds of a step, and samples a second of the background, where it runs. Collective."""
        system.step(self.batch)
        before, start = background.samples() if background else 0, time.perf_counter()
        took = slowest(system.seconds(self.batch, self._counts[key]))
        self.seconds.setdefault(name, []).append(took / self._counts[key])
        if background is not None:
            rate = (background.samples() - before) / (time.perf_counter() - start)
            self.rates.setdefault(key, []).append(rate)

    def _alone(self, background: Background, process: subprocess.Popen[bytes]) -> None:
        """The background's samples a second, while the foreground does nothing. Collective."""
        dist.barrier()
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        before, start = background.samples(), time.perf_counter()
        time.sleep(self.asked["turn_s"])
        rate = (background.samples() - before) / (time.perf_counter() - start)
        process.send_signal(signal.SIGSTOP)
        self.rates.setdefault("alone", []).append(rate)

    def _figures(self) -> dict[str, Any]:
        """The row. Collective."""
        s = {key: median(values) for key, values in self.seconds.items()}
        mine = {key: mean(values) for key, values in self.rates.items()}
        hosts: list[Any] = [None] * self.world
        dist.all_gather_object(hosts, mine)
        if not all(host["alone"] for host in hosts):
            turn_s = self.asked["turn_s"]
            raise SystemExit(f"a background made no step in {turn_s:g} s: give more by --turn")
        total = {key: sum(host[key] for host in hosts) for key in mine}
        share = {k: mean(h[k] / h["alone"] for h in hosts) for k in ("burst", "dp")}
        # Against the quicker of the two, so that our own slowness is no gain.
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


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of one model. Collective."""
    set_rate(asked["folder"], asked["mbit_s"])
    yield Rank(asked).row()


def measured(
    models: dict[str, int] | None = None, hosts: int = 2, mbit_s: float = MBIT_S, **turns: Any
) -> list[dict[str, Any]]:
    """A row for each model, given with its global batch."""
    asked = {"mbit_s": mbit_s, "turn_s": 10.0, "rounds": 2, **turns}
    rows = []
    for model, batch in (models or MODELS).items():
        rows += on_a_bed(__file__, {"model": model, "batch": batch, **asked}, hosts)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch", type=int, help="the global batch, in place of each model's")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=MBIT_S)
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of a turn, about")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    models = {name: asked.batch or MODELS[name] for name in asked.models}
    rows = measured(models, asked.hosts, asked.mbit, turn_s=asked.turn, rounds=asked.rounds)
    for row in rows:
        print_row(row)
    table = markdown_of(rows, COLUMNS)
    print(table)
    put_into(asked.markdown, "measured", table)
    print_json({"measured": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--background"]:
        train_in_background(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        run(rank_rows, main)
