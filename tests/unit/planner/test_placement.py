"""Placement on small clusters whose best order is known."""

from dataclasses import replace

import msgspec
from meshwright.planner.cost.placement import order_cost, place
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear


def racks(names, near=1e9, far=1e8):
    """Hosts of one device in racks, ``names`` saying in which."""
    return tuple(
        tuple(0.0 if i == j else near if a == b else far for j, b in enumerate(names))
        for i, a in enumerate(names)
    )


def test_equal_hosts_keep_their_order():
    assert place(cluster(4, 2)) == tuple(range(8))
    assert place(cluster(1)) == (0,)


def test_hosts_of_one_rack_become_neighbours():
    names = "abab"
    order = place(cluster(4, pairs=racks(names)), [Layout(groups=2, degree=2)])
    together = [{names[r] for r in order[i : i + 2]} for i in (0, 2)]
    assert all(len(rack) == 1 for rack in together)


def test_a_large_cluster_is_improved_by_search():
    names = "abcdabcdabcd"
    links = cluster(12, pairs=racks(names))
    layouts = [Layout(groups=4, degree=3)]
    order = place(links, layouts)
    assert order_cost(links, order, layouts) < order_cost(links, range(12), layouts)
    assert all(len({names[r] for r in order[i : i + 3]}) == 1 for i in range(0, 12, 3))


def test_more_hosts_than_pairs_are_tried_for_still_improve():
    names = "".join("abcdefgh"[i % 8] for i in range(72))
    links = cluster(72, pairs=racks(names))
    layouts = [Layout(groups=24, degree=3)]
    order = place(links, layouts)
    assert sorted(order) == list(range(72))
    assert order == place(links, layouts)
    assert order_cost(links, order, layouts) < order_cost(links, range(72), layouts)


def test_groups_do_not_straddle_hosts_of_different_sizes():
    links = cluster(devices=(1, 2, 1), inter=1e8, intra=1e10)
    layouts = [Layout(groups=2, degree=2)]
    order = place(links, layouts)
    nodes = [{links.node_of_rank[r] for r in order[i : i + 2]} for i in (0, 2)]
    assert {1} in nodes
    assert order_cost(links, order, layouts) < order_cost(links, range(4), layouts)


def test_the_plan_takes_the_placement():
    profile = chain_profile([linear("fc", 512, 512, 1e-4)])
    links = cluster(4, pairs=racks("abab", 1e9, 1e7))
    plan = solve(Problem(profile, links, Goal(batch=16))).plan
    assert plan.placement == place(links)
    assert plan.prediction.step_s < plan.baseline.step_s
    fixed = Problem(profile, links, Goal(batch=16), placement=(3, 2, 1, 0))
    assert solve(fixed).plan.placement == (3, 2, 1, 0)


def test_a_burst_takes_the_hosts_with_the_fastest_links():
    """Host 0 is the slow one; where units may leave ranks idle it comes last."""
    rates = (7.0, 20.0, 90.0)
    pairs = tuple(
        tuple(0.0 if i == j else 1e6 * min(a, b) for j, b in enumerate(rates))
        for i, a in enumerate(rates)
    )
    profile = chain_profile([linear("fc", 64, 64, 1e-4)])
    asked = Problem(profile, cluster(3, pairs=pairs), Goal(batch=6))
    assert asked.placed().placement == (0, 1, 2)
    bursts = msgspec.structs.replace(asked.capability, idle_positions=True)
    able = replace(asked, capability=bursts)
    assert able.placed().placement[-1] == 0
