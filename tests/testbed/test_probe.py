"""The probe finds the links that a bed was made with, in less than a minute. A case takes 40 s."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.record import load

from benchmarks.testbed import Bed, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(150),
    pytest.mark.alone,
]

MBIT = 1e6 / 8
LIMIT_S = 60.0


def probed(bed: Bed, folder: Path) -> Cluster:
    path, start = folder / "cluster.json", time.monotonic()
    done = bed.launch(["-m", "meshwright", "probe", "-o", str(path)], timeout_s=120)
    taken = time.monotonic() - start
    assert [d.returncode for d in done] == [0] * bed.count, [d.stderr[-800:] for d in done]
    assert taken < LIMIT_S, f"{taken:.0f} s"
    return load(Cluster, path)


def between(cluster: Cluster) -> float:
    level = cluster.level("inter")
    assert level is not None
    return level.bytes_per_s / MBIT


@pytest.mark.slow
def test_unequal_hosts_are_told_apart(tmp_path: Path) -> None:
    rates = (70.0, 200.0, 900.0)
    with Bed(3, rates) as bed:
        cluster = probed(bed, tmp_path)
    for i, row in enumerate(cluster.pair_bytes_per_s):
        for j, rate in enumerate(row):
            if i != j:
                assert rate / MBIT == pytest.approx(min(rates[i], rates[j]), rel=0.12), (i, j)
    assert between(cluster) == pytest.approx(70, rel=0.12)


@pytest.mark.long
def test_slow_equal_hosts_have_one_rate(tmp_path: Path) -> None:
    with Bed(2, 10.0) as bed:
        cluster = probed(bed, tmp_path)
    assert not cluster.pair_bytes_per_s
    assert between(cluster) == pytest.approx(10, rel=0.12)
    level = cluster.levels[0]
    (reduced,) = [c.seconds for c in level.curves if c.collective == "all_reduce"]
    # Of two ranks each sends the other as many bytes as the tensor has. What does not fit in the
    # budget is read off the last two sizes, so these must say the link's rate as well.
    assert 10 * MBIT * reduced(25e6) == pytest.approx(25e6, rel=0.12)


@pytest.mark.long
def test_a_host_that_sends_slower_than_it_receives(tmp_path: Path) -> None:
    with Bed(3, 200.0) as bed:
        bed.set_rate(bed.hosts[1], 50.0, receives=200.0)
        pairs = probed(bed, tmp_path).pair_bytes_per_s
    for i in (0, 1, 2):
        for j in {0, 1, 2} - {i}:
            assert pairs[i][j] / MBIT == pytest.approx(50 if i == 1 else 200, rel=0.12), (i, j)
