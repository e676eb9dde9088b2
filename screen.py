"""What people see: tables of decisions, predictions and measurements, and progress bars."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

Step = Callable[[int, int, str], None]
"""Progress as ``(done, total, what)``."""


def console(*, error: bool = False) -> Console:
    """Where to print: as wide as the terminal, and wide enough for a table where there is none."""
    made = Console(stderr=error, highlight=False)
    return made if made.is_terminal else Console(stderr=error, highlight=False, width=118)


@contextlib.contextmanager
def progress(title: str, *, show: bool = True) -> Iterator[Step]:
    """A bar on stderr while the block runs; yields the function that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    err = console(error=True)
    hidden = not (show and err.is_terminal)  # elsewhere it would only leave an empty line
    with Progress(*columns, console=err, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=None)

        def move(done: int, total: int, what: str) -> None:
            text = f"{title}: {what}" if what else title
            bar.update(task, completed=done, total=total or None, description=text[:60])

        yield move


def seconds(value: float) -> str:
    """A duration in the unit in which it reads best."""
    if value >= 1 or value == 0:
        return f"{value:.2f} s" if value else "0"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def gap_text(gap: float) -> str:
    """The gap between a plan and its bound; rounding is none."""
    if gap > 0.1:
        return f"{100 * gap:.0f}%"
    return f"{100 * gap:.2g}%" if gap > 1e-6 else "0%"


def size(count: float) -> str:
    """Bytes in the binary unit in which they read best."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def rate(bytes_per_s: float) -> str:
    """A bandwidth in bits, as networks are sold."""
    gigabits = bytes_per_s * 8 / 1e9
    return f"{gigabits:.2f} Gbit/s" if gigabits < 100 else f"{gigabits:.0f} Gbit/s"


def empty_table(title: str, headings: Iterable[str], left: int = 1) -> Table:
    """The first ``left`` columns are words, the others figures."""
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="", box=box.SIMPLE_HEAD
    )
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    return table


def figures_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is words."""
    table = empty_table(title, headings)
    for row in rows:
        table.add_row(*row)
    return table


def names_of(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
