"""What more would buy: bandwidth, memory, devices, micro-batches; and what fewer devices would do.

Each question changes one thing of the cluster or the goal and asks the solver anew, so that the
decisions may change with it; nothing is extrapolated.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from ..cost.budget import single_device_batch_s
from ..cost.cost import CostModel
from ..schema.cluster import Cluster, CollectiveCurve, Device, Level, LevelName
from ..schema.curve import Curve
from ..schema.errors import InputError
from ..schema.goal import MOST_MICRO_BATCHES
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..schema.record import Count, Record, Seconds
from ..schema.text import ranks as counted
from ..solve.choice import over_bytes
from ..solve.evaluate import evaluation
from ..solve.heuristic.checkpointing import limited_by_memory
from ..solve.heuristic.resize import NoLinksError, how_resized, resized_problem, resized_with
from ..solve.heuristic.schedules import WORTHWHILE
from ..solve.problem import Problem, Relaxation, Result
from ..solve.solver import expand_pins, solve, solvers

GBIT_BYTES = 125_000_000
GIB = 2**30
# Seconds after which no further number of micro-batches is tried.
EFFORT_S = 5.0
# Why nothing is said of more devices where one host was measured.
NO_LINKS = "the cluster states no links between nodes: probe two hosts, or describe such a cluster"


class Gain(Record, frozen=True, kw_only=True):
    """What one change would buy: the step (or the objective asked for) before and with it, and how
    that is known. ``after_s`` is None where no plan was found with the change, and where none
    could be looked for, for the ``reason`` given."""

    change: str
    before_s: Seconds
    after_s: Seconds | None
    method: str = "planned again"
    reason: str = ""

    @property
    def saved_s(self) -> float:
        """Seconds less; a solver that proves no optimum may find a little more."""
        return self.before_s - (self.before_s if self.after_s is None else self.after_s)


class Size(Record, frozen=True, kw_only=True):
    """A plan for one cluster size: what it predicts, and plain data parallelism on as many ranks.
    Where none fits (``why`` says what is missing) its figures are None. ``gap`` and
    ``objective_s`` are the solver's; ``baseline_fits`` is of data parallelism's memory."""

    ranks: Count
    nodes: Count
    fits: bool
    objective_s: Seconds | None = None
    step_s: Seconds | None = None
    baseline_step_s: Seconds | None = None
    baseline_fits: bool | None = None
    speedup: float | None = None
    samples_per_s: float | None = None
    gpu_seconds: Seconds | None = None
    gpu_seconds_per_sample: Seconds | None = None
    gap: float | None = None
    status: str = "infeasible"
    solver: str
    why: str = ""


class Sizes(Record, frozen=True, kw_only=True):
    """Plans for several cluster sizes, the global batch the same; and how they were made."""

    target: str
    batch: Count
    how: str
    rows: tuple[Size, ...]


def gains(
    problem: Problem, result: Result, solver: str = "auto", time_limit_s: float | None = None
) -> tuple[Gain, ...]:
    """What one more Gbit/s on each level, twice the bandwidth to the hosts' memory (where it is
    waited for), one more GiB per device, half and twice the devices would buy over ``result``."""
    before = result.objective_s
    if before is None:
        raise InputError("nothing was planned to compare with: make the problem feasible first")
    found: list[Gain] = []
    copies = result.plan is not None and result.plan.prediction.copies_s > 0
    changes = _changes(problem, copies=copies)
    for change, asked in changes:
        problem.report(change, len(found) / len(changes))
        if isinstance(asked, str):
            gain = Gain(change=change, before_s=before, after_s=None, method="", reason=asked)
        else:
            # Its own progress would start anew with each question.
            after = solve(replace(asked, progress=None), solver, time_limit_s).objective_s
            other = after is None and asked.cluster.world_size != problem.cluster.world_size
            why = _pinned(asked) if other else ""
            gain = Gain(change=change, before_s=before, after_s=after, reason=why)
        found.append(gain)
    return tuple(found)


def gains_of(plan: Plan, problem: Problem, time_limit_s: float | None = None) -> tuple[Gain, ...]:
    """``gains`` over what planning again without a change gives, by the plan's own solver and with
    nothing given away for simplicity, so that only the change makes a difference."""
    # The placement is left open, as a cluster with other links may want another. A solver may give
    # away a little time for a simpler plan (``tie_tolerance``), which would be taken for the
    # change's gain.
    # And what another algorithm would gain is no change's.
    goal = msgspec.structs.replace(problem.goal, allow_local_steps=False)
    asked = replace(problem, goal=goal, placement=None, tie_tolerance=0.0)
    solver = plan.provenance.solver
    if solver not in solvers():
        solver = "auto"
    unchanged = solve(replace(asked, progress=None), solver, time_limit_s)
    if unchanged.objective_s is None:
        return ()
    return gains(asked, unchanged, solver, time_limit_s)


def _changes(problem: Problem, *, copies: bool) -> list[tuple[str, Problem | str]]:
    """The questions, or why one cannot be asked; levels that no two ranks use are left out.
    ``copies``: the step waits for copies to the hosts' memory."""
    cluster = problem.cluster
    shared = any(len(node.devices) > 1 for node in cluster.nodes)
    several = {"inter": len(cluster.nodes) > 1, "intra": shared}
    found: list[tuple[str, Problem | str]] = []
    for level in cluster.levels:
        if several[level.name]:
            wider = replace(problem, cluster=with_bandwidth(cluster, level.name, GBIT_BYTES))
            found.append((f"one more Gbit/s on {level.name} links", wider))
    if copies:
        wider = replace(problem, cluster=with_host_bandwidth(cluster, 2.0))
        found.append(("twice the bandwidth to the host's memory", wider))
    found.append(("one more GiB of memory on every device", _with_memory(problem, GIB)))
    found += _half(problem)
    twice = 2 * cluster.world_size
    change = f"{twice} devices for {cluster.world_size}"
    if cluster.level("inter") is None:
        found.append((change, NO_LINKS))
    elif twice % len(cluster.nodes[0].devices) == 0:
        larger = resized_problem(problem, twice)
        found.append((change, larger.uncut or larger))
    return found


def _half(problem: Problem) -> list[tuple[str, Problem | str]]:
    """The question of half of the devices: whole nodes or a part of one, all being alike."""
    cluster = problem.cluster
    each, half = len(cluster.nodes[0].devices), cluster.world_size // 2
    # Of unequal nodes a half is not known to be like the first.
    alike = all(node.devices == cluster.nodes[0].devices for node in cluster.nodes)
    if not alike or cluster.world_size % 2 or (half > each and half % each):
        return []
    smaller = resized_problem(problem, half)
    devices = "device" if half == 1 else "devices"
    return [(f"{half} {devices} for {cluster.world_size}", smaller.uncut or smaller)]


def _pinned(problem: Problem) -> str:
    """That pins keep units to layouts of other numbers of ranks; "" where none does."""
    world = problem.cluster.world_size
    for pin in problem.goal.pins:
        theirs = [layout.size for layout in pin.only]
        if theirs and world not in theirs:
            return f"its pins are layouts of {counted(max(theirs))}"
    return ""


def sizes(
    problem: Problem, ranks: Sequence[int], solver: str = "auto", time_limit_s: float | None = None
) -> Sizes:
    """Plans for clusters of so many ranks, built of the same nodes; the global batch stays. Sizes
    that take links which the cluster does not state are rows that do not fit; raises ``InputError``
    where all are."""
    asked = [_asked(problem, count) for count in dict.fromkeys(ranks)]
    if asked and all(isinstance(each, Size) for each in asked):
        resized_problem(problem, ranks[0])  # raises
    return Sizes(
        target=problem.profile.target,
        batch=problem.goal.batch,
        how=how_resized(problem.cluster),
        rows=tuple(
            each if isinstance(each, Size) else _size(each, solver, time_limit_s) for each in asked
        ),
    )


def _asked(problem: Problem, ranks: int) -> Problem | Size:
    """The problem on so many ranks, or the row that says why there is none."""
    try:
        asked = expand_pins(resized_problem(problem, ranks))
        why = asked.uncut
    except NoLinksError as error:
        why = str(error)
    if not why:
        return asked
    nodes = max(ranks // len(problem.cluster.nodes[0].devices), 1)
    return Size(ranks=ranks, nodes=nodes, fits=False, solver="none", why=why)


def _size(problem: Problem, solver: str, time_limit_s: float | None) -> Size:
    cluster = problem.cluster
    problem.report(f"{cluster.world_size} ranks", 0.0)
    result = solve(problem, solver, time_limit_s)
    size = Size(
        ranks=cluster.world_size, nodes=len(cluster.nodes), fits=False, solver=result.solver
    )
    plan = result.plan
    if plan is None:
        why = result.infeasible.sentence if result.infeasible else result.reason
        return msgspec.structs.replace(size, why=why)
    made = plan.prediction
    return msgspec.structs.replace(
        size,
        fits=True,
        objective_s=result.objective_s,
        step_s=made.step_s,
        baseline_step_s=plan.baseline.step_s,
        baseline_fits=plan.baseline_fits,
        speedup=plan.speedup,
        samples_per_s=made.samples_per_s,
        gpu_seconds=made.gpu_seconds,
        gpu_seconds_per_sample=made.gpu_seconds / problem.goal.batch,
        gap=result.gap,
        status=result.status,
    )


def with_bandwidth(cluster: Cluster, name: LevelName, more_bytes_per_s: float) -> Cluster:
    """The cluster with faster links of one level, by formula and where they were measured."""
    return with_rates(cluster, name, lambda rate: rate + more_bytes_per_s)


def with_rates(cluster: Cluster, name: LevelName, changed: Callable[[float], float]) -> Cluster:
    """The cluster with other bandwidths of one level's links, by formula and where they were
    measured; latencies stay."""

    def with_rate(level: Level) -> Level:
        if level.name != name:
            return level
        rate = changed(level.bytes_per_s)
        curves = tuple(_shrunk(curve, level.bytes_per_s / rate) for curve in level.curves)
        return msgspec.structs.replace(level, bytes_per_s=rate, curves=curves)

    def on_level(i: int, j: int) -> bool:
        return i != j and (node[i] == node[j]) == (name == "intra")

    node = cluster.node_of_rank
    pairs = tuple(
        tuple(changed(rate) if on_level(i, j) else rate for j, rate in enumerate(row))
        for i, row in enumerate(cluster.pair_bytes_per_s)
    )
    levels = tuple(map(with_rate, cluster.levels))
    return msgspec.structs.replace(cluster, levels=levels, pair_bytes_per_s=pairs)


def with_host_bandwidth(cluster: Cluster, times: float) -> Cluster:
    """The cluster whose devices have so many times the bandwidth to their host's memory, where that
    is known."""

    def changed(device: Device) -> Device:
        rate = device.host_bytes_per_s
        return msgspec.structs.replace(device, host_bytes_per_s=rate and times * rate)

    return _with_devices(cluster, changed)


def _with_devices(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    nodes = tuple(
        msgspec.structs.replace(node, devices=tuple(map(changed, node.devices)))
        for node in cluster.nodes
    )
    return msgspec.structs.replace(cluster, nodes=nodes)


def _shrunk(curve: CollectiveCurve, share: float) -> CollectiveCurve:
    # A faster link moves the bytes sooner; it does not answer sooner. So only what a measurement
    # took beyond the latency shrinks.
    start = curve.latency_s
    seconds = tuple(min(y, start) + max(y - start, 0.0) * share for y in curve.seconds.y)
    return msgspec.structs.replace(
        curve,
        seconds=Curve(x=curve.seconds.x, y=seconds),
        bytes_per_s=curve.bytes_per_s / share,
    )


def _with_memory(problem: Problem, more_bytes: int) -> Problem:
    limit = problem.goal.memory_limit_bytes
    # The goal's limit replaces that of every device, so with one more memory alone buys nothing.
    if limit is not None:
        goal = msgspec.structs.replace(problem.goal, memory_limit_bytes=limit + more_bytes)
        return replace(problem, goal=goal)

    def larger(device: Device) -> Device:
        return msgspec.structs.replace(device, memory_bytes=device.memory_bytes + more_bytes)

    return replace(problem, cluster=_with_devices(problem.cluster, larger))


def quicker_in_parts(problem: Problem, plan: Plan) -> Relaxation | None:
    """The number of micro-batches beyond those that the goal allows with which a plan by the
    heuristic is quickest, by so much that it is worth the change; None where there is none, or
    where memory does not hold the plan back. ``problem`` is the one that ``plan`` answers."""
    # A plan that had to recompute, to shard or to divide so as to fit may be slower than the same
    # batch in more micro-batches, which hold fewer feature maps at a time. The training loop goes
    # through them, so they are the user's to allow: they are tried and named, not taken.
    allowed = problem.goal.micro_batches
    if not (problem.capability.micro_batches and limited_by_memory(plan)):
        return None
    end, best = time.perf_counter() + EFFORT_S, None
    step_s = plan.prediction.step_s * (1 - WORTHWHILE)
    # Twice as many each time: halving what a micro-batch holds is what makes another plan fit.
    count = 2 * max(allowed)
    while count <= MOST_MICRO_BATCHES and count * problem.cluster.world_size <= problem.goal.batch:
        goal = msgspec.structs.replace(problem.goal, micro_batches=(count,))
        asked = replace(problem, goal=goal, progress=None, explains=False)
        found = solve(asked, "heuristic").plan
        if found is not None and found.prediction.step_s < step_s:
            best, step_s = found, found.prediction.step_s
        # Where memory holds nothing back, more parts only make each of them less efficient.
        free = found is not None and not limited_by_memory(found)
        if free or time.perf_counter() > end:
            break
        count *= 2
    if best is None:
        return None
    count = best.micro_batches
    counts = tuple(dict.fromkeys((*plan.goal.micro_batches, count)))
    took, takes = (
        f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
        for seconds in (plan.prediction.step_s, best.prediction.step_s)
    )
    sentence = (
        f"in {count} micro-batches the same batch would take {takes} a step under this memory "
        f"limit, where this plan takes {took}: allow them with --micro-batches "
        f"{','.join(map(str, counts))} (micro_batches={counts})"
    )
    return Relaxation("micro_batches", count, sentence)


class FewerDevices(NamedTuple):
    """So many devices by themselves, and what the plan's whole batch takes them."""

    devices: int
    step_s: float


def quicker_on_fewer(plan: Plan, profile: ModelProfile, cluster: Cluster) -> FewerDevices | None:
    """One device, or those of one node under plain data parallelism, where that is quicker than the
    plan's step and the model fits in their memory as it is; the quicker of the two, else None."""
    goal = msgspec.structs.replace(plan.goal, pins=())  # their layouts are of more devices
    found = []
    for devices in {1, len(cluster.nodes[0].devices)}:
        if devices >= plan.world_size:
            continue
        model = CostModel(*resized_with(profile, cluster, devices), goal)
        if devices == 1:  # it has no executor, which predictions of plans count
            taken_s = single_device_batch_s(model)
        else:
            taken_s = evaluation(model, model.baseline).prediction.step_s
        if taken_s >= plan.prediction.step_s:
            continue
        if over_bytes(model, model.baseline) <= 0:
            found.append(FewerDevices(devices, taken_s))
    return min(found, key=lambda one: one.step_s, default=None)


def ddp_step_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """The step of plain data parallelism as DistributedDataParallel sends gradients, in buckets as
    they get ready. The plan's baseline may have the plan's own schedule, where that is quicker."""
    model = CostModel(profile, cluster, plan.goal, micro_batches=plan.micro_batches)
    return evaluation(model, model.baseline).prediction.step_s
