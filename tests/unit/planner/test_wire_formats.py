"""Gradients rounded to travel: what that saves, takes and loses, and when it is planned."""

import msgspec
import pytest
from meshwright.planner.cost.budget import ROUNDED_AWAY, energy_budget, lost_energy
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory.timeline import UNIT_FIELDS
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import ROUNDED_FIDELITY, Goal, make_goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import CompressionRate, FidelityProfile
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.planner.solve.unit_options import unit_options

from tests.strategies import chain_profile, cluster, linear

HOME = Option(data_parallel(4))
SHORT = HOME._replace(wire="bf16")
SIZE = 64 * 64 * 4
RATE = CompressionRate(exchange="bf16", seconds_per_byte=1e-10, received_seconds_per_byte=5e-11)


def profile_of(dtype="float32", rates=(RATE,), seconds=1e-4):
    curve = FidelityProfile(exchange="topk", ratios=(0.5,), kept=(0.99999999,))
    units = [
        msgspec.structs.replace(
            linear(name, 64, 64, seconds), fidelity=(curve,), gradient_energy=energy
        )
        for name, energy in (("fc", 1.0), ("head", 3.0))
    ]
    profile = chain_profile(units, updates=(("adam", 1e-9),))
    return msgspec.structs.replace(profile, compression=rates, dtype=dtype)


def model_of(dtype="float32", rates=(RATE,), sliced=True, **goal):
    asked = {"allow_lossy": True, "min_fidelity": ROUNDED_FIDELITY, **goal}
    made = Goal(batch=32, optimizer="adam", **asked)
    return CostModel(profile_of(dtype, rates), cluster(4), made, message_bytes=4096, sliced=sliced)


def wires(model):
    options = unit_options(model, 1, EVERYTHING)
    return {(o.exchange, o.wire) for o in options if o.layout == HOME.layout}


@pytest.mark.parametrize("sliced", [False, True])
def test_half_of_the_bytes_travel(sliced):
    model = model_of(rates=(), sliced=sliced)
    exact, short = (model.unit(1, option) for option in (HOME, SHORT))
    assert short.exchange.sent_bytes == exact.exchange.sent_bytes / 2
    assert short.exchange.seconds < exact.exchange.seconds
    # Slices are cut from the gradient, each of which is sent as half as much.
    assert short.gradient_bytes == exact.gradient_bytes == SIZE
    whole = model.exchange(HOME, SIZE / 2)
    assert model.exchange(SHORT, SIZE) == whole


def test_parameters_come_back_as_they_are():
    model = model_of(rates=())
    sharded = HOME._replace(exchange="sharded")
    exact, short = (model.exchange(o, SIZE) for o in (sharded, sharded._replace(wire="bf16")))
    assert short.sent_bytes == pytest.approx(0.75 * exact.sent_bytes)
    # A plan holds plain numbers: numpy's cannot be written.
    assert {type(value) for on in (exact, short) for value in (on.seconds, on.sent_bytes)} == {
        float
    }


def test_rounding_takes_time_where_it_happens():
    model, free = model_of(), model_of(rates=())
    took, plain = (m.unit(1, SHORT) for m in (model, free))
    assert took.backward_s == pytest.approx(plain.backward_s + SIZE * 1e-10)
    assert took.update_s == pytest.approx(plain.update_s + SIZE * 5e-11)
    assert model.unit(1, HOME) == free.unit(1, HOME)
    alone = Option(Layout(groups=1), wire="bf16")
    assert model.unit(1, alone).backward_s == free.unit(1, alone).backward_s


def test_what_rounding_loses_needs_no_measuring():
    model = model_of()
    assert lost_energy(model, 1, SHORT) == ROUNDED_AWAY / 4
    assert energy_budget(model) > ROUNDED_AWAY


def test_rounding_is_offered_where_it_is_allowed_and_saves_bytes():
    dense = {("dense", "exact"), ("dense", "bf16")}
    sharded = {(e, w) for e in ("sharded", "fully_sharded") for w in ("exact", "bf16")}
    assert wires(model_of()) == dense | sharded
    assert wires(model_of(sliced=False)) == dense
    assert {wire for _, wire in wires(model_of(allow_lossy=False))} == {"exact"}
    assert {wire for _, wire in wires(model_of(dtype="bfloat16"))} == {"exact"}
    assert {wire for _, wire in wires(model_of(min_fidelity=1 - 1e-9))} == {"exact"}
    with pytest.raises(InputError, match="'bf16' with gradients of bfloat16: use 'exact'"):
        model_of(dtype="bfloat16").unit(1, SHORT)


def test_nothing_waits_where_only_rounding_was_allowed():
    # However much top-k would keep.
    assert not any(exchange == "topk" for exchange, _ in wires(model_of()))
    assert ("topk", "exact") in wires(model_of(min_fidelity=0.9))
    assert ("topk", "bf16") not in wires(model_of(min_fidelity=0.9))


def test_what_is_sent_of_sharded_gradients_takes_half_the_place():
    sharded = HOME._replace(exchange="sharded")

    def held(option):
        found = MemoryModel(model_of(rates=())).unit(1, option, 8).column
        return dict(zip(UNIT_FIELDS, found, strict=True))

    exact, short = held(sharded), held(sharded._replace(wire="bf16"))
    assert exact["comm_buffers"] == SIZE * 3 / 4
    assert short["comm_buffers"] == 0
    assert held(HOME) == held(SHORT)  # dense gradients are rounded in their own memory


def planned(links, profile=None, **goal):
    made = make_goal(32, optimizer="adam", allow_lossy=True, **goal)
    return solve(problem_for(profile or profile_of(), links, made, EVERYTHING), "heuristic").plan


def test_it_is_planned_where_the_link_is_slow():
    slow, fast = (planned(cluster(4, inter=rate)) for rate in (1e6, 1e12))
    assert {u.wire for u in slow.units if u.kind == "linear"} == {"bf16"}
    assert {u.wire for u in fast.units} == {"exact"}
    assert {u.exchange for u in slow.units} <= {"dense", "sharded"}


def test_it_needs_no_fidelity_and_goes_with_a_gradient_scaler():
    units = tuple(msgspec.structs.replace(u, fidelity=()) for u in profile_of().units)
    estimated = msgspec.structs.replace(profile_of(), units=units, precision="fp16-mixed")
    made = planned(cluster(4, inter=1e6), estimated)
    assert {u.wire for u in made.units if u.kind == "linear"} == {"bf16"}
    with pytest.raises(InputError, match="leave --min-fidelity"):
        planned(cluster(4, inter=1e6), estimated, min_fidelity=0.9)


def test_a_unit_cannot_be_rounded_and_sent_in_part():
    made = planned(cluster(4, inter=1e6))
    unit = msgspec.structs.replace(made.units[1], exchange="topk", wire="bf16")
    assert "exchange 'topk' and wire format 'bf16' at once" in EVERYTHING.refusal(unit, 4)
    exact_only = msgspec.structs.replace(EVERYTHING, wire=("exact",))
    assert "asks for wire format 'bf16'" in exact_only.refusal(made.units[1], 4)


def test_an_unusable_fidelity_says_what_to_do():
    with pytest.raises(InputError, match="leave --min-fidelity"):
        make_goal(8, allow_lossy=True, min_fidelity=1.0)
    assert make_goal(8, allow_lossy=True).min_fidelity == ROUNDED_FIDELITY


# -- eight bits ------------------------------------------------------------------------------------

EIGHT = HOME._replace(exchange="int8")


def eight_bits(fidelity=0.9999, **goal):
    curve = FidelityProfile(exchange="int8", ratios=(1.0,), kept=(fidelity,))
    profile = profile_of()
    units = tuple(msgspec.structs.replace(u, fidelity=(curve,)) for u in profile.units)
    rate = CompressionRate(
        exchange="int8", seconds_per_byte=3e-10, received_seconds_per_byte=2e-10,
        gathered_seconds_per_byte=5e-11,
    )  # fmt: skip
    profile = msgspec.structs.replace(profile, units=units, compression=(rate,))
    asked = Goal(batch=32, optimizer="adam", **{"allow_lossy": True, "min_fidelity": 0.99, **goal})
    return CostModel(profile, cluster(4), asked, message_bytes=4096, sliced=True)


def test_all_ranks_get_what_each_sends_in_eight_bits():
    model = eight_bits()
    cost = model.unit(1, EIGHT)
    each = SIZE / 4 * (1 + 4 / 256)
    assert cost.gradient_bytes == 4 * each
    assert cost.exchange.sent_bytes == pytest.approx(3 * each)
    assert cost.backward_s == pytest.approx(model.unit(1, HOME).backward_s + SIZE * 3e-10)
    assert cost.update_s == pytest.approx(model.unit(1, HOME).update_s + SIZE * 4e-10)


def test_the_share_that_is_chosen_tells_what_choosing_takes():
    rates = tuple(
        CompressionRate(exchange="topk", ratio=ratio, seconds_per_byte=seconds)
        for ratio, seconds in ((0.01, 1e-10), (0.25, 6e-10))
    )
    asked = Goal(batch=32, optimizer="adam", allow_lossy=True)
    curve = FidelityProfile(exchange="topk", ratios=(0.01, 0.05, 0.25), kept=(0.5, 0.7, 0.9))
    profile = profile_of(rates=rates)
    units = tuple(msgspec.structs.replace(u, fidelity=(curve,)) for u in profile.units)
    profile = msgspec.structs.replace(profile, units=units)
    model = CostModel(profile, cluster(4), asked, message_bytes=4096, sliced=True)

    def chosen_s(ratio):
        option = HOME._replace(exchange="topk", ratio=ratio)
        return model.unit(1, option).backward_s - model.unit(1, HOME).backward_s

    assert chosen_s(0.01) == pytest.approx(SIZE * 1e-10)
    assert chosen_s(0.05) == pytest.approx(SIZE * 1e-10)  # the nearest
    assert chosen_s(0.25) == pytest.approx(SIZE * 6e-10)


def test_what_rounding_leaves_and_messages_take_memory():
    def held(option):
        found = MemoryModel(eight_bits()).unit(1, option, 8).column
        return dict(zip(UNIT_FIELDS, found, strict=True))

    exact, short = held(HOME), held(EIGHT)
    assert short["residual"] - exact["residual"] == SIZE
    assert short["comm_buffers"] == pytest.approx(4 * SIZE / 4 * (1 + 4 / 256))
    assert short["gradients"] == exact["gradients"]


def test_eight_bits_are_offered_where_they_keep_enough():
    def offered(model):
        return {o.exchange for o in unit_options(model, 1, EVERYTHING)}

    assert "int8" in offered(eight_bits())
    assert "int8" not in offered(eight_bits(fidelity=0.9))
    assert "int8" not in offered(eight_bits(min_fidelity=ROUNDED_FIDELITY))
    unrounded = [o for o in unit_options(eight_bits(), 1, EVERYTHING) if o.exchange == "int8"]
    assert {o.wire for o in unrounded} == {"exact"}
