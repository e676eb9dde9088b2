"""``multiplex``: plans and background jobs on one cluster, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..goals import parse_seconds
from ..multiplexing import assumptions_of, cluster_tables
from ..planner.cluster import Cluster
from ..planner.multiplex.jobs import Assumptions
from ..planner.noun import load
from ..planner.plan import Plan
from ..planner.profile import ModelProfile
from ..plots import check_plots
from .output import Json, check_out, deliver, note, out

_DEFAULT = Assumptions()


def add_to(app: typer.Typer) -> None:
    """Registers the verb."""
    app.command("multiplex")(multiplex)


def multiplex(
    plan_files: Annotated[
        list[Path], typer.Argument(metavar="PLAN…", help="The foregrounds' plans.")
    ],
    background: Annotated[
        list[Path] | None,
        typer.Option(help="A profile whose model trains in the gaps. May be given several times."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="The profile of each plan, in their order (else by fingerprint)."),
    ] = None,
    cluster: Annotated[
        list[Path] | None,
        typer.Option(help="The cluster of each plan, in their order (else by fingerprint)."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices (default: what the plans need together).")
    ] = None,
    horizon: Annotated[
        str | None, typer.Option(help="How long, such as 2s (default: eight of the longest steps).")
    ] = None,
    slowdown: Annotated[
        float, typer.Option(help="How much longer a foreground computes on shared devices.")
    ] = _DEFAULT.slowdown,
    piece: Annotated[
        str, typer.Option(help="Length of the background's pieces.")
    ] = f"{_DEFAULT.piece_s * 1e6:g}us",
    switch: Annotated[
        str, typer.Option(help="What each gap loses before the background runs.")
    ] = f"{_DEFAULT.switch_s * 1e6:g}us",
    speed: Annotated[
        float, typer.Option(help="Share of its speed that the background has in a gap.")
    ] = _DEFAULT.idle_speed,
    communicating_speed: Annotated[
        float, typer.Option(help="The same while the foreground communicates.")
    ] = _DEFAULT.communicating_speed,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the device map into this file, such as map.png.")
    ] = None,
    out_: Annotated[Path | None, out("figures")] = None,
    json: Json = False,
) -> None:
    """Simulate plans on one cluster, with background jobs in what they leave idle."""
    from .. import api

    for path in (trace, plot, out_):
        check_out(path)
    if plot is not None:
        check_plots()
    found = api.multiplex(
        [load(Plan, path) for path in plan_files],
        [load(ModelProfile, path) for path in background or ()],
        profiles=[load(ModelProfile, path) for path in profile or ()],
        clusters=[load(Cluster, path) for path in cluster or ()],
        assumptions=assumptions_of(
            slowdown=slowdown,
            piece_s=parse_seconds(piece),
            switch_s=parse_seconds(switch),
            idle_speed=speed,
            communicating_speed=communicating_speed,
        ),
        devices=devices,
        horizon_s=parse_seconds(horizon) if horizon else None,
        trace=trace,
        plot=plot,
    )
    for path in (trace, plot):
        note(f"written to {path}" if path else None)
    deliver(found, out_, json, *cluster_tables(found))
