"""The list of constraints at the head of the integer program names functions that exist."""

import re

from meshwright.planner import budget, rows, step
from meshwright.planner.exact import integer
from meshwright.planner.exact.linear import Linear
from meshwright.planner.exact.timeline import Timeline
from meshwright.planner.exact.variables import Variables

HOMES = {
    "Linear": Linear,
    "Program": integer.Program,
    "Timeline": Timeline,
    "Variables": Variables,
    "budget": budget,
    "rows": rows,
    "step": step,
}


def test_families_are_numbered_and_their_functions_exist():
    text = integer.__doc__
    numbers = [int(n) for n in re.findall(r"^(?= \(\d\)|\(\d\d\)) ?\((\d+)\) ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    named = re.findall(r"``(\w+)\.(\w+)``", text)
    assert len(named) >= len(numbers)
    for home, name in named:
        assert hasattr(HOMES[home], name), f"{home}.{name}"
