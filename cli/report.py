"""``report``: all that is known of a plan as one page for a browser."""

from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import console, progress
from ..planner.schema.cluster import Cluster
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from ..planner.schema.report import RunReport
from . import options
from .output import check_out
from .values import number


def report(
    plan_file: options.PlanFile,
    out_: Annotated[Path, options.out("page")] = Path("report.html"),
    profile: options.PlansProfile = None,
    cluster: options.PlansCluster = None,
    result: Annotated[
        Path | None, typer.Option(help="What launch --report wrote of a run of this plan.")
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option("--what-if/--no-what-if", help="Plan again over bandwidth, memory and ranks."),
    ] = True,
    time_limit: Annotated[float, number("Seconds for planning again.", above=0)] = 15.0,
) -> None:
    """Write one offline HTML page on a plan: decisions, step, memory, ranks, timeline, what if."""
    from .. import api

    check_out(out_)
    made = load(Plan, plan_file, "PLAN")
    with progress("planning again") as step:
        api.report(
            made,
            out_,
            load(ModelProfile, profile, "--profile") if profile else None,
            load(Cluster, cluster, "--cluster") if cluster else None,
            result=load(RunReport, result, "--result") if result else None,
            what_if=what_if,
            time_limit_s=time_limit,
            progress=step,
        )
    console().print(f"written to {out_}; any browser opens it")
