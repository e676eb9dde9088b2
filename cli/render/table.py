"""Tables of words and figures, all in one form."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table


def empty_table(title: str, headings: Iterable[str], left: int = 1) -> Table:
    """The first ``left`` columns are words, the others figures."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.SIMPLE_HEAD,
        # A narrower gap between columns, and none around them, leaves names more room.
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    # Folded and not cut off: the end of a long name says more than its beginning.
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    return table


def filled_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is words."""
    table = empty_table(title, headings)
    for row in rows:
        table.add_row(*row)
    return table


def names_of(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
