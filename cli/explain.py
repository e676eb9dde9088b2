"""``explain`` and ``compare``: why a plan is as it is, and what another does differently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import progress
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from .output import Json, check_out, deliver, note
from .render.comparisons import comparison_tables
from .render.explanations import explanation_tables
from .render.memory import memory_tables, plot_memory
from .values import number, whole


def add_to(app: typer.Typer) -> None:
    """Registers the verbs."""
    app.command("explain")(explain)
    app.command("compare")(compare)


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan's file.")],
    profile: Annotated[
        Path | None, typer.Option(help="The profile it was made from (else found by fingerprint).")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster it was made for (else found by fingerprint).")
    ] = None,
    best: Annotated[int, whole("So many alternatives of each unit.")] = 2,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if/--no-what-if", help="Plan again with more bandwidth, memory, devices."
        ),
    ] = True,
    time_limit: Annotated[
        float, number("Seconds for each time that it is planned again.", above=0)
    ] = 10.0,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what ranks hold at each point of a step instead.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="With --memory: draw it into this file, such as memory.png.")
    ] = None,
    all_units: Annotated[bool, typer.Option("--all-units", help="Fold no rows.")] = False,
    json: Json = False,
) -> None:
    """Why a plan is as it is: each unit's alternatives, what binds, what more would buy."""
    from .. import api

    made = load(Plan, plan_file, "PLAN")
    if plot is not None and not memory:
        raise InputError(f"--plot {plot} draws the memory timeline: add --memory")
    if memory:
        _memory(made, profile, cluster, plot, json=json, fold=not all_units)
        return
    with progress("explaining") as step:
        found = api.explain(
            made,
            load(ModelProfile, profile, "--profile") if profile else None,
            load(Cluster, cluster, "--cluster") if cluster else None,
            best=best,
            what_if=what_if,
            time_limit_s=time_limit,
            progress=step,
        )
    deliver(found, None, json, *explanation_tables(found, made.goal.objective, fold=not all_units))


def _memory(
    made: Plan,
    profile: Path | None,
    cluster: Path | None,
    plot: Path | None,
    *,
    json: bool,
    fold: bool,
) -> None:
    from .. import api

    check_out(plot)
    found = api.memory_timeline(
        made,
        load(ModelProfile, profile, "--profile") if profile else None,
        load(Cluster, cluster, "--cluster") if cluster else None,
    )
    if plot is not None:
        plot_memory(found, plot)
        note(f"drawn into {plot}")
    deliver(found, None, json, *memory_tables(found, fold=fold))


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan's file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another plan's file.")],
    json: Json = False,
) -> None:
    """Two plans side by side: what they decide differently and what they predict."""
    from .. import api

    found = api.compare(load(Plan, first, "A"), load(Plan, second, "B"))
    deliver(found, None, json, *comparison_tables(found, first.name, second.name))
