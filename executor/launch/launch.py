"""Running a plan: its own workload or a user's script, here or on one of several hosts; and a plan
that would have fitted, after a run that lacked memory."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from ...planner.schema import cache
from ...planner.schema.cluster import Cluster
from ...planner.schema.errors import InputError, MemoryRunError, NoRoomError
from ...planner.schema.plan import Plan
from ...planner.schema.profile import ModelProfile
from ...planner.schema.record import load, save
from ...planner.schema.recorded import RecordedSteps
from ...planner.schema.report import RunReport
from ...planner.schema.text import seconds, size
from ...planner.solve.problem import Problem
from ...planner.solve.solver import solve
from ..background.job import Job, background_job
from ..capability import CAPABILITY
from ..checkpoint.checkpoint import EVERY_VARIABLE, FOLDER_VARIABLE
from ..checkpoint.folder import check_folder, refused_apart, steps_in
from ..comm.setups import device_name
from ..headroom import command, forecast, less_than
from .background import (
    Background,
    hardly_ran,
    has_ended,
    outlook,
    over_step_limit,
    sentence,
)
from .devices import gpus_here, on_gpus
from .processes import Ranks, check_plan, run_ranks
from .replan import Replanner, RoomForPlan
from .report import (
    PLAN_VARIABLE,
    REPORT_VARIABLE,
    RankFigures,
    background_figures,
    report_of_script,
)
from .restarts import Restarts, may_be_again, run_with_restarts
from .scalars import TENSORBOARD_VARIABLE, scalar_folder
from .start import cores
from .tasks import PLAN, CheckpointSettings, Task, run_task
from .timeline import TRACE_VARIABLE, recorded_in
from .worker import STDOUT_TO_STDERR

# Counts that are tried for a plan that takes less memory.
MICRO_BATCHES = (1, 2, 4, 8)


def launch(
    plan: Plan,
    script: Sequence[str],
    steps: int,
    ranks: Ranks,
    background: Background | None = None,
    keeping: CheckpointSettings | None = None,
    at_end: Callable[[RunReport | None], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None,
    restarts: Restarts | None = None,
    recorded: Callable[[Plan, list[RecordedSteps]], None] | None = None,
    replans: bool = True,
) -> RunReport | None:
    """See ``api.launch``. None where this host has no rank 0, or where too few steps were made
    under the plan to measure. ``say`` is told of the background job, of checkpoints and of
    restarts. Where steps are to be ``recorded``, the plan and those of the ranks here are handed
    over when these have ended, however that was, each time that they were started. A plan that
    needs more memory than is free is made again for that, unless that is left to who called
    (``replans``), or to nobody, as each of several launchers would make one of its own."""
    check_plan(plan, ranks.world_size)
    check_script(script)
    if keeping is not None and not script and plan.local_steps is not None:
        raise refused_apart("leave out --checkpoint (checkpoint)")
    again = restarts or Restarts()
    run = partial(
        _run, plan, script, steps, keeping=keeping, restarts=again, say=say, recorded=recorded,
        replans=replans and ranks.nodes == 1,
    )  # fmt: skip
    if background is None:
        report = run(ranks)
        at_end(report)
        return report
    # Each host has a background job of its own, beside the ranks that it starts.
    with background_job(background.settings()) as job, _stopped_with_run(job, say):
        say(outlook(plan, ranks.here))
        if (late := over_step_limit(plan, background.limit)) is not None:
            say(late)
        report = run(ranks.telling(job.environment))
        state = job.state()
        if report is not None:
            report = msgspec.structs.replace(
                report, background=background_figures(state, background.limit)
            )
        at_end(report)
        say(sentence(state, background.limit))
        say(hardly_ran(state, background.limit) or "")
        if background.finishes and not state.ended:
            say(f"the background job goes on, output in {background.log}; Ctrl-C ends it")
            say(has_ended(job.wait(), background.log))
    return report


def check_script(script: Sequence[str]) -> None:
    """Raises ``InputError`` for a script that is not on this host."""
    if script and script[0] == "-m":
        if len(script) < 2:
            raise InputError("-m names no module: write -m package.module")
    elif script and not Path(script[0]).is_file():
        raise InputError(f"there is no script {script[0]}: name a Python file, or -m and a module")


@contextlib.contextmanager
def _stopped_with_run(job: Job, say: Callable[[str], None]) -> Iterator[None]:
    """Where the block fails or is stopped (Ctrl-C), so is the background, and how it ended is
    said."""
    try:
        yield
    except BaseException:
        say(has_ended(job.stop(), job.settings.log))
        raise


def _run(
    plan: Plan,
    script: Sequence[str],
    steps: int,
    ranks: Ranks,
    *,
    keeping: CheckpointSettings | None,
    restarts: Restarts,
    say: Callable[[str], None],
    recorded: Callable[[Plan, list[RecordedSteps]], None] | None,
    replans: bool,
) -> RunReport | None:
    """Runs a plan that was checked, again where it has lost a rank, or another where it does not
    fit; what was measured."""

    room = RoomForPlan(plan, lambda: Replanner.for_plan(plan, restarts), say)

    def attempt(ranks: Ranks, keeping: CheckpointSettings | None) -> RunReport | None:
        while True:
            try:
                return planned(room.plan, ranks, keeping)
            except NoRoomError as error:
                if not replans:
                    raise
                room.plan_after(error)

    def planned(plan: Plan, ranks: Ranks, keeping: CheckpointSettings | None) -> RunReport | None:
        if recorded is None:
            return ranks_run(plan, ranks, keeping)
        # A folder for each attempt, so that one that was too short to record anything does not show
        # what the attempt before it recorded.
        with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
            try:
                return ranks_run(plan, ranks.telling({TRACE_VARIABLE: name}), keeping)
            finally:
                recorded(plan, recorded_in(Path(name)))

    def ranks_run(plan: Plan, ranks: Ranks, keeping: CheckpointSettings | None) -> RunReport | None:
        if not script:
            task = Task(name="train", steps=steps, keeping=keeping)
            return run_task(task, ranks, RunReport, plan)
        if keeping is not None:
            ranks = ranks.telling(
                {FOLDER_VARIABLE: keeping.folder, EVERY_VARIABLE: str(keeping.every)}
            )
        return _launch_script(plan, script, ranks)

    try:
        report = run_with_restarts(
            attempt, ranks, keeping, restarts, say, None if script else steps
        )
    except MemoryRunError as error:
        raise with_a_plan_that_fits(error, room.plan) from None
    if script and keeping is not None and not steps_in(Path(keeping.folder)):
        say(
            f"no checkpoint is in {keeping.folder}: the script has to keep them, by "
            "mw.checkpoint(None, model, optimizer) and its step() after each step"
        )
    return report


def keeping_for(
    folder: str | Path | None, every: int, *, resume: bool, restarted: bool = False
) -> CheckpointSettings | None:
    """How a run keeps checkpoints. Raises ``InputError`` for a folder that cannot be, and without
    ``resume`` for one that has some."""
    if folder is None:
        return None
    if every < 1:
        raise InputError(f"a checkpoint every {every} steps cannot be: give at least 1")
    path = Path(folder).absolute()
    check_folder(path)
    steps = steps_in(path)
    if steps and not resume:
        raise InputError(
            f"{folder} has checkpoints up to step {steps[0]}: name a new folder to begin anew, or "
            "go on from them (without --no-resume, with resume=True)"
        )
    again = restarted or may_be_again()
    return CheckpointSettings(folder=str(path), every=every, restarted=again)


def _launch_script(plan: Plan, script: Sequence[str], ranks: Ranks) -> RunReport | None:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        save(plan, folder / PLAN)
        told = {PLAN_VARIABLE: str(folder / PLAN), REPORT_VARIABLE: name}
        run_ranks(script, ranks.telling(told), folder)
        found = [load(RankFigures, path) for path in sorted(folder.glob("figures-*.json"))]
    return report_of_script(plan, found) if found and ranks.node_rank == 0 else None


def differences(plan: Plan, ranks: int, first: int = 0) -> list[str]:
    """What a run of ``ranks`` of a plan's ranks on this host, from the ``first`` on, has of other
    devices than those that the plan was made for, each in a sentence; told before anything is
    started."""
    found = []
    gpus, on_cpu = gpus_here(), not on_gpus(ranks)
    if on_cpu and gpus:
        found.append(
            f"{_ranks(ranks)} of the plan start on this host, which has {gpus} "
            f"GPU{'s' * (gpus > 1)}: they run on "
            "its CPU; spread them over hosts with --nnodes, or plan for what is here"
        )
    elif on_cpu and ranks > cores():
        found.append(
            f"{_ranks(ranks)} of the plan start on this host, which has {cores()} cores: they take "
            "turns, and a step takes longer than predicted; spread them over hosts with --nnodes, "
            "or plan for what is here"
        )
    made_for = cache.get(Cluster, plan.provenance.cluster)
    here = device_name(torch.device("cpu") if on_cpu else torch.device("cuda", 0))
    # Of unequal devices this host has its own.
    devices = made_for.devices[first : first + ranks] if made_for else ()
    names = sorted({device.name for device in devices}) or [here]
    if names != [here]:
        found.append(
            f"the plan was made for {' and '.join(names)} and this host has {here}: what is "
            "measured here says little of the prediction"
        )
    nodes = made_for.node_of_rank[first : first + ranks] if made_for else ()
    if made_for and len(set(nodes)) > 1:
        hosts = " and ".join(made_for.nodes[i].name for i in dict.fromkeys(nodes))
        found.append(
            f"the plan was made for {hosts}, and their ranks all start on this host: the links "
            "between them are not used, and steps take less than predicted; spread the ranks over "
            "hosts with --nnodes or --hosts"
        )
    return found


def spread_over_hosts(plan: Plan, counts: Sequence[int]) -> str | None:
    """That ranks which the plan has on one node start on several of the hosts, which get so many
    each."""
    made_for = cache.get(Cluster, plan.provenance.cluster)
    if made_for is None or made_for.world_size != sum(counts):
        return None
    host_of = [host for host, count in enumerate(counts) for _ in range(count)]
    places = list(zip(made_for.node_of_rank, host_of, strict=True))
    for number, node in enumerate(made_for.nodes):
        hosts = len({host for of, host in places if of == number})
        if hosts > 1:
            return (
                f"the plan was made for {node.name} with {_ranks(len(node.devices))}, and these "
                f"start on {hosts} hosts: what was to stay inside one goes over the network, and "
                "steps take longer than predicted; start the hosts that it was made for, or plan "
                "for these"
            )
    return None


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def ranks_for(
    plan: Plan,
    ranks_here: int | Sequence[int] | None,
    nodes: int,
    node_rank: int,
    rendezvous: str | None,
    timeout_s: float | None,
    quiet: bool,
    tensorboard: str | Path | None = None,
) -> Ranks:
    """The ranks of this host: the plan's, divided over the hosts, where no number is given."""
    counts = ranks_of_hosts(plan, ranks_here, nodes)
    environment = {STDOUT_TO_STDERR: "1"} if quiet else {}
    if tensorboard is not None:
        environment[TENSORBOARD_VARIABLE] = scalar_folder(tensorboard)
    here = counts[node_rank] if 0 <= node_rank < nodes else counts[0]  # refused by Ranks itself
    return Ranks(here, nodes, node_rank, rendezvous, timeout_s, environment, counts)


def ranks_of_hosts(plan: Plan, asked: int | Sequence[int] | None, nodes: int) -> tuple[int, ...]:
    """How many ranks start on each of some hosts: the plan's, divided over them, or those that are
    asked for, one number for each host or one for all."""
    if nodes > plan.world_size:
        raise InputError(
            f"the plan has {plan.world_size} ranks and {nodes} hosts were named: use "
            f"{plan.world_size} of them at most"
        )
    if asked is None:
        each, left = divmod(plan.world_size, max(nodes, 1))
        if left:
            able = [each + (n < left) for n in range(nodes)]
            raise InputError(
                f"the plan's {plan.world_size} ranks do not divide over {nodes} hosts: use as many "
                f"hosts as divide them, or say how many each has (--nproc "
                f"{','.join(map(str, able))}, ranks_here={able})"
            )
        return (each,) * max(nodes, 1)
    counts = (asked,) if isinstance(asked, int) else tuple(asked)
    if len(counts) == 1:
        return counts * max(nodes, 1)
    if len(counts) != nodes:
        raise InputError(
            f"--nproc (ranks_here) has numbers for {len(counts)} hosts and there are {nodes}: give "
            "one for each, or one for all"
        )
    return counts


def with_a_plan_that_fits(error: MemoryRunError, plan: Plan) -> MemoryRunError:
    """The error with what ``plan`` was predicted to hold, unless it says so already, and with a
    plan for the same batch that needs less, where one is found."""
    # The limit is a tenth less than what was predicted, as what was predicted did not fit.
    limit = min(error.limit_bytes or less_than(plan), less_than(plan))
    details = error.details or forecast(plan)
    told = MemoryRunError(error.sentence, (*details, _remedy(plan, limit)), limit)
    return told.standing_for(error)


def _remedy(plan: Plan, limit_bytes: int) -> str:
    profile = cache.get(ModelProfile, plan.provenance.profile)
    cluster = cache.get(Cluster, plan.provenance.cluster)
    most = plan.goal.batch // plan.world_size
    counts = tuple(n for n in MICRO_BATCHES if n <= max(most, 1))
    if profile is None or cluster is None:
        return f"a plan that needs less: {command(plan, limit_bytes, counts)}"
    allowed = tuple(sorted({*counts, *plan.goal.micro_batches}))
    goal = msgspec.structs.replace(
        plan.goal, memory_limit_bytes=limit_bytes, micro_batches=allowed, slice_bytes=()
    )
    problem = Problem(profile, cluster, goal, CAPABILITY, executor=CAPABILITY, any_schedule=True)
    found = solve(problem, "heuristic")
    if found.plan is None:
        why = f": {found.infeasible.sentence}" if found.infeasible is not None else ""
        return f"with a tenth less memory{why}"
    needs = size(max(found.plan.prediction.peak_bytes, default=0))
    return (
        f"a plan that fits, predicted to take {needs} and {seconds(found.plan.prediction.step_s)} "
        f"a step: {command(plan, limit_bytes, counts)}"
    )
