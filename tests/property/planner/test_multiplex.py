"""Shared devices on random small plans: time is conserved, classes are devices."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.compute import backward_s, forward_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.ownership import group_samples
from meshwright.planner.multiplex.jobs import Assumptions, BackgroundJob, ForegroundJob
from meshwright.planner.multiplex.report import report
from meshwright.planner.multiplex.simulation import background_share, simulate_cluster
from meshwright.planner.solve.device_timelines import timelines
from meshwright.planner.solve.evaluate import evaluation

from tests.strategies import decided, up_to

SOME = settings(max_examples=60, deadline=None)


@st.composite
def steps(draw):
    """(cost model, decisions, schedule, timelines); steps that take no time are left out."""
    model, chosen = draw(decided())
    schedule = draw(st.sampled_from(["barrier", "priority"]))
    model = CostModel(
        model.profile, model.cluster, model.goal, micro_batches=model.micro_batches,
        message_bytes=20_000, sliced=schedule == "priority",
    )  # fmt: skip
    return model, chosen, schedule, timelines(model, chosen, schedule)


@st.composite
def assumptions(draw, step_s):
    speeds = st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0])
    return Assumptions(
        slowdown=1.0,
        piece_s=step_s * draw(st.floats(0.003, 0.7)),
        switch_s=step_s * draw(up_to(0.1)),
        idle_speed=draw(speeds),
        communicating_speed=draw(speeds),
    )


@SOME
@given(steps())
def test_devices_compute_what_their_units_cost(case):
    model, chosen, schedule, step = case
    done = evaluation(model, chosen, schedule=schedule)
    assert step.step_s == pytest.approx(done.prediction.step_s, rel=1e-9)
    noise = model.cluster.interference.compute_slowdown
    for kind in step.kinds:
        own = own_s(model, chosen, kind.positions[0])
        assert own * (1 - 1e-6) - 1e-12 <= kind.compute_s <= own * noise * (1 + 1e-6) + 1e-12


def own_s(model, chosen, position):
    """Seconds of a step in which the device at a position computes, from its own samples."""
    total = 0.0
    for k, option in enumerate(chosen):
        samples = group_samples(model.counts, option.layout)[position]
        if samples is None:
            continue
        unit, cost = model.profile.units[k], model.unit(k, option)
        most = max(s for s in group_samples(model.counts, option.layout) if s is not None)
        for seconds, busiest in ((forward_s, cost.forward_s), (backward_s, cost.backward_s)):
            whole = seconds(unit, option.style, option.layout.degree, most)
            own = seconds(unit, option.style, option.layout.degree, samples)
            total += model.micro_batches * (busiest * min(own / whole, 1) if whole else busiest)
        total += cost.update_s
    return total


@SOME
@given(st.data(), steps())
def test_time_is_conserved_and_classes_are_devices(data, case):
    model, _, _, step = case
    if step.step_s <= 0:
        return
    given_ = data.draw(assumptions(step.step_s))
    horizon_s = step.step_s * data.draw(st.floats(0.3, 4))
    extra = data.draw(st.integers(0, 2))
    job = ForegroundJob("fg", model.goal.batch, step, step)
    background = BackgroundJob("bg", 3, 0.1)
    run = simulate_cluster(model.world_size + extra, [job], [background], given_, horizon_s)
    found = report(run, bins=7)
    assert sorted(d for c in run.classes for d in c.devices) == list(range(run.devices))
    for one, figures in zip(run.classes, found.classes, strict=True):
        computing = [i for i, _, _ in one.computing]
        inside = [(f.start_s, f.end_s) for f in one.filled if f.pieces]
        for low, high in computing + inside:
            assert 0 <= low <= high <= horizon_s * (1 + 1e-12)
        for low, high in inside:  # never in the foreground's time
            for a, b in computing:
                assert min(high, b) - max(low, a) <= 1e-9 * step.step_s
        total = figures.foreground_s + figures.background_s + figures.idle_s
        assert total == pytest.approx(horizon_s, rel=1e-9)
        for device in one.devices:
            assert plain(step, device, given_, horizon_s) == (
                pytest.approx(figures.foreground_s, rel=1e-9, abs=1e-12),
                one.pieces,
            )
    busy = sum((m.foreground + m.background) * horizon_s / 7 for m in found.utilisation)
    told = sum((c.foreground_s + c.background_s) * len(c.devices) for c in found.classes)
    assert busy * run.devices == pytest.approx(told, rel=1e-6, abs=1e-12)


def plain(step, device, given_, horizon_s):
    """(seconds of the foreground, pieces of the background) on one device by itself, from event to
    event: a clock, and a state of the device after each of them."""
    mine = [k for k in step.kinds if device in k.positions]
    computing, talking = [], []
    for n in range(int(horizon_s / step.step_s) + 1):
        for kind in mine:
            for busy in kind.computing:
                computing.append((n * step.step_s + busy.start_s, n * step.step_s + busy.end_s))
            for busy in kind.communicating:
                talking.append((n * step.step_s + busy.start_s, n * step.step_s + busy.end_s))
    events = sorted({0.0, horizon_s, *(t for i in computing + talking for t in i if t < horizon_s)})
    foreground_s, pieces, done, ready, in_gap = 0.0, 0, 0.0, 0.0, False
    for low, high in pairwise(events):
        middle = (low + high) / 2
        if any(a <= middle < b for a, b in computing):
            foreground_s += high - low
            in_gap = False
            continue
        if not in_gap:
            in_gap, ready, done = True, low + given_.switch_s, 0.0
        communicates = any(a <= middle < b for a, b in talking)
        shared = any(a < horizon_s for a, _ in computing)  # some foreground computes here
        idle_speed = given_.idle_speed if shared else 1.0
        speed = given_.communicating_speed if communicates else idle_speed
        before = int(done / given_.piece_s + 1e-9)
        done += max(high - max(low, ready), 0.0) * speed
        pieces += int(done / given_.piece_s + 1e-9) - before
    return foreground_s, pieces


@SOME
@given(st.data(), steps())
def test_many_steps_come_to_the_steady_share(data, case):
    model, _, _, step = case
    if step.step_s <= 0:
        return
    given_ = data.draw(assumptions(step.step_s))
    job = ForegroundJob("fg", model.goal.batch, step, step)
    count = 30
    run = simulate_cluster(
        model.world_size, [job], [BackgroundJob("bg", 1, 1.0)], given_, count * step.step_s
    )
    for one in run.classes:
        kind = step.kinds[one.visits[0].kind]
        share = background_share(kind, step.step_s, given_)
        simulated = one.pieces * given_.piece_s / (count * step.step_s)
        # the first and the last gap are cut, and a step's last piece may fall to rounding
        assert simulated == pytest.approx(share, abs=2.0 / count + 1e-9)
