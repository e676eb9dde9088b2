"""``verify``, ``launch`` and ``demo``: a plan at work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..background import AtEnd, Background
from ..comparisons import measured_table, verification_table
from ..goals import parse_bytes
from ..planner.errors import InputError, RunError
from ..planner.noun import load
from ..planner.plan import Plan
from ..screen import console, size
from .output import Json, check_out, deliver, note, out

if TYPE_CHECKING:  # it loads torch
    from ..executor.report import RunReport

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan's file.")]
Timeout = Annotated[
    float | None, typer.Option(help="End the run after so many seconds, whatever it does.")
]


def add_to(app: typer.Typer) -> None:
    """Registers the verbs."""
    app.command("verify")(verify)
    app.command("launch")(launch)
    app.command("demo")(demo)


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
        takes_value = ours and "=" not in word and word not in ("--json", "--help", "-h")
        at += 2 if takes_value else 1
    return list(arguments)


def _positive(what: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"{what} {value:g} cannot be: give more than 0")


def verify(
    plan_file: PlanFile,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    batch: Annotated[
        int | None, typer.Option(help="Samples of a step (default: up to 4 for each rank).")
    ] = None,
    timeout: Timeout = None,
    out_: Annotated[Path | None, out("result")] = None,
    json: Json = False,
) -> None:
    """Show that training under a plan equals training in one process, on the plan's own model."""
    from .. import api

    check_out(out_)
    _positive("--timeout", timeout)
    made = load(Plan, plan_file, "PLAN")
    found = api.verify(made, dtype=_dtype(dtype), batch=batch, timeout_s=timeout)
    for remark in found.notes:
        note(remark)
    verdict = "PASS" if found.passed else "FAIL"
    deliver(found, out_, json, verification_table(found), verdict)
    if not found.passed:
        raise RunError(f"the plan's training differs from one process's in {found.dtype}")


def _dtype(name: str) -> Literal["float64", "float32"]:
    names: dict[str, Literal["float64", "float32"]] = {"float64": "float64", "float32": "float32"}
    if name not in names:
        raise InputError(f"--dtype {name!r} is not compared: choose float64 or float32")
    return names[name]


def launch(
    context: typer.Context,
    plan_file: PlanFile,
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT ARGS…]", help="What every rank runs (default: training)."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to train, where no script is given.")] = 30,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start here (default: the plan's over the hosts).")
    ] = None,
    nnodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT of host 0, the same on all hosts.")
    ] = None,
    timeout: Timeout = None,
    report: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    background: Annotated[
        str | None,
        typer.Option(
            help="Another training job for what this run leaves idle here: a command, or a plan "
            "for one device."
        ),
    ] = None,
    background_limit: Annotated[
        float | None,
        typer.Option(
            help="The run's steps may take so many times as long for it (default: what the plan "
            "was made for, else 1.1)."
        ),
    ] = None,
    background_memory: Annotated[
        str | None, typer.Option(help="Most data of each of its processes, such as 4GiB.")
    ] = None,
    background_at_end: Annotated[
        str | None,
        typer.Option(
            help="When the run has ended it may finish (default of a command), or is told to stop "
            "(of a plan)."
        ),
    ] = None,
    background_grace: Annotated[
        float, typer.Option(help="Seconds between SIGTERM, for its checkpoint, and SIGKILL.")
    ] = 30.0,
    background_log: Annotated[Path, typer.Option(help="Where its output is appended.")] = Path(
        "background.log"
    ),
    json: Json = False,
) -> None:
    """Run a plan, and end with what was predicted beside what was measured."""
    from .. import api

    check_out(report)
    _positive("--steps", steps)
    _positive("--timeout", timeout)
    made = load(Plan, plan_file, "PLAN")
    _say_differences(made, nproc, nnodes)
    beside = None
    if background is None:
        _refuse_stray(context)
    else:
        beside = Background(
            run=background,
            limit=made.goal.background_limit if background_limit is None else background_limit,
            memory_bytes=None if background_memory is None else parse_bytes(background_memory),
            at_end=_at_end(background_at_end),
            grace_s=background_grace,
            log=str(background_log),
        )

    def show(found: RunReport | None) -> None:
        if found is not None:
            deliver(found, report, json, measured_table(found))
            note(_over(made, found.measured.peak_bytes))
        elif node_rank == 0:
            note(
                "nothing was measured: the script made fewer than two optimizer steps under the "
                "plan"
            )

    api.launch(
        made,
        script or (),
        steps=steps,
        ranks_here=nproc,
        nodes=nnodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        timeout_s=timeout,
        quiet=json,
        background=beside,
        at_end=show,
        say=note,
    )


def _refuse_stray(context: typer.Context) -> None:
    """What concerns a background job asks for one."""
    for name, source in ((n, context.get_parameter_source(n)) for n in context.params):
        if name.startswith("background_") and source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} concerns a background job: add --background COMMAND")


def _at_end(word: str | None) -> AtEnd | None:
    words: dict[str, AtEnd] = {"finish": "finish", "stop": "stop"}
    if word is not None and word not in words:
        raise InputError(f"--background-at-end {word!r} cannot be: choose finish or stop")
    return None if word is None else words[word]


def _say_differences(plan: Plan, nproc: int | None, nodes: int) -> None:
    """Before anything is started, that this host is not what the plan was made for. Where the
    number of ranks is another one, that is refused."""
    from ..launching import differences

    here = nproc or plan.world_size // max(nodes, 1)
    if here * nodes == plan.world_size:
        for text in differences(plan, here):
            note(text)


def _over(plan: Plan, taken: int | None) -> str | None:
    """That more memory was taken than the plan was made for."""
    limit = plan.goal.memory_limit_bytes
    if limit is None or taken is None or taken <= limit:
        return None
    return (
        f"tensors took {size(taken)} and the plan was made for {size(limit)}: where that much is "
        f"not there, plan with a --memory-limit that is lower by {size(taken - limit)}"
    )


def demo(
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder for the files it makes.")
    ] = None,
    json: Json = False,
) -> None:
    """All of it on this machine: measure, plan, verify, train, and compare with the prediction."""
    from ..demonstration import demo as run_demo

    screen = console(error=json)
    found = run_demo(folder, say=screen.print)
    if json:
        deliver(found, None, json)
