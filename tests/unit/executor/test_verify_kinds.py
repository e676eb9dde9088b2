"""What ``verify`` calls the classes of parameters that it compares."""

import msgspec
import pytest
import torch
from meshwright.executor.launch.verify import Verification, _compare, _kinds, _Trained
from meshwright.executor.launch.yardstick import Deviation
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear


def test_units_are_named_by_how_they_are_divided_and_exchanged():
    made = make_plan(chain_profile([linear(n) for n in "abc"]), cluster(4), Goal(batch=16))
    how = {
        "a": {"exchange": "fully_sharded"},
        "b": {"layout": Layout(groups=2, degree=2), "style": "column", "exchange": "sharded"},
    }
    units = [msgspec.structs.replace(u, **how.get(u.name, {})) for u in made.units]
    kind = _kinds(msgspec.structs.replace(made, units=tuple(units)))
    assert kind("a.weight") == "parameters, data parallel, fully_sharded"
    assert kind("b.weight") == "parameters, column (2,2), sharded"
    assert kind("c.weight") == kind("elsewhere") == "parameters, data parallel"


@pytest.mark.parametrize(("off_by", "passed"), [(1e-14j, True), (1e-4j, False), (1e-4, False)])
def test_complex_numbers_are_compared_as_pairs(off_by, passed):
    """They are no whole numbers, which must be equal, and both parts count."""
    plan = make_plan(chain_profile([linear("a")]), cluster(2), Goal(batch=16))
    value = torch.ones(3, dtype=torch.complex128)
    ours, theirs = (_Trained([1.0], {"a": v}) for v in (value + off_by, value))
    found = _compare(ours, theirs, plan, torch.float64, {"a"})
    assert [d.passed for d in found] == [True, passed]


@pytest.mark.parametrize("draws", [None, 8])
def test_an_answer_is_read_as_it_was_written(draws):
    """Ranks write it to a file, from which the command reads it."""
    deviation = Deviation(what="losses", tensors=3, largest=0.0, of_allowed=0.0, worst="step 1")
    answer = Verification(
        target="mlp", world_size=2, dtype="float64", batches=(8, 9, 8), notes=(),
        deviations=(deviation,), passed=True, draws=draws, random="module '0'" if draws else "",
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Verification) == answer
