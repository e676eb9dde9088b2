"""What each rank of ``benchmarks/exchange.py`` runs: the systems, in turns, and their bound.

Rank 0 asks for another rate of the links by a file in the shared folder; the process that holds the
test bed sets it and answers by another.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from exchange_parts import Parts, Times
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.gradients.order import Order, Orders
from meshwright.executor.launch.start import start_process_group
from meshwright.executor.parallel import run_of
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch, Workload
from meshwright.models.zoo import build
from meshwright.planner.cost.step_time import LINKS, Chain, empty_chain, priority_bound
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.plan import Plan, Prediction, Provenance, UnitPlan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.schedule import Message, Step, work_of
from meshwright.planner.simulate.slicing import cut
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import searched
from meshwright.planner.solve.solver import solve
from meshwright.profiler.model import profile
from meshwright.profiler.probe import probe
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 8
"""Steps before a system that finds out its order is measured."""
MIB = 2**20
BUCKETS_MB = (5, 25, 100)
"""DDP's bucket sizes; 25 is its default."""
SLICE_BYTES = 4 * MIB
WHOLE = 2**40
"""A slice size that leaves every parameter whole."""
PROBE_S = 4.0
PROFILE_S = 15.0
PLAN_S = 10.0
JITTER = 0.1
NOTHING = Prediction(
    step_s=0.0, compute_s=0.0, blocking_s=0.0, exposed_s=0.0, update_s=0.0, exchange_s=0.0,
    wire_bytes=0, peak_bytes=(), gpu_seconds=0.0, samples_per_s=0.0,
)  # fmt: skip


class Jitter:
    """Sleeps for a random share, up to 2·``JITTER``, of what each part of the step takes."""

    def __init__(self, model: nn.Module, compute_s: float) -> None:
        self.on = False
        self._draw = random.Random(dist.get_rank())
        parts = list(model.children()) or [model]
        while len(parts) == 1 and list(parts[0].children()):
            parts = list(parts[0].children())
        self._each_s = 2 * JITTER * compute_s / (2 * len(parts))
        for part in parts:
            part.register_forward_pre_hook(lambda *_: self._wait())
            part.register_full_backward_pre_hook(lambda *_: self._wait())

    def _wait(self) -> None:
        if self.on:
            time.sleep(self._draw.random() * self._each_s)


Optimizing = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What systems train with unless told."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


class System:
    """A live model that is trained one way. ``finish`` ends what a step has left pending."""

    def __init__(
        self, workload: Workload, compute_s: float, optimizing: Optimizing = momentum
    ) -> None:
        self.workload, self.model = workload, workload.model
        self.jitter = Jitter(self.model, compute_s)
        self.finish: Callable[[], None] = lambda: None
        self.optimizer = optimizing(self.model.parameters())

    def step(self, batch: Batch) -> float:
        """One step; when it ended."""
        value = self.workload.loss(self.model(*batch.args, **batch.kwargs), batch.target)
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter()

    def turn(self, batch: Batch, steps: int, *, jitter: bool = False) -> float:
        """Seconds of a step in the steady state: from the end of the first to that of the last."""
        self.jitter.on = jitter
        ends = [self.step(batch) for _ in range(steps + 1)]
        self.finish()
        return (ends[-1] - ends[0]) / steps


class Found(NamedTuple):
    """What was measured of a model before a row's systems are made."""

    name: str
    parts: Parts
    times: Times
    bytes_per_s: float
    profile: ModelProfile | None

    @property
    def chain(self) -> Chain:
        """Costs of the units under data parallelism."""
        world, chain = dist.get_world_size(), empty_chain(len(self.parts.sizes))
        sizes = np.array(self.parts.sizes)
        chain.forward_s[:] = self.times.forward
        chain.backward_s[:] = self.times.backward
        chain.update_s[:] = sizes / sizes.sum() * self.times.update_s
        chain.exchange_s[1] = 2 * (world - 1) / world * sizes / self.bytes_per_s
        return chain


def fresh(name: str) -> Workload:
    """The model as every system starts with it."""
    torch.manual_seed(0)
    return build(name)


def by_ddp(found: Found, bucket_mb: int) -> System:
    """DistributedDataParallel. Collective."""
    system = System(fresh(found.name), found.times.step_s)
    system.model = DistributedDataParallel(system.model, bucket_cap_mb=bucket_mb)
    return system


def by_fsdp(found: Found, optimizing: Optimizing = momentum) -> System:
    """FSDP2: a group for every unit with parameters of its own, the root's for the rest.
    Collective."""
    workload = fresh(found.name)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    uses: dict[nn.Parameter, int] = {}
    for _, parameter in workload.model.named_parameters(remove_duplicate=False):
        uses[parameter] = uses.get(parameter, 0) + 1
    for modules in found.parts.modules:
        for module in (workload.model.get_submodule(path) for path in modules):
            mine = list(module.parameters())
            if mine and all(uses[parameter] == 1 for parameter in mine):
                fully_shard(module, mesh=mesh)
    fully_shard(workload.model, mesh=mesh)
    return System(workload, found.times.step_s, optimizing)


def timed_fsdp(found: Found, batch: Batch, steps: int) -> tuple[float | None, str]:
    """Seconds of a step by FSDP2 in one turn, as it is slow; or why it does not run this model: it
    fails alike on all ranks. Collective."""
    try:
        system = by_fsdp(found)
        system.turn(batch, 1)
        return slowest(system.turn(batch, steps)), ""
    except (RuntimeError, ValueError, AttributeError) as error:
        return None, str(error).splitlines()[0]


def plan_of(found: Found, slice_bytes: int) -> Plan:
    """Plain data parallelism by priority, with the times that rank 0 measured. Collective."""
    return rank_zero_decides(lambda: _plan_of(found, slice_bytes))


def _plan_of(found: Found, slice_bytes: int) -> Plan:
    world, chain = dist.get_world_size(), found.chain
    units = tuple(
        UnitPlan(
            name=modules[0] or "model", kind="other", modules=modules,
            layout=data_parallel(world), forward_s=float(chain.forward_s[k]),
            backward_s=float(chain.backward_s[k]), exchange_s=float(chain.exchange_s[1][k]),
        )
        for k, modules in enumerate(found.parts.modules)
    )  # fmt: skip
    return Plan(
        target="benchmark", model=found.name, world_size=world, schedule="priority",
        goal=Goal(batch=world, optimizer="momentum"), placement=tuple(range(world)),
        bucket_bytes=slice_bytes, units=units, prediction=NOTHING, baseline=NOTHING,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )  # fmt: skip


def by_plan(
    found: Found, plan: Plan, optimizing: Optimizing = momentum, *, urgent: bool = True
) -> System:
    """Whatever ``plan`` says; without ``urgent`` slices go first come, first served. Collective."""
    system = System(fresh(found.name), found.times.step_s, optimizing)
    apply(system.model, system.optimizer, plan)
    run = run_of(system.model)
    if not urgent:
        exchange = run.priority
        exchange._orders = Order(Orders(plan, urgent=False), exchange.grad_groups, run.control)
    system.finish = run.finish_steps
    return system


def chosen_plan(found: Found, batch: int) -> Plan:
    """The planner's own lossless choice for the links as ``probe`` measures them. Collective."""
    world = dist.get_world_size()
    assert found.profile is not None
    cluster = probe(budget_s=PROBE_S)
    goal = Goal(batch=batch * world, optimizer="momentum")
    problem = Problem(found.profile, cluster, goal, searched(CAPABILITY), any_schedule=True)
    return rank_zero_decides(lambda: solve(problem, "auto", PLAN_S).checked())


def predicted(found: Found, *, sliced: bool, urgent: bool) -> float:
    """A step as the planner simulates it: slices or whole gradients, by urgency or in order."""
    return simulated(found.chain, found.parts.sizes, SLICE_BYTES if sliced else WHOLE, urgent)


def simulated(chain: Chain, sizes: Sequence[int], limit_bytes: int, urgent: bool = True) -> float:
    """Seconds of a step whose gradients of those sizes travel in slices under the limit."""
    messages = []
    for k in reversed(range(len(sizes))):
        for piece in cut([sizes[k]], limit_bytes):
            seconds = float(chain.exchange_s[1][k]) / piece.parts
            messages.append(Message((k,), LINKS[1], seconds, k if urgent else 0))
    return simulate(Step(work_of(chain, 1, "priority"), tuple(messages), "priority")).step_s


class Link(NamedTuple):
    """What a large all_reduce makes of it."""

    bytes_per_s: float
    """That a rank sends."""
    processor_s_per_byte: float
    """Of the process, user's and system's, for each byte that it sends."""


def goodput(bytes_: int) -> Link:
    """One large all_reduce, of the slowest rank. Collective."""
    flat = torch.zeros(min(max(bytes_ // 4, 2**18), 2**22))
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    dist.all_reduce(flat)
    busy = time.process_time() - busy
    seconds = slowest(time.perf_counter() - start)
    world = dist.get_world_size()
    sent = 2 * (world - 1) / world * flat.numel() * 4
    return Link(sent / seconds, slowest(busy) / sent)


def set_rate(folder: Path, mbit_s: float) -> None:
    """Asks the holder of the bed for that rate. Collective."""
    if dist.get_rank() == 0:
        (folder / "asked.part").write_text(repr(mbit_s))
        (folder / "asked.part").rename(folder / "asked")
        while not (folder / "done").exists():
            time.sleep(0.02)
        (folder / "done").unlink()
    dist.barrier()


def slowest(value: float) -> float:
    """The largest over ranks. Collective."""
    held = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


@dataclass
class Turns:
    """The systems of a row in turns, and the figures that frame them."""

    found: Found
    batch: Batch
    steps: int
    rounds: int

    def measure(self, systems: dict[str, System], *, jitter: bool = False) -> dict[str, float]:
        """The median of each system's turns, of the slowest rank."""
        for key, system in systems.items():
            system.turn(self.batch, 1 if key.startswith("ddp") else WARM_UP, jitter=jitter)
        taken: dict[str, list[float]] = {key: [] for key in systems}
        for _ in range(self.rounds):
            for key, system in systems.items():
                dist.barrier()
                taken[key].append(slowest(system.turn(self.batch, self.steps, jitter=jitter)))
        return {key: median(values) for key, values in taken.items()}


def compared(found: Found, batch: Batch, asked: dict[str, Any]) -> dict[str, Any]:
    """DDP, FSDP2, priority, the planner's choice: one row."""
    systems = {f"ddp_{mb}": by_ddp(found, mb) for mb in BUCKETS_MB}
    systems["priority_s"] = by_plan(found, plan_of(found, SLICE_BYTES))
    plan = chosen_plan(found, batch.size)
    systems["plan_s"] = by_plan(found, plan)
    turns = Turns(found, batch, asked["steps"], asked["rounds"])
    seconds = turns.measure(systems)
    fsdp_s, failed = timed_fsdp(found, batch, asked["steps"])
    best_ddp = min(BUCKETS_MB, key=lambda mb: seconds[f"ddp_{mb}"])
    keys = f"ddp_{best_ddp}", "priority_s"
    shaken = replace(turns, rounds=1).measure({key: systems[key] for key in keys}, jitter=True)
    divided = [u.name for u in plan.units if u.layout.degree > 1]
    return {
        "ddp_best_s": seconds[keys[0]], "ddp_default_s": seconds["ddp_25"],
        "fsdp_s": fsdp_s, "fsdp_failed": failed,
        "priority_s": seconds[keys[1]], "plan_s": seconds["plan_s"],
        "ddp_bucket_mb": best_ddp, "slice_mib": SLICE_BYTES // MIB,
        "plan_schedule": plan.schedule, "plan_divided": len(divided),
        "plan_slice_mib": plan.bucket_bytes / MIB,
        "ddp_jitter_s": shaken[keys[0]], "priority_jitter_s": shaken[keys[1]],
    }  # fmt: skip


def ablated(found: Found, batch: Batch, asked: dict[str, Any]) -> dict[str, Any]:
    """First come, first served or by priority, whole gradients or slices: measured, predicted."""
    ways = {
        f"{'priority' if urgent else 'fifo'}_{'slices' if sliced else 'whole'}": (sliced, urgent)
        for urgent in (False, True)
        for sliced in (False, True)
    }
    systems = {
        key: by_plan(found, plan_of(found, SLICE_BYTES if sliced else WHOLE), urgent=urgent)
        for key, (sliced, urgent) in ways.items()
    }
    seconds = Turns(found, batch, asked["steps"], asked["rounds"]).measure(systems)
    row: dict[str, Any] = {f"{key}_s": value for key, value in seconds.items()}
    for key, (sliced, urgent) in ways.items():
        row[f"{key}_predicted_s"] = slowest(predicted(found, sliced=sliced, urgent=urgent))
    return row


def one_row(found: Found, batch: Batch, asked: dict[str, Any], ratio: float) -> dict[str, Any]:
    """Sets the rate, measures the link and the systems. Collective."""
    world = dist.get_world_size()
    sent = 2 * (world - 1) / world * sum(found.parts.sizes)
    mbit_s = 8e-6 * sent / (ratio * found.times.step_s)
    set_rate(Path(asked["folder"]), mbit_s)
    links = [goodput(int(sent)) for _ in range(3)]
    found = found._replace(bytes_per_s=median(link.bytes_per_s for link in links))
    measure = ablated if asked["ablation"] else compared
    figures = measure(found, batch, asked)
    links += [goodput(int(sent)) for _ in range(2)]
    # What disturbs a measurement makes a link slower: the quickest gives a bound that holds.
    bytes_per_s = max(link.bytes_per_s for link in links)
    bound_s = slowest(priority_bound(found._replace(bytes_per_s=bytes_per_s).chain))
    row = {
        "model": found.name, "hosts": world, "ratio": ratio, "mbit_s": mbit_s,
        "batch": batch.size, "compute_s": found.times.step_s,
        "goodput_mbit_s": 8e-6 * bytes_per_s, **figures, "bound_s": bound_s,
        "exchange_processor_s": sent * median(link.processor_s_per_byte for link in links),
    }  # fmt: skip
    if not asked["ablation"]:
        row["efficiency"] = bound_s / row["priority_s"]
    return row


def main() -> None:
    """All rows of one model; rank 0 writes each as it is done. Collective."""
    asked = json.loads(sys.argv[1])
    folder, name, size = Path(asked["folder"]), asked["model"], asked["batch"]
    torch.set_num_threads(1)
    start_process_group()
    alone = fresh(name)
    torch.manual_seed(1 + dist.get_rank())
    batch = alone.make_batch(size)
    units = discover(alone.model, alone.make_batch(2)).units
    made = None
    if not asked["ablation"]:
        made = rank_zero_decides(
            lambda: profile(
                fresh(name), batches=(max(size // 2, 1), size, 2 * size), degrees=(2,),
                optimizers=("momentum",), budget_s=PROFILE_S,
            )
        )  # fmt: skip
    parts = Parts(System(alone, 0.0), units)
    for ratio in asked["ratios"]:
        dist.barrier()
        times = parts.times(batch, slowest)
        row = one_row(Found(name, parts, times, 1.0, made), batch, asked, ratio)
        if dist.get_rank() == 0:
            with (folder / "rows").open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
