"""What gradients as products of thin matrices cost, hold and are cut into."""

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.exchange import matrix_sides, packed_bytes, thin_rank, thin_share
from meshwright.planner.memory.gradient_buffers import feedback_bytes
from meshwright.planner.memory.timeline import UNIT_FIELDS
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.profile import CompressionRate, FidelityProfile
from meshwright.planner.simulate.schedule import messages_of, pack_gradients
from meshwright.planner.simulate.slicing import SliceSpec, cut_lossy
from meshwright.planner.solve.unit_options import unit_options

from tests.strategies import cluster

from .test_wire_formats import HOME, SIZE, profile_of

RATIO = 1 / 64
THIN = HOME._replace(exchange="low_rank", ratio=RATIO)


def thin(there=None, **goal):
    curve = FidelityProfile(exchange="low_rank", ratios=(RATIO,), kept=(0.9,))
    rate = CompressionRate(
        exchange="low_rank", ratio=0.01, seconds_per_byte=3e-10, received_seconds_per_byte=2e-10
    )
    profile = profile_of()
    units = tuple(msgspec.structs.replace(u, fidelity=(curve,)) for u in profile.units)
    profile = msgspec.structs.replace(profile, units=units, compression=(rate,))
    asked = Goal(batch=32, optimizer="adam", **{"allow_lossy": True, "min_fidelity": 0.5, **goal})
    return CostModel(profile, there or cluster(4), asked, message_bytes=4096, sliced=True)


def test_the_rank_is_the_whole_number_next_to_the_ratio():
    assert thin_share([(256, 256)], 1) == pytest.approx(1 / 256)
    assert thin_rank([(256, 256)], 0.01) == 3  # 2.56
    assert thin_rank([(10, 4096)], 1e-6) == 1
    assert thin_rank([(10, 4096)], 1.0) == 10  # no more than it has rows
    # All matrices of a unit have the one that was measured.
    for sides in ([(512, 4608)], [(4096, 4096), (1024, 4096)], [(2, 40), (300, 200), (3, 3)]):
        for rank in (1, 2, 4, 8):
            assert thin_rank(sides, thin_share(sides, rank)) == rank
    assert thin_share([(0, 40)], 1) == 0.0
    assert matrix_sides((64, 3, 3, 3)) == (64, 27)


def test_one_all_reduce_carries_the_mean_of_two_steps_matrices():
    model = thin()
    cost, plain = model.unit(1, THIN), model.unit(1, HOME)
    assert cost.gradient_bytes == SIZE * RATIO
    assert cost.exchange == model.exchange(HOME, SIZE * RATIO)
    assert cost.backward_s == pytest.approx(plain.backward_s + SIZE * 3e-10)
    assert cost.update_s == pytest.approx(plain.update_s + SIZE * 2e-10)


def test_what_is_left_out_and_directions_take_memory():
    def held(option):
        found = MemoryModel(thin()).unit(1, option, 8).column
        return dict(zip(UNIT_FIELDS, found, strict=True))

    exact, short = held(HOME), held(THIN)
    assert short["residual"] - exact["residual"] == SIZE * (1 + 2 * RATIO)
    assert short["comm_buffers"] == 2 * RATIO * SIZE
    assert short["gradients"] == exact["gradients"]


def test_gradients_of_16_bits_are_multiplied_in_32(monkeypatch):
    def of_low_rank():
        return feedback_bytes(thin(), THIN, 100.0, 60.0, 0.0)

    assert of_low_rank() == (100 * (1 + 2 * RATIO), 100, 0, 0)
    monkeypatch.setattr(CostModel, "element_bytes", 2)
    # The whole in 32 bits, and what it is rounded to.
    assert of_low_rank() == (100 * (1 + 2 * RATIO * 2), 100, 0, 3 * 60)


def test_what_is_sent_whole_comes_first_and_thin_matrices_share_a_message():
    found = cut_lossy("low_rank", [400_000, 50, 800_000], [False, True, False], 300_000)
    assert found == (SliceSpec((1,)), SliceSpec((0, 2)))
    assert cut_lossy("low_rank", [50], [True], 300_000) == (SliceSpec((0,)),)


def test_small_messages_of_several_units_are_packed():
    kib = 2**10
    assert packed_bytes(HOME, 640 * kib, whole=False) == 640 * kib
    # As four times the bytes that travel: 32 KiB of thin matrices fill a message.
    assert packed_bytes(THIN, 640 * kib, whole=False) == 40 * kib
    assert packed_bytes(THIN._replace(ratio=0.5), 640 * kib, whole=False) == 640 * kib
    assert packed_bytes(THIN, 640 * kib, whole=True) == 640 * kib
    # What is freed in backward is not held until other units' gradients are there.
    assert packed_bytes(THIN._replace(early_release=True), 640 * kib, whole=False) == 640 * kib


def test_units_of_other_ratios_share_a_message():
    """The rank is the same, and the sides are others."""
    model = thin()
    decisions = tuple(
        option if option.layout.groups == 1 or model.profile.units[k].fixed
        else option._replace(exchange="low_rank", ratio=RATIO / (k + 1))
        for k, option in enumerate(model.baseline)
    )  # fmt: skip
    shared = [p for p in pack_gradients(model, decisions, "priority") if len(p.units) > 1]
    assert shared
    sent = {m.sent_bytes for m in messages_of(model, decisions, "priority")}
    for packed in shared:
        thin_bytes = sum(g.payload_bytes for g in packed.gradients if not g.whole)
        on = model.exchange(packed.kind, thin_bytes)
        assert on.sent_bytes in sent


def test_it_is_offered_where_it_keeps_enough_and_devices_are_equal():
    def offered(model):
        return {o.exchange for o in unit_options(model, 1, EVERYTHING)}

    assert "low_rank" in offered(thin())
    assert "low_rank" not in offered(thin(min_fidelity=0.99))
    model = thin()
    model.kinds = model.kinds * 2  # as if hosts were of two kinds
    assert "low_rank" not in offered(model)
    (first, second) = cluster(2).nodes
    other = msgspec.structs.replace(second.devices[0], name="another device, as fast")
    unlike = msgspec.structs.replace(second, devices=(other,))
    assert "low_rank" not in offered(
        thin(msgspec.structs.replace(cluster(2), nodes=(first, unlike)))
    )


def test_it_is_not_offered_to_divided_units():
    """What was measured is what thin matrices of whole ones keep."""
    model = thin()
    offered = list(unit_options(model, 1, EVERYTHING))
    assert {o.layout.degree for o in offered} > {1}
    assert {o.layout.degree for o in offered if o.exchange == "low_rank"} == {1}
