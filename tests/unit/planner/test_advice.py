"""The ladder of ways to train: each is what planning it gives, and the quickest comes first."""

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.explain.advice import advise, slow_hosts
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.goal import Goal, make_goal
from meshwright.planner.schema.profile import CompressionRate, FidelityProfile
from meshwright.planner.solve.choice import over_bytes
from meshwright.planner.solve.heuristic.resize import resized
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear

CAPABILITY = msgspec.structs.replace(
    PLAIN, styles=("none",), wire=("exact", "bf16"), exchange=("dense", "topk"), priority=True
)


def profile_of(seconds=1e-4, fidelity=True):
    curve = FidelityProfile(exchange="topk", ratios=(0.05,), kept=(0.95,))
    curves = (curve,) if fidelity else ()
    units = [
        msgspec.structs.replace(
            linear(f"fc{i}", 256, 256, seconds), fidelity=curves, gradient_energy=1.0
        )
        for i in range(3)
    ]
    profile = chain_profile(units, updates=(("sgd", 1e-12),))
    rate = CompressionRate(exchange="bf16", seconds_per_byte=1e-10)
    return msgspec.structs.replace(profile, compression=(rate,))


def advice_of(ranks=4, rate=1e8, profile=None, batch=64, hosts=None, **goal):
    links = cluster(ranks, inter=rate)
    problem = problem_for(profile or profile_of(), links, make_goal(batch, **goal), CAPABILITY)
    return advise(problem, "heuristic"), links


def by_name(found):
    return {way.name: way for way in found.ways}


@pytest.mark.parametrize("rate", [1e5, 1e7, 1e10])
def test_the_quickest_comes_first_and_gains_are_over_data_parallelism(rate):
    found, _ = advice_of(rate=rate)
    rates = [way.samples_per_s for way in found.ways if way.samples_per_s is not None]
    assert rates == sorted(rates, reverse=True)
    assert by_name(found)["data parallel (DDP)"].gain == pytest.approx(1)
    for way in found.ways:
        if way.gain is not None:
            assert way.samples_per_s == pytest.approx(way.batch / way.step_s)
            base = by_name(found)["data parallel (DDP)"].samples_per_s
            assert way.gain == pytest.approx(way.samples_per_s / base)


def test_each_way_is_the_plan_that_its_options_make():
    found, links = advice_of(rate=1e6)
    ways, profile = by_name(found), profile_of()

    def step_s(ranks=4, batch=64, **goal):
        problem = problem_for(profile, resized(links, ranks), make_goal(batch, **goal), CAPABILITY)
        return solve(problem, "heuristic").plan.prediction.step_s

    assert ways["exact plan"].step_s == step_s()
    assert ways["plan with bfloat16 gradients"].options == ("--allow-lossy",)
    assert ways["plan with bfloat16 gradients"].step_s == step_s(allow_lossy=True)
    assert ways["plan with gradients in part"].options[1:] == ("--min-fidelity", "0.9")
    parts = step_s(allow_lossy=True, min_fidelity=0.9)
    assert ways["plan with gradients in part"].step_s == parts
    assert ways["plan for twice the batch"].step_s == step_s(batch=128, micro_batches=(1, 2))
    assert ways["half of the hosts"].step_s == step_s(ranks=2)


def test_ways_without_a_plan_and_without_a_measurement_say_so():
    found, _ = advice_of(rate=1e6, profile=profile_of(fidelity=False))
    ways = by_name(found)
    assert ways["one device"].options is ways["data parallel (DDP)"].options is None
    assert ways["exact plan"].options == ()
    for name in ("plan with int8 gradients", "plan with gradients in part"):
        assert ways[name].step_s is None
        assert "is not measured" in ways[name].why


def test_what_the_goal_allows_besides_is_left_to_the_ways():
    exact, _ = advice_of(rate=1e6)
    allowed, _ = advice_of(rate=1e6, allow_lossy=True, min_fidelity=0.5)
    assert exact == allowed


def test_a_slow_network_leaves_one_device_and_a_fast_one_the_cluster():
    slow, _ = advice_of(rate=1e4)
    assert slow.ways[0].name == "one device"
    assert slow.exchange_ratio > 100
    fast, _ = advice_of(rate=1e12)
    assert fast.ways[0].ranks == 4
    assert fast.exchange_ratio < 0.1
    assert by_name(fast)["plan with bfloat16 gradients"].why == "no unit gains by it"


def test_what_cannot_be_is_not_offered():
    scaled = msgspec.structs.replace(profile_of(), precision="fp16-mixed")
    found, _ = advice_of(profile=scaled)
    assert "plan with gradients in part" not in by_name(found)
    alone, _ = advice_of(ranks=1)
    assert not {"one device", "one host", "half of the hosts"} & by_name(alone).keys()


def test_what_does_not_fit_says_so():
    # Below what a rank needs under any plan, but for the smallest.
    found, _ = advice_of(rate=1e6, memory_limit_bytes=1000)
    assert all(way.gain is None for way in found.ways)
    assert "memory" in by_name(found)["one device"].why
    assert "memory" in by_name(found)["exact plan"].why


def test_one_device_is_planned_where_plain_training_does_not_fit():
    units = [linear(f"fc{i}", 256, 256, 1e-4, saved=65_536.0) for i in range(6)]
    profile = chain_profile(units, updates=(("sgd", 1e-12),))
    able = msgspec.structs.replace(CAPABILITY, memory=("keep", "recompute"))
    links = cluster(4, inter=1e5)

    def problem(there, **limit):
        return problem_for(profile, there, make_goal(64, **limit), able)

    def one_device(**limit):
        return by_name(advise(problem(links, **limit), "heuristic"))["one device"]

    assert one_device().options is None
    single = resized(links, 1)
    limit = max(solve(problem(single), "heuristic").plan.prediction.peak_bytes) - 2**20
    way = one_device(memory_limit_bytes=limit)
    plan = solve(problem(single, memory_limit_bytes=limit), "heuristic").plan
    assert any(unit.memory == "recompute" for unit in plan.units)
    assert (way.options, way.step_s) == (("--ranks", "1"), plan.prediction.step_s)


def test_what_is_not_planned_takes_as_many_micro_batches_as_it_needs():
    units = [linear(f"fc{i}", 256, 256, 1e-4, saved=65_536.0) for i in range(3)]
    profile = chain_profile(units, updates=(("sgd", 1e-12),))

    def needed(count):
        goal = make_goal(64, memory_limit_bytes=1)
        model = CostModel(profile, cluster(4), goal, micro_batches=count)
        return over_bytes(model, model.baseline) + 1

    limit = int(needed(1) + needed(8)) // 2

    def plain(**goal):
        found, _ = advice_of(profile=profile, memory_limit_bytes=limit, **goal)
        return by_name(found)["data parallel (DDP)"]

    assert plain().why == "memory is too small"
    assert plain(micro_batches=(1, 8)).gain == pytest.approx(1)


def test_a_host_of_several_devices_by_itself():
    links = cluster(4, inter=1e6)
    device = links.nodes[0].devices[0]
    nodes = tuple(msgspec.structs.replace(n, devices=(device,) * 2) for n in links.nodes[:2])
    levels = (
        links.level("inter"),
        msgspec.structs.replace(links.level("inter"), name="intra", bytes_per_s=1e11),
    )
    both = msgspec.structs.replace(links, nodes=nodes, levels=levels)
    problem = problem_for(profile_of(), both, Goal(batch=64), CAPABILITY)
    ways = by_name(advise(problem, "heuristic"))
    assert ways["one host"].ranks == 2
    assert ways["one host"].step_s < ways["exact plan"].step_s
    assert "half of the hosts" not in ways


def measured_pairs(own, back=None):
    """A cluster of hosts with one device each, whose links reach what the slower end allows."""
    back = back or own
    pairs = tuple(
        tuple(0.0 if i == j else float(min(own[i], back[j])) for j in range(len(own)))
        for i in range(len(own))
    )
    return msgspec.structs.replace(cluster(len(own)), pair_bytes_per_s=pairs)


def test_a_host_with_slow_links_is_named():
    (found,) = slow_hosts(measured_pairs([9e7, 9e6, 9e7, 8e7]))
    assert found.name == cluster(4).nodes[1].name
    assert found.bytes_per_s == 9e6
    assert found.others_bytes_per_s == 9e7
    # One that is slow in one direction only holds the others up too.
    (found,) = slow_hosts(measured_pairs([9e7, 9e7, 9e7], [9e7, 9e7, 1e7]))
    assert found.name == cluster(3).nodes[2].name


def test_hosts_that_are_about_alike_are_not_named():
    assert slow_hosts(measured_pairs([9e7, 5e7, 6e7, 8e7])) == ()
    assert slow_hosts(measured_pairs([9e7, 1e6])) == ()  # which of two it is nobody can tell
    assert slow_hosts(cluster(4)) == ()


def test_eight_bits_are_a_way_of_their_own():
    curve = FidelityProfile(exchange="int8", ratios=(1.0,), kept=(0.9999,))
    profile = profile_of()
    units = tuple(msgspec.structs.replace(u, fidelity=(*u.fidelity, curve)) for u in profile.units)
    profile = msgspec.structs.replace(profile, units=units)
    able = msgspec.structs.replace(CAPABILITY, exchange=(*CAPABILITY.exchange, "int8"))
    problem = problem_for(profile, cluster(2, inter=1e8), Goal(batch=64), able)
    ways = by_name(advise(problem, "heuristic"))
    assert ways["plan with int8 gradients"].options == (
        "--allow-lossy", "--min-fidelity", "0.99", "--forbid=dropped", "--forbid=topk",
        "--forbid=low_rank",
    )  # fmt: skip
    assert ways["plan with int8 gradients"].gain > ways["plan with bfloat16 gradients"].gain


def test_local_steps_that_do_not_fit_say_so():
    """Hosts keep a copy of the model and messages besides: with room for the exact plan only."""
    able = msgspec.structs.replace(CAPABILITY, local_steps=True)
    goal = make_goal(64, memory_limit_bytes=3 * 2**20)
    problem = problem_for(profile_of(), cluster(4, inter=1e6), goal, able)
    ways = by_name(advise(problem, "heuristic"))
    assert ways["exact plan"].step_s is not None
    why = ways["plan with local steps"].why
    assert why == "nothing fits in the memory of a host's ranks then"
