"""Seconds of collectives against hand calculation."""

import numpy as np
import pytest
from meshwright.planner.cost.collectives import (
    Fabric,
    all_to_all_s,
    collective_s,
    groups_of,
    measured_s,
    peers_of,
    rings,
)
from meshwright.planner.schema.cluster import CollectiveCurve
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.layout import Layout, data_parallel

from tests.strategies import cluster

LATENCY, RATE, INSIDE = 1e-4, 1e8, 1e10


def fabric(nodes=4, devices=1, **changes):
    links = cluster(nodes, devices, RATE, INSIDE, LATENCY, **changes)
    return Fabric(links, tuple(range(links.world_size)))


def test_ring_formulas():
    f = fabric()
    ring = rings(f, groups_of(Layout(groups=1, degree=4)))
    half_s = 3 * LATENCY + 3 / 4 * 4e6 / RATE
    assert collective_s(f, ring, "all_reduce", 4e6) == pytest.approx(2 * half_s)
    assert collective_s(f, ring, "all_gather", 4e6) == pytest.approx(half_s)
    assert collective_s(f, ring, "reduce_scatter", 4e6) == pytest.approx(half_s)
    pair = rings(f, np.array([[0, 3]]))
    assert collective_s(f, pair, "p2p", 4e6) == pytest.approx(LATENCY + 4e6 / RATE)
    level = f.level("inter")
    assert all_to_all_s(level, 3, 4e6) == pytest.approx(3 * LATENCY + 4e6 / RATE)


def test_one_rank_and_no_bytes_take_no_time():
    f = fabric()
    alone = rings(f, peers_of(Layout(groups=1, degree=4)))
    assert collective_s(f, alone, "all_reduce", 1e9) == 0
    assert collective_s(f, rings(f, peers_of(data_parallel(4))), "all_reduce", 0) == 0


def test_a_ring_over_neighbours_leaves_each_node_once():
    f = fabric(nodes=2, devices=4)
    ring = rings(f, peers_of(data_parallel(8)))
    assert (ring.level, ring.load, ring.bytes_per_s) == ("inter", 1, RATE)


def test_exchange_groups_share_the_network_interface():
    """Groups of four inside each of two nodes: four pairs exchange gradients over one interface."""
    f = fabric(nodes=2, devices=4)
    layout = Layout(groups=2, degree=4)
    inside, across = rings(f, groups_of(layout)), rings(f, peers_of(layout))
    assert (inside.level, inside.load, inside.bytes_per_s) == ("intra", 1, INSIDE)
    assert (across.level, across.load, across.bytes_per_s) == ("inter", 4, RATE / 4)
    assert collective_s(f, across, "all_reduce", 1e6) == pytest.approx(
        2 * LATENCY + 1e6 / (RATE / 4)
    )


def test_a_slow_link_inside_nodes_holds_a_ring_back():
    links = cluster(2, 2, inter=1e9, intra=1e8)
    ring = rings(Fabric(links, (0, 1, 2, 3)), peers_of(data_parallel(4)))
    assert (ring.level, ring.bytes_per_s) == ("inter", 1e8)


def test_placement_decides_which_hops_cross():
    links = cluster(2, 2, inter=RATE, intra=INSIDE)
    layout = Layout(groups=2, degree=2)
    apart = Fabric(links, (0, 2, 1, 3))  # members of a group on two nodes
    assert rings(apart, groups_of(layout)).level == "inter"
    assert rings(apart, peers_of(layout)).level == "intra"


def test_measured_pairs_bound_the_slowest_hop():
    pairs = tuple(tuple(0.0 if i == j else 1e7 * (1 + i) for j in range(4)) for i in range(4))
    f = fabric(pairs=pairs)
    assert rings(f, peers_of(data_parallel(4))).bytes_per_s == 1e7


def test_pairs_of_the_levels_own_rate_change_nothing():
    """Neither by formula nor where curves were measured."""
    for curves in ((), (curve("all_reduce", 2, (0.01, 0.02)),)):
        rows = tuple(
            tuple(0.0 if i == j else INSIDE if i // 2 == j // 2 else RATE for j in range(4))
            for i in range(4)
        )
        one, other = (fabric(2, 2, curves=curves, pairs=pairs) for pairs in ((), rows))
        for layout in (Layout(groups=2, degree=2), data_parallel(4)):
            for groups in (groups_of(layout), peers_of(layout)):
                seconds = [
                    collective_s(f, rings(f, groups), "all_reduce", 1e6) for f in (one, other)
                ]
                assert seconds[0] == pytest.approx(seconds[1])


def test_a_ring_over_faster_links_reads_the_curve_at_fewer_bytes():
    pairs = tuple(
        tuple(0.0 if i == j else RATE * (1 + (i + j > 2)) for j in range(4)) for i in range(4)
    )
    f = fabric(pairs=pairs, curves=(curve("all_reduce", 2, (0.01, 0.02)),))
    slow, fast = (rings(f, np.array([ranks])) for ranks in ((0, 1), (2, 3)))
    assert collective_s(f, slow, "all_reduce", 2e6) == pytest.approx(0.02)
    assert collective_s(f, fast, "all_reduce", 2e6) == pytest.approx(0.01)


def curve(collective, ranks, seconds, latency_s=1e-3, rate=1e8):
    points = Curve(x=(1e6, 2e6), y=seconds)
    return CollectiveCurve(
        collective=collective, ranks=ranks, seconds=points, latency_s=latency_s, bytes_per_s=rate
    )


def test_measured_curves_replace_the_formula():
    f = fabric(curves=(curve("all_reduce", 4, (0.02, 0.03)),))
    ring = rings(f, peers_of(data_parallel(4)))
    assert collective_s(f, ring, "all_reduce", 1.5e6) == pytest.approx(0.025)
    assert collective_s(f, ring, "all_gather", 4e6) == pytest.approx(3 * LATENCY + 3e6 / RATE)


def test_between_measured_rank_counts_seconds_are_interpolated():
    curves = (curve("all_reduce", 2, (0.01, 0.02)), curve("all_reduce", 6, (0.03, 0.06)))
    level = fabric(curves=curves).level("inter")
    assert measured_s(level, "all_reduce", 4, 1e6) == pytest.approx(0.02)


def test_beyond_measured_rank_counts_share_and_steps_grow():
    level = fabric(curves=(curve("all_reduce", 2, (0.011, 0.021)),)).level("inter")
    # twice the share of the bytes less a quarter: 2·3/4 over 2·1/2; six steps instead of two
    expected = 0.016 + 2 * 1e-3
    assert measured_s(level, "all_reduce", 4, 1e6) == pytest.approx(expected)


def test_what_took_longer_than_more_bytes_was_disturbed():
    level = fabric(curves=(curve("p2p", 2, (0.8, 0.01)),)).level("inter")
    assert measured_s(level, "p2p", 2, 1e6) == 0.01
    assert measured_s(level, "p2p", 2, 2e6) == 0.01


def test_rings_that_share_an_interface_read_the_curve_at_more_bytes():
    f = fabric(nodes=2, devices=2, curves=(curve("all_reduce", 2, (0.01, 0.02)),))
    ring = rings(f, peers_of(Layout(groups=2, degree=2)))
    assert collective_s(f, ring, "all_reduce", 1e6) == pytest.approx(0.02)
