"""``multiplex``: plans and background jobs on one cluster, simulated."""

from pathlib import Path
from typing import Annotated

import typer

from ..executor.notes import note
from ..planner.multiplex.jobs import Assumptions
from ..planner.schema.cluster import Cluster
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from .options import Json, out
from .output import check_out, deliver
from .render.multiplexing import cluster_tables
from .render.plots import check_plots
from .values import duration, number, whole

_DEFAULT = Assumptions()


def _us(seconds: float) -> str:
    # As people write it: Python would show 0.0002.
    return f"{seconds * 1e6:g}us"


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
        int | None, whole("Devices (default: what the plans need together).")
    ] = None,
    horizon: Annotated[
        float | None, duration("How long, such as 2s (default: eight of the longest steps).")
    ] = None,
    slowdown: Annotated[
        float, number("How much longer a foreground computes on shared devices.", least=1)
    ] = _DEFAULT.slowdown,
    piece: Annotated[
        float, duration(f"Length of the background's pieces (default: {_us(_DEFAULT.piece_s)}).")
    ] = _DEFAULT.piece_s,
    switch: Annotated[
        float,
        duration(
            f"What each gap loses before the background runs (default: {_us(_DEFAULT.switch_s)})."
        ),
    ] = _DEFAULT.switch_s,
    speed: Annotated[
        float, number("Share of its speed that the background has in a gap.", least=0, most=1)
    ] = _DEFAULT.idle_speed,
    communicating_speed: Annotated[
        float, number("The same while the foreground communicates.", least=0, most=1)
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
    # Before a simulation that may take minutes.
    if plot is not None:
        check_plots()
    found = api.multiplex(
        [load(Plan, path) for path in plan_files],
        [load(ModelProfile, path) for path in background or ()],
        profiles=[load(ModelProfile, path) for path in profile or ()],
        clusters=[load(Cluster, path) for path in cluster or ()],
        assumptions=Assumptions(
            slowdown=slowdown,
            piece_s=piece,
            switch_s=switch,
            idle_speed=speed,
            communicating_speed=communicating_speed,
        ),
        devices=devices,
        horizon_s=horizon,
        trace=trace,
        plot=plot,
    )
    for path in (trace, plot):
        note(f"written to {path}" if path else None)
    deliver(found, out_, json, *cluster_tables(found))
