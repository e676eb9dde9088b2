"""``advise``: what each way to train a model on a cluster is predicted to reach."""

from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import progress
from ..planner.cost.device_kinds import with_relative_speeds
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InfeasibleError
from ..planner.schema.goal import make_goal
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from . import options
from .output import check_out, deliver
from .render.advice import advice_sentence, slow_sentences, ways_table
from .render.documents import of_other_devices
from .values import profiles_of, speeds


def advise(
    target: options.Target,
    cluster: options.ClusterFile,
    batch: options.Batch,
    out_: Annotated[Path | None, options.out("table")] = None,
    memory_limit: options.MemoryLimit = None,
    optimizer: options.Optimizer = "sgd",
    micro_batches: options.MicroBatches = (1,),
    batch_statistics: options.BatchStatistics = "local",
    precision: options.PrecisionName = None,
    profile_of: options.ProfilesOf = None,
    relative_speed: options.RelativeSpeeds = None,
    solver: options.Solver = "auto",
    time_limit: options.TimeLimit = None,
    json: options.Json = False,
) -> None:
    """Say which way to train TARGET on a cluster is quickest, and what each changes."""
    from .. import api

    check_out(out_)
    goal = make_goal(
        batch,
        memory_limit_bytes=memory_limit,
        optimizer=optimizer,
        micro_batches=micro_batches,
        batch_statistics=batch_statistics,
    )
    what = load(ModelProfile, target, "TARGET") if target.endswith(".json") else target
    there = with_relative_speeds(load(Cluster, cluster, "--cluster"), speeds(relative_speed))
    others = profiles_of(profile_of)
    with progress(f"planning {target}") as step:
        found = api.advise(
            what, there, goal,
            precision=precision, solver=solver, time_limit_s=time_limit, profiles_of=others,
            progress=step,
        )  # fmt: skip
    words = [advice_sentence(found), *slow_sentences(found)]
    if isinstance(what, ModelProfile):
        words += of_other_devices(what, there)
    deliver(found, out_, json, ways_table(found), *words)
    if not any(way.gain for way in found.ways):
        raise typer.Exit(InfeasibleError.exit_code)
