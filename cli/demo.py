"""``demo``: all verbs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import console
from .options import Json
from .output import deliver


def demo(
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder for the files it makes.")
    ] = None,
    json: Json = False,
) -> None:
    """All of it on this machine: measure, plan, verify, train, and compare with the prediction."""
    from .demonstration import demo as run_demo

    screen = console(error=json)
    found = run_demo(folder, say=screen.print)
    if json:
        deliver(found, None, json)
