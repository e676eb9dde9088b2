"""Which way to go: what each way to train a model on a cluster is predicted to reach, from one
device by itself to gradients in fewer bytes, a larger batch and fewer hosts.

Each way is planned as ``plan`` would plan it with the options that stand beside it; nothing is
extrapolated. What a way changes in the training is said, and left to the user.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from ..cost.budget import single_device_batch_s
from ..cost.cost import CostModel
from ..schema.cluster import Cluster
from ..schema.goal import ROUNDED_FIDELITY, Goal
from ..schema.plan import LOSSY, Plan
from ..schema.precision import is_scaled
from ..schema.record import Count, Positive, Record, Seconds
from ..solve.evaluate import evaluation, excess, rank_memory
from ..solve.heuristic.resize import resized, resized_problem
from ..solve.problem import Problem
from ..solve.solver import solve

# A host is slow whose links reach less than this share of what hosts' links reach in the median.
SLOW = 0.5
# The share of the gradients' energy that the way with parts of them must send at once.
PARTS_FIDELITY = 0.9

Changes = Literal["nothing", "rounding", "waiting", "batch"]
"""What a way changes in the training: nothing; the rounding of gradients; that part of them waits
for a later step; the number of samples in a step."""


class Way(Record, frozen=True, kw_only=True):
    """One way to train, and what is predicted of it. ``options`` are those of ``plan`` that make
    its plan. ``gain`` is its samples per second over those of data parallelism as
    DistributedDataParallel does it. Where it cannot be had the figures are None, and ``why`` says
    so."""

    name: str
    changes: Changes
    ranks: Count
    batch: Count
    options: tuple[str, ...] = ()
    step_s: Seconds | None = None
    samples_per_s: float | None = None
    gain: float | None = None
    why: str = ""


class SlowHost(Record, frozen=True, kw_only=True):
    """A host whose fastest measured link, in the slower direction, is much slower than those of the
    others, in their median ``others_bytes_per_s``."""

    name: str
    bytes_per_s: Positive
    others_bytes_per_s: Positive


class Advice(Record, frozen=True, kw_only=True):
    """The ways to train ``target``, the quickest first, those that cannot be had last.
    ``compute_s`` and ``exchange_s`` are what a step of plain data parallelism computes, and what
    its gradients would take by themselves. ``slow_hosts`` hold the others up."""

    target: str
    batch: Count
    ranks: Count
    compute_s: Seconds
    exchange_s: Seconds
    ways: tuple[Way, ...]
    slow_hosts: tuple[SlowHost, ...] = ()

    @property
    def exchange_ratio(self) -> float:
        """How many times as long as it computes a step of data parallelism communicates."""
        return self.exchange_s / self.compute_s if self.compute_s else 0.0


def advise(problem: Problem, solver: str = "auto", time_limit_s: float | None = None) -> Advice:
    """The ways to train the problem's model on its cluster, the quickest first. ``time_limit_s`` is
    for each plan. What the problem's goal allows beyond an exact exchange is not taken over."""
    goal = msgspec.structs.replace(problem.goal, allow_lossy=False, min_fidelity=1.0)
    exact = replace(problem, goal=goal)
    plain = CostModel(exact.profile, exact.cluster, goal)
    done = evaluation(plain, plain.baseline)
    ways = [_data_parallel(plain), *_by_fewer(exact, solver, time_limit_s)]
    for name, changes, options, asked in _planned(exact):
        problem.report(name, len(ways) / 8)
        ways.append(_way(name, changes, options, asked, solver, time_limit_s))
    base = goal.batch / done.prediction.step_s if done.prediction.step_s else 0.0
    judged = [_with_gain(way, base) for way in ways]
    return Advice(
        target=exact.profile.target,
        batch=goal.batch,
        ranks=exact.cluster.world_size,
        compute_s=done.prediction.compute_s,
        exchange_s=done.prediction.exchange_s,
        ways=tuple(sorted(judged, key=lambda way: -(way.samples_per_s or 0.0))),
        slow_hosts=slow_hosts(exact.cluster),
    )


def slow_hosts(cluster: Cluster) -> tuple[SlowHost, ...]:
    """The hosts that hold the others up, where links were measured host by host."""
    if not cluster.pair_bytes_per_s:
        return ()
    rates, node = np.array(cluster.pair_bytes_per_s), np.array(cluster.node_of_rank)
    crossing = np.where(node[:, None] != node, rates, 0.0)
    # What a link between two hosts reaches is up to the slower of them: a host's fastest link is
    # the one that tells of itself.
    reached = np.minimum(crossing.max(axis=1), crossing.max(axis=0))
    own = np.array([reached[node == i].max() for i in range(len(cluster.nodes))])
    found = []
    for i, host in enumerate(cluster.nodes):
        others = float(np.median(np.delete(own, i))) if len(own) > 2 else 0.0
        if own[i] < SLOW * others:
            rate = float(own[i])
            found.append(SlowHost(name=host.name, bytes_per_s=rate, others_bytes_per_s=others))
    return tuple(found)


def _data_parallel(model: CostModel) -> Way:
    done = evaluation(model, model.baseline)
    fits = excess(model, done.memory).over_bytes <= 0
    return Way(
        name="data parallel (DDP)",
        changes="nothing",
        ranks=model.world_size,
        batch=model.goal.batch,
        **_figures(model.goal, done.prediction.step_s) if fits else {"why": "memory is too small"},
    )


def _by_fewer(problem: Problem, solver: str, time_limit_s: float | None) -> Iterator[Way]:
    """One device, the devices of one host, and half of the hosts, each by themselves."""
    cluster, goal = problem.cluster, problem.goal
    one = CostModel(problem.profile, resized(cluster, 1), _unpinned(goal))
    fits = excess(one, rank_memory(one, one.baseline)).over_bytes <= 0
    # It has no executor, which predictions of plans count.
    taken = _figures(goal, single_device_batch_s(one))
    if cluster.world_size > 1:
        yield Way(
            name="one device", changes="nothing", ranks=1, batch=goal.batch,
            **taken if fits else {"why": "memory is too small"},
        )  # fmt: skip
    own, hosts = len(cluster.nodes[0].devices), len(cluster.nodes)
    sizes = {"one host": own} if own > 1 and hosts > 1 else {}
    sizes |= {"half of the hosts": own * (hosts // 2)} if hosts > 3 else {}
    for name, ranks in sizes.items():
        fewer = resized_problem(replace(problem, goal=_unpinned(goal)), ranks)
        yield _way(name, "nothing", ("--ranks", str(ranks)), fewer, solver, time_limit_s)


def _planned(exact: Problem) -> Iterator[tuple[str, Changes, tuple[str, ...], Problem]]:
    """The ways that use the whole cluster."""

    def asked(**changed: Any) -> Problem:
        return replace(exact, goal=msgspec.structs.replace(exact.goal, **changed))

    yield "exact plan", "nothing", (), exact
    rounded = asked(allow_lossy=True, min_fidelity=ROUNDED_FIDELITY)
    yield "plan with bfloat16 gradients", "rounding", ("--allow-lossy",), rounded
    measured = any(unit.fidelity for unit in exact.profile.units)
    if measured and not is_scaled(exact.profile.precision):
        parts = asked(allow_lossy=True, min_fidelity=PARTS_FIDELITY)
        allowing = ("--allow-lossy", "--min-fidelity", f"{PARTS_FIDELITY:g}")
        yield "plan with gradients in part", "waiting", allowing, parts
    batch, allowed = 2 * exact.goal.batch, exact.goal.micro_batches
    counts = tuple(dict.fromkeys((*allowed, *(2 * count for count in allowed))))
    options = ("--batch", str(batch), "--micro-batches", ",".join(map(str, counts)))
    twice = asked(batch=batch, micro_batches=counts)
    yield "plan for twice the batch", "batch", options, twice


def _way(
    name: str,
    changes: Changes,
    options: tuple[str, ...],
    asked: Problem,
    solver: str,
    time_limit_s: float | None,
) -> Way:
    found = solve(replace(asked, progress=None), solver, time_limit_s)
    way = Way(
        name=name, changes=changes, options=options,
        ranks=asked.cluster.world_size, batch=asked.goal.batch,
    )  # fmt: skip
    if found.plan is None:
        why = found.infeasible.sentence if found.infeasible else found.reason
        return msgspec.structs.replace(way, why=why or "no plan fits")
    if changes in ("rounding", "waiting") and not _changed(found.plan, changes):
        return msgspec.structs.replace(way, why="no unit gains by it")
    return msgspec.structs.replace(way, **_figures(asked.goal, found.plan.prediction.step_s))


def _changed(plan: Plan, changes: Changes) -> bool:
    """Whether the plan does what was allowed."""
    if changes == "waiting":
        return any(unit.exchange in LOSSY for unit in plan.units)
    return any(unit.wire != "exact" for unit in plan.units)


def _with_gain(way: Way, base: float) -> Way:
    if way.samples_per_s is None or not base:
        return way
    return msgspec.structs.replace(way, gain=way.samples_per_s / base)


def _figures(goal: Goal, step_s: float) -> dict[str, float | None]:
    return {"step_s": step_s, "samples_per_s": goal.batch / step_s if step_s else None}


def _unpinned(goal: Goal) -> Goal:
    """Without pins, whose layouts are of more devices."""
    return msgspec.structs.replace(goal, pins=())
