"""Traces of a step: as predicted, and as recorded beside that."""

import json

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.device_kinds import slowed, with_profiles
from meshwright.planner.explain.step_trace import predicted_step, step_trace
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.recorded import (
    RecordedGroup,
    RecordedSpan,
    RecordedStep,
    RecordedSteps,
)
from meshwright.planner.simulate.trace_events import (
    TraceProcess,
    TraceSpan,
    TraceTrack,
    encode_trace,
)
from meshwright.planner.solve.evaluate import decisions_of, plan_by

from tests.strategies import chain_profile, cluster, linear
from tests.traces import check_trace, durations, tracks

MS = 1e-3
UNITS = ("a", "b", "c")


def planned(schedule="barrier", layouts=(), nodes=2, devices=2, inter=1e8):
    """(plan, profile, cluster) of three units on four devices; ``layouts`` of some of them."""
    profile = chain_profile([linear(name, 256, 256, MS) for name in UNITS])
    there = cluster(nodes, devices, inter=inter)
    model = CostModel(
        profile, there, Goal(batch=8), message_bytes=2**16, sliced=schedule == "priority"
    )
    world = nodes * devices
    options = {**{u.name: Layout(groups=world) for u in profile.units}, **dict(layouts)}
    decisions = tuple(Option(layout) for layout in options.values())
    return plan_by(model, decisions, schedule, EVERYTHING), profile, there


def events_of(*given):
    return json.loads(step_trace(*given))["traceEvents"]


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_the_predicted_trace_is_the_predicted_step(schedule):
    plan, profile, there = planned(schedule)
    events = events_of(plan, predicted_step(plan, profile, there))
    check_trace(events)
    took = durations(events)
    step_us = 1e6 * plan.prediction.step_s
    for rank in range(4):
        name = f"rank {rank}"
        assert took[name, "step, predicted"] == pytest.approx(step_us, rel=1e-6)
        worked = took[name, "computing, predicted"] + took[name, "optimizer, predicted"]
        assert worked == pytest.approx(1e6 * plan.prediction.compute_s, rel=1e-6)
        assert took[name, "links between nodes, predicted"] > 0
    spans = tracks(events)["rank 0", "computing, predicted"]
    assert [s["name"] for s in spans[:3]] == ["forward a", "forward b", "forward c"]


def test_a_rank_that_a_unit_leaves_idle_computes_less():
    plan, profile, there = planned(layouts={"b": Layout(groups=2)}.items())
    took = durations(events_of(plan, predicted_step(plan, profile, there)))
    assert took["rank 3", "computing, predicted"] < 0.8 * took["rank 0", "computing, predicted"]


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_ranks_of_unequal_speed_compute_as_long_as_their_devices_take(schedule):
    """Even shares, and each unit is slow somewhere else: the step is that of one rank."""
    plan, profile, there = planned(schedule, nodes=2, devices=1, inter=1e12)
    both = zip(slowed(profile, 2.0).units, slowed(profile, 0.5).units, strict=True)
    units = tuple(quick if slow.name == "b" else slow for slow, quick in both)
    other = msgspec.structs.replace(profile, units=units)
    joined = with_profiles(profile, {there.nodes[1].name: other}, there)
    model = CostModel(
        joined, there, Goal(batch=8), message_bytes=2**16, sliced=schedule == "priority"
    )
    plan = plan_by(model, decisions_of(plan), schedule, EVERYTHING)
    took = durations(events_of(plan, predicted_step(plan, joined, there)))
    assert took["rank 0", "step, predicted"] == pytest.approx(1e6 * plan.prediction.step_s)
    computed = [took[f"rank {rank}", "computing, predicted"] for rank in range(2)]
    updated = [took[f"rank {rank}", "optimizer, predicted"] for rank in range(2)]
    assert computed[1] + updated[1] == pytest.approx(1e6 * plan.prediction.compute_s, rel=1e-6)
    assert computed[0] < 0.9 * computed[1]


def test_of_many_ranks_one_of_each_kind_is_told():
    plan, profile, there = planned(nodes=40)
    names = {
        process for process, _ in tracks(events_of(plan, predicted_step(plan, profile, there)))
    }
    # A batch of 8 on 80 ranks leaves most without samples.
    assert names == {"rank 0 and 7 more alike", "rank 8 and 71 more alike"}


def recorded(rank=0, late=0.0):
    """Two steps of 10 ms: one computes for 6 ms, then waits for what it had sent at 2 and 3 ms."""
    span, found = RecordedSpan, {"computing": [], "waiting": [], "updating": [], "messages": []}
    for n in range(2):
        at = 0.5 + 0.0123 * n + late
        found["computing"].append(span(name="forward a", start_s=at, end_s=at + 6 * MS))
        found["waiting"].append(span(name="wait", start_s=at + 6 * MS, end_s=at + 9 * MS))
        found["updating"].append(span(name="update", start_s=at + 9 * MS, end_s=at + 10 * MS))
        for issued, end in ((2, 5), (3, 9)):
            found["messages"].append(
                span(name="slice", start_s=at + issued * MS, end_s=at + end * MS, message_bytes=7)
            )
    steps = tuple(
        RecordedStep(start_s=one.start_s, end_s=one.start_s + 10 * MS) for one in found["computing"]
    )
    group = RecordedGroup(label="exchange", ranks=(0, 2), messages=tuple(found.pop("messages")))
    return RecordedSteps(
        rank=rank, steps=steps, groups=(group,), **{key: tuple(v) for key, v in found.items()}
    )


def test_predicted_and_measured_steps_begin_together():
    plan, profile, there = planned()
    mine = [recorded(rank, late=0.1 * rank) for rank in (1, 0)]
    events = events_of(plan, predicted_step(plan, profile, there), mine)
    check_trace(events)
    found = tracks(events)
    assert next(iter(found))[0] == "rank 0"
    for rank in (0, 1):
        starts = [
            [s["ts"] for s in found[f"rank {rank}", f"step, {which}"]]
            for which in ("predicted", "measured")
        ]
        assert starts[0] == starts[1]
        assert starts[0][1] >= 1e6 * max(plan.prediction.step_s, 10 * MS)
    order = [track for process, track in found if process == "rank 0"]
    assert order[:2] == ["step, predicted", "step, measured"]
    at = order.index("links between nodes, predicted")
    assert order[at + 1] == "exchange between nodes, measured"


def test_messages_of_a_group_go_one_after_another():
    plan, profile, there = planned()
    events = events_of(plan, predicted_step(plan, profile, there), [recorded()])
    first, second = tracks(events)["rank 0", "exchange between nodes, measured"][:2]
    assert (first["ts"], first["dur"]) == pytest.approx((2000, 3000))
    # Issued a millisecond after the first, which had the link until 5 ms.
    assert (second["ts"], second["dur"]) == pytest.approx((5000, 4000))
    assert second["args"] == {"bytes": 7, "ranks": "0, 2", "behind_others_us": 2000.0}


def test_without_what_the_plan_was_made_from_there_is_what_was_measured():
    plan, _, _ = planned()
    found = tracks(events_of(plan, None, [recorded()]))
    assert ("rank 0", "exchange, measured") in found
    assert not any("predicted" in track for _, track in found)


def test_what_is_on_its_way_when_a_step_ends_goes_on_in_the_next():
    plan, _, _ = planned()
    one = recorded()
    late = RecordedSpan(name="late", start_s=0.508, end_s=0.514)
    group = RecordedGroup(label="exchange", ranks=(0, 1), messages=(late,))
    steps = (
        RecordedStep(start_s=0.5, end_s=0.51),
        RecordedStep(start_s=0.51, end_s=0.52),
    )
    made = RecordedSteps(
        rank=0, steps=steps, groups=(group,), computing=(), waiting=(), updating=one.updating
    )
    spans = tracks(events_of(plan, None, [made]))["rank 0", "exchange, measured"]
    assert [s["dur"] for s in spans] == pytest.approx([2000, 4000])


def test_spans_that_overlap_have_rows_of_their_own():
    spans = [TraceSpan("x", 0.0, 2e-3), TraceSpan("y", 1e-3, 3e-3), TraceSpan("z", 2e-3, 4e-3)]
    data = encode_trace([TraceProcess("p", [TraceTrack("t", spans)])], target="<&")
    found = json.loads(data)
    check_trace(found["traceEvents"])
    assert found["otherData"] == {"target": "<&"}
    assert {k: [s["name"] for s in v] for k, v in tracks(found["traceEvents"]).items()} == {
        ("p", "t"): ["x", "z"],
        ("p", "t (2)"): ["y"],
    }


def test_the_rules_are_held():
    """What breaks them is found."""
    spans = [TraceSpan("x", 0.0, 2e-3), TraceSpan("y", 2e-3, 3e-3)]
    made = json.loads(encode_trace([TraceProcess("p", [TraceTrack("t", spans)])]))["traceEvents"]
    check_trace(made)
    for change in (
        {"ts": 1999.0},  # overlaps in part
        {"ph": "B"},
        {"dur": -1.0},
        {"tid": 9},
        {"name": ""},
    ):
        with pytest.raises(AssertionError):
            check_trace([*made[:-1], {**made[-1], **change}])
    with pytest.raises(AssertionError):
        check_trace([{k: v for k, v in event.items() if k != "ts"} for event in made])
