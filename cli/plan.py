"""``plan``: from measurements to a decision; or to a table, over cluster sizes or as a front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..executor.launch.progress import progress
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError
from ..planner.schema.goal import Goal, make_goal
from ..planner.schema.pins import parse_wishes
from ..planner.schema.plan import LOSSY, Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from ..planner.schema.text import seconds
from . import plan_options as given
from .output import Json, check_out, deliver, note, out
from .render.documents import alone_words, decision_table, prediction_table, verdict
from .render.trade_offs import front_table, sizes_table
from .values import shares_note


def add_to(app: typer.Typer) -> None:
    """Registers the verb."""
    app.command("plan")(plan)


def plan(
    target: given.Target,
    cluster: given.ClusterFile,
    batch: given.Batch,
    out_: Annotated[Path | None, out("plan (or the table)")] = None,
    memory_limit: given.MemoryLimit = None,
    optimizer: given.Optimizer = "sgd",
    micro_batches: given.MicroBatches = (1,),
    batch_statistics: given.BatchStatistics = "local",
    pin: given.Pins = None,
    forbid: given.Forbidden = None,
    objective: given.Objective = "step",
    step_limit: given.StepLimit = None,
    amplification_limit: given.AmplificationLimit = None,
    unit_amplification_limit: given.UnitAmplificationLimit = None,
    background_limit: given.BackgroundLimit = None,
    allow_lossy: given.AllowLossy = False,
    min_fidelity: given.MinFidelity = None,
    slices: given.Slices = None,
    schedule: given.Schedule = "auto",
    bursts: given.Bursts = False,
    hypothetical: given.Hypothetical = False,
    all_layouts: given.AllLayouts = False,
    solver: given.Solver = "auto",
    time_limit: given.TimeLimit = None,
    ranks: given.ClusterSizes = None,
    front: given.AsFront = False,
    all_units: given.AllUnits = False,
    json: Json = False,
) -> None:
    """Decide how to train TARGET on a cluster, and predict what a step takes."""
    check_out(out_)
    if ranks is not None and front:
        raise InputError("--ranks and --front are two tables: ask for one at a time")
    if slices is not None and schedule == "barrier":
        raise InputError(
            "--slices is how priority cuts, and --schedule is 'barrier': leave one of them out"
        )
    wishes = parse_wishes(pin or (), forbid or ())
    goal = make_goal(
        batch,
        memory_limit_bytes=memory_limit,
        optimizer=optimizer,
        micro_batches=micro_batches,
        batch_statistics=batch_statistics,
        objective=objective,
        step_limit_s=step_limit,
        amplification_limit=amplification_limit,
        unit_amplification_limit=unit_amplification_limit,
        background_limit=background_limit,
        min_fidelity=min_fidelity,
        allow_lossy=allow_lossy,
        slice_bytes=slices or (),
        pins=wishes.pins,
        all_layouts=all_layouts,
    )
    how = {
        "solver": solver,
        "time_limit_s": time_limit,
        "bursts": bursts,
        "hypothetical": hypothetical,
        "forbidden": wishes.without,
        "schedule": schedule,
    }
    asked = _asked(target, cluster, goal)
    if ranks is not None:
        _sizes(target, asked, ranks, out_, json, how)
    elif front:
        _front(target, asked, out_, json, how)
    else:
        _plan(target, asked, out_, json, how, fold=not all_units)


Asked = tuple[str | ModelProfile, Cluster, Goal]


def _asked(target: str, cluster: Path, goal: Goal) -> Asked:
    """What is planned, on which cluster, to which end."""
    there = load(Cluster, cluster, "--cluster")
    what = load(ModelProfile, target, "TARGET") if target.endswith(".json") else target
    return what, there, goal


def _plan(
    title: str, asked: Asked, path: Path | None, json: bool, options: dict[str, Any], *, fold: bool
) -> None:
    from .. import api

    with progress(f"planning {title}") as step:
        found = api.plan(*asked, **options, progress=step)
    _, cluster, goal = asked
    note(shares_note(goal.batch, cluster.world_size))
    if goal.allow_lossy and not any(unit.exchange in LOSSY for unit in found.units):
        note(
            "no unit sends its gradient in part: none was measured to keep enough "
            f"({goal.min_fidelity:g} of the energy), or no exchange is exposed"
        )
    for reason in found.hypothetical[:1]:
        note(f"the executor cannot run this plan: {reason}")
    note(_simulated_longer(found))
    note(_quicker(found, asked, options))
    table = decision_table(found, fold=fold)
    words = [verdict(found), *_alone(found, asked)]
    deliver(found, path, json, table, prediction_table(found), *words)


def _simulated_longer(found: Plan) -> str | None:
    """That a step is predicted to take longer than its limit, which the formula keeps."""
    limit_s, step_s = found.goal.time_limit_s, found.prediction.step_s
    if limit_s is None or step_s <= limit_s:
        return None
    return (
        f"the limit of {seconds(limit_s)} is kept by the formula, and simulated the step takes "
        f"{seconds(step_s)}: for a plan whose simulated step keeps it, ask for less, such as "
        f"--step-limit {limit_s * limit_s / step_s:.3g}s"
    )


def _alone(found: Plan, asked: Asked) -> list[str]:
    """That one device would be quicker, where it would."""
    from .. import api

    what, cluster, _ = asked
    try:
        alone_s = api.quicker_alone(
            found, what if isinstance(what, ModelProfile) else None, cluster
        )
    except InputError:  # what was measured for the plan could not be kept on disk
        return []
    return [] if alone_s is None else [alone_words(alone_s, found.world_size)]


def _quicker(found: Plan, asked: Asked, options: dict[str, Any]) -> str | None:
    """More micro-batches that would help, in a sentence."""
    from .. import api

    what, cluster, _ = asked
    profile = what if isinstance(what, ModelProfile) else None
    try:
        better = api.quicker_in_parts(
            found,
            profile,
            cluster,
            forbidden=options["forbidden"],
            schedule=options["schedule"],
        )
    except InputError:  # what was measured for the plan could not be kept on disk
        return None
    return better.sentence if better is not None else None


def _sizes(
    title: str,
    asked: Asked,
    ranks: Sequence[int],
    path: Path | None,
    json: bool,
    options: dict[str, Any],
) -> None:
    from .. import api

    with progress(f"planning {title}") as step:
        found = api.sizes(*asked, ranks, **options, progress=step)
    deliver(found, path, json, *sizes_table(found))


def _front(
    title: str, asked: Asked, path: Path | None, json: bool, options: dict[str, Any]
) -> None:
    from .. import api

    with progress(f"planning {title}") as step:
        found = api.front(*asked, **options, progress=step)
    deliver(found, path, json, *front_table(found))
    if not (options["bursts"] or options["hypothetical"]):
        note("no unit leaves devices idle: add --bursts to trade time for devices")
