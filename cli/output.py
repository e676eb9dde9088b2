"""Where the results of all verbs go."""

import os
import re
import sys
import textwrap
from pathlib import Path

from rich.console import RenderableType

from ..executor.launch.progress import console
from ..planner.schema.errors import InputError
from ..planner.schema.record import Record, encode, save

# Between a number and its unit no line ends.
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMG]iB|B|s|ms|µs|ns|[GM]bit/s)\b)")
_UNBROKEN = "\N{NO-BREAK SPACE}"


def check_out(path: Path | None) -> None:
    """Refuses a file that cannot be written, before anything takes its time."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: no permission in {folder}; name another folder")


def deliver(record: Record, path: Path | None, json: bool, *parts: RenderableType) -> None:
    """Writes a result where it was asked for, and prints it: JSON, or its ``parts``. What cannot be
    written is printed all the same, before ``InputError`` is raised."""
    if path is not None:
        try:
            save(record, path)
        except InputError:
            show(record, None, json, *parts)
            raise
    show(record, path, json, *parts)


def show(record: Record, path: Path | None, json: bool, *parts: RenderableType) -> None:
    """Prints a result, which has been written to ``path`` if one was asked for."""
    if json:
        sys.stdout.write(encode(record).decode())
        return
    # Console and not print: tables fit themselves to the width of the terminal.
    screen = console()
    for part in parts:
        screen.print(in_lines(part, screen.width) if isinstance(part, str) else part)
    if path is not None:
        screen.print(f"written to {path}")


def in_lines(text: str, width: int) -> str:
    """A text in lines of that width, none of which ends between a number and its unit."""
    joined = _BEFORE_UNIT.sub(_UNBROKEN, text)
    lines = (
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in joined.split("\n")
    )
    return "\n".join(lines).replace(_UNBROKEN, " ")
