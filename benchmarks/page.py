"""Results on a page of docs/: tables, between marks so that the words around them stay; and rows
kept in a file as they come, so that a long benchmark can be run in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)
) -> str:
    """A Markdown table; the columns in ``left`` stand to the left, the others to the right."""
    rule = ["---" if i in left else "--:" for i in range(len(headings))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (headings, rule, *rows))


def put(text: str, name: str, part: str) -> str:
    """The page ``text`` with that part between its marks; at its end where there are none."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    block = f"{first}\n{part.rstrip()}\n{last}"
    if first not in text:
        return f"{text.rstrip()}\n\n{block}\n".lstrip()
    return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: block, text, flags=re.S)


def put_into(page: Path, name: str, part: str) -> None:
    """The same in a file, which need not be there."""
    before = page.read_text() if page.exists() else ""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(put(before, name, part))


def known(kept: Path | None) -> list[dict[str, Any]]:
    """The rows of earlier runs; none without a file."""
    if kept is None or not kept.exists():
        return []
    return [json.loads(line) for line in kept.read_text().splitlines()]


def keep(kept: Path | None, row: Mapping[str, Any]) -> None:
    """Adds a row to the file, where there is one."""
    if kept is not None:
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
