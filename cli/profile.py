"""``profile``: what a model's units are measured, or estimated, to take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import progress
from .options import AllUnits, Json, out
from .output import check_out, deliver
from .render.documents import units_table
from .values import counts, whole


def profile(
    target: Annotated[
        str,
        typer.Argument(
            help="A workload's name, path/to/file.py:factory or package.module:factory.",
            metavar="TARGET",
        ),
    ],
    out_: Annotated[Path | None, out("profile")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, or a catalogued device to estimate for, such as h100-sxm."),
    ] = None,
    batches: Annotated[
        Sequence[int] | None, counts("Batch sizes to measure, such as 8,16,32.")
    ] = None,
    ranks: Annotated[
        int, whole("Measure while so many processes compute, as in a run on one host.")
    ] = 1,
    all_units: AllUnits = False,
    json: Json = False,
) -> None:
    """Measure a model: each unit's times, memory and parameters."""
    from .. import api

    check_out(out_)
    with progress(f"profiling {target}") as step:
        found = api.profile(target, batches=batches, device=device, ranks=ranks, progress=step)
    deliver(found, out_, json, units_table(found, fold=not all_units))
