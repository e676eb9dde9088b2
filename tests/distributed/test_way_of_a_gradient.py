"""The table of docs/executor.md that follows one gradient has functions that are called in that
order."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from meshwright.executor.apply import apply
from meshwright.planner.explain.compare import with_wire
from plans import plan, scheduled, unit
from torch import nn

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\|[^|]*\| `([\w/]+\.py)` \| (`.*) \|$")

Place = tuple[str, str]
"""A file in executor/, and a function in it as the table names it."""


def documented() -> Iterator[Place]:
    page = (ROOT / "docs/executor.md").read_text().split("One gradient on its way", 1)[1]
    for line in page.split("\n\n")[1].splitlines()[2:]:
        found = ROW.match(line)
        assert found, f"no file and functions in {line!r}"
        functions = re.findall(r"`([\w.]+)`(?=, |$|:| )", found[2])
        assert functions, f"no function of {found[1]}"
        for name in functions:
            yield found[1], name


def called(rank: int, places: list[Place]) -> list[Place]:
    """Those of the places that a backward, the step and the next forward call."""
    # One message of one unit: what comes before another comes before it once.
    with scheduled("priority"):
        chosen = with_wire(plan(2, [unit("0", 1, "none", 2)], message_bytes=2**20), "bf16")
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, optimizer, chosen, timeout_s=20)
    found: list[Place] = []

    def call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        for name, told in places if event == "call" else ():
            here = code.co_filename.endswith(f"executor/{name}")
            if here and f".{code.co_qualname}".endswith(f".{told}"):
                found.append((name, told))

    for _ in range(2):  # a first step makes what later ones use
        loss = model(torch.full((2, 3), 1.0 + rank)).square().mean()
        sys.setprofile(call)
        try:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 3))
        finally:
            sys.setprofile(None)
        made, found = found, []
    return made


def test_every_function_on_the_way_is_called_in_that_order(ranks):
    places = list(documented())
    assert len(places) > 20
    for found in ranks(2)(called, places):
        calls = iter(found)
        late = [
            place for place in places if place not in calls
        ]  # each is looked for after the last
        assert not late, f"{late[0]} is not called after those before it, of {found}"
