"""Rows of a benchmark: printed, kept in a file as they come so that a long benchmark can be run in
pieces, and put as tables on a page of docs/, between marks so that the words around them stay."""

import argparse
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.render.table import filled_table
from rich.console import Console

Row = Mapping[str, Any]


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's arguments, under the first line of its module's ``doc``."""
    return argparse.ArgumentParser(description=(doc or "").splitlines()[0])


def shown(value: object) -> str:
    """A figure for people: three digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_row(row: Row) -> None:
    print("  ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)


def print_json(result: Mapping[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    texts = [[str(cell) for cell in row] for row in rows]
    # Wider than a file's or a pipe's 80 columns, which would fold every cell.
    Console(width=150).print(filled_table(title, headings, texts))


def markdown(
    headings: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)
) -> str:
    """A Markdown table; the columns in ``left`` stand to the left, the others to the right."""
    rule = ["---" if i in left else "--:" for i in range(len(headings))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (headings, rule, *rows))


def markdown_of(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """A Markdown table of these fields of rows."""
    return markdown(columns, [[shown(row[name]) for name in columns] for row in rows])


def put(text: str, name: str, part: str) -> str:
    """The page ``text`` with that part between its marks; at its end where there are none."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    block = f"{first}\n{part.rstrip()}\n{last}"
    if first not in text:
        return f"{text.rstrip()}\n\n{block}\n".lstrip()
    # A function, as re.sub would read backslashes in a text as references to groups.
    return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: block, text, flags=re.S)


def put_into(page: Path | None, name: str, part: str) -> None:
    """The same in a file, which need not be there; nothing without a page."""
    if page is not None:
        before = page.read_text() if page.exists() else ""
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(put(before, name, part))


def known(kept: Path | None) -> list[dict[str, Any]]:
    """The rows of earlier runs; none without a file."""
    if kept is None or not kept.exists():
        return []
    return [json.loads(line) for line in kept.read_text().splitlines()]


def keep(kept: Path | None, row: Row) -> None:
    if kept is not None:
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
