"""What the executor's own work adds to a step, measured by running it.

Two toy models, one of few parameters and one of many, are trained plainly and under a plan of data
parallelism, in turns. What the step takes longer under the plan, less the all-reduce of its one
bucket (which predictions count by itself), is the executor's: the ranks' agreement on samples and
on used parameters, hooks, and the filling of buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..planner.cluster import StepOverhead
from ..planner.goal import Goal
from ..planner.layout import data_parallel
from ..planner.plan import Plan, Prediction, Provenance, UnitPlan
from .apply import apply

FEW, MANY = 4, 48
"""Layers of the two toy models, each with a weight and a bias."""
WIDTH = 8
ROUNDS, UNCOUNTED = 25, 3


def measure_overhead(rounds: int = ROUNDS) -> StepOverhead:
    """The overhead on CPU ranks, as the slowest rank sees it. Collective over the default group.

    On a GPU the host's work runs ahead of the device's and hides behind it: nothing is measured.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return StepOverhead()
    with torch.random.fork_rng(devices=[]):
        few, many = (_excess(layers, ranks, rounds) for layers in (FEW, MANY))
    excess = torch.tensor([few, many], dtype=torch.float64)
    dist.all_reduce(excess, op=dist.ReduceOp.MAX)
    few, many = excess.tolist()
    each = max((many - few) / (2 * (MANY - FEW)), 0.0)
    return StepOverhead(step_s=max(few - 2 * FEW * each, 0.0), parameter_s=each)


def _excess(layers: int, ranks: int, rounds: int) -> float:
    """Seconds by which a step under a plan is longer than a plain one and its all-reduce."""
    plain = _toy(layers)
    planned, _ = apply(_toy(layers), None, _plan(layers, ranks))
    bucket = torch.zeros(sum(p.numel() for p in plain.parameters()))
    turns: list[Callable[[], object]] = [
        lambda: _step(plain),
        lambda: _step(planned),
        lambda: dist.all_reduce(bucket),
    ]
    taken: list[list[float]] = [[], [], []]
    for _ in range(rounds + UNCOUNTED):
        for turn, seconds in zip(turns, taken, strict=True):
            dist.barrier()
            start = time.perf_counter()
            turn()
            seconds.append(time.perf_counter() - start)
    alone, under, sent = (median(seconds[UNCOUNTED:]) for seconds in taken)
    return under - alone - sent


def _toy(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _step(model: nn.Module) -> None:
    loss: Tensor = model(torch.ones(2, WIDTH)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def _plan(layers: int, ranks: int) -> Plan:
    """Data parallelism with one bucket."""
    nothing = Prediction(
        step_s=0.0,
        compute_s=0.0,
        blocking_s=0.0,
        exposed_s=0.0,
        update_s=0.0,
        exchange_s=0.0,
        wire_bytes=0,
        peak_bytes=(0,) * ranks,
        gpu_seconds=0.0,
        samples_per_s=0.0,
    )
    units = [
        UnitPlan(name=str(i), kind="linear", modules=(str(i),), layout=data_parallel(ranks))
        for i in range(layers)
    ]
    return Plan(
        target="toy",
        model="toy",
        world_size=ranks,
        goal=Goal(batch=2 * ranks),
        placement=tuple(range(ranks)),
        units=tuple(units),
        prediction=nothing,
        baseline=nothing,
        provenance=Provenance(solver="none", status="manual", profile="", cluster=""),
    )
