"""Options that no plan needs where only memory is limited: leaving them out changes nothing."""

import time
from dataclasses import replace

import msgspec
import pytest
from meshwright.planner.solve.ilp import solver as ilp
from meshwright.planner.solve.ilp.least_options import least_options
from meshwright.planner.solve.option_table import OptionTable

from tests.problems import problem


def only_memory_limited(seed, varied=False):
    made = problem(seed, varied=varied)
    goal = msgspec.structs.replace(
        made.goal, memory_limit_bytes=1000, amplification_limit=None, time_limit_s=None,
        unit_amplification_limit=None,
    )  # fmt: skip
    return replace(made, goal=goal).placed()


def least_bytes(made):
    found = ilp.IntegerEvidence().closest([made], "memory_limit_bytes", time.perf_counter() + 60)
    assert found is None or found.proved
    return found and found.limit


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("seed", range(300, 312))
def test_the_least_memory_is_that_of_all_options(seed, varied, monkeypatch):
    made = only_memory_limited(seed, varied)
    fewer = least_bytes(made)
    monkeypatch.setattr(ilp, "only_memory", lambda model: False)
    assert fewer == least_bytes(made)


def test_fewer_options_are_left_and_one_of_each_state():
    left = whole = 0
    for seed in range(300, 306):
        made = only_memory_limited(seed, varied=True)
        for model in made.cost_models():
            table = OptionTable(model, made.capability)
            fewer = least_options(made, table, model)
            assert fewer.states == table.states
            for few, every in zip(fewer.options, table.options, strict=True):
                assert set(few) <= set(every)
                assert {o[:2] for o in few} == {o[:2] for o in every}
            left += sum(map(len, fewer.options))
            whole += sum(map(len, table.options))
    assert left < 0.8 * whole
