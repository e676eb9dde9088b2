"""``verify``, ``launch``, ``export`` and ``demo``: a plan held to one process, a plan at work, what
came of it, all of it."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..executor.launch.background import AtEnd, Background
from ..executor.launch.progress import console
from ..executor.launch.restarts import DEFAULT_RESTARTS, Restarts
from ..executor.notes import note
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError, RunError, StoppedError
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from ..planner.schema.report import RunReport
from ..planner.schema.text import option, size
from . import options
from .output import check_out, deliver
from .render.comparisons import (
    losses_sentence,
    losses_table,
    measured_table,
    verification_table,
)
from .values import given_options, whole


def verify(
    context: typer.Context,
    plan_file: options.PlanFile,
    dtype: Annotated[str, typer.Option(help="float64, float32, or own: the plan's.")] = "float64",
    batch: Annotated[
        int | None, whole("Samples of a step (default: up to 4 for each rank).")
    ] = None,
    steps: Annotated[
        int | None,
        whole("Compare the loss of so many steps with that of exact gradients, for a lossy plan."),
    ] = None,
    seeds: Annotated[int, whole("With --steps: from so many weights.")] = 3,
    timeout: options.Timeout = None,
    out_: Annotated[Path | None, options.out("result")] = None,
    json: options.Json = False,
) -> None:
    """Show that training under a plan equals training in one process, on the plan's own model."""
    from .. import api

    check_out(out_)
    given = given_options(context)
    for name in sorted(given & ({"seeds"} if steps is None else {"dtype", "batch"})):
        where = "without" if steps is None else "with"
        raise InputError(f"{option(name)} says nothing {where} --steps: leave one of them out")
    made = load(Plan, plan_file, "PLAN")
    if steps is not None:
        from ..executor.launch.losses import steps_to_begin  # which imports torch

        losses = api.compare_losses(made, steps=steps, seeds=seeds, timeout_s=timeout)
        if steps <= (begun := steps_to_begin(made)):
            note(
                f"what this plan leaves for later steps is in full force after {begun} steps, and "
                f"{steps} were compared: ask for more, such as --steps {2 * begun}"
            )
        deliver(losses, out_, json, losses_table(losses), losses_sentence(losses))
        return
    found = api.verify(made, dtype=_dtype(dtype), batch=batch, timeout_s=timeout)
    # On stderr: with --json stdout is the result's.
    for remark in found.notes:
        note(remark)
    verdict = "PASS" if found.passed else "FAIL"
    if found.passed and found.draws:
        verdict = f"PASS: equal within its own spread (random: {found.random})"
    deliver(found, out_, json, verification_table(found), verdict)
    if not found.passed:
        why = f": {found.cause}" if found.cause else ""
        raise RunError(f"the plan's training differs from one process's in {found.dtype}{why}")


def _dtype(name: str) -> Literal["float64", "float32", "own"]:
    names: dict[str, Literal["float64", "float32", "own"]]
    names = {"float64": "float64", "float32": "float32", "own": "own"}
    if name not in names:
        raise InputError(f"--dtype {name!r} is not compared: choose float64, float32 or own")
    return names[name]


# The options of launch that take no value.
_FLAGS = (
    "--json", "--dry-run", "--submit", "--resume", "--no-resume", "--progress", "--no-progress",
    "--help", "-h",
)  # fmt: skip


def separate_script(arguments: Sequence[str]) -> list[str]:
    """``launch``'s arguments with ``--`` before SCRIPT: what follows it are the script's options,
    what precedes it are ours, on whichever side of PLAN they stand."""
    if not arguments or arguments[0] != "launch":
        return list(arguments)
    positional, at = 0, 1
    while at < len(arguments) and arguments[at] != "--":
        word = arguments[at]
        ours = word.startswith("-") and word != "-m"
        if not ours:
            positional += 1
            if positional == 2:
                return [*arguments[:at], "--", *arguments[at:]]
        # Which options take a value is not asked of typer, which has not parsed them yet: all of
        # launch's do but these.
        takes_value = ours and "=" not in word and word not in _FLAGS
        at += 2 if takes_value else 1
    return list(arguments)


def launch(
    context: typer.Context,
    plan_file: options.PlanFile,
    script: options.Script = None,
    steps: options.Steps = 30,
    nproc: options.RanksHere = None,
    nnodes: options.Hosts = 1,
    node_rank: options.HostNumber = 0,
    rendezvous: options.Rendezvous = None,
    timeout: options.Timeout = None,
    report: options.Report = None,
    background: options.BackgroundJob = None,
    background_limit: options.LaunchBackgroundLimit = None,
    background_memory: options.BackgroundMemory = None,
    background_gpu_memory: options.BackgroundGpuMemory = None,
    background_at_end: options.BackgroundAtEnd = None,
    background_grace: options.BackgroundGrace = 30.0,
    background_log: options.BackgroundLog = Path("background.log"),
    hosts: options.HostNames = None,
    hostfile: options.HostFile = None,
    ssh_config: options.SshConfig = None,
    ssh_option: options.SshOptions = None,
    remote_python: options.RemotePython = "",
    folder: options.Folder = "",
    env: options.Variables = None,
    dry_run: options.DryRun = False,
    slurm: options.SlurmScript = None,
    slurm_option: options.SlurmOptions = None,
    submit: options.Submit = False,
    kubernetes: options.Kubernetes = None,
    image: options.Image = None,
    gpus: options.GpusPerHost = None,
    job_name: options.JobName = "meshwright",
    checkpoint: options.CheckpointFolder = None,
    checkpoint_every: options.CheckpointEvery = 50,
    resume: options.Resume = True,
    max_restarts: options.MaxRestarts = None,
    min_nodes: options.MinNodes = None,
    profile: options.PlansProfile = None,
    cluster: options.PlansCluster = None,
    progress: options.ShowProgress = True,
    trace: options.RunTrace = None,
    tensorboard: options.Tensorboard = None,
    json: options.Json = False,
) -> None:
    """Run a plan, here or on several hosts, and end with what was predicted beside what was
    measured."""
    from .. import api
    from ..executor.launch.launch import spread_over_hosts
    from . import elsewhere

    # Before the training, which may take days.
    check_out(report)
    check_out(trace)
    made = load(Plan, plan_file, "PLAN")
    given = given_options(context)
    asked = elsewhere.Elsewhere(
        given=frozenset(given), hosts=hosts, hostfile=hostfile, slurm=slurm, kubernetes=kubernetes,
        ssh_config=ssh_config, ssh_options=tuple(ssh_option or ()), python=remote_python,
        folder=folder, variables=tuple(env or ()), rendezvous=rendezvous, dry_run=dry_run,
        slurm_options=tuple(slurm_option or ()), submit=submit, image=image, gpus=gpus,
        job_name=job_name, max_restarts=max_restarts or 0, resume=resume,
    )  # fmt: skip
    asked.check()
    _check_belongs(given, "background", "a background job: add --background COMMAND", background)
    _check_belongs(given, "checkpoint", "checkpoints: add --checkpoint FOLDER", checkpoint)
    _check_belongs(given, "resume", "checkpoints: add --checkpoint FOLDER", checkpoint)
    if script and "steps" in given:
        raise InputError(
            f"--steps {steps} concerns a plan's own workload, and a script makes as many as it "
            "likes: leave it out, or give it to the script behind its name"
        )
    note(None if script else _no_whole_round(made, steps))
    found_hosts = asked.found_hosts()
    hosts_named = len(found_hosts.names) if found_hosts else nnodes
    if node_rank == 0:
        note(spread_over_hosts(made, _counts(made, nproc, hosts_named)))
    restarts = _restarts(max_restarts, min_nodes, profile, cluster)
    restarts.check(
        checkpoint, len(found_hosts.names) if found_hosts else 0, nnodes if not asked.way else 1
    )
    if dry_run or slurm is not None or kubernetes is not None:
        for text in asked.notes(made, context.params):
            note(text)
        words = elsewhere.own_words(context.params, given)
        asked.write(made, plan_file, words, script or (), elsewhere.Nodes(nnodes, nproc))
        return
    if found_hosts is None:
        _note_differences(made, nproc, nnodes, node_rank)
    background_job = None
    if background is not None:
        background_job = Background(
            run=background,
            limit=made.goal.background_limit if background_limit is None else background_limit,
            memory_bytes=background_memory,
            gpu_memory_bytes=background_gpu_memory,
            at_end=_at_end(background_at_end),
            grace_s=background_grace,
            log=str(background_log),
        )

    unwritten: list[InputError] = []

    def at_end(found: RunReport | None) -> None:
        if found is not None:
            try:
                _show(found, made, report, json=json)
            except InputError as error:  # of this machine's folder: no host has failed
                unwritten.append(error)
        elif node_rank == 0:
            note(f"nothing was measured: {_too_few(bool(script))}")

    # The report is shown when the run is over. This may return later, when the background is done.
    with _telling_how_to_go_on(checkpoint, here=found_hosts is None, resume=resume):
        api.launch(
            made,
            script or (),
            steps=steps,
            ranks_here=nproc,
            nodes=nnodes,
            node_rank=node_rank,
            rendezvous=None if found_hosts else rendezvous,
            timeout_s=timeout,
            # With --json stdout is the report's alone.
            quiet=json,
            hosts=found_hosts,
            background=background_job,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            resume=resume,
            restarts=restarts,
            progress=progress,
            trace=trace,
            tensorboard=tensorboard,
            at_end=at_end,
            say=note,
        )
    if unwritten:
        raise unwritten[0]


def _no_whole_round(plan: Plan, steps: int) -> str | None:
    """That so many steps are not the rounds that were predicted, where hosts train apart."""
    local = plan.local_steps
    if local is None or steps >= local.inner_steps:
        return None
    return (
        f"hosts average what they have learnt once in {local.inner_steps} steps, and --steps "
        f"{steps} is no whole round, for whose mean the step is predicted: ask for more, such as "
        f"--steps {2 * local.inner_steps}"
    )


def _restarts(
    most: int | None, min_nodes: int | None, profile: Path | None, cluster: Path | None
) -> Restarts:
    """How the run is started again."""
    if min_nodes is None and (profile or cluster):
        raise InputError(
            "--profile and --cluster are for planning again with fewer hosts: add --min-nodes, or "
            "leave them out"
        )
    return Restarts(
        DEFAULT_RESTARTS if most is None and min_nodes is not None else most or 0,
        min_nodes,
        load(ModelProfile, profile, "--profile") if profile else None,
        load(Cluster, cluster, "--cluster") if cluster else None,
    )


@contextlib.contextmanager
def _telling_how_to_go_on(folder: Path | None, *, here: bool, resume: bool) -> Iterator[None]:
    """Where the block is stopped (Ctrl-C) and checkpoints are kept in ``folder``, says which of
    them there is to go on from; it is ``here`` unless other hosts have it."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is None:
            raise
        raise StoppedError(_how_to_go_on(folder, here=here, resume=resume)) from None


def _how_to_go_on(folder: Path, *, here: bool, resume: bool) -> str:
    from ..executor.checkpoint.latest import latest_whole

    command = "the same command" if resume else "the same command without --no-resume"
    if not here:
        return f"stopped; {command} goes on from the latest whole checkpoint in {folder}"
    # By their sizes: who has pressed Ctrl-C does not wait for many gigabytes to be read.
    found = latest_whole(folder, by_size=True)
    if found.index is not None:
        return f"stopped; {command} {found.sentence}"
    return f"stopped; there is no whole checkpoint in {folder} to go on from"


def _too_few(is_script: bool) -> str:
    if is_script:
        return "the script made fewer than two optimizer steps under the plan"
    return "fewer than 3 of --steps were left, and the first two only warm up"


def _check_belongs(given: set[str], start: str, what: str, asked: object) -> None:
    """Raises ``InputError`` for an option of that ``start`` where nothing is ``asked`` of it."""
    for name in sorted(given):
        if asked is None and name.startswith(start):
            raise InputError(f"{option(name)} concerns {what}")


def _note_differences(plan: Plan, nproc: Sequence[int] | None, nnodes: int, node_rank: int) -> None:
    """Says what this host has that the plan was not made for."""
    from ..executor.launch.launch import differences

    counts = _counts(plan, nproc, nnodes)
    # Another number of ranks is refused by the launch itself.
    if sum(counts) == plan.world_size and node_rank < nnodes:
        for text in differences(plan, counts[node_rank], sum(counts[:node_rank])):
            note(text)


def _counts(plan: Plan, nproc: Sequence[int] | None, hosts: int) -> tuple[int, ...]:
    """The ranks of each host; none where that cannot be, which the launch says itself."""
    from ..executor.launch.launch import ranks_of_hosts

    try:
        return ranks_of_hosts(plan, nproc, hosts)
    except InputError:
        return ()


def _show(found: RunReport, plan: Plan, path: Path | None, *, json: bool) -> None:
    """What was measured."""
    deliver(found, path, json, measured_table(found))
    limit, taken = plan.goal.memory_limit_bytes, found.measured.peak_bytes
    if limit is not None and taken is not None and taken > limit:
        note(
            f"tensors took {size(taken)} and the plan was made for {size(limit)}: where that much "
            f"is not there, plan with a --memory-limit that is lower by {size(taken - limit)}"
        )


def _at_end(word: str | None) -> AtEnd | None:
    words: dict[str, AtEnd] = {"finish": "finish", "stop": "stop"}
    if word is not None and word not in words:
        raise InputError(f"--background-at-end {word!r} cannot be: choose finish or stop")
    return None if word is None else words[word]


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of checkpoints.")],
    out_: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="A .pt, .pth or .safetensors file, or a folder, to write the weights to.",
        ),
    ],
) -> None:
    """Write the weights of the latest whole checkpoint as one file that any tool reads."""
    from ..executor.checkpoint.weights import export as export_weights

    found = export_weights(folder, out_, say=note)
    console().print(f"the weights of {found} are written to {out_}")


def demo(
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder for the files it makes.")
    ] = None,
    json: options.Json = False,
) -> None:
    """All of it on this machine: measure, plan, verify, train, and compare with the prediction."""
    from .demonstration import demo as run_demo

    screen = console(error=json)
    found = run_demo(folder, say=screen.print)
    if json:
        deliver(found, None, json)
