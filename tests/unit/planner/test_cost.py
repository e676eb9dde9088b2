"""Costs of units and edges against hand calculation."""

import msgspec
import pytest
from meshwright.planner.cost.compute import batch_counts, busiest_samples, share_of
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.step_time import LINKS
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.cluster import StepOverhead
from meshwright.planner.schema.curve import proportional
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option, allowed, ties_agree
from meshwright.planner.schema.profile import (
    CompressionRate,
    FidelityProfile,
    ParameterProfile,
    UpdateRate,
)

from tests.strategies import chain_profile, cluster, linear, norm, share

HOME = Option(data_parallel(4))
RATE = 1e8


def model(units, batch=16, micro_batches=1, links=None, updates=(), sliced=False, **goal):
    profile = chain_profile(units, bytes_per_sample=400.0, features=100, updates=updates)
    links = links or cluster(4, inter=RATE, latency_s=0.0)
    return CostModel(
        profile, links, Goal(batch=batch, **goal), micro_batches=micro_batches, sliced=sliced
    )


def may(m, k, option, capability):
    return allowed(m.profile.units[k], option, m.goal, capability, m.world_size)


def test_uneven_batches_count_by_the_busiest_group():
    counts = batch_counts(10, 4)
    assert counts == (3, 3, 2, 2)
    assert busiest_samples(counts, Layout(groups=2, degree=2)) == 6
    assert busiest_samples(counts, data_parallel(4)) == 3
    assert batch_counts(3, 4) == (1, 1, 1, 0)
    assert batch_counts(22, 4, 2) == (3, 3, 3, 3)


def test_micro_batches_need_a_sample_each():
    with pytest.raises(InputError, match="at most 2"):
        batch_counts(8, 4, 3)


def test_data_parallel_unit():
    m = model([linear("fc", 100, 100, 1e-3)], updates=(("sgd", 1e-9),))
    cost = m.unit(1, HOME)
    assert cost.forward_s == pytest.approx(4e-3)
    assert cost.backward_s == pytest.approx(8e-3)
    assert cost.exchange.seconds == pytest.approx(2 * 3 / 4 * 40_000 / RATE)
    assert cost.update_s == pytest.approx(40_000e-9)
    assert cost.shard_bytes == cost.gradient_bytes == 40_000


def test_divided_unit_exchanges_its_shard_only():
    m = model([linear("fc", 100, 100, 1e-3)], updates=(("sgd", 1e-9),))
    cost = m.unit(1, Option(Layout(groups=2, degree=2), "column"))
    assert cost.forward_s == pytest.approx(8 * 1e-3 / 2)  # the group's 8 samples, half the work
    assert cost.exchange.seconds == pytest.approx(20_000 / RATE)
    assert cost.update_s == pytest.approx(20_000e-9)
    assert cost.inner_forward.seconds == 0
    alone = m.unit(1, Option(Layout(groups=1, degree=4), "column"))
    assert alone.exchange.seconds == 0
    assert alone.gradient_bytes == 0
    assert alone.trained_bytes == 10_000


def test_row_units_reduce_their_outputs():
    m = model([linear("fc", 100, 100, 1e-3)])
    cost = m.unit(1, Option(Layout(groups=2, degree=2), "row"))
    assert cost.inner_forward.seconds == pytest.approx(8 * 400 / 2 / RATE)
    assert cost.inner_backward.seconds == pytest.approx(8 * 400 / 2 / RATE)


def test_partial_sums_cross_a_link_that_members_share():
    """Two hosts of two: each rank sends both ranks of the other host their samples, and so four
    parts of a quarter cross the link of each host, not the three of a ring."""
    shared = cluster(2, devices=2, inter=RATE, intra=1e15, latency_s=0.0)
    cost = model([linear("fc", 100, 100)], links=shared).unit(
        1, Option(Layout(groups=1, degree=4), "row")
    )
    for inner in (cost.inner_forward, cost.inner_backward):
        assert inner.seconds == pytest.approx(4 * 16 * 400 / 4 / RATE)
        assert LINKS[inner.link] == "inter"
        assert inner.sent_bytes == 3 * 16 * 400 / 4


def test_parts_that_are_sent_to_each_peer_cross_a_link_that_ranks_share():
    """Each of two ranks of a host sends both of the other host a quarter; NCCL's ring, which adds
    up what is not rounded, enters the host once with three."""
    described = cluster(2, devices=2, inter=RATE, intra=1e15, latency_s=0.0)
    cpus = (msgspec.structs.replace(described.nodes[0].devices[0], name="cpu"),) * 2
    nodes = tuple(msgspec.structs.replace(node, devices=cpus) for node in described.nodes)
    on_cpus = msgspec.structs.replace(described, nodes=nodes)
    gathered_s = 3 / 4 * 40_000 / RATE
    for links, wire, scattered_s in (
        (described, "exact", 3 / 4 * 40_000 / RATE),
        (described, "bf16", 4 / 4 * 20_000 / RATE),
        (on_cpus, "exact", 4 / 4 * 40_000 / RATE),
    ):
        option = Option(data_parallel(4), exchange="sharded", wire=wire)
        cost = model([linear("fc", 100, 100)], links=links, sliced=True).unit(1, option)
        assert cost.exchange.seconds == pytest.approx(scattered_s + gathered_s)


def test_uneven_divisions_count_by_the_largest_shard():
    m = model([linear("fc", 10, 100, 1e-3)])
    assert m.unit(1, Option(Layout(groups=1, degree=4), "column")).shard_bytes == 3 * 400


def test_column_then_row_moves_nothing_between():
    m = model([linear("a", 100, 100), linear("b", 100, 100)])
    layout = Layout(groups=2, degree=2)
    column, row = Option(layout, "column"), Option(layout, "row")
    assert m.edge(1, column, row).forward.seconds == 0
    assert m.edge(1, column, column).forward.seconds == pytest.approx(8 * 200 / RATE)
    assert m.edge(0, HOME, column).forward.seconds == pytest.approx(4 * 400 / RATE)
    assert m.edge(0, HOME, column).backward.seconds == 0  # the model's input wants no gradient


def test_glue_takes_tensors_home():
    m = model([linear("a"), linear("b")])
    glue = msgspec.structs.replace(m.profile.units[1], kind="glue")
    assert glue.fixed
    m = model([linear("a"), msgspec.structs.replace(linear("g"), kind="glue"), linear("b")])
    assert not may(m, 2, Option(Layout(groups=2, degree=2), "column"), PLAIN)
    assert may(m, 2, HOME, PLAIN)


def test_batch_statistics():
    local = model([norm("bn", statistics_bytes=1000)])
    assert local.unit(1, HOME).inner_forward.seconds == 0
    burst = Option(Layout(groups=2))
    idle = msgspec.structs.replace(PLAIN, idle_positions=True)
    assert not may(local, 1, burst, idle)
    whole = model([norm("bn", statistics_bytes=1000)], batch_statistics="global")
    assert whole.unit(1, HOME).inner_forward.seconds == pytest.approx(1.5 * 1000 / RATE)
    assert whole.unit(1, HOME).inner_backward.seconds == pytest.approx(1.5 * 1000 / RATE)
    assert may(whole, 1, burst, idle)


def test_statistics_and_partial_sums_are_both_counted():
    unit = msgspec.structs.replace(
        linear("fc", 100, 100), batch_statistics=True, statistics_bytes=1000
    )
    cost = model([unit], batch_statistics="global").unit(
        1, Option(Layout(groups=2, degree=2), "row")
    )
    expected = 1.5 * 1000 / RATE + 8 * 400 / 2 / RATE
    assert cost.inner_forward.seconds == pytest.approx(expected)
    assert cost.inner_backward.seconds == pytest.approx(expected)


def test_the_executor_costs_something_in_every_backward():
    links = msgspec.structs.replace(
        cluster(4, inter=RATE, latency_s=0.0),
        overhead=StepOverhead(step_s=4e-3, parameter_s=1e-4, byte_s=1e-9),
    )
    units = [linear("fc", 100, 100, 1e-3)]
    free, charged = model(units, micro_batches=2), model(units, micro_batches=2, links=links)
    parameters = len(charged.owned[1])
    more = charged.unit(1, HOME).backward_s - free.unit(1, HOME).backward_s
    # Each gradient is exchanged once a step, not in each half.
    assert more == pytest.approx(1e-4 * parameters + 40_000e-9 / 2)
    alone = Option(Layout(groups=1, degree=4), "column")  # nothing of it travels
    more = charged.unit(1, alone).backward_s - free.unit(1, alone).backward_s
    assert more == pytest.approx(1e-4 * parameters)
    assert charged.unit(0, HOME).backward_s == pytest.approx(2e-3)  # once a step, in two halves
    assert charged.unit(1, HOME).forward_s == free.unit(1, HOME).forward_s


def test_micro_batches_add_gradients_up_and_code_them_once():
    def backward_s(micro_batches: int, updates=(), rates=()):
        profile = chain_profile([linear("fc", 100, 100, 1e-3)], features=100, updates=updates)
        profile = msgspec.structs.replace(profile, compression=rates)
        made = CostModel(
            profile,
            cluster(4, inter=RATE),
            Goal(batch=16),
            micro_batches=micro_batches,
            sliced=True,
        )
        return made.unit(1, HOME._replace(wire="bf16")).backward_s

    # Four backwards, of which all but the first add 40,000 bytes.
    rate = (("sgd", 1e-9),)
    assert backward_s(1, rate) == backward_s(1)
    assert 4 * (backward_s(4, rate) - backward_s(4)) == pytest.approx(3 * 40_000e-9)
    coding = (CompressionRate(exchange="bf16", seconds_per_byte=1e-9),)
    for count in (1, 2, 4):
        more_s = backward_s(count, rates=coding) - backward_s(count)
        assert count * more_s == pytest.approx(40_000e-9)


FIXED = {"fixed_s": 1e-3, "received_fixed_s": 1e-4, "gathered_fixed_s": 1e-5}


@pytest.mark.parametrize(
    ("option", "codings"),
    [
        (HOME._replace(exchange="low_rank", ratio=0.1), 1),  # its bias travels whole
        (HOME._replace(exchange="int8"), 4),  # slices of 10,000 bytes
        (HOME._replace(wire="bf16"), 5),  # its bias makes a fifth one
        (Option(Layout(groups=2, degree=2), "column", wire="bf16"), 3),  # of a member's half
    ],
)
def test_what_is_fixed_in_coding_counts_for_each_piece(option, codings):
    def unit(**fixed: float):
        name = option.exchange if option.lossy else option.wire
        rate = CompressionRate(exchange=name, ratio=None, seconds_per_byte=1e-9, **fixed)
        kept = (FidelityProfile(exchange=option.exchange, ratios=(option.ratio,), kept=(0.9,)),)
        profile = chain_profile([linear("fc", 100, 100, 1e-3)], features=100)
        (weight,) = profile.units[1].parameters
        bias = ParameterProfile(name="fc.bias", shared="fc.bias", shape=(100,), bytes=400)
        fc = msgspec.structs.replace(
            profile.units[1], parameters=(weight, bias), fidelity=kept if option.lossy else ()
        )
        units = profile.units[0], fc, *profile.units[2:]
        profile = msgspec.structs.replace(profile, units=units, compression=(rate,))
        links = cluster(4, inter=RATE)
        made = CostModel(profile, links, Goal(batch=16), message_bytes=10_000, sliced=True)
        return made.unit(1, option)

    free, charged = unit(), unit(**FIXED)
    assert charged.backward_s - free.backward_s == pytest.approx(codings * 1e-3)
    each_s = 1e-4 + option.layout.groups * 1e-5
    assert charged.update_s - free.update_s == pytest.approx(codings * each_s)


def test_the_executor_costs_something_around_each_second_forward():
    links = msgspec.structs.replace(
        cluster(4, inter=RATE, latency_s=0.0), overhead=StepOverhead(rerun_s=1e-3)
    )
    units = [linear("a", 100, 100), linear("b", 100, 100)]
    free, charged = model(units), model(units, links=links)
    again = HOME._replace(memory="recompute")
    together = again._replace(segment=("a", "b"))
    for decisions, at_a, at_b in (
        ((HOME, again, HOME), 1e-3, 0.0),
        ((HOME, again, again), 1e-3, 1e-3),
        ((HOME, together, together), 0.0, 1e-3),  # where the last one's backward begins
    ):
        before, after = free.chain(decisions), charged.chain(decisions)
        assert after.backward_s - before.backward_s == pytest.approx([0.0, at_a, at_b])
        assert (after.forward_s == before.forward_s).all()


def test_the_executors_cost_is_that_of_the_schedule():
    links = msgspec.structs.replace(
        cluster(4, inter=RATE, latency_s=0.0), overhead=StepOverhead(parameter_s=1e-4)
    )
    other = msgspec.structs.replace(links, priority_overhead=StepOverhead(parameter_s=3e-4))
    units = [linear("fc", 100, 100, 1e-3)]

    def backward_s(links, *, sliced):
        return model(units, links=links, sliced=sliced).unit(1, HOME).backward_s

    parameters = len(model(units).owned[1])
    barrier_s = backward_s(links, sliced=False)
    assert backward_s(links, sliced=True) == barrier_s  # not measured: the barrier's stands for it
    assert backward_s(other, sliced=False) == barrier_s
    assert backward_s(other, sliced=True) == pytest.approx(barrier_s + 2e-4 * parameters)


def test_partial_sums_have_the_bytes_that_were_measured():
    """Pooling in the unit leaves less of them for the next one."""
    plain = linear("a", 100, 100)
    share = msgspec.structs.replace(plain.whole, style="row", degree=2, partial_sums=1600)
    pooled = msgspec.structs.replace(plain, shares=(plain.whole, share))
    row = Option(Layout(groups=2, degree=2), "row")
    small, large = model([plain]).unit(1, row), model([pooled]).unit(1, row)
    for way in ("inner_forward", "inner_backward"):
        assert getattr(large, way).seconds == pytest.approx(4 * getattr(small, way).seconds)
        assert getattr(large, way).sent_bytes == 4 * getattr(small, way).sent_bytes


def test_the_executor_costs_something_around_every_redistribution():
    links = msgspec.structs.replace(
        cluster(4, inter=RATE, latency_s=0.0), overhead=StepOverhead(move_s=1e-3)
    )
    units = [linear("a", 100, 100), linear("b", 100, 100)]
    free, charged = model(units), model(units, links=links)
    layout = Layout(groups=2, degree=2)
    column, row = Option(layout, "column"), Option(layout, "row")
    for edge, source, target, moves in (
        (1, column, row, 0),
        (1, column, column, 2),
        (0, HOME, column, 1),  # the model's input wants no gradient
        (1, HOME, HOME, 0),
    ):
        before, after = free.edge(edge, source, target), charged.edge(edge, source, target)
        more = after.forward.seconds - before.forward.seconds
        more += after.backward.seconds - before.backward.seconds
        assert more == pytest.approx(moves * 1e-3)
    before, after = free.unit(2, row), charged.unit(2, row)
    assert after.inner_forward.seconds - before.inner_forward.seconds == pytest.approx(1e-3)
    assert after.inner_backward.seconds - before.inner_backward.seconds == pytest.approx(1e-3)


def test_the_executors_copies_are_charged_by_the_byte():
    links = msgspec.structs.replace(
        cluster(4, inter=RATE, latency_s=0.0), overhead=StepOverhead(move_byte_s=1e-6)
    )
    units = [linear("a", 100, 100), linear("b", 100, 100)]
    free, charged = model(units), model(units, links=links)
    column, row = (Option(Layout(groups=2, degree=2), style) for style in ("column", "row"))
    group_bytes = 8 * 400  # of a group of two, at a batch of 16 on four ranks
    before, after = free.edge(0, HOME, column), charged.edge(0, HOME, column)
    assert after.forward.seconds - before.forward.seconds == pytest.approx(1e-6 * group_bytes)
    assert charged.edge(1, HOME, HOME).forward.seconds == 0.0
    before, after = free.unit(2, row), charged.unit(2, row)
    for way in ("inner_forward", "inner_backward"):
        more = getattr(after, way).seconds - getattr(before, way).seconds
        assert more == pytest.approx(1e-6 * group_bytes)


def test_tied_units_agree_on_layout_and_dimension():
    m = model([linear("a", shared="w"), linear("b"), linear("c", shared="w")])
    layout = Layout(groups=2, degree=2)
    column, row = Option(layout, "column"), Option(layout, "row")
    assert m.ties == ((0,), (1, 3), (2,), (1, 3), (4,))
    assert ties_agree((m.profile.units[1], m.profile.units[3]), (column, column))
    assert not ties_agree((m.profile.units[1], m.profile.units[3]), (column, row))
    assert not ties_agree((m.profile.units[1], m.profile.units[3]), (column, HOME))
    assert m.unit(3, HOME).exchange.seconds == 0
    assert m.unit(3, HOME).shard_bytes == 0


def test_frozen_parameters_are_held_and_not_exchanged():
    unit = linear("fc", 100, 100)
    frozen = tuple(msgspec.structs.replace(p, trainable=False) for p in unit.parameters)
    cost = model([msgspec.structs.replace(unit, parameters=frozen)]).unit(1, HOME)
    assert (cost.gradient_bytes, cost.shard_bytes, cost.exchange.seconds) == (0, 40_000, 0)


def test_policies_without_a_known_cost_are_refused():
    m = model([linear("fc")])
    for change, remedy in (
        ({"memory": "offload"}, "host_bytes_per_s"),
        ({"exchange": "topk", "ratio": 0.1}, "fidelity"),
        ({"exchange": "sharded"}, "priority"),
        ({"early_release": True}, "priority"),
    ):
        with pytest.raises(InputError, match=remedy):
            m.unit(1, HOME._replace(**change))


def test_measured_degrees_are_interpolated_in_their_inverse():
    unit = linear("fc", seconds_per_sample=8.0)
    for degree, seconds in ((2, 5.0), (4, 3.5)):
        half = share("column", degree, proportional(seconds), proportional(0.0))
        unit = msgspec.structs.replace(unit, shares=(*unit.shares, half))

    def at(degree):
        return share_of(unit, "column", degree, lambda s: s.forward, 1)

    assert (at(1), at(2), at(4)) == (8.0, 5.0, 3.5)
    assert at(3) == pytest.approx(5.0 - 1.5 * (1 / 2 - 1 / 3) / (1 / 4))
    assert at(8) == pytest.approx(3.5 - 1.5 / 2)
    assert at(1000) > 2.0  # the part that is not divided


def test_nothing_divides_better_than_perfectly():
    unit = linear("fc", seconds_per_sample=8.0)
    quick = share("column", 2, proportional(1.0), proportional(0.0))
    unit = msgspec.structs.replace(unit, shares=(*unit.shares, quick))
    assert share_of(unit, "column", 4, lambda s: s.forward, 1) == 0.5


def test_each_figure_stands_on_its_link():
    links = cluster(2, 2, inter=RATE, intra=1e9, latency_s=0.0)
    m = model([linear("fc", 100, 100)], links=links)
    chain = m.chain((HOME, Option(Layout(groups=2, degree=2), "row"), HOME))
    intra, inter = LINKS.index("intra"), LINKS.index("inter")
    assert chain.inner_forward_s[intra, 1] > 0 == chain.inner_forward_s[inter, 1]
    assert chain.exchange_s[inter, 1] > 0 == chain.exchange_s[intra, 1]
    # two exchange groups share the node's interface
    assert chain.exchange_s[inter, 1] == pytest.approx(2 * 20_000 / RATE)


def test_a_thousand_ranks_are_quick():
    m = model([linear("a", 4096, 4096), linear("b", 4096, 4096)], 2048, 1, cluster(128, 8))
    for degree in (1, 8, 1024):
        layout = Layout(groups=1024 // degree, degree=degree)
        style = "none" if degree == 1 else "column"
        assert m.edge(1, Option(layout, style), Option(data_parallel(1024))).forward.seconds >= 0


def test_adam_updates_as_adamw_where_only_that_was_measured():
    profile = chain_profile(
        [linear("fc", 100, 100, 1e-3)], updates=(("adamw", 2e-9), ("sgd", 1e-9))
    )
    assert profile.update_seconds_per_byte("adam") == 2e-9
    assert profile.update_seconds_per_byte("sgd") == 1e-9
    assert profile.update_seconds_per_byte("momentum") == 0.0


def test_sharded_exchanges_take_the_time_of_their_own_updates():
    m = model([linear("fc", 100, 100, 1e-3)], updates=(("sgd", 1e-9),), sliced=True)
    home = Option(data_parallel(4))
    shared = home._replace(exchange="sharded")
    assert m.unit(1, home).update_s == pytest.approx(40_000e-9)
    assert m.unit(1, shared).update_s == pytest.approx(10_000e-9)
    rates = (*m.profile.updates, UpdateRate(optimizer="sgd", seconds_per_byte=3e-9, sharded=True))
    with_main = msgspec.structs.replace(m.profile, updates=rates)
    m = CostModel(with_main, m.cluster, m.goal, sliced=True)
    assert m.unit(1, home).update_s == pytest.approx(40_000e-9)
    assert m.unit(1, shared).update_s == pytest.approx(30_000e-9)
