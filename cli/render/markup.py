"""HTML and SVG as trees of elements, so that every text is escaped where the tree is written."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from rich.table import Table

Content = Element | str | None


def make(tag: str, /, *content: Content, **attributes: object) -> Element:
    """An element; ``class_`` and ``stroke_width`` are called ``class`` and ``stroke-width``."""
    named = {key.rstrip("_").replace("_", "-"): _text(v) for key, v in attributes.items()}
    element = Element(tag, named)
    for part in content:
        add(element, part)
    return element


def add(element: Element, part: Content) -> None:
    """Appends an element or a text."""
    if part is None:
        return
    if isinstance(part, Element):
        element.append(part)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + part
    else:
        element.text = (element.text or "") + part


def written(element: Element) -> str:
    return tostring(element, encoding="unicode", method="html")


def _text(value: object) -> str:
    # A hundredth of a pixel is enough.
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def html_table(table: Table) -> Element:
    """A table for the terminal as one for a page. On narrow screens each row is a block, whose
    cells say their column's name."""
    headings = [str(column.header) for column in table.columns]
    left = [column.justify == "left" for column in table.columns]
    head = make(
        "tr", *(make("th", text, **_side(side)) for text, side in zip(headings, left, strict=True))
    )
    body = make("tbody")
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = [
            make(
                "td",
                str(cell).strip(),
                **_side(side),
                **({"data_label": heading} if heading else {}),
            )
            for cell, heading, side in zip(row, headings, left, strict=True)
        ]
        if cells:
            # What is indented belongs to the row above it.
            depth = len(str(row[0])) - len(str(row[0]).lstrip())
            if depth:
                cells[0].set("class", "in")
        body.append(make("tr", *cells))
    found = make("table", make("thead", head), body)
    if table.caption:
        return make("div", found, make("p", str(table.caption).strip(), class_="note"))
    return make("div", found)


def _side(left: bool) -> dict[str, object]:
    return {} if left else {"class_": "figure"}
