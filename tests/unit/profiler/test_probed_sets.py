"""Which groups of ranks the link probe measures, and the Cluster that it makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from meshwright.planner.schema.cluster import Device, Interference
from meshwright.profiler.collectives import COLLECTIVES, MeasuredGroup
from meshwright.profiler.links import _cluster, _groups


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


@pytest.mark.parametrize("hosts", ["aab", "abb"])
def test_hosts_of_several_sizes_have_both_levels(hosts) -> None:
    def timed(ranks: tuple[int, ...]) -> MeasuredGroup:
        handle: Any = None
        seconds = {(c, size): [1e-4 + size / 1e9] for c in COLLECTIVES for size in (1024, 2**20)}
        return MeasuredGroup(handle, ranks, 0, torch.device("cpu"), seconds=seconds)

    measured = [(level, sets, timed(sets[0])) for level, sets in _groups(hosts)]
    device = Device(name="cpu", memory_bytes=2**30, source="measured")
    rates = np.full((2, 2), 1e8)
    made = _cluster(hosts, [device] * len(hosts), measured, Interference(), rates)
    inside = {level.name: {c.ranks for c in level.curves} for level in made.levels}
    assert inside == {"intra": {2}, "inter": {3}}
