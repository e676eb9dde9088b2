"""The verbs as functions: what the command line calls, for scripts and notebooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import msgspec

from .executor.capability import CAPABILITY
from .planner.cost.device_kinds import check_names, with_profiles, with_relative_speeds
from .planner.explain import advice, calibration, why
from .planner.explain import compare as comparing
from .planner.explain import local_steps as hosts_apart
from .planner.explain import memory_timeline as timelines
from .planner.explain import step_trace as traces
from .planner.explain import what_if as changes
from .planner.explain.advice import Advice
from .planner.explain.calibration import Calibration
from .planner.explain.compare import Comparison
from .planner.explain.curves import what_if_curves
from .planner.explain.front import Front, described_front
from .planner.explain.memory_timeline import MemoryTimeline
from .planner.explain.what_if import Sizes
from .planner.explain.why import Explanation, StepBottleneck
from .planner.multiplex.jobs import Assumptions
from .planner.multiplex.report import ClusterReport
from .planner.multiplex.report import report as cluster_report
from .planner.multiplex.report import trace as trace_of
from .planner.multiplex.simulation import simulate_plans
from .planner.schema import cache
from .planner.schema.capability import Capability
from .planner.schema.cluster import Cluster
from .planner.schema.errors import InputError, NoRoomError
from .planner.schema.goal import Goal, make_goal
from .planner.schema.pins import EARLY_RELEASE
from .planner.schema.plan import Plan
from .planner.schema.precision import Precision, check_precision
from .planner.schema.profile import ModelProfile
from .planner.schema.record import check_is, write_whole
from .planner.schema.recorded import RecordedSteps
from .planner.schema.report import RunReport
from .planner.solve.local_steps import plan_of_host, refuse_local_steps
from .planner.solve.needless_loss import without_needless_loss
from .planner.solve.problem import Problem, Relaxation
from .planner.solve.request import (
    Schedules,
    capability_of,
    check_schedule,
    check_time_limit,
    made_from,
    problem_for,
    problem_of,
    shown,
)
from .planner.solve.solver import check_solver, expand_pins, solve

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .executor.gradients.feedback import Lossy
    from .executor.launch.background import Background
    from .executor.launch.hosts.settings import Hosts
    from .executor.launch.losses import LossComparison
    from .executor.launch.progress import Step
    from .executor.launch.restarts import Restarts
    from .executor.launch.verify import Verification
    from .models.workload import Workload
    from .planner.schema.goal import BatchStatistics

# Torch and what needs it is imported where it is used: reading, comparing and explaining plans must
# not wait seconds for it.


def profile(
    target: str | Workload,
    *,
    batches: Sequence[int] | None = None,
    device: str | None = None,
    ranks: int = 1,
    precision: str | None = None,
    together: bool = False,
    progress: Step | None = None,
) -> ModelProfile:
    """What a model's units take, measured on this machine.

    ``target`` names a workload or is one. ``batches`` are the batch sizes to measure. ``device`` is
    ``cpu`` or ``cuda``, or a catalogued device that is not here, for which times are estimated.
    With ``ranks`` above 1 so many processes measure at once, as they will share this host's memory
    in a run (needs a target by name). With ``together`` all ranks that torchrun has started measure
    at once (collective), and hosts that are quicker than others keep times of their own.
    ``precision`` is how the model computes (default: the
    workload's own): ``float32``, ``tf32``, ``bf16``, ``bf16-mixed`` or ``fp16-mixed``, see
    ``planner.schema.precision``. Raises ``InputError``.
    """
    from .profiler import sessions

    if batches and min(batches) < 1:
        raise InputError(f"batch size {min(batches)} cannot be measured: give at least 1")
    if ranks < 1:
        raise InputError(f"{ranks} ranks cannot measure: give at least 1")
    return sessions.profile(target, batches, device, ranks, precision, progress, together=together)


def probe(*, ranks: int | None = None, progress: Step | None = None) -> Cluster:
    """What the links among ranks do.

    Collective where torchrun started this process or a process group is initialised; else starts
    ``ranks`` processes on this machine (default: one for each GPU, or 2). One rank has no links:
    the answer is then this machine's device alone.
    """
    from .profiler import sessions

    return sessions.probe(ranks, progress)


def describe_cluster(
    *, relative_speeds: Mapping[str, float] | None = None, **description: Any
) -> Cluster:
    """A cluster of catalogued devices from a description; see ``profiler.catalogue``.
    ``relative_speeds`` are those of nodes that compute faster or slower than the device says, by
    name: 0.5 is half as fast."""
    from .profiler.catalogue import describe_cluster as describe

    return with_relative_speeds(describe(**description), relative_speeds or {})


def plan(
    what: str | Workload | ModelProfile,
    cluster: Cluster,
    goal: Goal,
    *,
    solver: str = "auto",
    time_limit_s: float | None = None,
    bursts: bool = False,
    hypothetical: bool = False,
    forbidden: Sequence[str] = (),
    schedule: Schedules = "auto",
    precision: str | None = None,
    profiles_of: Mapping[str, ModelProfile] | None = None,
    progress: Step | None = None,
) -> Plan:
    """How to train a model on a cluster.

    ``what`` is a profile, or a target that is measured here (where the cluster is of this machine's
    devices) or estimated (where its devices are catalogued), in ``precision`` as for ``profile``:
    the plan says it, and what runs the plan computes so. Plans only what the executor can run,
    unless ``hypothetical``; never the policies ``forbidden``. With ``bursts`` units may take a part
    of the ranks and leave the others idle. ``schedule`` says how gradients
    travel: ``barrier``, ``priority``, or ``auto``: priority if predicted at least 5% quicker, or
    if nothing else fits. The goal's pins may name patterns of units. ``profiles_of`` are profiles
    of the same model from nodes of the cluster whose devices are quicker or slower, by the nodes'
    names: ranks get samples by their speed then (``Plan.local_batch_sizes``). Raises
    ``InputError``, and ``InfeasibleError`` where nothing fits.
    """
    _check_search(solver, time_limit_s)
    problem = _problem(
        what, cluster, goal, precision, profiles_of, bursts=bursts, hypothetical=hypothetical,
        forbidden=forbidden, schedule=schedule, progress=progress,
    )  # fmt: skip
    # Patterns in pins are of this profile's units: they are expanded once it is known.
    return _solved(expand_pins(problem), solver, time_limit_s)


def _check_search(solver: str, time_limit_s: float | None) -> None:
    """Refuses what cannot be searched with, before anything is measured."""
    check_time_limit(time_limit_s)
    check_solver(solver)


def _solved(problem: Problem, solver: str, time_limit_s: float | None) -> Plan:
    found = without_needless_loss(problem, solve(problem, solver, time_limit_s)).checked()
    # Explaining the plan finds both again by the fingerprints that the plan keeps.
    cache.put(problem.profile)
    cache.put(problem.cluster)
    return found


class PlanOptions(TypedDict, total=False):
    """What ``plan``, ``sizes`` and ``front`` may be told besides, as in ``plan``."""

    bursts: bool
    hypothetical: bool
    forbidden: Sequence[str]
    schedule: Schedules
    progress: Step | None


def _problem(
    what: str | Workload | ModelProfile,
    cluster: Cluster,
    goal: Goal,
    precision: str | None,
    profiles_of: Mapping[str, ModelProfile] | None = None,
    **how: Unpack[PlanOptions],
) -> Problem:
    """The problem of ``problem_for``, with a profile where ``what`` is none: measured here, or
    estimated for the cluster's devices; with the times of those nodes that have ``profiles_of``
    their own."""
    # Before measuring, which may take a minute.
    check_is(cluster, Cluster)
    check_is(goal, Goal)
    check_schedule(how.get("schedule", "auto"))
    if profiles_of:
        check_names(profiles_of, cluster, "profile")
    wanted = check_precision(precision)
    if not isinstance(what, ModelProfile):
        what = _profiled(what, cluster, goal, wanted, how.get("progress"))
    elif wanted not in (None, what.precision):
        raise InputError(
            f"the profile of {what.target} was made with precision {what.precision or 'as built'}, "
            f"not {wanted}: profile it so, or leave --precision (precision) out"
        )
    problem = problem_for(what, cluster, goal, CAPABILITY, **how)
    if not profiles_of:
        return problem
    return replace(problem, profile=with_profiles(problem.profile, profiles_of, cluster))


def _profiled(
    target: str | Workload,
    cluster: Cluster,
    goal: Goal,
    precision: Precision | None,
    progress: Step | None,
) -> ModelProfile:
    """A profile of the target on the cluster's devices: kept, measured or estimated."""
    from .profiler.kept_estimates import kept_estimate

    kept = kept_estimate(target, cluster, precision)
    if kept is not None:
        return kept
    from .profiler import sessions

    return sessions.profile_for(target, cluster, goal, precision, progress)


def quicker_in_parts(
    plan: Plan,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    *,
    forbidden: Sequence[str] = (),
    schedule: Schedules = "auto",
) -> Relaxation | None:
    """More micro-batches than the plan's goal allows with which the same batch would be quicker
    within its memory limit; None where there are none, or memory holds nothing back.

    The profile and the cluster are found as for ``explain``; the rest as it was planned. Under
    more micro-batches the training loop goes through ``micro_batches(model, batch, count)``.
    """
    check_is(plan, Plan)
    if plan.local_steps is not None:
        return None  # more micro-batches were searched for a host by itself
    made, there = made_from(plan, profile, cluster)
    # A plan does not say what it was allowed to decide: what it has decided must be allowed.
    problem = problem_for(
        made, there, plan.goal, CAPABILITY, bursts=plan.leaves_idle,
        hypothetical=bool(plan.hypothetical), forbidden=forbidden, schedule=schedule,
    )  # fmt: skip
    return changes.quicker_in_parts(problem, plan)


def quicker_on_fewer(
    plan: Plan, profile: ModelProfile | None = None, cluster: Cluster | None = None
) -> changes.FewerDevices | None:
    """One device by itself, or those of one node, where the plan's batch fits there and that is
    quicker than the plan; else None. The profile and the cluster are found as for ``explain``."""
    return changes.quicker_on_fewer(plan, *made_from(plan, profile, cluster))


def bottleneck(
    plan: Plan, profile: ModelProfile | None = None, cluster: Cluster | None = None
) -> StepBottleneck:
    """What bounds a plan's step, without a search. The profile and the cluster are found as for
    ``explain``."""
    made, there = made_from(plan, profile, cluster)
    if plan.local_steps is not None:
        return hosts_apart.bottleneck(plan, made, there)
    return why.bottleneck(plan, made, there)


def sizes(
    what: str | Workload | ModelProfile,
    cluster: Cluster,
    goal: Goal,
    ranks: Sequence[int],
    *,
    precision: str | None = None,
    solver: str = "auto",
    time_limit_s: float | None = None,
    **how: Unpack[PlanOptions],
) -> Sizes:
    """Plans for clusters of so many ``ranks``, made of nodes like the given cluster's first; the
    global batch stays. ``time_limit_s`` is for each size, the rest as in ``plan``."""
    _check_search(solver, time_limit_s)
    if not ranks:
        raise InputError("no cluster sizes to plan for: name at least one, such as 8")
    problem = _problem(what, cluster, goal, precision, **how)
    return changes.sizes(problem, ranks, solver, time_limit_s)


def advise(
    what: str | Workload | ModelProfile,
    cluster: Cluster,
    goal: Goal,
    *,
    precision: str | None = None,
    solver: str = "auto",
    time_limit_s: float | None = None,
    profiles_of: Mapping[str, ModelProfile] | None = None,
    **how: Unpack[PlanOptions],
) -> Advice:
    """What each way to train a model on a cluster is predicted to reach, the quickest first: one
    device or one host by itself, plain data parallelism, the exact plan, gradients as bfloat16,
    in eight bits or in part, local steps, twice the batch, half of the hosts. ``goal`` is as for an
    exact plan: what it allows beyond that is not taken over. ``time_limit_s`` is for each way, the
    rest as in ``plan``."""
    _check_search(solver, time_limit_s)
    problem = _problem(what, cluster, goal, precision, profiles_of, **how)
    return advice.advise(expand_pins(problem), solver, time_limit_s)


def front(
    what: str | Workload | ModelProfile,
    cluster: Cluster,
    goal: Goal,
    *,
    points: int = 8,
    precision: str | None = None,
    solver: str = "auto",
    time_limit_s: float | None = None,
    **how: Unpack[PlanOptions],
) -> Front:
    """The plans that no other beats in both step time and device-seconds, at most ``points`` of
    them. ``time_limit_s`` is for each search, the rest as in ``plan``."""
    _check_search(solver, time_limit_s)
    if points < 2:
        raise InputError(f"a front of {points} points has no two ends: ask for at least 2")
    problem = _problem(what, cluster, goal, precision, **how)
    return described_front(expand_pins(problem), points, solver, time_limit_s)


def explain(
    plan: Plan,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    *,
    best: int = 2,
    what_if: bool = True,
    time_limit_s: float = 10.0,
    progress: Step | None = None,
) -> Explanation:
    """Why a plan is as it is. The profile and the cluster that it was made from are found by their
    fingerprints where this machine made it; raises ``InputError`` where they are not. With
    ``what_if`` it is planned again with more of everything, ``time_limit_s`` for each question. Of
    a plan with local steps the units are those of a host by itself, and ``what_if`` asks for a
    longer round and faster links only."""
    check_time_limit(time_limit_s)
    if best < 1:
        raise InputError(f"{best} alternatives explain nothing: ask for at least 1")
    made, there = made_from(plan, profile, cluster)
    known = capability_of(plan, CAPABILITY)
    if plan.local_steps is not None:
        why.check_belongs(plan, made, there)
        return hosts_apart.explain(plan, made, there, capability=known, best=best, what_if=what_if)
    found = why.explain(plan, made, there, capability=known, best=best)
    if not what_if:
        return found
    problem = replace(problem_of(plan, made, there, CAPABILITY), progress=shown(progress))
    more = changes.gains_of(plan, problem, time_limit_s)
    return msgspec.structs.replace(found, gains=more)


def memory_timeline(
    plan: Plan, profile: ModelProfile | None = None, cluster: Cluster | None = None
) -> MemoryTimeline:
    """What ranks hold at each point of a step under a plan, by class; of a plan with local steps,
    without what they keep besides, which their limits leave room for. The profile and
    the cluster are found as for ``explain``."""
    made, there = made_from(plan, profile, cluster)
    plan, there = plan_of_host(plan, made, there)
    return timelines.memory_timeline(plan, made, there)


def trace(
    plan: Plan,
    path: str | Path,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
) -> str:
    """Writes the timeline of a step under a plan, as it is predicted, in Chrome's Trace Event
    Format: a process for each rank. Returns a sentence that says where. The profile and the cluster
    are found as for ``explain``."""
    return _write_trace(plan, path, *made_from(plan, profile, cluster))


def _write_trace(
    plan: Plan,
    path: str | Path,
    profile: ModelProfile | None,
    cluster: Cluster | None,
    recorded: Sequence[RecordedSteps] = (),
) -> str:
    predicted, missing = None, ""
    if profile is not None and cluster is not None:
        predicted = traces.predicted_step(plan, profile, cluster)
    else:
        missing = ", without what is predicted: this machine has not made the plan"
    write_whole(path, traces.step_trace(plan, predicted, recorded))
    return f"trace written to {path}{missing}; https://ui.perfetto.dev opens it"


@contextmanager
def _run_trace(
    trace: str | Path | None, node_rank: int, say: Callable[[str], None]
) -> Iterator[Callable[[Plan, list[RecordedSteps]], None] | None]:
    """For a run, what is to be told of what the ranks of each attempt have recorded; None without a
    ``trace``. That file holds the latest attempt of which there is something to tell, under the
    plan of that."""
    if trace is None:
        yield None
        return
    from .executor.launch.timeline import LEAST_STEPS

    path, is_written = Path(trace), False
    if node_rank:
        path = path.with_stem(f"{path.stem}-{node_rank}")

    def recorded(plan: Plan, found: list[RecordedSteps]) -> None:
        nonlocal is_written
        if found:
            say(_write_trace(plan, path, *_known(plan), found))
            is_written = True

    try:
        yield recorded
    finally:
        if not is_written:
            say(f"no trace: fewer than {LEAST_STEPS} steps were made under the plan")


def _known(plan: Plan) -> tuple[ModelProfile | None, Cluster | None]:
    """What a plan was made from, where it is found by its fingerprint."""
    made = plan.provenance
    return cache.get(ModelProfile, made.profile), cache.get(Cluster, made.cluster)


def report(
    plan: Plan,
    path: str | Path,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    *,
    result: RunReport | None = None,
    what_if: bool = True,
    time_limit_s: float = 15.0,
    progress: Step | None = None,
) -> None:
    """Writes all that is known of a plan as one HTML page, which needs neither a network nor a
    script: decisions, step, memory, the map of ranks, the timeline, and what other links, limits
    and numbers of ranks would give (``what_if``, for which there are ``time_limit_s``).

    ``result`` is what ``launch`` has measured of this plan. The profile and the cluster are found
    as for ``explain``. Raises ``InputError``, also for the result of another plan.
    """
    from .cli.render.page import PageContents, page

    check_time_limit(time_limit_s)
    made, there = made_from(plan, profile, cluster)
    why.check_belongs(plan, made, there)
    if result is not None:
        check_is(result, RunReport)
        calibration.check_result_of(plan, result)
    curves = None
    if what_if:
        problem = problem_of(plan, made, there, CAPABILITY)
        told = shown(progress) or (lambda doing, share: None)
        curves = what_if_curves(plan, problem, time_limit_s, told)
    found = PageContents(
        plan, made, there, bottleneck(plan, made, there), memory_timeline(plan, made, there),
        traces.predicted_step(plan, made, there), changes.quicker_on_fewer(plan, made, there),
        curves, result,
    )  # fmt: skip
    write_whole(path, page(found).encode())


def multiplex(
    plans: Sequence[Plan],
    backgrounds: Sequence[ModelProfile] = (),
    *,
    profiles: Sequence[ModelProfile] = (),
    clusters: Sequence[Cluster] = (),
    assumptions: Assumptions | None = None,
    devices: int | None = None,
    horizon_s: float | None = None,
    trace: str | Path | None = None,
    plot: str | Path | None = None,
) -> ClusterReport:
    """Simulates ``plans`` side by side on ``devices`` for ``horizon_s``, with a training job of
    each of ``backgrounds`` on every device's share of what they leave idle, at its best batch.

    ``profiles`` and ``clusters`` are what the plans were made from, in their order; where none are
    given they are found as for ``explain``. ``trace`` and ``plot`` are files to write. Raises
    ``InputError``.
    """
    for what, found in (("profiles", profiles), ("clusters", clusters)):
        if found and len(found) != len(plans):
            raise InputError(
                f"{len(found)} {what} for {len(plans)} plans: name one for each plan, in their "
                "order, or none"
            )
    for plan in plans:
        check_is(plan, Plan)
        refuse_local_steps(plan, "simulated beside others")
    # repeat() has no end, so zip cannot be strict: the counts are checked above.
    jobs = [
        (plan, *made_from(plan, profile, cluster))
        for plan, profile, cluster in zip(
            plans, profiles or repeat(None), clusters or repeat(None), strict=False
        )
    ]
    run = simulate_plans(jobs, backgrounds, assumptions or Assumptions(), devices, horizon_s)
    if trace is not None:
        write_whole(trace, trace_of(run))
    # Loaded where a plot is asked for: it needs matplotlib, which is an extra.
    if plot is not None:
        from .cli.render.multiplexing import plot_cluster

        plot_cluster(run, Path(plot))
    return cluster_report(run)


def compare(first: Plan, second: Plan) -> Comparison:
    """What two plans decide differently, and what they predict."""
    check_is(first, Plan)
    check_is(second, Plan)
    return comparing.compare(first, second)


def calibrate(
    plan: Plan,
    report: RunReport,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
) -> Calibration:
    """What a run of ``plan`` contradicts of the profile and the cluster that it was made from, and
    both of them corrected, to plan with next. ``report`` is what ``launch`` returned. The profile
    and the cluster are found as for ``explain``. Raises ``InputError`` for the report of another
    plan, and for one that tells nothing."""
    check_is(plan, Plan)
    check_is(report, RunReport)
    refuse_local_steps(plan, "held against a run")
    return calibration.calibrate(plan, report, *made_from(plan, profile, cluster))


def is_rank_zero() -> bool:
    """Whether this process prints: the only one, or rank 0 of those that torchrun started."""
    # From the environment: the process group has not been started when this is first asked.
    return os.environ.get("RANK", "0") == "0"


def verify(
    plan: Plan,
    *,
    dtype: Literal["float64", "float32", "own"] = "float64",
    batch: int | None = None,
    timeout_s: float | None = None,
) -> Verification:
    """Whether training under ``plan`` equals that of one process, on the plan's own model.

    Starts the plan's ranks on this machine; see ``executor.launch.verify``. ``dtype`` is what
    parameters and inputs are made into: ``own`` leaves them as the plan's precision has them, while
    ``float64`` shows whether the mathematics are right, whatever rounds. ``batch`` in samples
    (default: the plan's, at most four for each rank). ``timeout_s`` ends it. Raises ``InputError``,
    also where all of that is predicted to take more memory than is free here.
    """
    from .executor.launch.processes import check_plan
    from .executor.launch.tasks import Task, run_here
    from .executor.launch.verify import Verification
    from .executor.launch.verify_room import check_room

    check_is(plan, Plan)
    check_plan(plan, plan.world_size)
    if plan.local_steps is not None:
        raise InputError(
            "the plan has local steps, so that hosts train apart, which one process does not: "
            "compare its loss with that of exact gradients (verify --steps 50, compare_losses), or "
            "verify a plan without"
        )
    # Steps under a lossy exchange are other steps, not wrong ones: no comparison could tell.
    lossy = [unit for unit in plan.units if unit.lossy]
    if lossy:
        raise InputError(
            f"unit {lossy[0].name!r} leaves part of its gradient for later steps "
            f"({lossy[0].exchange}), which one process does not: compare its loss with that of "
            "exact gradients (verify --steps 50, compare_losses), or verify a plan without"
        )
    if batch is not None and batch < 1:
        raise InputError(f"a batch of {batch} cannot be compared: give at least 1")
    check_room(plan, dtype, batch)
    task = Task(name="verify", dtype=dtype, batch=batch, timeout_s=timeout_s)
    return run_here(task, Verification, plan)


def compare_losses(
    plan: Plan, *, steps: int = 50, seeds: int = 3, timeout_s: float | None = None
) -> LossComparison:
    """The loss under a plan that rounds gradients, leaves parts of them for later steps or lets
    hosts train apart, beside that of the same training with exact gradients, on the plan's own
    model and data.

    Starts the plan's ranks on this machine, which train ``steps`` steps from each of ``seeds``
    weights both ways, with the goal's optimizer at ``launch``'s learning rate. That shows how these
    steps went, not where a training ends. Raises ``InputError``, and ``RunError`` where a loss is
    not finite.
    """
    from .executor.launch.losses import LossComparison
    from .executor.launch.processes import check_plan
    from .executor.launch.tasks import Task, run_here

    check_is(plan, Plan)
    check_plan(plan, plan.world_size)
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise InputError(f"{value} {name} compare nothing: give at least 1")
    if plan.local_steps is None and not any(u.lossy or u.rounded for u in plan.units):
        raise InputError(
            "the plan sends all gradients whole and exact, so there is no loss to compare: plan "
            "with --allow-lossy (allow_lossy=True), or verify it without --steps (mw.verify)"
        )
    task = Task(name="losses", steps=steps, seeds=seeds, timeout_s=timeout_s)
    return run_here(task, LossComparison, plan)


def launch(
    plan: Plan,
    script: Sequence[str] = (),
    *,
    steps: int = 30,
    ranks_here: int | Sequence[int] | None = None,
    nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    timeout_s: float | None = None,
    quiet: bool = False,
    hosts: Hosts | None = None,
    background: Background | str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    resume: bool = True,
    restarts: Restarts | int = 0,
    progress: bool = True,
    trace: str | Path | None = None,
    tensorboard: str | Path | None = None,
    at_end: Callable[[RunReport | None], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None,
) -> RunReport | None:
    """Runs ``plan`` and returns what was predicted beside what was measured.

    ``script`` with its arguments is run on every rank, where ``auto_parallelize`` picks the plan
    up; without one the plan's own workload is trained for ``steps``. ``ranks_here`` processes start
    on this machine, which is host ``node_rank`` of ``nodes``; the hosts meet at ``rendezvous``
    (HOST:PORT of host 0). Where hosts have different numbers of ranks, ``ranks_here`` are those of
    all. ``hosts`` are started from here instead, over ssh (``Hosts``), with ``ranks_here`` on each;
    what they print has their names in front. ``quiet`` sends what ranks print to stderr. Returns
    None on hosts other than 0, and where a script made too few optimizer steps under the plan to
    measure. Raises ``InputError`` for a plan that cannot be run so, ``RunError`` for a run that
    failed; no process is left behind.

    ``background`` is a job for what the run leaves idle on this host: a command, a plan's file, or
    ``Background`` with settings. ``at_end`` is told the result when the run is over, the return may
    be later: when the background job is. ``say`` is told what that has had and cost.

    ``checkpoint`` is a folder that all hosts share, into which the training is saved after
    ``checkpoint_every`` steps each and at its end (a script keeps them itself, by ``mw.checkpoint``
    without a folder). Where it has some, the run goes on from the latest that is whole; without
    ``resume`` such a folder is refused. A run that loses a rank or a host is started again so many
    times as ``restarts`` says, from the latest checkpoint; ``Restarts`` has also on how few of
    ``hosts`` it may go on, under another plan. Where some rank has less memory free than the plan
    needs, it is made again within that before anything has run (not with ``nodes``, whose launchers
    would each make their own).

    ``progress`` is shown by rank 0 while it trains, on stderr. ``trace`` is a file for the
    timelines of a few steps, as they are predicted and as ranks have recorded them (see ``trace``);
    each of several hosts that were not started from here writes that of its own ranks, host n with
    n behind the file's name. ``tensorboard`` is a folder into which rank 0 writes scalars of each
    step for TensorBoard, which must be installed.
    """
    from .executor.launch.background import Background
    from .executor.launch.hosts.elastic import launch_elastic
    from .executor.launch.hosts.protocol import HostWork
    from .executor.launch.hosts.settings import counts_of
    from .executor.launch.launch import keeping_for, launch, ranks_for, ranks_of_hosts
    from .executor.launch.restarts import Restarts
    from .executor.launch.scalars import TENSORBOARD_VARIABLE
    from .executor.launch.training_progress import PROGRESS_VARIABLE

    check_is(plan, Plan)
    again = Restarts(restarts) if isinstance(restarts, int) else restarts
    again.check(checkpoint, 0 if hosts is None else len(hosts.names), nodes)
    background_job = (
        Background(background, limit=plan.goal.background_limit)
        if isinstance(background, str)
        else background
    )

    if hosts is not None:
        if tensorboard is not None:
            # Named from the working folder there.
            hosts = hosts.telling({TENSORBOARD_VARIABLE: str(Path(hosts.where) / tensorboard)})
        if (nodes, node_rank, rendezvous) != (1, 0, None):
            raise InputError(
                "hosts say themselves how many they are and where they meet: leave out nodes, "
                "node_rank and rendezvous (Hosts has one)"
            )
        counts = ranks_of_hosts(plan, ranks_here or counts_of(hosts), len(hosts.names))
        work = HostWork(
            plan=plan, script=tuple(script), steps=steps, per_host=counts, timeout_s=timeout_s,
            quiet=quiet, background=background_job,
            checkpoint=None if checkpoint is None else str(checkpoint),
            checkpoint_every=checkpoint_every, resume=resume, progress=progress,
            trace=trace is not None,
        )  # fmt: skip
        with _run_trace(trace, node_rank, say) as recorded:
            return launch_elastic(work, hosts, again, at_end, say, recorded)
    # Wrong counts and hosts are refused before a process is started.
    ranks = ranks_for(plan, ranks_here, nodes, node_rank, rendezvous, timeout_s, quiet, tensorboard)
    ranks = ranks.telling({PROGRESS_VARIABLE: "1" if progress else ""})
    keeping = keeping_for(checkpoint, checkpoint_every, resume=resume)
    with _run_trace(trace, node_rank, say) as recorded:
        return launch(
            plan, script, steps, ranks, background_job, keeping, at_end, say, again, recorded
        )


def auto_parallelize(
    model: nn.Module | Workload,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example_inputs: Any = None,
    global_batch_size: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    plan: Plan | str | Path | None = None,
    memory_limit_bytes: int | None = None,
    micro_batches: Sequence[int] = (1,),
    batch_statistics: BatchStatistics = "local",
    schedule: Schedules = "auto",
    lossy: bool | Lossy = False,
    min_fidelity: float | None = None,
    allow_local_steps: bool = False,
    inner_steps: int | None = None,
    precision: str | None = None,
    solver: str = "auto",
    time_limit_s: float | None = None,
    timeout_s: float | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None, Plan]:
    """Plans how to train ``model`` on the ranks there are, and makes it so; collective.

    Starts the process group from torchrun's environment if there is none; without torchrun this
    process is the only rank. ``plan`` is applied as it is, and rank 0 warns of what is asked for
    beside it and it was not made for; the file that the launcher names in ``MESHWRIGHT_PLAN`` goes
    before another one for the same model. Else rank 0 profiles the model, all ranks measure their
    links, and rank 0 plans for all; what was measured is kept on disk and found again by its
    fingerprint. Where some rank has less memory free than that plan needs, rank 0 plans again
    within what it has.

    ``example_inputs``: a tensor, a tuple of arguments, a mapping of keyword arguments or a
    ``Batch``, a few samples of what a rank will feed. Not needed for a ``Workload`` or a model with
    ``dummy_inputs``. ``global_batch_size`` in samples (default: the example's on each rank).
    ``loss(output, target)`` is measured with the model where given. ``schedule`` says how gradients
    travel: ``barrier``, ``priority``, or ``auto`` for what is predicted quicker. ``time_limit_s``
    bounds the search, ``timeout_s`` every later wait for another rank. ``lossy`` allows gradients
    to be rounded to bfloat16 to travel where communication would be waited for, and with
    ``min_fidelity`` also part of them to wait for later steps, as long as that share (0.9, say) of
    their energy is sent at once, as measured. ``Lossy`` settings in place of True say how, for a
    ready ``plan`` too. ``allow_local_steps`` lets hosts train apart and average what they have
    learnt after ``inner_steps`` (default: the fewest that hide the links), where no plan that
    exchanges gradients in every step is as quick. ``precision`` is how the model computes, as for
    ``profile``; the model's forward runs so from then on. Without it the autocast around this call
    is read, if there is one. The other arguments are ``Goal``'s; the optimizer's kind is read off
    ``optimizer``.

    Returns the same model object, the same optimizer object and the plan. Raises ``InputError`` or
    ``InfeasibleError``, the same on every rank.
    """
    import torch.distributed as dist

    from .executor.apply import apply
    from .executor.arguments import check_arguments, tell_of_idle_ranks, tell_of_ready_plan
    from .executor.comm.agreement import together
    from .executor.comm.watchdog import time_limit
    from .executor.gradients.feedback import Lossy
    from .executor.launch.attribution import check_mean
    from .executor.launch.report import given_plan, record_run
    from .executor.launch.start import start_process_group
    from .executor.launch.timeline import record_timeline
    from .executor.launch.training_progress import progress, progress_asked
    from .executor.optimizer.kinds import optimizer_name, planned_for, ready
    from .executor.optimizer.lazy import releases_not
    from .models.precision import check_conversion, set_precision, surrounding_precision
    from .models.target import try_out, workload_of
    from .models.workload import Workload

    limit = time_limit(timeout_s)
    check_schedule(schedule)
    check_solver(solver)
    check_arguments(
        optimizer, plan=plan, global_batch_size=global_batch_size,
        memory_limit_bytes=memory_limit_bytes, micro_batches=micro_batches,
        min_fidelity=min_fidelity, inner_steps=inner_steps, time_limit_s=time_limit_s, lossy=lossy,
    )  # fmt: skip
    wanted = check_precision(precision)
    device = start_process_group(limit)
    module = model.model if isinstance(model, Workload) else model
    # What may fail on one rank is done together: an error on one is raised on all of them, and no
    # rank waits in a collective for one that has gone.
    together(lambda: ready(module, optimizer, device))
    chosen = together(lambda: given_plan(plan))
    planned: Callable[[Goal], Plan] | None = None
    known = loss is not None and example_inputs is not None
    if chosen is None or known or isinstance(model, Workload):
        workload, samples = together(lambda: workload_of(model, example_inputs, loss))
        together(lambda: check_mean(workload))
    if chosen is None:
        own = wanted or workload.precision or surrounding_precision(device)
        workload = replace(workload, precision=own)
        if own is not None:  # before anything is measured, which may take a minute
            together(lambda: check_conversion(module, own, optimizer))
        together(lambda: try_out(workload, device))
        ranks = dist.get_world_size()
        batch = samples * ranks if global_batch_size is None else global_batch_size
        if dist.get_rank() == 0:
            tell_of_idle_ranks(batch, ranks)
        goal = together(
            lambda: make_goal(
                batch,
                memory_limit_bytes=memory_limit_bytes,
                optimizer=optimizer_name(optimizer),
                micro_batches=micro_batches,
                batch_statistics=batch_statistics,
                allow_lossy=lossy is not False,
                min_fidelity=min_fidelity,
                allow_local_steps=allow_local_steps,
                inner_steps=inner_steps,
            )
        )
        # Early release steps parameter by parameter, which not every optimizer bears.
        forbidden = (EARLY_RELEASE,) if releases_not(optimizer) else ()
        planned = partial(
            _plan_on_ranks, workload, device=device, solver=solver, time_limit_s=time_limit_s,
            runs=planned_for(optimizer, CAPABILITY), schedule=schedule, forbidden=forbidden,
        )  # fmt: skip
        chosen = planned(goal)
    elif wanted not in (None, chosen.precision):
        raise InputError(
            f"the plan is for precision {chosen.precision or 'as built'}, not {wanted}: plan for "
            "that precision, or leave precision out"
        )
    elif batch_statistics == "global" != chosen.goal.batch_statistics:
        raise InputError(
            "the plan is for batch statistics of each rank's share (local), not global: plan with "
            "--batch-statistics global (Goal.batch_statistics), or leave batch_statistics out"
        )
    elif dist.get_rank() == 0:
        tell_of_ready_plan(
            chosen, global_batch_size=global_batch_size, memory_limit_bytes=memory_limit_bytes,
            micro_batches=micro_batches, min_fidelity=min_fidelity, inner_steps=inner_steps,
        )  # fmt: skip
    computed = chosen.precision
    if computed is not None:
        together(lambda: set_precision(module, computed, optimizer))
    # True allows lossy exchange in planning; how it is done is left to the defaults.
    settings = lossy if isinstance(lossy, Lossy) else None
    applied = partial(apply, module, optimizer, timeout_s=timeout_s, lossy=settings)
    chosen = _made_to_fit(chosen, planned, applied)
    # Each does something only where the launcher asked for it.
    record_run(module, optimizer)
    record_timeline(module, optimizer)
    if progress_asked():
        progress(module, optimizer)
    return module, optimizer, chosen


def _made_to_fit(
    plan: Plan, planned: Callable[[Goal], Plan] | None, applied: Callable[[Plan], object]
) -> Plan:
    """The plan that was ``applied``: where some rank has less memory free than ``plan`` needs,
    another one that is ``planned`` within that, unless the user has given it. Collective."""
    import torch.distributed as dist

    from .executor.launch.replan import planned_within

    try:
        applied(plan)
        return plan
    except NoRoomError as error:  # the same on all ranks, and nothing is changed
        if planned is None:
            raise
        found = planned(plan.goal.within(error.limit_bytes))
        if dist.get_rank() == 0:
            again = planned_within(error.limit_bytes, plan, found)
            # To the line of the script that calls auto_parallelize.
            warnings.warn(f"{error.sentence}: {again}", stacklevel=3)
    applied(found)
    return found


def _plan_on_ranks(
    workload: Workload,
    goal: Goal,
    device: torch.device,
    solver: str,
    time_limit_s: float | None,
    *,
    runs: Capability,
    **how: Any,
) -> Plan:
    """What rank 0 plans from what all ranks measure, within what ``runs``; collective."""
    import torch

    from .executor.comm.agreement import rank_zero_decides
    from .profiler.sessions import batches_for, cluster_of_ranks, profile_on_ranks

    # Measuring draws random batches. The user's own draws go on as if nothing had been measured.
    with torch.random.fork_rng():
        profile = profile_on_ranks(
            workload, batches_for(goal, torch.distributed.get_world_size()), device
        )
        problem = problem_for(profile, cluster_of_ranks(device), goal, runs, **how)
        return rank_zero_decides(lambda: _solved(problem, solver, time_limit_s))
