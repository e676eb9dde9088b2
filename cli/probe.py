"""``probe``: what the links among ranks are measured to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..executor.launch.progress import progress
from .options import Json, out
from .output import check_out, deliver
from .render.documents import cluster_table
from .values import whole


def probe(
    out_: Annotated[Path | None, out("cluster")] = None,
    ranks: Annotated[
        int | None,
        whole("Start so many ranks here (default: one for each GPU, else 2); 1 has no links."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure the links among ranks: those it is started on by torchrun, else local ones."""
    from .. import api

    check_out(out_)
    with progress("probing") as step:
        found = api.probe(ranks=ranks, progress=step)
    if api.is_rank_zero():
        deliver(found, out_, json, cluster_table(found))
