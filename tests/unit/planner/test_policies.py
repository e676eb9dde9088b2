"""What each policy about memory and exchange changes in a unit's costs and in what a rank holds."""

from math import ceil

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.budget import energy_budget, gpu_seconds_limit, lost_energy
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.step_time import LINKS, Chain, priority_step
from meshwright.planner.memory.timeline import UNIT_FIELDS
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.capability import EVERYTHING, PLAIN
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import CompressionRate, FidelityProfile
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.schedule import Message, Step, work_of
from meshwright.planner.solve.evaluate import rank_memory
from meshwright.planner.solve.unit_options import unit_options

from tests.strategies import chain_profile, cluster, linear

HOME = Option(data_parallel(4))
RATE = 1e9


@pytest.fixture
def model():
    unit = linear("fc", 64, 64, 1e-4, saved=4096.0)
    curve = FidelityProfile(exchange="topk", ratios=(0.1, 0.5), kept=(0.6, 0.9))
    unit = msgspec.structs.replace(unit, fidelity=(curve,), gradient_energy=1.0)
    other = msgspec.structs.replace(linear("head", 64, 64), gradient_energy=3.0)
    profile = chain_profile([unit, other], updates=(("adam", 1e-9),))
    rate = (CompressionRate(exchange="topk", seconds_per_byte=2e-9),)
    profile = msgspec.structs.replace(profile, compression=rate)
    goal = Goal(batch=32, optimizer="adam", allow_lossy=True, min_fidelity=0.89)
    links = cluster(4)
    device = msgspec.structs.replace(links.devices[0], host_bytes_per_s=RATE)
    nodes = tuple(msgspec.structs.replace(n, devices=(device,)) for n in links.nodes)
    links = msgspec.structs.replace(links, nodes=nodes)
    return CostModel(profile, links, goal, message_bytes=4096, sliced=True)


def holds(model, option):
    """What unit 1 holds, by field."""
    return dict(zip(UNIT_FIELDS, MemoryModel(model).unit(1, option, 8).column, strict=True))


def changes(model, option):
    """Which of its bytes differ from those of plain data parallelism, and by how much."""
    ours, plain = holds(model, option), holds(model, HOME)
    return {name: ours[name] - plain[name] for name in ours if ours[name] != plain[name]}


def test_recompute_runs_forward_again_and_keeps_the_output(model):
    keep, again = model.unit(1, HOME), model.unit(1, HOME._replace(memory="recompute"))
    assert again.backward_s == keep.backward_s + keep.forward_s
    freed = 4096 * 8 - 256 * 8
    found = changes(model, HOME._replace(memory="recompute"))
    assert found == {"saved": -freed, "workspace": freed, "recomputed": freed}


def test_an_output_that_nobody_saves_stays_where_a_unit_runs_again_from_it(model):
    """That is another tensor than what the unit which made it has saved."""
    again, units = HOME._replace(memory="recompute"), list(model.profile.units)

    def stays(kept):
        units[1] = msgspec.structs.replace(units[1], output_kept=kept)
        other = model.with_profile(msgspec.structs.replace(model.profile, units=tuple(units)))
        memory = MemoryModel(other)
        return [memory.unit(k, again, 8).phases.saved for k in (1, 2)]

    output = 256 * 8
    own, next_own = stays(True)
    assert own == output
    assert stays(False) == [0, next_own + output]


def test_recompute_issues_the_inner_collectives_again(model):
    row = Option(Layout(groups=2, degree=2), "row")
    keep, again = model.unit(1, row), model.unit(1, row._replace(memory="recompute"))
    both = keep.inner_forward.seconds + keep.inner_backward.seconds
    assert keep.inner_forward.seconds > 0
    assert again.inner_backward.seconds == pytest.approx(both)


def test_offload_copies_both_ways_and_keeps_nothing(model):
    keep, away = model.unit(1, HOME), model.unit(1, HOME._replace(memory="offload"))
    copy_s = 4096 * 8 / RATE
    assert away.forward_s == pytest.approx(keep.forward_s + copy_s)
    assert away.backward_s == pytest.approx(keep.backward_s + copy_s)
    assert holds(model, HOME._replace(memory="offload"))["saved"] == 0


def test_what_is_offloaded_leaves_and_comes_back_while_the_unit_after_it_is_at_work(model):
    away = HOME._replace(memory="offload")
    own, before = 256 * 8, 4096 * 8
    for first, expected in ((HOME, own), (away, own + before)):
        points = rank_memory(model, (HOME, first, away, HOME))[0].points
        there = {(p.unit, p.phase): p.workspace for p in points}
        assert there[2, "backward"] == expected
        assert there[2, "forward"] == expected


def test_an_offloaded_output_is_there_until_the_last_unit_that_it_enters(model):
    units = [linear(name, 64, 64, saved=4096.0) for name in "abcd"]
    made = chain_profile(units)
    far = msgspec.structs.replace(made.edges[1], target="d")
    made = msgspec.structs.replace(made, edges=(*made.edges, far))
    away = HOME._replace(memory="offload")
    found = model.with_profile(made)
    table = rank_memory(found, (HOME, away, HOME, HOME, HOME, HOME))[0].memory
    whole, output = 4096 * 8, 256 * 8
    for point in ("neighbours_forward", "neighbours_backward", "neighbours_update"):
        assert table.field(point).tolist() == [0, 0, whole, output, output, 0]


def test_a_sharded_exchange_divides_state_and_update(model):
    dense, shard = model.unit(1, HOME), model.unit(1, HOME._replace(exchange="sharded"))
    assert shard.update_s == pytest.approx(dense.update_s / 4)
    assert shard.exchange.sent_bytes == dense.exchange.sent_bytes
    assert shard.exchange.seconds == pytest.approx(dense.exchange.seconds)
    sharded = HOME._replace(exchange="sharded")
    assert holds(model, sharded)["optimizer"] == ceil(holds(model, HOME)["optimizer"] / 4)
    size = 4 * 64 * 64
    assert holds(model, sharded)["comm_buffers"] == size * (1 - 1 / 4)  # received from three
    wide = CostModel(model.profile, model.cluster, model.goal, message_bytes=2**20, sliced=True)
    assert holds(model, HOME)["comm_buffers"] == 0
    assert holds(wide, HOME)["comm_buffers"] == size  # packed: copied


def test_topk_gathers_values_and_numbers_and_takes_time_to_choose(model):
    dense = model.unit(1, HOME)
    topk = model.unit(1, HOME._replace(exchange="topk", ratio=0.1))
    size = 4 * 64 * 64
    assert topk.gradient_bytes == ceil(4 * 0.1 * size * 2)
    assert topk.backward_s == pytest.approx(dense.backward_s + size * 2e-9)
    assert topk.update_s == dense.update_s
    found = changes(model, HOME._replace(exchange="topk", ratio=0.1))
    # At first a quarter is sent, with numbers as large, and received from all four; the choice
    # has values, numbers in int64 and in int32.
    assert found["residual"] == size
    assert found["exchange_temp"] == pytest.approx((1 + 2 + 1) / 4 * size, abs=8)
    assert "update_temp" not in found  # what comes from four takes no more than Adam's two copies
    assert found["comm_buffers"] == pytest.approx(0.25 * 2 * size * (4 + 1), abs=8)


@pytest.fixture
def lossy(model):
    """The same for SGD, with every exchange possible in both units."""
    curves = tuple(
        FidelityProfile(exchange=e, ratios=(0.1, 0.5), kept=(0.99, 0.99))
        for e in ("topk", "dropped")
    )
    inner = (msgspec.structs.replace(u, fidelity=curves) for u in model.profile.units[1:-1])
    units = (model.profile.units[0], *inner, model.profile.units[-1])
    profile = msgspec.structs.replace(model.profile, units=units)
    goal = Goal(batch=32, optimizer="momentum", allow_lossy=True, min_fidelity=0.89)
    return CostModel(profile, model.cluster, goal, message_bytes=4096, sliced=True)


TOPK, SIZE = HOME._replace(exchange="topk", ratio=0.1), 4 * 64 * 64


@pytest.mark.parametrize(
    ("feedback", "always", "moment"),
    [("in_place", 1, 1), ("mirror", 1, 1), ("host_mirror", 0, 2)],
)
def test_gradients_that_are_taken_in_live_for_a_moment(lossy, feedback, always, moment):
    found = changes(lossy, TOPK._replace(feedback=feedback))
    del found["comm_buffers"], found["bucketed"]
    expected = {"residual": always * SIZE, "gradients": -SIZE, "map_gradients": SIZE}
    expected |= {"exchange_temp": moment * SIZE, "update_temp": 2 * SIZE}  # what has come from four
    assert found == {name: size for name, size in expected.items() if size}


def test_what_is_dropped_is_held_or_sent(lossy):
    found = changes(lossy, HOME._replace(exchange="dropped", ratio=0.5))
    del found["bucketed"]
    assert found == {
        "residual": SIZE, "gradients": -SIZE, "map_gradients": SIZE, "exchange_temp": SIZE
    }  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_way_to_keep_the_rest_holds_less_than_the_one_before(lossy, micro_batches):
    model = CostModel(
        lossy.profile, lossy.cluster, lossy.goal, micro_batches=micro_batches, sliced=True
    )
    peaks = [
        max(m.peak_bytes for m in rank_memory(model, (HOME, one, one, HOME)))
        for one in (TOPK._replace(feedback=f) for f in ("residual", "in_place", "host_mirror"))
    ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_mirror_on_the_host_takes_time_to_copy(lossy):
    here, there = (lossy.unit(1, TOPK._replace(feedback=f)) for f in ("mirror", "host_mirror"))
    assert there.backward_s == pytest.approx(here.backward_s + 2 * SIZE / RATE)
    assert there.update_s == here.update_s


def test_mirrors_are_planned_for_sgd_and_in_place_for_others(model, lossy):
    def ways(priced, **changed):
        known = msgspec.structs.replace(EVERYTHING, **changed)
        return {o.feedback for o in unit_options(priced, 1, known) if o.exchange == "topk"}

    assert ways(lossy) == {"mirror", "host_mirror"}
    assert ways(lossy, feedback=("residual", "in_place")) == {"in_place"}
    assert ways(lossy, feedback=("residual",)) == {"residual"}
    assert ways(model) == {"in_place"}
    with pytest.raises(InputError, match="'mirror' with optimizer 'adam'"):
        model.unit(1, TOPK._replace(feedback="mirror"))


def test_early_release_waits_in_backward_and_frees_the_gradient(model):
    late, early = model.unit(1, HOME), model.unit(1, HOME._replace(early_release=True))
    assert early.exchange.seconds == early.update_s == early.slice_s == 0
    assert early.released == late.exchange
    assert early.backward_s == late.backward_s + late.update_s
    assert holds(model, HOME._replace(early_release=True))["gradients"] == 0
    plain = (HOME,) * 4
    freed = (HOME, *(HOME._replace(early_release=True),) * 2, HOME)
    peaks = [max(m.peak_bytes for m in rank_memory(model, d)) for d in (plain, freed)]
    assert peaks[1] < peaks[0]


def test_fidelity_weighs_units_by_their_energy(model):
    half = HOME._replace(exchange="topk", ratio=0.5)
    assert lost_energy(model, 1, half) == pytest.approx(0.1 * 1 / 4)
    assert energy_budget(model) == pytest.approx(0.11)
    ratios = {o.ratio for o in unit_options(model, 1, EVERYTHING) if o.lossy}
    assert ratios == {0.1, 0.5}
    assert not any(o.lossy for o in unit_options(model, 2, EVERYTHING))


def test_what_cannot_travel_in_buckets_is_planned_in_slices_only(model):
    only_sliced = msgspec.structs.replace(EVERYTHING, in_buckets=("dense",))
    in_buckets = CostModel(model.profile, model.cluster, model.goal, sliced=False)
    assert any(o.lossy for o in unit_options(model, 1, only_sliced))
    assert not any(o.lossy for o in unit_options(in_buckets, 1, only_sliced))
    assert any(o.lossy for o in unit_options(in_buckets, 1, EVERYTHING))


def test_today_s_executor_gets_plain_options_only(model):
    for k in range(4):
        for option in unit_options(model, k, PLAIN):
            assert option[2:] == HOME[2:]
            assert option.layout.size == 4


def test_amplification_is_against_one_device(model):
    goal = msgspec.structs.replace(model.goal, amplification_limit=2.0)
    limited = CostModel(model.profile, model.cluster, goal, sliced=True)
    update = 2 * 4 * 64 * 64 * 1e-9
    assert gpu_seconds_limit(limited) == pytest.approx(2 * (2 * 32 * 3e-4 + update))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_slices_take_at_most_the_longest_of_a_later_unit_more(seed):
    """Priority that does not stop a slice under way lies between the formula with slices of no
    size and the one that waits for the longest slice after each unit."""
    rng = np.random.default_rng(seed)
    n, link = int(rng.integers(1, 7)), int(rng.integers(0, 2))

    def draw(*shape):
        return rng.integers(0, 10, shape) * (rng.random(shape) < 0.7) * 1.0

    exchange = draw(2, n)
    exchange[1 - link] = 0.0
    pieces = rng.integers(1, 5, n)
    slices = exchange / pieces
    blocking = [draw(2, n) for _ in range(4)]
    chain = Chain(draw(n), draw(n), draw(n), *blocking, exchange, slices)
    messages = [
        Message((k,), LINKS[link], float(slices[link, k]), k)
        for k in reversed(range(n))
        for _ in range(pieces[k] if exchange[link, k] else 0)
    ]
    times = int(rng.integers(1, 3))
    step = Step(work_of(chain, times, "priority"), tuple(messages), "priority")
    real = simulate(step, steps=8).step_s
    assert priority_step(chain._replace(slice_s=None), times) <= real + 1e-9
    assert real <= priority_step(chain, times) + 1e-9


def test_parameters_between_units_travel_dense(model):
    """No hook tells when the model's own code uses them."""
    assert len(unit_options(model, 1, EVERYTHING)) > 1
    first, *units = model.profile.units
    own = msgspec.structs.replace(units[0].parameters[0], name="scale", shared="scale")
    units = (msgspec.structs.replace(first, parameters=(own,)), *units)
    profile = msgspec.structs.replace(model.profile, units=units)
    between = CostModel(profile, model.cluster, model.goal, message_bytes=4096, sliced=True)
    assert unit_options(between, 0, EVERYTHING) == (HOME,)
    assert between.unit(0, HOME).exchange.sent_bytes > 0
