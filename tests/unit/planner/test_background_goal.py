"""A goal with a background job: what a step may take for it, and what that changes in a plan."""

import msgspec
import pytest
from meshwright.planner.explain.why import explain
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, make_goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear


def asked(**goal):
    """Two layers that take 4 x 3 x 1 ms of computing each on 4 ranks, and bursts."""
    profile = chain_profile([linear(n, 32, 32, 1e-3) for n in ("a", "b")])
    return Problem(profile, cluster(4, latency_s=1e-6), Goal(batch=16, **goal), EVERYTHING)


def test_without_one_nothing_is_slowed():
    goal = Goal(batch=16, time_limit_s=1.0)
    assert (goal.slowdown, goal.undisturbed_limit_s) == (1.0, 1.0)
    assert Goal(batch=16, background=True).slowdown == 1.1


@pytest.mark.parametrize(
    "solver",
    # It looks for relaxations one by one, which takes long.
    [pytest.param("heuristic", marks=pytest.mark.slow), "integer", "lagrangian"],
)
def test_a_step_keeps_its_limit_with_the_background_too(solver):
    quickest = solve(asked(), solver).plan.prediction.step_s
    limit = quickest * 1.3
    with_background = {"background": True, "background_limit": 1.2}
    economical = {"objective": "gpu_seconds", "time_limit_s": limit}
    alone, slowed = (solve(asked(**economical, **b), solver).plan for b in ({}, with_background))
    assert alone.prediction.step_s <= limit * (1 + 1e-6)
    assert slowed.slowed_s == pytest.approx(slowed.prediction.step_s * 1.2)
    assert slowed.slowed_s <= limit * (1 + 1e-6)
    with_background["background_limit"] = 1.4
    refused = solve(asked(**economical, **with_background), solver)
    assert refused.plan is None
    named = next(r for r in refused.infeasible.relaxations if r.what == "time_limit_s")
    assert named.value >= quickest * 1.4 * 0.99  # a search may stop that near the best
    assert solve(
        asked(objective="gpu_seconds", time_limit_s=named.value, **with_background), solver
    ).plan


def test_the_prediction_is_of_the_step_alone_and_explain_shows_both():
    problem = asked(background=True, background_limit=1.5, time_limit_s=1.0)
    plan = solve(problem, "integer").plan
    assert plan.prediction == solve(asked(time_limit_s=1.0), "integer").plan.prediction
    found = explain(plan, problem.profile, problem.cluster, capability=EVERYTHING)
    assert found.slowed_s == pytest.approx(1.5 * found.step_s)
    used = next(use for use in found.limits if use.limit == "time_limit_s")
    assert used.used == pytest.approx(1.5 * plan.prediction.step_s)


def test_plans_made_before_there_was_a_limit_are_read():
    plan = solve(asked(), "integer").plan
    text = msgspec.json.decode(msgspec.json.encode(plan))
    del text["goal"]["background_limit"]
    assert msgspec.convert(text, Plan) == plan


@pytest.mark.parametrize("limit", [1.0, 0.5, float("inf"), float("nan")])
def test_a_limit_that_nothing_can_keep_is_refused(limit):
    with pytest.raises(InputError, match="more than 1"):
        make_goal(8, background_limit=limit)
    assert make_goal(8, background_limit=1.25).slowdown == 1.25
