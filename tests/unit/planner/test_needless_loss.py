"""Rounded gradients that are predicted to save nothing give way to exact ones."""

from dataclasses import replace

import pytest
from meshwright.executor.capability import CAPABILITY
from meshwright.planner.schema.goal import ROUNDED_FIDELITY, Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import CompressionRate
from meshwright.planner.solve.answer import plan_of
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.needless_loss import without_needless_loss
from meshwright.planner.solve.problem import Result
from meshwright.planner.solve.request import problem_for

from tests.strategies import cluster

from .test_wire_formats import profile_of


def found(seconds_per_byte):
    """A result all of whose gradients are rounded, for that each byte of them takes so long."""
    rate = CompressionRate(exchange="bf16", seconds_per_byte=seconds_per_byte)
    goal = Goal(batch=32, optimizer="adam", allow_lossy=True, min_fidelity=ROUNDED_FIDELITY)
    problem = problem_for(profile_of(rates=(rate,)), cluster(4), goal, CAPABILITY)
    assert problem.any_schedule  # what was found may be by another than it begins with
    decided = replace(problem.placed(), schedule="priority")
    model = decided.cost_model()
    plain = Option(data_parallel(4))
    decisions = tuple(
        plain if unit.fixed or not unit.parameters else plain._replace(wire="bf16")
        for unit in problem.profile.units
    )
    chosen = choice(model, decisions, decided.schedule)
    plan = plan_of(decided, chosen, "integer", "optimal", bound_s=chosen.step_s, gap=0.0)
    return problem, Result(
        "integer", "optimal", chosen.objective_s, chosen.step_s, 0.0, plan, decisions, 0.0
    )


@pytest.mark.parametrize(("seconds_per_byte", "stays"), [(0.0, True), (1e-6, False)])
def test_what_is_predicted_to_take_longer_is_left_out(seconds_per_byte, stays):
    problem, before = found(seconds_per_byte)
    assert any(unit.rounded for unit in before.plan.units)
    after = without_needless_loss(problem, before)
    if stays:
        assert after is before
        return
    assert not any(unit.rounded for unit in after.plan.units)
    assert after.plan.schedule == before.plan.schedule
    assert after.plan.prediction.step_s <= before.plan.prediction.step_s
    # Nothing is proved of it: the formula preferred the other.
    assert (after.status, after.bound_s, after.gap) == ("heuristic", None, None)
    assert without_needless_loss(problem, after) is after
