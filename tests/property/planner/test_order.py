"""The order of slices: hand-made cases, and what must hold for every order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.simulate.slicing import (
    PACKED_BYTES,
    ReadyGroup,
    SendSlot,
    cut,
    send_order,
)

whole = st.integers(0, 8).map(float)


@st.composite
def many_groups(draw):
    count = draw(st.integers(1, 6))
    links = draw(st.integers(1, 2))
    return [
        ReadyGroup(
            draw(whole),
            k,
            tuple(draw(st.lists(whole, max_size=4))),
            draw(st.integers(0, links - 1)),
        )
        for k in range(count)
    ]


def starts(groups, slots):
    """When each slot starts, if each link takes its slots as soon as it is free."""
    free: dict[int, float] = {}
    found = []
    for slot in slots:
        group = groups[slot.group]
        at = max(free.get(group.link, 0.0), group.ready_s)
        free[group.link] = at + group.slices[slot.number]
        found.append(at)
    return found


def test_an_urgent_unit_goes_between_the_slices_of_a_less_urgent_one():
    late = ReadyGroup(0.0, 1, (2.0, 2.0, 2.0))
    early = ReadyGroup(3.0, 0, (1.0, 1.0))
    first = [SendSlot(0, 0), SendSlot(0, 1), SendSlot(1, 0), SendSlot(1, 1), SendSlot(0, 2)]
    assert send_order([late, early]) == first
    assert send_order([late, early], urgent=False) == sorted(first)
    assert send_order([late, early], sliced=False) == sorted(first)


def test_links_do_not_wait_for_each_other():
    groups = [ReadyGroup(0.0, 1, (9.0, 9.0), link=0), ReadyGroup(1.0, 0, (1.0,), link=1)]
    assert send_order(groups) == [SendSlot(0, 0), SendSlot(1, 0), SendSlot(0, 1)]


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
            if rival.link == mine.link and rival.ready_s <= start:
                assert rival.urgency >= mine.urgency
            if other.group == slot.group:
                assert other.number > slot.number


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
