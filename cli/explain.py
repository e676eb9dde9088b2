"""``explain``: why a plan is as it is, and what ranks hold at each point of its step."""

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
from .options import AllUnits, Json, PlanFile
from .output import check_out, deliver, note
from .render.explanations import explanation_tables
from .render.memory import memory_tables, plot_memory
from .values import number, whole


def explain(
    plan_file: PlanFile,
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
    all_units: AllUnits = False,
    json: Json = False,
) -> None:
    """Why a plan is as it is: each unit's alternatives, what binds, what more would buy."""
    from .. import api

    made = load(Plan, plan_file, "PLAN")
    made_from = (
        load(ModelProfile, profile, "--profile") if profile else None,
        load(Cluster, cluster, "--cluster") if cluster else None,
    )
    if plot is not None and not memory:
        raise InputError(f"--plot {plot} draws the memory timeline: add --memory")
    if memory:
        check_out(plot)
        timeline = api.memory_timeline(made, *made_from)
        if plot is not None:
            plot_memory(timeline, plot)
            note(f"drawn into {plot}")
        deliver(timeline, None, json, *memory_tables(timeline, fold=not all_units))
        return
    with progress("explaining") as step:
        found = api.explain(
            made, *made_from, best=best, what_if=what_if, time_limit_s=time_limit, progress=step
        )
    tables = explanation_tables(found, made.goal.objective, fold=not all_units)
    deliver(found, None, json, *tables)
