"""Where words for people go while work is going on: the console, and a bar on stderr."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Progress as (done, total, what).
Step = Callable[[int, int, str], None]


def console(*, error: bool = False) -> Console:
    """Where to print: as wide as the terminal, and wide enough for a table where there is none."""
    # Names of units and files are shown as they are: brackets in them are no markup.
    plain = partial(Console, stderr=error, highlight=False, markup=False, emoji=False)
    made = plain()
    return made if made.is_terminal else plain(width=118)


@contextlib.contextmanager
def progress(title: str, *, show: bool = True) -> Iterator[Step]:
    """A bar on stderr while the block runs; yields the function that moves it."""
    err = console(error=True)
    if not (show and err.is_terminal):
        # Not even a hidden bar: some versions of rich end one with an empty line.
        yield lambda done, total, what: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def move(done: int, total: int, what: str) -> None:
            text = f"{title}: {what}" if what else title
            bar.update(task, completed=done, total=total or None, description=text[:60])

        yield move
