"""``launch``: a plan at work, and another job in what it leaves idle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..executor.launch.background import AtEnd, Background
from ..planner.schema.errors import InputError
from ..planner.schema.plan import Plan
from ..planner.schema.record import load
from ..planner.schema.text import size
from . import options
from .output import check_out, deliver, note
from .render.comparisons import measured_table

if TYPE_CHECKING:  # it loads torch
    from ..executor.launch.report import RunReport


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
    background_at_end: options.BackgroundAtEnd = None,
    background_grace: options.BackgroundGrace = 30.0,
    background_log: options.BackgroundLog = Path("background.log"),
    json: options.Json = False,
) -> None:
    """Run a plan, and end with what was predicted beside what was measured."""
    from .. import api

    check_out(report)
    made = load(Plan, plan_file, "PLAN")
    _say_differences(made, nproc, nnodes)
    beside = None
    if background is None:
        _refuse_stray(context)
    else:
        beside = Background(
            run=background,
            limit=made.goal.background_limit if background_limit is None else background_limit,
            memory_bytes=background_memory,
            at_end=_at_end(background_at_end),
            grace_s=background_grace,
            log=str(background_log),
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
        at_end=lambda found: _show(found, made, report, first=node_rank == 0, json=json),
        say=note,
    )


def _show(
    found: RunReport | None, plan: Plan, path: Path | None, *, first: bool, json: bool
) -> None:
    """What was measured, on the ``first`` host."""
    if found is not None:
        deliver(found, path, json, measured_table(found))
        note(_over(plan, found.measured.peak_bytes))
    elif first:
        note("nothing was measured: the script made fewer than two optimizer steps under the plan")


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
    from ..executor.launch.launch import differences

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
