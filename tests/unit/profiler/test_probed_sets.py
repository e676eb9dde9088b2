"""Which groups of ranks the link probe measures, and the Cluster that it makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from meshwright.planner.cost.collectives import Fabric
from meshwright.planner.cost.ownership import TensorPlacement
from meshwright.planner.cost.redistribution import redistribution_s, traffic
from meshwright.planner.schema.cluster import Cluster, Device, Interference
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.profiler.collectives import COLLECTIVES, MeasuredGroup
from meshwright.profiler.links import _cluster, _groups

TIMED_S, TIMED_RATE = 1e-4, 1e9


def probed(hosts: str) -> Cluster:
    """The cluster of ranks on those hosts, in whose groups every collective takes as long."""

    def timed(ranks: tuple[int, ...]) -> MeasuredGroup:
        handle: Any = None
        calls = ((c, size) for c in COLLECTIVES for size in (1024, 2**20))
        seconds = {call: [TIMED_S + call[1] / TIMED_RATE] for call in calls}
        return MeasuredGroup(handle, ranks, 0, torch.device("cpu"), seconds=seconds)

    measured = [(level, sets, timed(sets[0])) for level, sets in _groups(hosts)]
    device = Device(name="cpu", memory_bytes=2**30, source="measured")
    rates = np.full((len(set(hosts)),) * 2, 1e8)
    return _cluster(hosts, [device] * len(hosts), measured, Interference(), rates)


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ("aab", [(0, 1)]),
        ("abb", [(1, 2)]),
        ("aaab", [(0, 1)]),
        ("aaabb", [(0, 1), (3, 4)]),
        ("aaaaabbb", [(0, 1), (2, 3), (5, 6)]),
    ],
)
def test_pairs_inside_hosts_are_measured_where_all_else_crosses_them(hosts, pairs) -> None:
    sets = _groups(hosts)
    assert [found for level, found in sets if level == "intra"] == [pairs]
    # Interference is measured among all, last.
    assert sets[-1] == ("inter", [tuple(range(len(hosts)))])


@pytest.mark.parametrize("hosts", ["aa", "ab", "aabb", "aaaabb", "abc"])
def test_elsewhere_all_ranks_are_in_each_set(hosts) -> None:
    for _, sets in _groups(hosts):
        assert sorted(rank for ranks in sets for rank in ranks) == list(range(len(hosts)))


@pytest.mark.parametrize(
    ("hosts", "ranks", "busiest"),
    [
        ("aabb", 4, 2 * 2 / 3),  # two of a host's ranks send two thirds to the other host
        ("aaaabbbb", 8, 4 * 4 / 7),
        ("aabb", 2, 2.0),  # two pairs over one interface
        ("abcd", 4, 1.0),
    ],
)
def test_an_all_to_all_is_known_by_what_the_busiest_interface_carries(hosts, ranks, busiest):
    made = probed(hosts)
    between = made.level("inter")
    assert between is not None
    curves = {c.collective: c for c in between.curves if c.ranks == ranks}
    assert curves["all_to_all"].seconds.x[0] == pytest.approx(1024 * busiest)
    ring = 2 if (hosts, ranks) == ("aabb", 2) else 1
    assert curves["all_reduce"].seconds.x[0] == 1024 * ring


@pytest.mark.parametrize("hosts", ["aabb", "aaaabbbb", "abcd"])
def test_a_redistribution_among_all_takes_what_the_probe_took_for_it(hosts):
    made, world = probed(hosts), len(hosts)
    fabric = Fabric(made, tuple(range(world)))
    whole, divided = data_parallel(world), Layout(groups=1, degree=world)
    moved = traffic(
        fabric, (3,) * world, [TensorPlacement(whole, "batch_shard")],
        [TensorPlacement(divided, "feature_shard")], features=16 * world,
    )  # fmt: skip
    sent = float(moved.sent[0, 0]) * 4.0
    # Inside hosts there are fewer ranks, whose curve says nothing of so many.
    between = moved._replace(intra=0 * moved.intra)
    seconds = redistribution_s(fabric, between, 4.0)[0, 0]
    assert seconds == pytest.approx(TIMED_S + sent / TIMED_RATE)


@pytest.mark.parametrize("hosts", ["aab", "abb"])
def test_hosts_of_several_sizes_have_both_levels(hosts) -> None:
    inside = {level.name: {c.ranks for c in level.curves} for level in probed(hosts).levels}
    assert inside == {"intra": {2}, "inter": {3}}
