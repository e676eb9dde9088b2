"""``calibrate``: what a run contradicts is corrected for the next plan."""

from pathlib import Path
from typing import Annotated

import typer

from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load, save
from ..planner.schema.report import RunReport
from . import options
from .output import check_out, deliver
from .render.comparisons import calibration_parts


def calibrate(
    plan_file: options.PlanFile,
    result: Annotated[
        Path, typer.Argument(metavar="RESULT", help="What launch --report wrote of its run.")
    ],
    cluster_out: Annotated[Path, typer.Option(help="Write the corrected cluster here.")] = Path(
        "cluster.calibrated.json"
    ),
    profile_out: Annotated[Path, typer.Option(help="Write the corrected profile here.")] = Path(
        "profile.calibrated.json"
    ),
    profile: options.PlansProfile = None,
    cluster: options.PlansCluster = None,
    json: options.Json = False,
) -> None:
    """Correct what a run contradicts of the cluster and the profile, for the next plan."""
    from .. import api

    for path in (cluster_out, profile_out):
        check_out(path)
    if cluster_out.resolve() == profile_out.resolve():
        raise InputError(f"--cluster-out and --profile-out are both {cluster_out}: name two files")
    plan, report = load(Plan, plan_file, "PLAN"), load(RunReport, result, "RESULT")
    found = api.calibrate(
        plan,
        report,
        load(ModelProfile, profile, "--profile") if profile else None,
        load(Cluster, cluster, "--cluster") if cluster else None,
    )
    save(found.cluster, cluster_out)
    save(found.profile, profile_out)
    goal = plan.goal
    again = (
        f"Written; to plan from them: meshwright plan {profile_out} --cluster {cluster_out} "
        f"--batch {goal.batch} --optimizer {goal.optimizer}"
    )
    deliver(found, None, json, *calibration_parts(found), again)
