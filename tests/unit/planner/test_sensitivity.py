"""What-if questions, the front of time and device-seconds, and bursts."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from meshwright.planner.cost.budget import single_device_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.placement import order_cost, place
from meshwright.planner.explain.curves import what_if_curves
from meshwright.planner.explain.front import cheapest_within, front, within
from meshwright.planner.explain.what_if import (
    _half,
    gains,
    gains_of,
    quicker_on_fewer,
    sizes,
    with_bandwidth,
)
from meshwright.planner.schema.capability import EVERYTHING, PLAIN
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.evaluate import make_plan
from meshwright.planner.solve.heuristic.bursts import greedy, own_s
from meshwright.planner.solve.heuristic.resize import how_resized, resized
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear


@pytest.fixture
def problem():
    units = [linear(f"u{i}", 256, 256, 1e-4 * (i + 1), saved=4096.0) for i in range(3)]
    return Problem(
        profile=chain_profile(units, 1024.0, 256),
        cluster=cluster(2, 2),
        goal=Goal(batch=32, memory_limit_bytes=2**30),
        capability=EVERYTHING,
        schedule="priority",
        message_bytes=2**16,
        tie_tolerance=0.0,
    )


def test_gains_name_every_level_memory_and_devices_and_never_lose(problem):
    result = solve(problem, "lagrangian")
    found = gains(problem, result, "lagrangian")
    assert len(found) == len(problem.cluster.levels) + 3
    less, more = found[-2:]
    assert (less.change, more.change) == ("2 devices for 4", "8 devices for 4")
    assert all(g.after_s <= g.before_s * 1.01 for g in found if g is not less)
    assert all(g.method == "planned again" for g in found)


def test_half_of_the_devices_are_planned_for_as_a_cluster_of_that_size(problem):
    result = solve(problem, "lagrangian")
    less = next(g for g in gains(problem, result, "lagrangian") if g.change == "2 devices for 4")
    (size,) = sizes(problem, (2,), "lagrangian").rows
    assert less.after_s == size.objective_s


def test_half_of_two_devices_is_one_device(problem):
    ((change, _),) = _half(replace(problem, cluster=cluster(1, 2)))
    assert change == "1 device for 2"


@pytest.mark.parametrize(
    ("nodes", "each", "asked"), [(2, 1, True), (1, 4, True), (3, 2, False), (1, 1, False)]
)
def test_half_of_the_devices_are_whole_nodes_or_a_part_of_one(problem, nodes, each, asked):
    there = replace(problem, cluster=cluster(nodes, each))
    assert bool(_half(there)) == asked


def test_half_of_unequal_nodes_is_not_asked_about(problem):
    first, second = problem.cluster.nodes
    devices = tuple(msgspec.structs.replace(d, memory_bytes=2**20) for d in second.devices)
    nodes = (first, msgspec.structs.replace(second, devices=devices))
    there = msgspec.structs.replace(problem.cluster, nodes=nodes)
    assert _half(replace(problem, cluster=there)) == []


def test_sizes_plan_every_cluster_and_keep_the_batch(problem):
    rows = sizes(problem, (1, 2, 4, 8), "lagrangian").rows
    assert [r.ranks for r in rows] == [1, 2, 4, 8]
    assert [r.nodes for r in rows] == [1, 1, 2, 4]
    alone = solve(problem, "lagrangian")
    assert rows[2].objective_s == alone.objective_s
    assert rows[2].speedup == alone.plan.speedup
    for row in rows:
        assert row.step_s * row.samples_per_s == pytest.approx(problem.goal.batch)
        assert row.gpu_seconds <= row.ranks * row.step_s * (1 + 1e-9)
        assert row.gpu_seconds_per_sample == pytest.approx(row.gpu_seconds / 32)
        assert row.speedup == pytest.approx(row.baseline_step_s / row.step_s)


def test_a_size_whose_ranks_would_be_without_samples_says_why(problem):
    """A sample for each rank in each micro-batch, and no other number is allowed."""
    goal = msgspec.structs.replace(problem.goal, micro_batches=(8,))
    asked = replace(problem, goal=goal)  # 32 samples on 4 ranks
    rows = sizes(asked, (4, 8), "heuristic").rows
    assert [row.fits for row in rows] == [True, False]
    assert "on 8 ranks cannot be cut into 8 micro-batches" in rows[1].why
    plan = solve(asked, "heuristic").checked()
    more = {gain.change: gain for gain in gains_of(plan, asked, 10)}
    assert "cannot be cut" in more["8 devices for 4"].reason
    curves = what_if_curves(plan, asked, 10.0, lambda what, share: None).curves
    (ranks,) = (curve for curve in curves if curve.name == "ranks")
    assert all(p.again_s is None for p in ranks.points if p.x == 8)


def test_a_size_that_does_not_fit_says_why(problem):
    unit = 4 * 256 * 256
    tight = msgspec.structs.replace(problem.goal, memory_limit_bytes=4 * unit)
    rows = sizes(replace(problem, goal=tight), (1, 8), "integer").rows
    assert [r.fits for r in rows] == [False, True]
    assert rows[0].step_s is None
    assert "available" in rows[0].why


def test_the_given_size_is_the_given_cluster(problem):
    pairs = tuple(tuple(0.0 if i == j else 1e9 for j in range(4)) for i in range(4))
    links = msgspec.structs.replace(problem.cluster, pair_bytes_per_s=pairs)
    assert resized(links, 4) is links
    assert not resized(links, 8).pair_bytes_per_s
    assert "left out" in how_resized(links)


def test_resized_refuses_what_the_nodes_cannot_give(problem):
    with pytest.raises(InputError, match="multiple of 2"):
        resized(problem.cluster, 3)
    lone = msgspec.structs.replace(
        problem.cluster,
        nodes=problem.cluster.nodes[:1],
        levels=tuple(v for v in problem.cluster.levels if v.name == "intra"),
    )
    with pytest.raises(InputError, match="inter"):
        resized(lone, 4)


def test_sizes_that_need_unknown_links_are_rows_that_say_so(problem):
    lone = msgspec.structs.replace(
        problem.cluster,
        nodes=problem.cluster.nodes[:1],
        levels=tuple(v for v in problem.cluster.levels if v.name == "intra"),
    )
    asked = replace(problem, cluster=lone)
    rows = sizes(asked, (2, 4, 8), "heuristic").rows
    assert [(r.ranks, r.nodes, r.fits) for r in rows] == [
        (2, 1, True),
        (4, 2, False),
        (8, 4, False),
    ]
    assert "add the inter level" in rows[1].why
    with pytest.raises(InputError, match="4 ranks need 2 nodes"):
        sizes(asked, (4, 8), "heuristic")


def test_bandwidth_raises_one_level_only(problem):
    wider = with_bandwidth(problem.cluster, "inter", 1e9)
    before, after = problem.cluster, wider
    assert after.level("inter").bytes_per_s == before.level("inter").bytes_per_s + 1e9
    assert after.level("intra") == before.level("intra")


def test_front_falls_in_device_seconds_as_it_rises_in_time(problem):
    points = front(problem, 6, "lagrangian")
    assert points
    for faster, slower in pairwise(points):
        assert faster.step_s < slower.step_s
        assert faster.gpu_seconds > slower.gpu_seconds


def test_plans_are_never_worse_than_the_greedy_bursts(problem):
    model = CostModel(
        problem.profile, problem.cluster, problem.goal, message_bytes=2**16, sliced=True
    )
    for limit in (1.1, 2.0, 8.0):
        theirs = choice(model, greedy(model, limit), "priority")
        fast = within(problem, theirs.gpu_seconds, "lagrangian")
        cheap = cheapest_within(problem, theirs.step_s, "lagrangian")
        assert fast.step_s <= theirs.step_s * (1 + 1e-8)
        assert fast.gpu_seconds <= theirs.gpu_seconds * (1 + 1e-8)
        assert cheap.gpu_seconds <= theirs.gpu_seconds * (1 + 1e-8)
        assert cheap.step_s <= theirs.step_s * (1 + 1e-8)


def test_greedy_keeps_every_unit_within_its_limit(problem):
    model = CostModel(
        problem.profile, problem.cluster, problem.goal, message_bytes=2**16, sliced=True
    )
    for limit in (1.1, 2.0):
        for k, option in enumerate(greedy(model, limit)):
            if not problem.profile.units[k].fixed and option.layout != Layout(groups=1):
                used = own_s(model, k, option) * option.layout.groups
                assert used <= limit * single_device_s(model, k) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_placement_of_nodes_is_never_worse_than_hostname_or_random_orders(seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    links = cluster(4, 2)
    node = links.node_of_rank
    between = rng.uniform(1e8, 2e9, (4, 4))
    pairs = [
        [0.0 if i == j else (5e10 if node[i] == node[j] else float(between[node[i], node[j]]))
         for j in range(8)]
        for i in range(8)
    ]  # fmt: skip
    links = msgspec.structs.replace(links, pair_bytes_per_s=tuple(tuple(r) for r in pairs))
    layouts = [Layout(groups=8), Layout(groups=4, degree=2), Layout(groups=2, degree=4)]
    cost = order_cost(links, place(links, layouts), layouts)
    assert cost <= order_cost(links, range(8), layouts) * (1 + 1e-9)
    for _ in range(30):
        random = tuple(int(r) for r in rng.permutation(8))
        assert cost <= order_cost(links, random, layouts) / 0.99


def test_unlimited_problem_is_left_as_it_was(problem):
    asked = replace(problem, tie_tolerance=0.0)
    within(asked, 1e9, "lagrangian")
    assert asked.goal.amplification_limit is None


def test_fewer_devices_that_are_quicker_are_named():
    """The devices of a node, where the network between nodes is slow; one, where all links are."""
    profile, goal = chain_profile([linear("fc", 512, 512, 1e-3)]), Goal(batch=8)

    def fewer(inter: float, intra: float, memory_bytes: int = 2**30):
        links = cluster(4, 2, inter=inter, intra=intra, memory_bytes=memory_bytes)
        return quicker_on_fewer(make_plan(profile, links, goal), profile, links)

    # All samples take one device 24 ms and one of two 12 ms; a mebibyte of gradients takes a link
    # of 10 MB/s 0.1 s, each way and a half.
    slow_network = fewer(1e7, 1e10)
    assert slow_network is not None
    assert slow_network.devices == 2
    assert slow_network.step_s == pytest.approx(12e-3, rel=0.05)
    slow_links = fewer(1e7, 1e7)
    assert slow_links is not None
    assert slow_links.devices == 1
    assert slow_links.step_s == pytest.approx(24e-3)
    assert fewer(1e10, 1e10) is None
    # Nothing of less memory than the model takes is named.
    assert fewer(1e7, 1e10, memory_bytes=2**20) is None


def test_other_sizes_have_as_much_memory_of_the_host(problem):
    nodes = tuple(
        msgspec.structs.replace(node, host_memory_bytes=2**34) for node in problem.cluster.nodes
    )
    known = msgspec.structs.replace(problem.cluster, nodes=nodes)
    for ranks in (1, 8):
        assert {node.host_memory_bytes for node in resized(known, ranks).nodes} == {2**34}


def test_pins_keep_other_numbers_of_devices_from_a_plan(problem):
    pin = Pin(unit="u0", only=(Layout(groups=4),))
    pinned = replace(problem, goal=msgspec.structs.replace(problem.goal, pins=(pin,)))
    asked = replace(pinned, capability=PLAIN)
    found = gains(asked, solve(asked, "heuristic"), "heuristic")
    more, less = found[-1], found[0]
    assert (more.change, more.after_s) == ("8 devices for 4", None)
    assert more.reason == "its pins are layouts of 4 ranks"
    assert less.reason == ""
