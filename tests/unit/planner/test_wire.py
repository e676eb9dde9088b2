"""What each position sends, by hand."""

from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan, Provenance, UnitPlan
from meshwright.planner.schema.profile import EdgeProfile
from meshwright.profiler.overhead import UNPREDICTED
from msgspec.structs import replace

from tests.wire import ExchangedParam, exchanged_bytes, moved_bytes, ring_bytes

EVEN = (2, 2)


def plan(*units: UnitPlan, ranks: int = 2) -> Plan:
    ends = [unit("@input", Layout(groups=ranks)), unit("@output", Layout(groups=ranks))]
    return Plan(
        target="test",
        model="test",
        world_size=ranks,
        goal=Goal(batch=4),
        placement=tuple(range(ranks)),
        units=(ends[0], *units, ends[1]),
        prediction=UNPREDICTED,
        baseline=UNPREDICTED,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )


def unit(name: str, layout: Layout, **options) -> UnitPlan:
    modules = () if name.startswith("@") else (name,)
    return UnitPlan(name=name, kind="linear", modules=modules, layout=layout, **options)


def edge(source: str, target: str, size: float, back: float, features: int = 1) -> EdgeProfile:
    return EdgeProfile(
        source=source,
        target=target,
        bytes_per_sample=size,
        gradient_bytes_per_sample=back,
        features=features,
    )


def test_a_burst_fetches_its_samples_and_gives_them_back():
    made = plan(unit("a", Layout(groups=1)))
    flows = [edge("@input", "a", 10, 0), edge("a", "@output", 7, 7)]
    # Position 1 sends its two samples there; their results come back, and gradients of these go.
    assert moved_bytes(made, flows, EVEN) == [2 * 7, 2 * 10 + 2 * 7]


def test_what_two_units_need_alike_travels_once():
    there = Layout(groups=1, first=1)
    made = plan(unit("a", there), unit("b", there))
    flows = [edge("@input", "a", 10, 10), edge("@input", "b", 10, 10)]
    assert moved_bytes(made, flows, EVEN) == [2 * 10, 2 * 10]
    apart = plan(unit("a", there), unit("b", Layout(groups=1)))
    assert moved_bytes(apart, flows, EVEN) == [2 * 10 + 2 * 10, 2 * 10 + 2 * 10]


def test_sums_are_sent_again_where_they_are_computed_again():
    row = unit("a", Layout(groups=1, degree=2), style="row")
    flows = [edge("a", "@output", 6, 6)]
    assert moved_bytes(plan(row), flows, (1, 3)) == [3 * 6 + 1 * 6, 1 * 6 + 3 * 6]
    again = replace(row, memory="recompute")
    assert moved_bytes(plan(again), flows, (1, 3)) == [2 * 3 * 6 + 1 * 6, 2 * 1 * 6 + 3 * 6]


def test_a_ring_sends_its_share():
    assert ring_bytes(100, 1) == 0
    assert ring_bytes(100, 2) == 100
    assert ring_bytes(100, 4) == 150


def test_gradients_travel_among_those_who_hold_the_same():
    there = Layout(groups=1, first=1)
    whole, divided = ExchangedParam("a", (3, 5), 8), ExchangedParam("b", (3, 5), 8, dim=0)
    alone = plan(unit("a", there), unit("b", there))
    assert exchanged_bytes(alone, [whole, divided._replace(dim=None)]) == [0, 0]
    both = plan(unit("a", Layout(groups=2)), unit("b", Layout(groups=1, degree=2), style="column"))
    assert exchanged_bytes(both, [whole, divided]) == [120, 120]  # nobody else has their slices
    bias = ExchangedParam("b", (3,), 8)  # of a row unit, which all members have
    assert exchanged_bytes(both, [bias], backwards=2) == [2 * 24, 2 * 24]


def test_members_send_what_they_have():
    pairs = Layout(groups=2, degree=2)
    four = plan(unit("a", pairs, style="column"), ranks=4)
    packed = ExchangedParam("a", (9, 2), 4, dim=0, blocks=3)  # two rows and one of each block
    assert exchanged_bytes(four, [packed]) == [48, 24, 48, 24]
    sharded = replace(four, units=(unit("a", pairs, style="column", exchange="sharded"),))
    assert exchanged_bytes(sharded, [packed._replace(shape=(9, 1))]) == [24, 16, 24, 16]


def test_shards_go_to_their_owners_and_come_back_once():
    three = plan(unit("a", Layout(groups=3), exchange="sharded"), ranks=3)
    assert (
        exchanged_bytes(three, [ExchangedParam("a", (7,), 4)]) == [2 * 2 * 12] * 3
    )  # 3, 3 and 1 of 7
    assert exchanged_bytes(three, [ExchangedParam("a", (7,), 4)], backwards=2) == [3 * 2 * 12] * 3


def test_units_that_leave_ranks_idle_may_have_fewer_policies():
    narrow = replace(EVERYTHING, idle_exchange=("dense",), idle_release=False)
    part, whole = Layout(groups=1), Layout(groups=2)
    assert narrow.suits(part, 2, "dense", early_release=False)
    assert not narrow.suits(part, 2, "dense", early_release=True)
    assert not narrow.suits(part, 2, "topk", early_release=False)
    assert narrow.suits(whole, 2, "topk", early_release=True)
    asked = unit("a", part, exchange="topk")
    assert "leaves ranks idle" in narrow.refusal(asked, 2)
    assert EVERYTHING.refusal(asked, 2) is None
