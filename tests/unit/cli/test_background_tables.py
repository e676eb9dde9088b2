"""What people read of a plan with a background job, and of a run beside one."""

import msgspec
from meshwright.cli.render.comparisons import measured_rows
from meshwright.cli.render.documents import prediction_table
from meshwright.executor.background.law import LIMIT
from meshwright.executor.launch.background import over_step_limit
from meshwright.planner.schema.goal import BACKGROUND_LIMIT, Goal
from meshwright.planner.schema.report import BackgroundFigures, Figures, RunReport
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear


def plan_with(**goal):
    profile = chain_profile([linear("a", 32, 32, 1e-3)])
    return solve(Problem(profile, cluster(2), Goal(batch=8, **goal)), "heuristic").plan


def test_a_plan_shows_the_most_that_a_step_may_take():
    names = list(
        prediction_table(plan_with(background=True, background_limit=1.25)).columns[0].cells
    )
    assert names[1] == "  at most, with a background job (1.25 times)"
    assert "background" not in " ".join(prediction_table(plan_with()).columns[0].cells)


def test_a_run_beside_a_background_is_judged_by_both():
    job = BackgroundFigures(
        open_share=0.5,
        cpu_s=1.0,
        during_steps_s=4.0,
        during_steps_open_share=0.5,
        during_steps_cpu_s=1.0,
        stops=9,
        stopped_shares={"limit": 0.5},
        steps=40,
        slowdown=1.15,
        undisturbed_s=0.102,
        limit=1.2,
    )
    report = RunReport(
        target="test", world_size=2, steps=40, predicted=Figures(step_s=0.1),
        measured=Figures(step_s=0.117), data_parallel=Figures(step_s=0.2), background=job,
    )  # fmt: skip
    rows = measured_rows(report)
    assert rows[0] == ("step time, background job held", "100.00 ms", "102.00 ms", "1.02")
    with_it = "  with it, on average (1.15 times that, limit 1.2)"
    assert rows[1] == (with_it, "-", "117.30 ms", "")
    none = msgspec.structs.replace(job, steps=0)
    assert measured_rows(msgspec.structs.replace(report, background=none))[0][2] == "-"
    alone = msgspec.structs.replace(report, background=None)
    assert measured_rows(alone)[0] == ("step time", "100.00 ms", "117.00 ms", "1.17")


def test_a_step_limit_that_the_background_may_break_is_told():
    plan = plan_with(time_limit_s=10.0)
    step_s = plan.prediction.step_s
    tight = msgspec.structs.replace(plan.goal, time_limit_s=1.05 * step_s)
    plan = msgspec.structs.replace(plan, goal=tight)
    assert "--background-limit 1.1" in over_step_limit(plan, 1.1)
    assert over_step_limit(plan, 1.04) is None
    assert over_step_limit(plan_with(), 2.0) is None


def test_planner_and_pacer_have_one_default():
    assert LIMIT == BACKGROUND_LIMIT == Goal(batch=1).background_limit
