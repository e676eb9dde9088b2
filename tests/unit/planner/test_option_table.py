"""The tables that both proving solvers read: what units that are alike in part have in common."""

import msgspec
import numpy as np
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory.rows import AT
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.cluster import StepOverhead
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.option_table import OptionTable
from meshwright.planner.solve.unit_options import unit_options

from tests.strategies import chain_profile, cluster, linear


def table(*units, overhead=None):
    """The table of a chain of units on four ranks."""
    links = cluster(4)
    if overhead is not None:
        links = msgspec.structs.replace(links, overhead=overhead)
    return OptionTable(CostModel(chain_profile(list(units)), links, Goal(batch=8)), EVERYTHING)


def test_the_executors_own_work_counts_in_every_unit_of_a_shape():
    found = table(
        linear("a"), linear("b"), overhead=StepOverhead(parameter_s=1e-3, byte_s=1e-7, rerun_s=2e-3)
    )
    for k, unit in enumerate(found.units):
        numbers = unit.numbers()
        expected = [found.figures.of(k, unit.option(n)) for n in numbers]
        for name in ("backward", "idle"):
            np.testing.assert_allclose(
                [unit.figures(n)[AT[name]] for n in numbers], [row[AT[name]] for row in expected]
            )


@pytest.mark.parametrize("other", [{"batched_inputs": ()}, {"batch_dims": (1,)}])
@pytest.mark.parametrize("first", [True, False])
def test_units_that_differ_in_where_samples_enter_have_their_own_states(first, other):
    plain = linear("a")
    special = msgspec.structs.replace(linear("b"), **other)
    found = table(*((special, plain) if first else (plain, special)))
    for k, states in enumerate(found.states):
        options = unit_options(found.model, k, found.capability)
        assert set(states) == {(o.layout, o.style) for o in options}
