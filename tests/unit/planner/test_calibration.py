"""A run corrects what it contradicts: bandwidths and computing, by hand-made cases."""

import msgspec
import pytest
from meshwright.planner.explain.calibration import LEAST_STEPS, calibrate
from meshwright.planner.schema.cluster import CollectiveCurve, StepOverhead
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.report import Figures, RunReport, predicted_figures
from meshwright.planner.solve.evaluate import decisions_of, evaluate, make_plan

from tests.strategies import chain_profile, cluster, linear, norm

RATE = 125e6
# Of a linear unit of 512 by 512, which two ranks send each other in an all-reduce.
BYTES = 4 * 512 * 512
SAMPLES = 8


def report_of(plan, measured, **changes):
    """The report of a run of the plan that was measured so."""
    predicted = predicted_figures(plan.prediction)
    given = {"target": plan.target, "world_size": plan.world_size, "steps": 20} | changes
    return RunReport(
        predicted=predicted, measured=measured,
        data_parallel=predicted_figures(plan.baseline), **given,
    )  # fmt: skip


def figures(compute_s=0.0, blocking_s=0.0, exposed_s=0.0):
    step_s = compute_s + blocking_s + exposed_s
    return Figures(step_s=step_s, blocking_s=blocking_s, exposed_s=exposed_s)


def exposed_case(**how):
    """One unit on two hosts: nothing hides its exchange. (plan, profile, cluster)"""
    profile = chain_profile([linear("fc", 512, 512, 1e-4)], updates=[("sgd", 1e-9)])
    links = cluster(2, inter=RATE, latency_s=0.0, **how)
    return make_plan(profile, links, Goal(batch=2 * SAMPLES)), profile, links


def hidden_case():
    """The same behind a unit without parameters, whose backward of 8 ms hides what is sent then."""
    profile = chain_profile([norm("norm", 1e-3), linear("fc", 512, 512, 1e-5)])
    links = cluster(2, inter=RATE, latency_s=0.0)
    return make_plan(profile, links, Goal(batch=2 * SAMPLES)), profile, links


def compute_s(times=1.0):
    # Forward, twice that for backward, and the update.
    return times * (3 * SAMPLES * 1e-4 + BYTES * 1e-9)


@pytest.mark.parametrize("times", [4.0, 0.2])
def test_a_link_that_was_misdescribed(times):
    plan, profile, links = exposed_case()
    assert plan.prediction.exposed_s == pytest.approx(BYTES / RATE)
    measured = figures(compute_s(), 0.0, times * BYTES / RATE)
    found = calibrate(plan, report_of(plan, measured), profile, links)
    level = found.cluster.level("inter")
    assert level.bytes_per_s == pytest.approx(RATE / times, rel=0.01)
    assert found.calibrated.step_s == pytest.approx(measured.step_s, rel=0.005)
    (change,) = found.changes
    assert change.part == "inter"
    assert found.cluster.calibrated == (change.sentence,)
    assert found.profile == profile
    # What the next plan of the same decisions predicts.
    again = evaluate(found.profile, found.cluster, plan.goal, decisions_of(plan))
    assert again.step_s == found.calibrated.step_s


def test_what_is_said_of_a_link():
    plan, profile, links = exposed_case()
    run = report_of(plan, figures(compute_s(), 0.0, 4 * BYTES / RATE))
    found = calibrate(plan, run, profile, links)
    sentence = "links between nodes carry 250 Mbit/s, not 1.00 Gbit/s, by a run of test on 2 ranks"
    assert found.changes[0].sentence == sentence
    assert found.remarks == ()


def test_a_device_that_is_slower_than_profiled():
    plan, profile, links = exposed_case()
    measured = figures(compute_s(1.5), 0.0, BYTES / RATE)
    found = calibrate(plan, report_of(plan, measured), profile, links)
    assert found.cluster == links
    assert [change.part for change in found.changes] == ["compute"]
    whole, before = found.profile.unit("fc").whole, profile.unit("fc").whole
    assert whole.forward(8) == pytest.approx(1.5 * before.forward(8), rel=0.005)
    assert whole.backward(8) == pytest.approx(1.5 * before.backward(8), rel=0.005)
    assert found.profile.update_seconds_per_byte("sgd") == pytest.approx(1.5e-9, rel=0.005)
    assert found.profile.calibrated[0].startswith("computing takes 1.50 times as long as assumed")


def test_computing_that_was_quicker_is_said_as_such():
    plan, profile, links = exposed_case()
    measured = figures(compute_s(0.8), 0.0, BYTES / RATE)
    (change,) = calibrate(plan, report_of(plan, measured), profile, links).changes
    assert change.times == pytest.approx(0.8, rel=0.005)
    assert change.sentence.startswith("computing is 1.25 times as fast as assumed")


def test_both_at_once():
    plan, profile, links = exposed_case()
    measured = figures(compute_s(2.0), 0.0, 3 * BYTES / RATE)
    found = calibrate(plan, report_of(plan, measured), profile, links)
    assert found.cluster.level("inter").bytes_per_s == pytest.approx(RATE / 3, rel=0.01)
    times = {change.part: change.times for change in found.changes}
    assert times == pytest.approx({"compute": 2.0, "inter": 3.0}, rel=0.01)


def test_a_run_that_agrees_changes_nothing():
    plan, profile, links = exposed_case()
    measured = figures(1.03 * compute_s(), 0.0, 1.03 * BYTES / RATE)
    found = calibrate(plan, report_of(plan, measured), profile, links)
    assert (found.profile, found.cluster, found.changes) == (profile, links, ())
    assert found.calibrated == found.predicted == predicted_figures(plan.prediction)


def test_curves_move_with_their_link_and_latency_stays():
    sizes = (1e4, 1e8)
    curve = CollectiveCurve(
        collective="all_reduce", ranks=2, latency_s=1e-3, bytes_per_s=RATE,
        seconds=Curve(x=sizes, y=tuple(1e-3 + size / RATE for size in sizes)),
    )  # fmt: skip
    plan, profile, links = exposed_case(curves=(curve,))
    assert plan.prediction.exposed_s == pytest.approx(1e-3 + BYTES / RATE)
    measured = figures(compute_s(), 0.0, 1e-3 + 5 * BYTES / RATE)
    found = calibrate(plan, report_of(plan, measured), profile, links).cluster.level("inter")
    assert found.curves[0].latency_s == 1e-3
    assert found.curves[0].seconds(1e8) == pytest.approx(1e-3 + 5e8 / RATE, rel=0.01)
    assert found.curves[0].bytes_per_s == pytest.approx(RATE / 5, rel=0.01)


def test_links_that_were_fast_enough_are_at_least_so_fast():
    plan, profile, links = hidden_case()
    slow = msgspec.structs.replace(links.level("inter"), bytes_per_s=RATE / 5)
    links = msgspec.structs.replace(links, levels=(links.levels[0], slow))
    plan = make_plan(profile, links, plan.goal)
    assert plan.prediction.exposed_s > 0.03
    own_s = plan.prediction.compute_s
    found = calibrate(plan, report_of(plan, figures(own_s)), profile, links)
    # Sent during the 8 ms of backward and the 2% of a step by which a wait hardly shows.
    least = BYTES / (8e-3 + 0.02 * own_s)
    assert found.cluster.level("inter").bytes_per_s == pytest.approx(least, rel=0.01)
    assert "carry at least " in found.changes[0].sentence


def test_links_that_nobody_waits_for_are_left_alone():
    plan, profile, links = hidden_case()
    links = msgspec.structs.replace(
        links, levels=(links.levels[0], msgspec.structs.replace(links.levels[1], bytes_per_s=1e9))
    )
    plan = make_plan(profile, links, plan.goal)
    measured = figures(1.5 * plan.prediction.compute_s)
    found = calibrate(plan, report_of(plan, measured), profile, links)
    assert found.cluster == links
    assert [change.part for change in found.changes] == ["compute"]
    # 12 ms of backward at the speed found, and twice the 2% by which a wait hardly shows.
    slowest = 8 * BYTES / (12e-3 + 0.04 * measured.step_s) / 1e6
    (remark,) = found.remarks
    assert remark.startswith("Hardly any communication between nodes was waited for: ")
    assert float(remark.split("slower than ")[1].split()[0]) == pytest.approx(slowest, rel=0.01)


def test_waits_shorter_than_latency_are_not_the_bandwidth():
    plan, profile, links = exposed_case()
    late = msgspec.structs.replace(links.level("inter"), latency_s=0.05)
    links = msgspec.structs.replace(links, levels=(links.levels[0], late))
    plan = make_plan(profile, links, plan.goal)
    found = calibrate(plan, report_of(plan, figures(compute_s(), 0.0, 0.01)), profile, links)
    assert found.cluster == links
    assert "less than predicted without any bytes to move (100.0" in found.remarks[0]


def two_levels():
    """Hosts of two devices: one unit divided inside them, its gradients exchanged between them."""
    profile = chain_profile([linear("fc", 512, 512, 1e-4)], bytes_per_sample=1e6, features=512)
    links = cluster(2, 2, inter=RATE, intra=1e9, latency_s=0.0)
    whole = Option(data_parallel(4))
    chosen = [whole, Option(Layout(groups=2, degree=2), "column"), whole]
    return profile, links, chosen


def test_blocking_and_exposed_communication_tell_their_own_links():
    profile, links, chosen = two_levels()
    goal = Goal(batch=32)
    plan = make_plan(profile, links, goal, chosen)
    assert plan.prediction.blocking_s > 0
    assert plan.prediction.exposed_s > 0
    inside, between = links.levels
    true = msgspec.structs.replace(
        links,
        levels=(
            msgspec.structs.replace(inside, bytes_per_s=inside.bytes_per_s / 3),
            msgspec.structs.replace(between, bytes_per_s=between.bytes_per_s * 2),
        ),
    )
    found = make_plan(profile, true, goal, chosen).prediction
    measured = figures(found.compute_s, found.blocking_s, found.exposed_s)
    made = calibrate(plan, report_of(plan, measured), profile, links)
    for name in ("intra", "inter"):
        rate = true.level(name).bytes_per_s
        assert made.cluster.level(name).bytes_per_s == pytest.approx(rate, rel=0.02)
    assert made.profile == profile


def test_links_that_a_plan_does_not_use_are_not_told():
    profile, links, _ = two_levels()
    plan = make_plan(profile, links, Goal(batch=32))
    measured = figures(plan.prediction.compute_s, 0.0, 2 * plan.prediction.exposed_s)
    found = calibrate(plan, report_of(plan, measured), profile, links)
    assert found.cluster.level("intra") == links.level("intra")
    assert any("tells nothing of links inside nodes" in text for text in found.remarks)


def test_a_single_device_has_no_links_to_correct():
    profile = chain_profile([linear("fc", 512, 512, 1e-4)])
    plan = make_plan(profile, cluster(1), Goal(batch=8))
    measured = figures(0.8 * plan.prediction.compute_s)
    found = calibrate(plan, report_of(plan, measured), profile, cluster(1))
    assert found.calibrated.step_s == pytest.approx(measured.step_s, rel=0.005)
    assert found.remarks == ()


def test_calibrated_twice_says_both():
    plan, profile, links = exposed_case()
    run = report_of(plan, figures(compute_s(), 0.0, 4 * BYTES / RATE))
    first = calibrate(plan, run, profile, links)
    plan = make_plan(first.profile, first.cluster, plan.goal)
    run = report_of(plan, figures(compute_s(), 0.0, 2 * BYTES / RATE))
    second = calibrate(plan, run, first.profile, first.cluster)
    assert second.cluster.level("inter").bytes_per_s == pytest.approx(RATE / 2, rel=0.01)
    assert len(second.cluster.calibrated) == 2


FAST = figures(compute_s(), 0.0, BYTES / RATE)


@pytest.mark.parametrize(
    ("measured", "changes", "sentence"),
    [
        (FAST, {"target": "other"}, "of another plan, its model is other and the plan's test"),
        (FAST, {"world_size": 4}, "its number of ranks is 4 and the plan's 2"),
        (FAST, {"steps": LEAST_STEPS - 1}, "has 4 measured steps.*--steps 5 or more"),
        (figures(), {}, "leaves no time to compute"),
        (figures(0.0, 0.0, 0.1), {}, "waits of 100.00 ms, which leaves no time to compute"),
        (Figures(step_s=0.1), {}, "does not say how long ranks waited"),
        (figures(compute_s(), 0.0, 200 * BYTES / RATE), {}, "no factor up to 100 explains"),
        (figures(compute_s(200.0), 0.0, BYTES / RATE), {}, "no factor up to 100 explains"),
    ],
)
def test_a_report_that_tells_nothing_is_refused(measured, changes, sentence):
    plan, profile, links = exposed_case()
    with pytest.raises(InputError, match=sentence):
        calibrate(plan, report_of(plan, measured, **changes), profile, links)


def test_a_probe_of_a_busy_machine_is_told_from_a_wrong_device():
    """What the executor takes was measured as more than all that the run computed."""
    plan, profile, links = exposed_case(overhead=StepOverhead(step_s=5 * compute_s()))
    run = report_of(plan, figures(2 * compute_s(), 0.0, BYTES / RATE))
    with pytest.raises(InputError, match=r"the executor's own work alone .* probe, plan and"):
        calibrate(plan, run, profile, links)


def test_a_report_of_another_plan_is_refused():
    plan, profile, links = exposed_case()
    other = make_plan(profile, links, Goal(batch=4 * SAMPLES))
    with pytest.raises(InputError, match=r"its prediction is .* and the plan's"):
        calibrate(plan, report_of(other, FAST), profile, links)


def test_other_documents_than_the_plans_are_refused():
    plan, profile, links = exposed_case()
    run = report_of(plan, FAST)
    with pytest.raises(InputError, match="has 4 devices and the plan is for 2"):
        calibrate(plan, run, profile, cluster(4))
    with pytest.raises(InputError, match=r"is predicted to take .* and the plan says"):
        calibrate(plan, run, profile, cluster(2, inter=RATE / 2, latency_s=0.0))
    with pytest.raises(InputError, match="the profile is of another model"):
        calibrate(plan, run, chain_profile([linear("a")]), links)
