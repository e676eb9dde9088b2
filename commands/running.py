"""``verify``, ``launch`` and ``demo``: a plan at work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..comparisons import measured_table, verification_table
from ..planner.errors import InputError, RunError
from ..planner.noun import load
from ..planner.plan import Plan
from ..screen import console, size
from .output import Json, check_out, deliver, note, out

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
    json: Json = False,
) -> None:
    """Run a plan, and end with what was predicted beside what was measured."""
    from .. import api

    check_out(report)
    _positive("--steps", steps)
    _positive("--timeout", timeout)
    made = load(Plan, plan_file, "PLAN")
    _say_differences(made, nproc, nnodes)
    found = api.launch(
        made,
        script or (),
        steps=steps,
        ranks_here=nproc,
        nodes=nnodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        timeout_s=timeout,
        quiet=json,
    )
    if found is not None:
        deliver(found, report, json, measured_table(found))
        note(_over(made, found.measured.peak_bytes))
    elif node_rank == 0:
        note("nothing was measured: the script made fewer than two optimizer steps under the plan")


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
