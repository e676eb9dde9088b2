"""The order of slices: hand-made cases, and what must hold for every order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.exchange import PACKED_BYTES
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.schedule import COMPUTE, Message, Step, Work
from meshwright.planner.simulate.slicing import (
    ReadyGroup,
    SendSlot,
    cut,
    send_order,
)

whole = st.integers(0, 8).map(float)


@st.composite
def many_groups(draw):
    count = draw(st.integers(1, 6))
    return [
        ReadyGroup(
            draw(whole),
            k,
            tuple(draw(st.lists(whole, max_size=4))),
        )
        for k in range(count)
    ]


def starts(groups, slots):
    """When each slot starts, if the link takes its slots as soon as it is free."""
    free, found = 0.0, []
    for slot in slots:
        group = groups[slot.group]
        found.append(max(free, group.ready_s))
        free = found[-1] + group.slices[slot.number]
    return found


def test_an_urgent_unit_goes_between_the_slices_of_a_less_urgent_one():
    late = ReadyGroup(0.0, 1, (2.0, 2.0, 2.0))
    early = ReadyGroup(3.0, 0, (1.0, 1.0))
    first = [SendSlot(0, 0), SendSlot(0, 1), SendSlot(1, 0), SendSlot(1, 1), SendSlot(0, 2)]
    assert send_order([late, early]) == first
    assert send_order([late, early], urgent=False) == sorted(first)


@settings(max_examples=300, deadline=None)
@given(many_groups())
def test_no_slice_waits_for_a_less_urgent_one(groups):
    slots = send_order(groups)
    at = starts(groups, slots)
    assert sorted(slots) == [
        SendSlot(i, n) for i, m in enumerate(groups) for n in range(len(m.slices))
    ]
    for i, (slot, start) in enumerate(zip(slots, at, strict=True)):
        mine = groups[slot.group]
        for other in slots[i + 1 :]:
            rival = groups[other.group]
            if rival.ready_s <= start:
                assert rival.urgency >= mine.urgency
            if other.group == slot.group:
                assert other.number > slot.number


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4), st.integers(0, 8)), max_size=6))
def test_the_simulation_of_a_step_sends_in_that_order(units):
    """Units are given by the seconds of backward, their slices, and the seconds of a slice."""
    # No slice ends when a backward does: which comes first then is not said.
    seconds = [slice_s + 1 / 64 for _, _, slice_s in units]
    work = [Work(COMPUTE, k, "backward", float(units[k][0]), frees=True) for k in range(len(units))]
    after = Work(COMPUTE, 0, "forward", 1e6)
    messages = [
        Message((k,), "inter", seconds[k], k)
        for k, unit in enumerate(units)
        for _ in range(unit[1])
    ]
    step = Step((*reversed(work), after), tuple(messages), "priority")
    spans = [span for span in simulate(step, steps=1).spans if span.message >= 0]
    groups = [
        ReadyGroup(float(sum(b for b, _, _ in units[k:])), k, (seconds[k],) * count)
        for k, (_, count, _) in enumerate(units)
    ]
    assert [span.unit for span in spans] == [slot.group for slot in send_order(groups)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 20 * PACKED_BYTES), max_size=6), st.integers(2**12, 8 * PACKED_BYTES)
)
def test_slices_hold_everything_once_and_none_is_too_large(sizes, limit):
    held = dict.fromkeys(range(len(sizes)), 0.0)
    for spec in cut(sizes, limit):
        assert sum(sizes[i] for i in spec.parameters) / spec.parts <= limit
        assert spec.parts == 1 or len(spec.parameters) == 1
        for i in spec.parameters:
            held[i] += 1 / spec.parts
    for i, share in held.items():
        assert abs(share - (sizes[i] > 0)) < 1e-9
