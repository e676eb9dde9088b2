"""``plan``, ``explain`` and ``compare``: from measurements to a decision, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..comparisons import comparison_tables, explanation_tables
from ..goals import make_goal, parse_bytes, parse_counts, shares_note
from ..planner.cluster import Cluster
from ..planner.noun import load
from ..planner.plan import Plan
from ..planner.profile import ModelProfile
from ..screen import progress
from ..tables import decision_table, gain, prediction_table
from .output import Json, check_out, deliver, note, out

ClusterFile = Annotated[Path, typer.Option("--cluster", "-c", help="The cluster's file.")]


def add_to(app: typer.Typer) -> None:
    """Registers the verbs."""
    app.command("plan")(plan)
    app.command("explain")(explain)
    app.command("compare")(compare)


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
    out_: Annotated[Path | None, out("plan")] = None,
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
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Plan more than the executor can run.")
    ] = False,
    solver: Annotated[str, typer.Option(help="auto, or a solver's name.")] = "auto",
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the search.")] = None,
    all_units: Annotated[bool, typer.Option("--all-units", help="Fold no rows.")] = False,
    json: Json = False,
) -> None:
    """Decide how to train TARGET on a cluster, and predict what a step takes."""
    from .. import api

    check_out(out_)
    goal = make_goal(
        batch,
        memory_limit_bytes=parse_bytes(memory_limit) if memory_limit else None,
        optimizer=optimizer,
        micro_batches=parse_counts(micro_batches),
        batch_statistics=batch_statistics,
    )
    there = load(Cluster, cluster)
    what: str | ModelProfile = load(ModelProfile, target) if target.endswith(".json") else target
    with progress(f"planning {target}") as step:
        found = api.plan(
            what,
            there,
            goal,
            solver=solver,
            time_limit_s=time_limit,
            hypothetical=hypothetical,
            progress=step,
        )
    note(shares_note(batch, there.world_size))
    for reason in found.hypothetical[:1]:
        note(f"the executor cannot run this plan: {reason}")
    table = decision_table(found, fold=not all_units)
    deliver(found, out_, json, table, prediction_table(found), _verdict(found))


def _verdict(found: Plan) -> str:
    counts = f", in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    return f"Predicted to be {gain(found)}{counts}; {_proof(found)}."


def _proof(found: Plan) -> str:
    by = found.provenance
    if by.status == "optimal":
        return f"proved best by the {by.solver} solver"
    if by.gap is not None:
        return f"at most {100 * by.gap:.2g}% slower than the best, by the {by.solver} solver"
    return f"found by the {by.solver} solver, not proved best"


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan's file.")],
    profile: Annotated[
        Path | None, typer.Option(help="The profile it was made from (else found by fingerprint).")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster it was made for (else found by fingerprint).")
    ] = None,
    best: Annotated[int, typer.Option(help="So many alternatives of each unit.")] = 2,
    json: Json = False,
) -> None:
    """Why a plan is as it is: each unit's alternatives, what binds, what is exposed."""
    from .. import api

    made = load(Plan, plan_file)
    with progress("explaining") as step:
        found = api.explain(
            made,
            load(ModelProfile, profile) if profile else None,
            load(Cluster, cluster) if cluster else None,
            best=best,
            progress=step,
        )
    deliver(found, None, json, *explanation_tables(found))


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan's file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another plan's file.")],
    json: Json = False,
) -> None:
    """Two plans side by side: what they decide differently and what they predict."""
    from .. import api

    found = api.compare(load(Plan, first), load(Plan, second))
    deliver(found, None, json, *comparison_tables(found, first.name, second.name))
