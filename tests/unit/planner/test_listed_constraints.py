"""Where equations are said to be stated, they are: at the head of the integer program, in docs."""

import importlib
import re
from pathlib import Path

from meshwright.planner.cost import budget, step_time
from meshwright.planner.memory import rows
from meshwright.planner.solve.ilp import integer
from meshwright.planner.solve.ilp.memory_rows import MemoryRows
from meshwright.planner.solve.ilp.variables import Variables

HOMES = {
    "Program": integer.Program,
    "MemoryRows": MemoryRows,
    "Variables": Variables,
    "budget": budget,
    "rows": rows,
    "step_time": step_time,
}


def test_families_are_numbered_and_their_functions_exist():
    text = integer.__doc__
    numbers = [int(n) for n in re.findall(r"^(?= \(\d\)|\(\d\d\)) ?\((\d+)\) ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    named = re.findall(r"``(\w+)\.(\w+)``", text)
    assert len(named) >= len(numbers)
    for home, name in named:
        assert hasattr(HOMES[home], name), f"{home}.{name}"


def test_the_table_of_equations_names_what_exists():
    text = (Path(__file__).resolve().parents[3] / "docs" / "planner.md").read_text()
    table = text.split("Where to find each equation:")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+(?:\.\w+)*)`", table)
    assert len(named) > 15
    for name in named:
        folder, _, rest = name.rpartition("/")
        module, *steps = rest.split(".")
        path = ".".join(part for part in (*folder.split("/"), module) if part)
        at = importlib.import_module(f"meshwright.planner.{path}")
        for step_ in steps:
            at = getattr(at, step_)
