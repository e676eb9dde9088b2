"""The memory timeline against hand calculation, and what the simulation shows."""

from itertools import pairwise

import msgspec
import pytest
from meshwright.planner.cost.cost import BUCKET_BYTES, CostModel
from meshwright.planner.cost.ownership import group_samples, position_classes
from meshwright.planner.schema.curve import ZERO
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.evaluate import (
    evaluate,
    evaluation,
    excess,
    memory_of,
    rank_memory,
)

from tests.strategies import chain_profile, cluster, linear

MIB = 2**20


def units(count=3, saved=1000.0):
    return [linear(f"fc{i}", 512, 512, 1e-4, saved) for i in range(count)]


def model(batch=8, micro_batches=1, message_bytes=BUCKET_BYTES, **goal):
    goal = Goal(batch=batch, **goal)
    profile = chain_profile(units())
    return CostModel(
        profile, cluster(4), goal, micro_batches=micro_batches, message_bytes=message_bytes
    )


def test_data_parallel_timeline():
    (found,) = rank_memory(model(optimizer="adam"), model().baseline)
    forward = [p for p in found.points if p.phase == "forward"]
    backward = [p for p in found.points if p.phase == "backward"]
    assert all(p.weights == 3 * MIB and p.optimizer == 6 * MIB for p in found.points)
    assert [p.feature_maps for p in forward] == [0, 2000, 4000, 6000, 6000]
    assert [p.gradients for p in forward] == [0] * 5
    assert [p.gradients / MIB for p in backward] == [0, 1, 2, 3, 3]
    assert [p.feature_maps for p in backward] == [6000, 6000, 4000, 2000, 0]
    assert found.points[-1].phase == "update"
    assert found.points[-1].gradients == 3 * MIB
    assert found.peak_bytes == max(p.total for p in found.points)


def test_buckets_are_there_before_they_are_full():
    m, gathered = model(message_bytes=1), model(message_bytes=100 * MIB)
    (small,) = rank_memory(m, m.baseline)
    (large,) = rank_memory(gathered, gathered.baseline)
    backward = [
        [p.buffers // MIB for p in c.points if p.phase == "backward"] for c in (small, large)
    ]
    assert backward[0] == [0, 1, 1, 1, 0]  # the new gradient, until its bucket has it
    # And the bucket's part that is to come, once there is a first gradient.
    assert backward[1] == [0, 3, 2, 1, 0]
    assert [p.buffers for c in (small, large) for p in c.points if p.phase == "update"] == [0, 0]


def test_a_gradient_that_backward_does_not_compute_is_in_its_bucket_only():
    def last(reached):
        unit = units(1)[0]
        whole = msgspec.structs.replace(unit.whole, new_grad=ZERO)
        parameters = (msgspec.structs.replace(unit.parameters[0], reached=reached),)
        return msgspec.structs.replace(unit, parameters=parameters, shares=(whole,), splits=())

    for reached in (True, False):
        profile = chain_profile([last(reached)])
        m = CostModel(profile, cluster(4), Goal(batch=8), message_bytes=1)
        (found,) = rank_memory(m, m.baseline)
        backward = [p for p in found.points if p.phase == "backward"]
        assert max(p.buffers for p in backward) == MIB * reached
        assert found.points[-1].gradients == MIB  # its zeros are exchanged


def test_a_gradient_larger_than_a_bucket_closes_the_one_that_is_open():
    """While its backward is at work nothing is open that is not its own."""
    sizes = [linear("small", 512, 512, 1e-4, 1e3), linear("large", 1024, 1024, 1e-4, 1e3)]
    profile = chain_profile([*sizes, linear("last", 512, 512, 1e-4, 1e3)])
    m = CostModel(profile, cluster(4), Goal(batch=8), message_bytes=2 * MIB)
    (found,) = rank_memory(m, m.baseline)
    buffers = {p.unit: p.buffers / MIB for p in found.points if p.phase == "backward"}
    assert buffers[3] == 1 + 2  # its new gradient, and the open bucket
    assert buffers[2] == 4  # its new gradient only
    assert buffers[1] == 1


@pytest.mark.parametrize("saved", [1e3, 1e7])
def test_copies_are_made_when_the_unit_s_own_feature_maps_are_gone(saved):
    """The fuller of two moments: with feature maps, or with what a sharded exchange copies."""
    goal = Goal(batch=8, optimizer="sgd")
    profile = chain_profile(units(saved=saved))
    m = CostModel(profile, cluster(4), goal, message_bytes=MIB // 4, sliced=True)
    home = Option(data_parallel(4))
    chosen = (home, *(home._replace(exchange="sharded"),) * 3, home)
    (found,) = rank_memory(m, chosen)
    (point,) = (p for p in found.points if p.phase == "backward" and p.unit == 2)
    maps = saved * 2  # two samples on each rank, as many bytes of their gradients
    # What three peers send of a later unit's; of its own besides, in the gradient's place, what it
    # sends to them and its own elements: a moment before, beside the gradient.
    working = 3 * MIB + 2 * maps + maps + 2 * MIB + 0.75 * MIB
    leaving = 3 * MIB + maps + 2 * 256 + 2 * MIB + (0.75 + 1) * MIB
    assert point.total == max(working, leaving)
    assert (working > leaving) == (saved == 1e7)


@pytest.mark.parametrize("exchange", ["sharded", "fully_sharded"])
def test_main_weights_and_their_state_are_counted(exchange):
    def half(unit):
        (parameter,) = unit.parameters
        own = msgspec.structs.replace(parameter, bytes=parameter.bytes // 2)
        share = msgspec.structs.replace(unit.whole, parameter_bytes=own.bytes)
        return msgspec.structs.replace(unit, parameters=(own,), shares=(share,), splits=())

    goal = Goal(batch=8, optimizer="adamw")
    optimizer, update = {}, {}
    for name, made in (("float32", units()), ("bf16", [half(u) for u in units()])):
        m = CostModel(chain_profile(made), cluster(4), goal, message_bytes=MIB, sliced=True)
        home = Option(data_parallel(4))
        for wish in (home, home._replace(exchange=exchange)):
            (found,) = rank_memory(m, (home, *(wish,) * 3, home))
            optimizer[name, wish.exchange] = found.points[0].optimizer
            update[name, wish.exchange] = memory_of(m).unit(1, wish, 2).phases.update_temp
    assert optimizer["float32", "dense"] == 2 * 3 * MIB
    assert optimizer["float32", exchange] == 2 * 3 * MIB / 4
    assert optimizer["bf16", "dense"] == 3 * MIB
    # Two moments of four bytes for each element, and the weights once more.
    assert optimizer["bf16", exchange] == 3 * 3 * MIB / 4
    # The gradient in float32, then AdamW's two copies, in place of the gradient of half their size
    # or of its copies.
    gone = {"sharded": 2 - 1 / 4, "fully_sharded": 1 / 4}[exchange] * MIB / 2
    assert update["bf16", exchange] == max(3 * MIB / 4 - gone, 0)


def test_micro_batches_hold_one_of_feature_maps_and_all_gradients():
    whole, cut = model(batch=16), model(batch=16, micro_batches=2)
    (one,), (two,) = (rank_memory(m, m.baseline) for m in (whole, cut))
    assert max(p.feature_maps for p in two.points) * 2 == max(p.feature_maps for p in one.points)
    assert {p.gradients for p in two.points} == {3 * MIB}


def test_division_holds_shards():
    m = model(optimizer="momentum")
    divided = Option(Layout(groups=1, degree=4), "column")
    (found,) = rank_memory(m, (m.baseline[0], divided, divided, divided, m.baseline[0]))
    assert found.points[0].weights == 3 * MIB / 4
    assert found.points[0].optimizer == 3 * MIB / 4
    assert all(p.buffers < 10_000 for p in found.points)  # one group exchanges nothing


@pytest.mark.parametrize(
    ("style", "degree", "kept", "expected"),
    [
        ("column", 4, 0.0, 8 * 256.0),  # all samples of the group
        ("column", 4, 256.0, 8 * 256.0 - 2 * 256.0),  # in place of the rank's own two
        ("row", 4, 256.0, 0.0),  # as many bytes in another form
        ("row", 4, 0.0, 8 * 64.0),
    ],
)
def test_the_input_of_a_divided_unit(style, degree, kept, expected):
    first, second, third = units()
    chain = chain_profile([first, msgspec.structs.replace(second, input_kept=kept), third])
    memory = memory_of(CostModel(chain, cluster(4), Goal(batch=8)))
    option = Option(Layout(groups=4 // degree, degree=degree), style)
    assert memory.own_input_bytes(2, option, 8) == expected
    assert memory.own_input_bytes(2, Option(data_parallel(4)), 2) == 0


def test_the_largest_member_of_uneven_parts_counts():
    first, second, third = units()
    splits = tuple(msgspec.structs.replace(split, features=3) for split in second.splits)
    chain = chain_profile([first, msgspec.structs.replace(second, splits=splits), third])
    memory = memory_of(CostModel(chain, cluster(2), Goal(batch=8)))
    option = Option(Layout(groups=1, degree=2), "row")
    assert memory.own_input_bytes(2, option, 8) == pytest.approx(8 * 256 * 2 / 3)


def test_positions_that_take_no_part_hold_nothing():
    m = model()
    burst = Option(Layout(groups=2))
    classes = rank_memory(m, (m.baseline[0], burst, burst, burst, m.baseline[0]))
    assert [c.positions for c in classes] == [(0, 1), (2, 3)]
    assert classes[1].points[0].weights == 0
    assert classes[0].points[0].weights == 3 * MIB


def test_uneven_batches_make_classes():
    counts = (3, 3, 2, 2)
    classes = position_classes(counts, [data_parallel(4)])
    assert [c.positions for c in classes] == [(0, 1), (2, 3)]
    assert group_samples(counts, Layout(groups=2, degree=2)) == [6, 6, 4, 4]
    assert group_samples(counts, Layout(groups=1, degree=2, first=2)) == [None, None, 10, 10]


def test_the_tightest_rank_by_its_own_device():
    m = model()
    device = msgspec.structs.replace(m.cluster.devices[0], memory_bytes=MIB)
    nodes = (*m.cluster.nodes[:2], msgspec.structs.replace(m.cluster.nodes[2], devices=(device,)))
    links = msgspec.structs.replace(m.cluster, nodes=(*nodes, m.cluster.nodes[3]))
    m = CostModel(m.profile, links, m.goal, placement=(3, 2, 1, 0))
    tight = excess(m, rank_memory(m, m.baseline))
    assert (tight.position, tight.available_bytes) == (1, MIB)
    assert tight.over_bytes > 0


def test_interference_slows_what_overlaps():
    quiet = cluster(4, inter=1e8)
    noisy = cluster(4, inter=1e8, interference=msgspec.structs.replace(
        quiet.interference, compute_slowdown=1.5, communication_slowdown=1.2))  # fmt: skip
    steps = [
        evaluate(chain_profile(units()), c, Goal(batch=64), message_bytes=1) for c in (quiet, noisy)
    ]
    assert steps[0].compute_s < steps[1].compute_s
    assert steps[0].step_s < steps[1].step_s


def test_buckets_gather_units_and_save_latency():
    profile, links = chain_profile(units()), cluster(4, latency_s=1e-3)
    single = evaluate(profile, links, Goal(batch=8), message_bytes=1)
    gathered = evaluate(profile, links, Goal(batch=8), message_bytes=100 * MIB)
    assert single.exchange_s - gathered.exchange_s == pytest.approx(2 * 6 * 1e-3)


def test_gradients_that_are_released_early_are_sent_too():
    home = Option(data_parallel(4))
    early = (home, *(home._replace(early_release=True),) * 3, home)
    made = chain_profile(units()), cluster(4), Goal(batch=8)
    found = evaluate(*made, early, schedule="priority")
    assert found.wire_bytes == round(2 * 3 / 4 * 3 * MIB)


def test_wire_bytes_of_data_parallelism():
    found = evaluate(chain_profile(units()), cluster(4), Goal(batch=8))
    assert found.wire_bytes == round(2 * 3 / 4 * 3 * MIB)


def test_spans_fill_the_step():
    m = model()
    done = evaluation(m, m.baseline)
    assert max(s.end_s for s in done.simulation.spans) == pytest.approx(done.prediction.step_s)
    for resource in ("compute", "intra", "inter"):
        mine = [s for s in done.simulation.spans if s.resource == resource]
        for before, after in pairwise(mine):
            assert before.end_s <= after.start_s + 1e-12
