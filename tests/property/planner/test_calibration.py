"""Calibration on random problems: what a run shows of other speeds is predicted afterwards."""

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from meshwright.planner.explain.calibration import AGREES, calibrate
from meshwright.planner.explain.what_if import with_rates
from meshwright.planner.schema.report import Figures, RunReport, predicted_figures
from meshwright.planner.solve.evaluate import decisions_of, evaluate
from meshwright.planner.solve.solver import solve

from tests.problems import problem

SOME = settings(max_examples=12, deadline=None)
speeds = st.sampled_from((0.2, 0.5, 1.0, 2.0, 5.0))


def run_of(plan, profile, links):
    """The report of a run on the devices and links that are really there."""
    found = evaluate(
        profile, links, plan.goal, decisions_of(plan), plan.micro_batches, plan.placement,
        schedule=plan.schedule, message_bytes=plan.message_bytes,
    )  # fmt: skip
    measured = Figures(
        step_s=found.compute_s + found.blocking_s + found.exposed_s,
        blocking_s=found.blocking_s, exposed_s=found.exposed_s,
    )  # fmt: skip
    return RunReport(
        target=plan.target, world_size=plan.world_size, steps=20, measured=measured,
        predicted=predicted_figures(plan.prediction),
        data_parallel=predicted_figures(plan.baseline),
    )  # fmt: skip


@SOME
@given(st.integers(0, 10**6), speeds)
def test_the_links_that_were_misdescribed_are_found_out(seed, times):
    made = problem(seed, most=400)
    plan = solve(made, "heuristic").plan
    assume(plan is not None)
    profile, links = made.profile, made.cluster
    true = with_rates(links, "inter", lambda rate: rate / times)
    run = run_of(plan, profile, true)
    found = calibrate(plan, run, profile, links)
    assert found.profile == profile
    before = abs(found.predicted.step_s / run.measured.step_s - 1)
    after = abs(found.calibrated.step_s / run.measured.step_s - 1)
    assert after <= max(before / 2, AGREES) + 1e-9
    if before <= AGREES / 3 and times == 1.0:
        assert found.cluster == links
    # What it hands on is what it says of it: a second look finds nothing to correct.
    again = msgspec.structs.replace(plan, prediction=evaluated(plan, found))
    second = msgspec.structs.replace(run, predicted=predicted_figures(again.prediction))
    if after <= AGREES / 3:
        assert calibrate(again, second, found.profile, found.cluster).changes == ()


def evaluated(plan, found):
    return evaluate(
        found.profile, found.cluster, plan.goal, decisions_of(plan), plan.micro_batches,
        plan.placement, schedule=plan.schedule, message_bytes=plan.message_bytes,
    )  # fmt: skip
