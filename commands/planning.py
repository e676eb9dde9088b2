"""``plan``: from measurements to a decision; or to a table, over cluster sizes or as a front."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..goals import make_goal, parse_bytes, parse_counts, parse_seconds, shares_note
from ..planner.cluster import Cluster
from ..planner.errors import InputError
from ..planner.goal import Goal
from ..planner.noun import load
from ..planner.pins import parse_wishes
from ..planner.plan import LOSSY, Plan
from ..planner.profile import ModelProfile
from ..screen import progress
from ..tables import decision_table, prediction_table, verdict
from ..trade_offs import front_table, sizes_table
from .output import Json, check_out, deliver, note, out

ClusterFile = Annotated[Path, typer.Option("--cluster", "-c", help="The cluster's file.")]


def add_to(app: typer.Typer) -> None:
    """Registers the verb."""
    app.command("plan")(plan)


def plan(
    target: Annotated[
        str,
        typer.Argument(
            help="A workload's name, file.py:factory, package.module:factory, or a profile.json.",
            metavar="TARGET",
        ),
    ],
    cluster: ClusterFile,
    batch: Annotated[int, typer.Option(help="Global batch size in samples.")],
    out_: Annotated[Path | None, out("plan (or the table)")] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Most memory of a rank, such as 8GiB (default: its own).")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "sgd",
    micro_batches: Annotated[
        str, typer.Option(help="Counts of micro-batches to choose from, such as 1,2,4.")
    ] = "1",
    batch_statistics: Annotated[
        str,
        typer.Option(help="Normalise over each rank's share (local) or the whole batch (global)."),
    ] = "local",
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help="UNIT=LAYOUT decides units beforehand: fc1=4x2, 'block*=1x8', fc1=4x2:row. "
            "May be given several times.",
            metavar="UNIT=LAYOUT",
        ),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            help="UNIT=LAYOUT that it must not have; without UNIT= for all units, where a policy "
            "may stand too (recompute, topk). May be given several times.",
            metavar="[UNIT=]LAYOUT",
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What shall be least: step (time) or gpu-seconds.")
    ] = "step",
    step_limit: Annotated[
        str | None, typer.Option(help="Longest step allowed, such as 250ms or 1.5s.")
    ] = None,
    amplification_limit: Annotated[
        float | None,
        typer.Option(help="Most device time of a step, as a multiple of one device's."),
    ] = None,
    unit_amplification_limit: Annotated[
        float | None, typer.Option(help="The same for every unit by itself.")
    ] = None,
    background_limit: Annotated[
        float | None,
        typer.Option(
            help="A background job will run beside (launch --background): a step may take up to so "
            "many times as long, such as 1.1, and keeps --step-limit even then."
        ),
    ] = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Allow part of the gradients to wait a step.")
    ] = False,
    min_fidelity: Annotated[
        float | None, typer.Option(help="Least share of the gradient's energy sent, such as 0.9.")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(help="Slice sizes to choose from, such as 1MiB,4MiB.")
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="How gradients travel: barrier (buckets, all waited for), priority (slices, those "
            "first that forward needs first), or auto for the quicker."
        ),
    ] = "auto",
    bursts: Annotated[
        bool,
        typer.Option("--bursts", help="Units may take a part of the ranks and leave others idle."),
    ] = False,
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Plan more than the executor can run.")
    ] = False,
    all_layouts: Annotated[
        bool,
        typer.Option(
            "--all-layouts", help="Any number of groups and members, not only round ones."
        ),
    ] = False,
    solver: Annotated[str, typer.Option(help="auto, heuristic, integer or multipliers.")] = "auto",
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the search.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Compare cluster sizes instead, such as 8,16,32.")
    ] = None,
    front: Annotated[
        bool, typer.Option("--front", help="Show the trade of step time for device time instead.")
    ] = False,
    all_units: Annotated[bool, typer.Option("--all-units", help="Fold no rows.")] = False,
    json: Json = False,
) -> None:
    """Decide how to train TARGET on a cluster, and predict what a step takes."""
    check_out(out_)
    if ranks is not None and front:
        raise InputError("--ranks and --front are two tables: ask for one at a time")
    wishes = parse_wishes(pin or (), forbid or ())
    if slices is not None and schedule == "barrier":
        raise InputError(
            f"--slices {slices!r} says how priority cuts: leave --schedule barrier out"
        )
    goal = make_goal(
        batch,
        memory_limit_bytes=parse_bytes(memory_limit) if memory_limit else None,
        optimizer=optimizer,
        micro_batches=parse_counts(micro_batches),
        batch_statistics=batch_statistics,
        objective=objective,
        step_limit_s=parse_seconds(step_limit) if step_limit else None,
        amplification_limit=amplification_limit,
        unit_amplification_limit=unit_amplification_limit,
        background_limit=background_limit,
        min_fidelity=min_fidelity,
        allow_lossy=allow_lossy,
        slice_bytes=[parse_bytes(part) for part in slices.split(",")] if slices else (),
        pins=wishes.pins,
        all_layouts=all_layouts,
    )
    there = load(Cluster, cluster, "--cluster")
    what: str | ModelProfile = target
    if target.endswith(".json"):
        what = load(ModelProfile, target, "TARGET")
    options = {
        "solver": solver,
        "time_limit_s": time_limit,
        "bursts": bursts,
        "hypothetical": hypothetical,
        "forbidden": wishes.without,
        "schedule": schedule,
    }
    if ranks is not None:
        _sizes(target, (what, there, goal), parse_counts(ranks), out_, json, options)
    elif front:
        _front(target, (what, there, goal), out_, json, options)
    else:
        _plan(target, (what, there, goal), out_, json, options, fold=not all_units)


Asked = tuple[str | ModelProfile, Cluster, Goal]


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
    note(_quicker(found, asked, options))
    table = decision_table(found, fold=fold)
    deliver(found, path, json, table, prediction_table(found), verdict(found))


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
    ranks: tuple[int, ...],
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
