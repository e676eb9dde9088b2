"""Which way to go: what each way to train a model on a cluster is predicted to reach, from one
device by itself to gradients in fewer bytes, a larger batch and fewer hosts.

Each way is planned as ``plan`` would plan it with the options that stand beside it; nothing is
extrapolated. What a way changes in the training is said, and left to the user.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from ..cost.budget import single_device_batch_s
from ..cost.cost import CostModel
from ..schema.cluster import Cluster
from ..schema.goal import ROUNDED_FIDELITY, Goal
from ..schema.pins import without
from ..schema.plan import ExchangePolicy, UnitPlan
from ..schema.precision import is_scaled
from ..schema.record import Count, Positive, Record, Seconds
from ..solve.choice import over_bytes
from ..solve.evaluate import evaluation
from ..solve.heuristic.resize import resized_problem
from ..solve.needless_loss import without_needless_loss
from ..solve.problem import Problem
from ..solve.solver import solve

# A host is slow whose links reach less than this share of what hosts' links reach in the median.
SLOW = 0.5
# The share of the gradients' energy that the ways must send at once: with parts of them (of these
# exchanges), and in eight bits.
PARTS_FIDELITY, EIGHT_BITS_FIDELITY = 0.9, 0.99
PARTS: tuple[ExchangePolicy, ...] = ("dropped", "topk", "low_rank")

Changes = Literal["nothing", "rounding", "waiting", "batch", "algorithm"]
"""What a way changes in the training: nothing; the rounding of gradients; that part of them waits
for a later step; the number of samples in a step; the algorithm, as hosts train apart."""


EIGHT_BITS, IN_PART = "plan with int8 gradients", "plan with gradients in part"
LOCAL_STEPS = "plan with local steps"


class Way(Record, frozen=True, kw_only=True):
    """One way to train, and what is predicted of it. ``options`` are those of ``plan`` that make
    its plan, None where there is none to make. ``gain`` is its samples per second over those of
    data parallelism as DistributedDataParallel does it. ``inner_steps`` are those of a round, where
    hosts train apart. Where it cannot be had the figures are None, and ``why`` says so."""

    name: str
    changes: Changes
    ranks: Count
    batch: Count
    options: tuple[str, ...] | None = ()
    step_s: Seconds | None = None
    samples_per_s: float | None = None
    gain: float | None = None
    inner_steps: Count | None = None
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
    goal = msgspec.structs.replace(
        problem.goal, allow_lossy=False, min_fidelity=1.0, allow_local_steps=False
    )
    exact = replace(problem, goal=goal)
    plain = _without_a_plan(exact)
    step = evaluation(plain, plain.baseline).prediction
    ways = [_by_itself("data parallel (DDP)", plain, step.step_s)]
    asked = [*_fewer(exact), *_planned(exact)]
    if plain.world_size > 1:
        single = resized_problem(replace(exact, goal=_unpinned(goal)), 1)
        one = _without_a_plan(single)
        # It has no executor, which predictions of plans count.
        alone = _by_itself("one device", one, single_device_batch_s(one))
        if alone.why:  # then a plan may find room for it
            asked.insert(0, _Asked(alone.name, "nothing", ("--ranks", "1"), single))
        else:
            ways.append(alone)
    ways += _unmeasured(exact)
    for i, each in enumerate(asked):
        problem.report(each.name, i / len(asked))
        ways.append(_way(each, solver, time_limit_s))
    base = goal.batch / step.step_s if step.step_s else 0.0
    judged = [_with_gain(way, base) for way in ways]
    return Advice(
        target=exact.profile.target,
        batch=goal.batch,
        ranks=exact.cluster.world_size,
        compute_s=step.compute_s,
        exchange_s=step.exchange_s,
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


def _without_a_plan(problem: Problem) -> CostModel:
    """Data parallelism in as many micro-batches as are allowed and take least, of those that fit
    in memory if any does."""
    asked = problem.profile, problem.cluster, problem.goal
    counts = [*filter(problem.divides_into, problem.goal.micro_batches)] or [1]
    models = [CostModel(*asked, micro_batches=count) for count in counts]
    if len(models) == 1:
        return models[0]
    fitting = [model for model in models if over_bytes(model, model.baseline) <= 0]
    return min(fitting or models, key=lambda m: evaluation(m, m.baseline).prediction.step_s)


def _by_itself(name: str, model: CostModel, step_s: float) -> Way:
    """A way that has nothing to plan: data parallelism on the model's devices."""
    fits = over_bytes(model, model.baseline) <= 0
    return Way(
        name=name, changes="nothing", ranks=model.world_size, batch=model.goal.batch,
        options=None, **_figures(model.goal, step_s) if fits else {"why": "memory is too small"},
    )  # fmt: skip


class _Asked(NamedTuple):
    """A way that is to be planned. ``used`` says whether a unit does what the way is about,
    ``apart`` that hosts are to train apart."""

    name: str
    changes: Changes
    options: tuple[str, ...]
    problem: Problem
    used: Callable[[UnitPlan], bool] = lambda unit: True
    apart: bool = False


def _fewer(exact: Problem) -> Iterator[_Asked]:
    """The devices of one host, and half of the hosts, each by themselves."""
    own, hosts = len(exact.cluster.nodes[0].devices), len(exact.cluster.nodes)
    sizes = {"one host": own} if own > 1 and hosts > 1 else {}
    sizes |= {"half of the hosts": own * (hosts // 2)} if hosts > 3 else {}
    for name, ranks in sizes.items():
        fewer = resized_problem(replace(exact, goal=_unpinned(exact.goal)), ranks)
        yield _Asked(name, "nothing", ("--ranks", str(ranks)), fewer)


def _planned(exact: Problem) -> Iterator[_Asked]:
    """The ways that use the whole cluster."""

    def asked(forbidden: tuple[str, ...] = (), **changed: Any) -> Problem:
        goal = msgspec.structs.replace(exact.goal, **changed)
        return replace(exact, goal=goal, capability=without(exact.capability, forbidden))

    yield _Asked("exact plan", "nothing", (), exact)
    rounded = asked(allow_lossy=True, min_fidelity=ROUNDED_FIDELITY)
    yield _Asked(
        "plan with bfloat16 gradients", "rounding", ("--allow-lossy",), rounded,
        lambda unit: unit.rounded,
    )  # fmt: skip
    if not is_scaled(exact.profile.precision):
        measured = _measured(exact)
        if "int8" in measured:
            eight = asked(PARTS, allow_lossy=True, min_fidelity=EIGHT_BITS_FIDELITY)
            yield _Asked(
                EIGHT_BITS, "rounding",
                (*_allowing(EIGHT_BITS_FIDELITY), *(f"--forbid={name}" for name in PARTS)), eight,
                lambda unit: unit.exchange == "int8",
            )  # fmt: skip
        if measured:
            parts = asked(allow_lossy=True, min_fidelity=PARTS_FIDELITY)
            yield _Asked(
                IN_PART, "waiting", _allowing(PARTS_FIDELITY), parts,
                lambda unit: unit.exchange in PARTS,
            )  # fmt: skip
    batch, allowed = 2 * exact.goal.batch, exact.goal.micro_batches
    counts = tuple(dict.fromkeys((*allowed, *(2 * count for count in allowed))))
    options = ("--batch", str(batch), "--micro-batches", ",".join(map(str, counts)))
    twice = asked(batch=batch, micro_batches=counts)
    yield _Asked("plan for twice the batch", "batch", options, twice)
    if len(exact.cluster.nodes) > 1:
        local = asked(allow_local_steps=True)
        yield _Asked(LOCAL_STEPS, "algorithm", ("--allow-local-steps",), local, apart=True)


def _measured(exact: Problem) -> set[str]:
    """The exchanges of which the profile says what they keep."""
    return {curve.exchange for unit in exact.profile.units for curve in unit.fidelity}


def _unmeasured(exact: Problem) -> list[Way]:
    """The ways that a profile must have been measured for."""
    if _measured(exact) or is_scaled(exact.profile.precision):
        return []
    why = (
        "what its gradients keep is not measured: run meshwright profile TARGET -o profile.json "
        "where a device is, and give that file as TARGET"
    )
    kinds: dict[str, Changes] = {EIGHT_BITS: "rounding", IN_PART: "waiting"}
    return [
        Way(
            name=name, changes=changes, ranks=exact.cluster.world_size, batch=exact.goal.batch,
            why=why,
        )
        for name, changes in kinds.items()
    ]  # fmt: skip


def _allowing(fidelity: float) -> tuple[str, ...]:
    return "--allow-lossy", "--min-fidelity", f"{fidelity:g}"


def _way(asked: _Asked, solver: str, time_limit_s: float | None) -> Way:
    problem = asked.problem
    found = solve(replace(problem, progress=None), solver, time_limit_s)
    found = without_needless_loss(problem, found)
    way = Way(
        name=asked.name, changes=asked.changes, options=asked.options,
        ranks=problem.cluster.world_size, batch=problem.goal.batch,
    )  # fmt: skip
    if found.plan is None:
        why = found.infeasible.sentence if found.infeasible else found.reason
        return msgspec.structs.replace(way, why=why or "no plan fits")
    local = found.plan.local_steps
    if asked.apart and local is None:
        told = found.reason.partition("no local steps: ")[2].partition("; ")[0]
        why = told or "it would not be clearly quicker than the exact plan"
        return msgspec.structs.replace(way, why=why)
    if not any(map(asked.used, found.plan.units)):
        return msgspec.structs.replace(way, why="no unit gains by it")
    if local is not None:
        way = msgspec.structs.replace(way, inner_steps=local.inner_steps)
    return msgspec.structs.replace(way, **_figures(problem.goal, found.plan.prediction.step_s))


def _with_gain(way: Way, base: float) -> Way:
    if way.samples_per_s is None or not base:
        return way
    return msgspec.structs.replace(way, gain=way.samples_per_s / base)


def _figures(goal: Goal, step_s: float) -> dict[str, float | None]:
    return {"step_s": step_s, "samples_per_s": goal.batch / step_s if step_s else None}


def _unpinned(goal: Goal) -> Goal:
    """Without pins, whose layouts are of more devices."""
    return msgspec.structs.replace(goal, pins=())
