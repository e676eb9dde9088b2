"""Jobs that share devices, by hand: gaps of a burst, what a background does in them, queues."""

import json

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.multiplex.jobs import (
    Assumptions,
    BackgroundJob,
    best_background,
    foreground,
)
from meshwright.planner.multiplex.report import report, trace
from meshwright.planner.multiplex.simulation import background_share, fill, simulate_cluster
from meshwright.planner.schema.cluster import Device
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.device_timelines import timelines
from meshwright.planner.solve.evaluate import evaluation

from tests.strategies import chain_profile, cluster, linear
from tests.traces import check_trace, durations

MS = 1e-3
FREE = {"slowdown": 1.0, "switch_s": 1 * MS, "idle_speed": 1.0, "communicating_speed": 1.0}
WIRES = cluster(2, inter=1e15, intra=1e15, latency_s=0.0)
"""Two devices, between which communication takes next to nothing."""
LAYOUTS = {"wide": Layout(groups=2), "narrow": Layout(groups=1)}


def burst(goal=4):
    """Two units on two devices: forward takes a millisecond for each sample, backward two. With
    four samples the wide one computes on both, the narrow one on the first alone:

        device 0   F F | f f f f | b b b b b b b b | B B B B      18 ms
        device 1   F F |           12 ms           | B B B B       6 ms, and a gap of 12
    """
    units = [linear("wide", seconds_per_sample=MS), linear("narrow", seconds_per_sample=MS)]
    model = CostModel(chain_profile(units), WIRES, Goal(batch=goal))
    chosen = tuple(Option(LAYOUTS.get(u.name, Layout(groups=2))) for u in model.profile.units)
    return model, chosen


def test_a_burst_leaves_the_second_device_a_gap():
    step = timelines(*burst(), "barrier")
    assert step.step_s == pytest.approx(18 * MS)
    first, second = step.kinds
    assert (first.positions, second.positions) == ((0,), (1,))
    assert first.compute_s == pytest.approx(18 * MS)
    assert second.compute_s == pytest.approx(6 * MS)
    assert second.computing[0].end_s == pytest.approx(2 * MS)
    assert second.computing[1].start_s == pytest.approx(14 * MS)


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({}, 2),  # 12 ms, 1 to switch: two pieces of 5 ms, and 1 ms lost
        ({"switch_s": 3 * MS}, 1),  # 9 ms
        ({"switch_s": 8 * MS}, 0),  # 4 ms: shorter than a piece
        ({"idle_speed": 0.5, "communicating_speed": 0.5}, 1),  # 11 ms at half speed
        ({"piece_s": 1 * MS}, 11),
        ({"piece_s": 12 * MS}, 0),
    ],
)
def test_whole_pieces_of_a_background_fit_into_the_gap(changes, pieces):
    given = Assumptions(**({"piece_s": 5 * MS} | FREE | changes))
    step = timelines(*burst(), "barrier")
    share = [background_share(kind, step.step_s, given) for kind in step.kinds]
    assert share[0] == 0
    assert share[1] == pytest.approx(pieces * given.piece_s / (18 * MS))


def test_a_background_is_slower_while_the_foreground_communicates():
    given = Assumptions(
        piece_s=1.0, switch_s=0.0, slowdown=1.0, idle_speed=1.0, communicating_speed=0.5
    )
    # 2 s at full speed, 4 s at half, 4 s at full: 8 s of its own
    found = fill((0.0, 10.0), [(2.0, 6.0)], given)
    assert (found.pieces, found.start_s, found.end_s) == (8, 0.0, pytest.approx(10.0))
    # of 7 s, 2 are done at the second 2, 2 more at the second 6, and the rest at full speed
    assert fill((0.0, 9.5), [(2.0, 6.0)], given).end_s == pytest.approx(9.0)
    stopped = msgspec.structs.replace(given, communicating_speed=0.0)
    assert fill((0.0, 10.0), [(2.0, 6.0)], stopped).pieces == 6
    assert fill((0.0, 6.0), [(2.0, 6.0)], stopped).end_s == pytest.approx(2.0)


def jobs(slowdown=1.0):
    model, chosen = burst()
    return foreground("fg", model, chosen, "barrier", slowdown)


def test_throughput_of_a_hand_computed_cluster():
    job = jobs()._replace(data_parallel_samples_s=100.0)
    background = BackgroundJob("bg", 10, 50 * MS)
    given = Assumptions(**({"piece_s": 5 * MS} | FREE))
    run = simulate_cluster(2, [job], [background], given, 180 * MS)
    found = report(run, bins=18)
    (front,), (behind,) = found.foregrounds, found.backgrounds
    assert front.samples_per_s == pytest.approx(4 / 0.018)
    # ten steps, of each 10 ms on one of two devices
    assert behind.share == pytest.approx(100 / 360)
    assert behind.samples_per_s == pytest.approx(10 * 100 / 50 / 0.18)
    assert found.ratio == pytest.approx((4 / 0.018 + 1000 / 9) / 100)
    assert found.bounded_ratio == pytest.approx(4 / 0.018 / 100 + 100 / 360)
    for one in found.classes:
        assert one.foreground_s + one.background_s + one.idle_s == pytest.approx(0.18)
    # one step over bins of 10 ms: device 1 computes until 2 ms, works for the background from 3
    assert found.utilisation[0].foreground == pytest.approx((10 + 2) / 20)
    assert found.utilisation[0].background == pytest.approx(7 / 20)


def test_the_foreground_is_slowed_beside_a_background_only():
    job = jobs(slowdown=1.1)
    given = Assumptions(**({"piece_s": 5 * MS} | FREE | {"slowdown": 1.1}))
    alone = report(simulate_cluster(2, [job], [], given))
    shared = report(simulate_cluster(2, [job], [BackgroundJob("bg", 1, 1.0)], given))
    assert alone.foregrounds[0].step_s == pytest.approx(18 * MS)
    assert shared.foregrounds[0].step_s == pytest.approx(1.1 * 18 * MS)
    assert shared.foregrounds[0].slowdown == pytest.approx(1.1)


def test_data_parallelism_by_itself_is_as_quick_as_itself():
    model, _ = burst()
    spread = msgspec.structs.replace(model.profile, spread=0.2)
    model = CostModel(spread, WIRES, model.goal)
    predicted = evaluation(model, model.baseline).prediction
    job = foreground("fg", model, model.baseline, "barrier", 1.0)
    job = job._replace(data_parallel_samples_s=predicted.samples_per_s)
    assert report(simulate_cluster(2, [job])).ratio == pytest.approx(1.0)
    slowed = foreground("fg", model, model.baseline, "barrier", 1.1)
    assert slowed.shared.step_s == pytest.approx(1.1 * predicted.step_s)


def test_jobs_wait_for_devices_by_priority():
    late = jobs()._replace(name="late", arrival_s=9 * MS, steps=1, priority=2)
    every = [
        jobs()._replace(name="low", steps=2),
        jobs()._replace(name="high", steps=1, priority=1),
        late,
    ]
    run = simulate_cluster(2, every, horizon_s=100 * MS)
    starts = {run.foregrounds[r.job].name: r.start_s for r in run.runs}
    # the higher one first; the late one is before the low one although it came last
    assert starts == {
        "high": 0.0, "late": pytest.approx(18 * MS), "low": pytest.approx(36 * MS),
    }  # fmt: skip
    assert report(run).ratio is None  # they did not run all the time
    never = simulate_cluster(2, [jobs(), jobs()._replace(name="second")], horizon_s=50 * MS)
    assert never.waiting == (1,)
    assert report(never).foregrounds[1].waited


def test_backgrounds_are_dealt_to_the_devices_that_are_idle_most():
    given = Assumptions(**({"piece_s": 1 * MS} | FREE))
    one = BackgroundJob("one", 1, 1.0, copies=1)
    two = BackgroundJob("two", 1, 1.0, copies=2, priority=1)
    run = simulate_cluster(4, [jobs()], [one, two], given)
    # devices 2 and 3 have no foreground, device 1 a gap
    assert {c.devices: c.background for c in run.classes} == {
        (0,): None, (1,): 0, (2, 3): 1,
    }  # fmt: skip


def test_a_thousand_devices_are_few_classes():
    units = [linear("wide", seconds_per_sample=MS), linear("narrow", seconds_per_sample=MS)]
    model = CostModel(chain_profile(units), cluster(1024), Goal(batch=1024))
    chosen = tuple(
        Option(Layout(groups=64 if u.name == "narrow" else 1024)) for u in model.profile.units
    )
    job = foreground("fg", model, chosen, "barrier", 1.0)
    run = simulate_cluster(1024, [job], [BackgroundJob("bg", 1, 1.0)])
    assert [len(c.devices) for c in run.classes] == [64, 960]


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="for 2 devices and the cluster has 1"):
        simulate_cluster(1, [jobs()])
    with pytest.raises(InputError, match="horizon of -1"):
        simulate_cluster(2, [jobs()], horizon_s=-1.0)
    with pytest.raises(InputError, match="steps of fg: ask for at most"):
        simulate_cluster(2, [jobs()], horizon_s=1e6)


def test_the_best_background_is_the_quickest_that_fits():
    unit = linear("a", saved=1000.0)
    # twice the samples in less than twice the time up to 8; beyond, nothing is gained
    seconds = Curve(x=(1.0, 8.0, 16.0), y=(1.0, 2.0, 4.0))
    share = msgspec.structs.replace(unit.shares[0], forward=seconds, backward=seconds)
    unit = msgspec.structs.replace(unit, shares=(share,))
    profile = msgspec.structs.replace(chain_profile([unit]), batches=(1, 8, 16))
    roomy = best_background(profile, Device(name="d", memory_bytes=2**30))
    assert (roomy.batch, roomy.samples_per_s) == (8, pytest.approx(2.0))
    held = 2**30 - roomy.peak_bytes + 1
    assert best_background(profile, Device(name="d", memory_bytes=2**30), "sgd", held).batch == 1
    with pytest.raises(InputError, match="are left on d"):
        best_background(profile, Device(name="d", memory_bytes=2**30), "sgd", 2**30)


def test_the_trace_holds_every_span():
    given = Assumptions(**({"piece_s": 5 * MS} | FREE))
    run = simulate_cluster(2, [jobs()], [BackgroundJob("bg", 1, 1.0)], given, 36 * MS)
    events = json.loads(trace(run))["traceEvents"]
    check_trace(events)
    took = durations(events)
    assert took["device 0", "foreground"] == pytest.approx(36e3, rel=1e-6)
    assert took["device 1", "foreground"] == pytest.approx(12e3, rel=1e-6)
    assert took["device 1", "background"] == pytest.approx(20e3, rel=1e-6)


def test_a_step_is_the_one_that_is_predicted():
    model, chosen = burst()
    predicted = evaluation(model, chosen).prediction
    step = timelines(model, chosen, "barrier")
    assert step.step_s == predicted.step_s
    assert step.peak_bytes == max(predicted.peak_bytes)
