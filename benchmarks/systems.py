"""Models in training, one way each, that take turns in the same processes; and compute alone."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.parallel import is_parallel, run_of
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch, Workload
from meshwright.models.zoo import build
from meshwright.models.zoo.data import Pictures, image_workload
from meshwright.models.zoo.vision import vgg_thumbnail
from meshwright.planner.cost.step_time import LINKS, Chain, empty_chain
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.plan import Plan, UnitPlan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.schedule import Message, Step, work_of
from meshwright.planner.simulate.slicing import cut
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.profiler.links import probe
from meshwright.profiler.overhead import plan_by_hand
from ranks import ring_bytes, slowest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# Models of the exchange benchmarks, and samples of a rank in a step.
BATCHES = {"vgg19-32": 32, "resnet50-32": 8, "seq2seq": 12, "gpt-mini": 8}
# VGG-16's convolutions for 32-pixel images and a single linear layer after them.
CONVOLUTIONS = "vgg16-32-conv"
SLICE_BYTES = 4 * 2**20
# DDP's bucket sizes; 25 is its default.
BUCKETS_MB = (5, 25, 100)
PROBE_S, PLAN_S = 4.0, 10.0
# Steps before a system that finds out its order is measured.
WARM_UP = 8
# A step alone is measured so often, after one that does not count.
PARTS_TIMES = 5
JITTER = 0.1

Optimizing = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fresh(name: str) -> Workload:
    """The model as every system starts with it."""
    torch.manual_seed(0)
    if name != CONVOLUTIONS:
        return build(name)
    model = vgg_thumbnail(16)
    model.classifier = nn.Sequential(nn.Linear(512, 10))
    return image_workload(name, model, Pictures(channels=3, pixels=32, classes=10))


def own_batch(name: str, size: int) -> Batch:
    """This rank's samples, the same for every system."""
    workload = fresh(name)
    torch.manual_seed(1 + dist.get_rank())
    return workload.make_batch(size)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


class System:
    """A live model that is trained one way: under ``plan``, or alone."""

    def __init__(
        self,
        workload: Workload,
        optimizing: Optimizing = momentum,
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        self.workload, self.model = workload, workload.model
        self.optimizer = optimizing(self.model.parameters())
        if plan is not None:
            apply(self.model, self.optimizer, plan, **options)

    def parts(self, batch: Batch) -> Iterable[Batch]:
        return (batch,)

    def step(self, batch: Batch) -> float:
        start = time.perf_counter()
        for part in self.parts(batch):
            value = self.workload.loss(self.model(*part.args, **part.kwargs), part.target)
            value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def seconds(self, batch: Batch, steps: int) -> float:
        """Of that many steps."""
        return sum(self.step(batch) for _ in range(steps))

    def finish(self) -> None:
        """Ends what a step has left pending."""
        if is_parallel(self.model):
            run_of(self.model).finish_steps()

    def turn(self, batch: Batch, steps: int) -> float:
        """Seconds of a step in the steady state: from the end of the first to that of the last."""
        self.step(batch)
        taken = self.seconds(batch, steps)
        self.finish()
        return taken / steps


class Jitter:
    """Makes each part of a model sleep for a random share, up to 2·``JITTER``, of what it takes. A
    plan is applied before: it divides no module that has hooks."""

    # One switch for all systems: they take turns.
    on = False

    def __init__(self, model: nn.Module, compute_s: float) -> None:
        self._draw = random.Random(dist.get_rank())
        parts = list(model.children()) or [model]
        while len(parts) == 1 and list(parts[0].children()):
            parts = list(parts[0].children())
        # Every part sleeps twice, before its forward and before its backward.
        self._each_s = 2 * JITTER * compute_s / (2 * len(parts))
        for part in parts:
            part.register_forward_pre_hook(lambda *_: self._wait())
            part.register_full_backward_pre_hook(lambda *_: self._wait())

    def _wait(self) -> None:
        if Jitter.on:
            time.sleep(self._draw.random() * self._each_s)


class Times(NamedTuple):
    """Seconds of forward and backward by unit, of the update, and of the whole step."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_s: float
    step_s: float


class UnitClock:
    """A model that trains alone: when each unit's forward began and its last gradient was there.
    Units without parameters count to the one before them. ``sizes`` are bytes of parameters."""

    def __init__(self, name: str, optimizing: Optimizing = momentum) -> None:
        workload = fresh(name)
        units = discover(workload.model, workload.make_batch(2)).units
        self.system = System(workload, optimizing)
        self.sizes: list[int] = []
        self.modules: list[tuple[str, ...]] = []
        seen: set[nn.Parameter] = set()
        for unit in units:
            modules = [workload.model.get_submodule(path) for path in unit.modules]
            own = [p for m in modules for p in m.parameters() if p not in seen]
            if own:
                seen.update(own)
                self._watch(len(self.sizes), modules[0], own)
                self.sizes.append(sum(p.nbytes for p in own))
                self.modules.append(unit.modules)
        self.began = [0.0] * len(self.sizes)
        self.ready = [0.0] * len(self.sizes)

    def _watch(self, k: int, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        def began(*_: object) -> None:
            self.began[k] = time.perf_counter()

        def ready(_: nn.Parameter) -> None:
            self.ready[k] = time.perf_counter()

        module.register_forward_pre_hook(began)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(ready)

    def times(self, batch: Batch) -> Times:
        """Medians of a few steps; the whole step is the slowest rank's, parts are scaled to it.
        Collective."""
        rows = [self._step(batch) for _ in range(PARTS_TIMES + 1)][1:]
        step_s = slowest(median(row.step_s for row in rows))
        update_s = median(row.update_s for row in rows)
        forward = np.median([row.forward for row in rows], axis=0)
        backward = np.median([row.backward for row in rows], axis=0)
        scale = (step_s - update_s) / (forward.sum() + backward.sum())
        return Times(tuple(forward * scale), tuple(backward * scale), update_s, step_s)

    def _step(self, batch: Batch) -> Times:
        system, start = self.system, time.perf_counter()
        value = system.workload.loss(system.model(*batch.args, **batch.kwargs), batch.target)
        middle = time.perf_counter()
        value.backward()
        back = time.perf_counter()
        system.optimizer.step()
        system.optimizer.zero_grad()
        end = time.perf_counter()
        # Where branches end in another order, a unit's time counts to the one that comes later.
        edges = np.maximum.accumulate([start, *self.began[1:], middle])
        downs = np.maximum.accumulate([middle, *self.ready[:0:-1], back])
        return Times(tuple(np.diff(edges)), tuple(np.diff(downs)[::-1]), end - back, end - start)


class Measured(NamedTuple):
    """What was measured of a model before a row's systems are made."""

    name: str
    sizes: Sequence[int]
    modules: Sequence[tuple[str, ...]]
    times: Times
    bytes_per_s: float

    @property
    def chain(self) -> Chain:
        chain, sizes = empty_chain(len(self.sizes)), np.array(self.sizes)
        chain.forward_s[:] = self.times.forward
        chain.backward_s[:] = self.times.backward
        chain.update_s[:] = sizes / sizes.sum() * self.times.update_s
        chain.exchange_s[1] = ring_bytes(1) * sizes / self.bytes_per_s
        return chain

    def workload(self) -> Workload:
        """A fresh one."""
        return fresh(self.name)

    def plan(self, slice_bytes: int = SLICE_BYTES, share: float = 1.0) -> Plan:
        """Plain data parallelism by priority, with the times that rank 0 measured; an exchange
        takes that ``share`` of a float32 ring's. Collective."""
        world, chain = dist.get_world_size(), self.chain
        units = (
            UnitPlan(
                name=modules[0] or "model", kind="other", modules=modules,
                layout=data_parallel(world), forward_s=float(chain.forward_s[k]),
                backward_s=float(chain.backward_s[k]),
                exchange_s=share * float(chain.exchange_s[1][k]),
            )
            for k, modules in enumerate(self.modules)
        )  # fmt: skip
        goal = Goal(batch=world, optimizer="momentum")
        return rank_zero_decides(
            lambda: plan_by_hand(units, goal, "priority", slice_bytes, "benchmark")
        )


def planned(model: ModelProfile, goal: Goal) -> Plan:
    """The planner's choice for the links as ``probe`` measures them. Collective."""
    cluster = probe(budget_s=PROBE_S)
    return rank_zero_decides(
        lambda: solve(problem_for(model, cluster, goal, CAPABILITY), "auto", PLAN_S).checked()
    )


def by_ddp(measured: Measured, bucket_mb: int) -> System:
    system = System(measured.workload())
    system.model = DistributedDataParallel(system.model, bucket_cap_mb=bucket_mb)
    return system


def by_fsdp(measured: Measured, optimizing: Optimizing = momentum) -> System:
    """FSDP2: a group for every unit with parameters of its own, the root's for the rest.
    Collective."""
    workload = measured.workload()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    users: dict[nn.Parameter, int] = {}
    for _, parameter in workload.model.named_parameters(remove_duplicate=False):
        users[parameter] = users.get(parameter, 0) + 1
    for modules in measured.modules:
        # A tied parameter belongs to the root's group: two groups cannot own it.
        for module in (workload.model.get_submodule(path) for path in modules):
            own = list(module.parameters())
            if own and all(users[parameter] == 1 for parameter in own):
                fully_shard(module, mesh=mesh)
    fully_shard(workload.model, mesh=mesh)
    return System(workload, optimizing)


def simulated(chain: Chain, sizes: Sequence[int], limit_bytes: int, urgent: bool = True) -> float:
    """Seconds of a step whose gradients of those sizes travel in slices under the limit, by urgency
    or in order."""
    messages = []
    # Backward has the last unit's gradients first.
    for k in reversed(range(len(sizes))):
        for piece in cut([sizes[k]], limit_bytes):
            seconds = float(chain.exchange_s[1][k]) / piece.parts
            messages.append(Message((k,), LINKS[1], seconds, k if urgent else 0))
    return simulate(Step(work_of(chain, 1, "priority"), tuple(messages), "priority")).step_s


def in_turns(systems: dict[str, System], batch: Batch, steps: int, rounds: int) -> dict[str, float]:
    """The median of each system's turns, of the slowest rank. Collective."""
    for key, system in systems.items():
        system.turn(batch, 1 if key.startswith("ddp") else WARM_UP)
    turns = {key: partial(system.turn, batch, steps) for key, system in systems.items()}
    return medians(turns, rounds)


def medians(turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of each, of the slowest rank. Collective."""
    taken: dict[str, list[float]] = {key: [] for key in turns}
    # In turns, so that what disturbs the machine for a while hits all alike.
    for _ in range(rounds):
        for key, turn in turns.items():
            dist.barrier()
            taken[key].append(slowest(turn()))
    return {key: median(values) for key, values in taken.items()}
