"""What leaves in which bucket, and when."""

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.step_time import LINKS, empty_chain
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.plan import ScheduleName
from meshwright.planner.simulate.events import Simulation, simulate
from meshwright.planner.simulate.rank_classes import simulate_decisions
from meshwright.planner.simulate.schedule import (
    Message,
    Step,
    messages_of,
    pack_gradients,
    slice_messages,
    step_of,
    work_of,
)

from tests.strategies import chain_profile, cluster, linear

MIB = 2**20


def buckets(model, decisions):
    return pack_gradients(model, decisions, "barrier")


def member_bytes(bucket):
    return sum(g.payload_bytes for g in bucket.gradients)


def model(count, message_bytes):
    units = [linear(f"fc{i}", 512, 512, 1e-4) for i in range(count)]
    return CostModel(chain_profile(units), cluster(4), Goal(batch=16), message_bytes=message_bytes)


def test_buckets_close_before_they_overflow():
    m = model(5, 2 * MIB)
    found = buckets(m, m.baseline)
    assert [b.units for b in found] == [(4, 5), (2, 3), (1,)]
    assert [member_bytes(b) for b in found] == [2 * MIB, 2 * MIB, MIB]


def test_a_parameter_larger_than_a_bucket_travels_alone():
    m = model(2, 1000)
    assert [b.units for b in buckets(m, m.baseline)] == [(2,), (1,)]


def test_each_layout_has_buckets_of_its_own():
    m = model(4, 100 * MIB)
    divided = Option(Layout(groups=2, degree=2), "column")
    alone = Option(Layout(groups=1, degree=4), "column")
    chosen = (m.baseline[0], m.baseline[0], divided, m.baseline[0], alone, m.baseline[0])
    found = {b.kind.layout: b for b in buckets(m, chosen)}
    assert found[m.baseline[0].layout].units == (1, 3)
    assert member_bytes(found[divided.layout]) == MIB / 2
    assert sum(g.full_bytes for g in found[divided.layout].gradients) == MIB
    assert alone.layout not in found  # nobody else holds those slices


def test_buckets_leave_in_one_order():
    m = model(4, 2 * MIB)
    divided = Option(Layout(groups=2, degree=2), "column")
    chosen = (m.baseline[0], divided, m.baseline[0], m.baseline[0], divided, m.baseline[0])
    messages = messages_of(m, chosen, "barrier")
    ready = [message.ready for message in messages]
    assert ready == sorted(ready, reverse=True)
    assert messages[-1].units == (1, 4)
    assert {u for message in messages for u in message.units} == {1, 2, 3, 4}


def test_slices_are_even_and_urgent_by_unit():
    m = model(2, 300_000)
    found = slice_messages(m, m.baseline)
    assert [s.units for s in found] == [(2,)] * 4 + [(1,)] * 4
    assert sum(s.sent_bytes for s in found) == 2 * 3 / 4 * 2 * MIB
    assert {s.urgency for s in found} == {1, 2}


def two_units():
    """Backward takes a second each; both exchange for two seconds on the link between nodes."""
    chain = empty_chain(2)
    chain.backward_s[:] = 1.0
    chain.forward_s[:] = 0.5
    return chain


def spans(step):
    found = simulate(step).spans
    return [(s.unit, s.start_s, s.end_s) for s in found if s.phase == "exchange"]


def test_first_in_first_out():
    link = LINKS[1]
    messages = (Message((1,), link, 2.0), Message((0,), link, 2.0))
    step = Step(work_of(two_units(), 1, "barrier"), messages, "barrier")
    assert spans(step) == [(1, 2.0, 4.0), (0, 4.0, 6.0)]
    assert simulate(step).step_s == 6.0
    assert simulate(step).exposed_s == 3.0


def test_blocking_communication_takes_the_link_at_once():
    chain = two_units()
    chain.entry_backward_s[1, 1] = 0.5
    step = Step(work_of(chain, 1, "barrier"), (Message((1,), LINKS[1], 2.0),), "barrier")
    assert spans(step) == [(1, 2.5, 4.5)]
    chain.entry_backward_s[:, 1] = 0.5, 0.0  # the other link is free meanwhile
    step = Step(work_of(chain, 1, "barrier"), (Message((1,), LINKS[1], 2.0),), "barrier")
    assert spans(step) == [(1, 2.0, 4.0)]


def test_more_urgent_messages_preempt():
    messages = (Message((1,), LINKS[1], 2.0, 1), Message((0,), LINKS[1], 0.5, 0))
    step = Step(work_of(two_units(), 1, "priority"), messages, "priority", preempt=True)
    first = [s for s in simulate(step).spans if s.phase == "exchange"][:3]
    assert [(s.unit, s.start_s, s.end_s) for s in first] == [
        (1, 2.0, 3.0),
        (0, 3.0, 3.5),
        (1, 3.5, 4.5),
    ]


def idle_on(
    device: str, schedule: ScheduleName, option: Option, part: Layout, inter: float = 1e9
) -> Simulation:
    """Four layers on two devices of that name, one of them laid out as ``part`` says."""
    profile = chain_profile([linear(f"fc{i}", 512, 512) for i in range(4)])
    links = cluster(2, inter=inter)
    there = msgspec.structs.replace(links.nodes[0].devices[0], name=device)
    nodes = tuple(msgspec.structs.replace(n, devices=(there,)) for n in links.nodes)
    cost = CostModel(
        profile, msgspec.structs.replace(links, nodes=nodes), Goal(batch=64),
        message_bytes=2**20, sliced=schedule == "priority",
    )  # fmt: skip
    layouts = [part if k == 2 else BOTH for k in range(6)]
    decisions = [option._replace(layout=layout) for layout in layouts]
    step = step_of(cost, decisions, cost.chain(decisions), schedule)
    return simulate_decisions(cost, decisions, step)


BOTH, FIRST = Layout(groups=2, degree=1), Layout(groups=1, degree=1)
SECOND = Layout(groups=1, degree=1, first=1)
PLAIN, ROUNDED = Option(BOTH), Option(BOTH, wire="bf16")
SHARDED = Option(BOTH, exchange="sharded")


@pytest.mark.parametrize(
    ("device", "option", "part", "late"),
    [
        ("a100", ROUNDED, FIRST, True), ("a100", ROUNDED, SECOND, True),
        ("a100", PLAIN, FIRST, False), ("a100", ROUNDED, BOTH, False),
        ("cpu (test)", ROUNDED, FIRST, False), ("cpu (test)", ROUNDED, SECOND, False),
    ],
)  # fmt: skip
def test_on_gpus_gradients_leave_after_backward_where_ranks_are_idle_unless_all_reduced(
    device, option, part, late
):
    spans = idle_on(device, "barrier", option, part).spans
    leaves = min(span.start_s for span in spans if span.phase == "exchange")
    assert (leaves >= max(span.end_s for span in spans if span.phase == "backward")) == late


def test_what_leaves_late_makes_the_step_longer():
    on_gpus, on_cpus = (
        idle_on(d, "priority", SHARDED, FIRST, 5e7).step_s for d in ("a100", "cpu (test)")
    )
    assert on_gpus > 1.05 * on_cpus


@pytest.mark.parametrize(("device", "held"), [("a100", True), ("cpu (test)", False)])
def test_on_gpus_the_next_forward_waits_for_all_sharded_gradients(device, held):
    """A step there queues all updates in front of it; gathers it waits for one by one."""
    spans = idle_on(device, "priority", SHARDED, BOTH, 5e7).spans
    first = min(s.unit for s in spans if s.phase == "forward")
    second_s = sorted(s.start_s for s in spans if (s.phase, s.unit) == ("forward", first))[1]
    there = {s.unit for s in spans if s.phase == "exchange" and s.end_s <= second_s}
    assert (len(there) == 4) == held
