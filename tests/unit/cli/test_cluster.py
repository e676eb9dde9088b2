"""The verb ``cluster`` as users call it."""

from __future__ import annotations

import json

import msgspec
from meshwright.cli.render.documents import cluster_table
from meshwright.planner.schema.cluster import Cluster, Device, Node
from meshwright.planner.schema.record import load
from meshwright.planner.solve.heuristic.resize import resized

from .conftest import cluster_of


def rows(cluster) -> list[tuple[str, str]]:
    """The first two cells of each row."""
    first, second, *_ = cluster_table(cluster).columns
    return list(zip(map(str, first.cells), map(str, second.cells), strict=True))


def test_equal_nodes_share_a_row(meshwright):
    arguments = (
        *("cluster", "--device", "a100-sxm-40gb", "--nodes", 64, "--devices-per-node", 8),
        *("--inter-gbit-s", 100, "--intra-gbyte-s", 300),
    )
    done = meshwright(*arguments)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if "node" in line]
    assert len(lines) == 4, done.out  # the title, the nodes, two kinds of links
    assert "node0 … node63 (64)" in done.out
    assert "8 x a100-sxm-40gb" in done.out
    assert len(json.loads(meshwright(*arguments, "--json").out)["nodes"]) == 64


def test_what_is_kept_back_and_what_hosts_have_is_shown(meshwright):
    arguments = ("cluster", "--device", "a100-sxm-40gb", "--nodes", 2, "--inter-gbit-s", 1)
    done = meshwright(
        *arguments, "--reserve", "3GiB", "--host-memory", "64GiB", "--host-gbyte-s", 20
    )
    assert done.code == 0, done.err
    assert "3.00 GiB of each kept back, 64.00 GiB in the host" in " ".join(done.out.split())
    row = "between a device and the host's memory 160 Gbit/s"
    assert row in " ".join(done.out.split())
    refused = meshwright(*arguments, "--reserve", "3")
    assert refused.code == 2
    assert refused.err == "meshwright: --reserve 3 is 3 bytes: write a unit, as in 3GiB\n"


def test_nodes_that_differ_have_rows_of_their_own():
    small = Device(name="t4", memory_bytes=16 * 2**30)
    made = cluster_of(5)
    mixed = Node(name="mixed", devices=(small, small, *made.nodes[0].devices))
    nodes = (*made.nodes[:3], mixed, *made.nodes[3:])
    levels = (*made.levels, msgspec.structs.replace(made.levels[0], name="intra"))
    assert rows(msgspec.structs.replace(made, nodes=nodes, levels=levels))[:3] == [
        ("host0 … host2 (3)", "1 x a100, 40.00 GiB"),
        ("mixed", "2 x t4, 16.00 GiB; 1 x a100, 40.00 GiB"),
        ("host3, host4", "1 x a100, 40.00 GiB"),
    ]


def test_one_rank_is_this_device_alone(meshwright, profile_file, tmp_path):
    path = tmp_path / "alone.json"
    done = meshwright("probe", "--ranks", 1, "-o", path)
    assert done.code == 0, done.err
    assert "one device on one node" in done.out
    found = load(Cluster, path)
    assert found.world_size == 1
    assert not found.levels
    done = meshwright("plan", profile_file, "-c", path, "--batch", 16)
    assert done.code == 0, done.err


def test_hosts_of_unequal_links_are_listed_the_slowest_first():
    rates = ((0.0, 1e7, 2.5e6), (1e7, 0.0, 2.5e6), (5e6, 5e6, 0.0))
    made = msgspec.structs.replace(cluster_of(3), pair_bytes_per_s=rates)
    *_, bandwidth = cluster_table(made).columns
    assert rows(made)[-4:] == [
        ("slowest between nodes", "by formula"),
        ("host2", "its fastest link"),
        ("host0", "its fastest link"),
        ("host1", "its fastest link"),
    ]
    told = list(map(str, bandwidth.cells))[-3:]
    assert told == ["40 Mbit/s out, 20 Mbit/s in", "80 Mbit/s", "80 Mbit/s"]


def test_links_between_hosts_are_kept_for_more_hosts_than_one(meshwright, tmp_path):
    path = tmp_path / "one.json"
    one = ("cluster", "--device", "a100-sxm-40gb", "--devices-per-node", 8)
    rates = ("--intra-gbyte-s", 300, "--inter-gbit-s", 100)
    assert meshwright(*one, *rates, "-o", path).code == 0
    assert resized(load(Cluster, path), 16).level("inter").bytes_per_s == 100e9 / 8
    assert meshwright(*one, *rates[:2], "-o", path).code == 0
    assert load(Cluster, path).level("inter") is None
