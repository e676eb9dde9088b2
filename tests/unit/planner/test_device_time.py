"""What device-seconds are made of: by hand, and adding up for every plan."""

import msgspec
import pytest
from hypothesis import given, settings
from meshwright.planner.cost.budget import overdrawn
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.explain.why import device_time
from meshwright.planner.schema.cluster import Interference, StepOverhead
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.evaluate import evaluation
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve, solvers

from tests.strategies import chain_profile, cluster, decided, linear

SOME = settings(max_examples=100, deadline=None)


def test_a_small_model_on_two_devices_by_hand():
    """A layer that takes 3 ms forward and 6 ms backward for 8 samples, and 2 and 4 ms for 4; 1 ms
    of update; 0.5 ms of the executor's own work in each step."""
    layer = linear("fc", 100, 100)
    forward = Curve(x=(4.0, 8.0), y=(2e-3, 3e-3))
    backward = Curve(x=(4.0, 8.0), y=(4e-3, 6e-3))
    whole = msgspec.structs.replace(layer.whole, forward=forward, backward=backward)
    layer = msgspec.structs.replace(layer, shares=(whole,))
    profile = chain_profile([layer], updates=(("sgd", 1e-3 / 40_000),))
    links = msgspec.structs.replace(
        cluster(2, inter=40_000 / 2e-3, latency_s=0.0), overhead=StepOverhead(step_s=0.5e-3)
    )
    model = CostModel(profile, links, Goal(batch=8))
    found = device_time(evaluation(model, model.baseline))
    assert found.single_device_s == pytest.approx(10e-3)
    assert found.shares_s == pytest.approx(2 * 6e-3 - 9e-3)
    assert found.updates_s == pytest.approx(1e-3)
    assert found.executor_s == pytest.approx(2 * 0.5e-3)
    assert found.slowing_s == pytest.approx(0.0, abs=1e-12)
    # 40,000 bytes over a ring of two: each sends as many, in 2 ms, after the layer's backward,
    # while the executor ends the step's
    assert found.waiting_s == pytest.approx(2 * 1.5e-3)
    assert found.amplification == pytest.approx(18e-3 / 10e-3)
    # on one of the devices the other is idle while it computes
    part = (model.baseline[0], Option(Layout(groups=1)), model.baseline[2])
    narrow = device_time(evaluation(model, part))
    assert narrow.shares_s == pytest.approx(0.0, abs=1e-12)
    assert narrow.updates_s == pytest.approx(0.0, abs=1e-12)


def test_where_units_take_no_time_any_device_seconds_are_over_the_limit():
    goal = Goal(batch=2, amplification_limit=1.0)
    model = CostModel(chain_profile([linear("fc", 4, 4, 0.0)]), cluster(2), goal)
    assert overdrawn(model, model.baseline, 0.0) == 0.0
    assert overdrawn(model, model.baseline, 1e-6) > 0.0


@pytest.mark.parametrize("solver", solvers())
def test_a_limit_that_is_a_multiple_of_no_time_is_refused_as_such(solver):
    goal = Goal(batch=8, amplification_limit=1.5)
    profile = chain_profile([linear("a", 64, 64, 0.0), linear("b", 64, 64, 0.0)])
    found = solve(Problem(profile, cluster(1, 2), goal), solver)
    assert found.plan is None
    assert found.infeasible.relaxations == ()
    assert found.infeasible.sentence.endswith(
        "a multiple of what one device takes, which is 0 s by the profile: leave the limit out, or "
        "profile the model anew"
    )
    # One device by itself uses none either.
    assert solve(Problem(profile, cluster(1), goal), solver).plan is not None


def test_what_communication_slows_is_told_apart():
    links = cluster(2, inter=1e6, interference=Interference(compute_slowdown=1.5))
    profile = chain_profile([linear(n, 64, 64, 1e-3) for n in ("a", "b")])
    model = CostModel(profile, links, Goal(batch=8), message_bytes=64)
    assert device_time(evaluation(model, model.baseline)).slowing_s > 0


@SOME
@given(decided(measured=True))
def test_the_parts_add_up(case):
    model, chosen = case
    found = device_time(evaluation(model, chosen))
    parts = found.single_device_s + found.shares_s + found.updates_s + found.executor_s
    parts += found.slowing_s + found.waiting_s + found.copies_s
    assert parts == pytest.approx(found.used_s, rel=1e-9, abs=1e-12)
