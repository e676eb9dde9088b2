"""``compare``: what two plans decide differently, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..planner.schema.plan import Plan
from ..planner.schema.record import load
from .options import Json
from .output import deliver
from .render.comparisons import comparison_tables


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan's file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another plan's file.")],
    json: Json = False,
) -> None:
    """Two plans side by side: what they decide differently and what they predict."""
    from .. import api

    found = api.compare(load(Plan, first, "A"), load(Plan, second, "B"))
    deliver(found, None, json, *comparison_tables(found, first.name, second.name))
