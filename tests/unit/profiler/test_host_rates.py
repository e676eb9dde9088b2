"""Rates between hosts: what a stream's arrivals say, and what becomes of them in a Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from meshwright.planner.cost.collectives import Fabric, collective_s, rings
from meshwright.planner.schema.cluster import Cluster, Device, Interference
from meshwright.profiler.collectives import COLLECTIVES, MeasuredGroup
from meshwright.profiler.host_rates import (
    ALIKE,
    MESSAGES,
    agree,
    common_rate,
    differ,
    filled,
    stream_of,
    without_noise,
)
from meshwright.profiler.links import _cluster

RATE, MESSAGE = 1e6, 50_000


def arrivals(rate: float, message: int, bucket: int = 0) -> list[float]:
    """Seconds after which messages arrive through a token bucket that is full at first."""
    sent = (np.arange(MESSAGES) + 1) * message
    return list(np.maximum(sent - bucket, 0) / rate + 1e-4)


@pytest.mark.parametrize("bucket", [0, 100_000, 300_000])
def test_what_a_bucket_lets_through_at_once_does_not_count(bucket: int) -> None:
    stream = stream_of(arrivals(RATE, MESSAGE, bucket), MESSAGE)
    assert stream.bytes_per_s == pytest.approx(RATE)
    assert stream.settled


def test_a_stream_inside_the_bucket_has_not_settled() -> None:
    assert not stream_of(arrivals(RATE, MESSAGE, 550_000), MESSAGE).settled


def test_a_rank_that_was_not_woken_for_a_while_does_not_count() -> None:
    """It finds some messages at once, amid the half that counts."""
    late = np.array(arrivals(RATE, MESSAGE))
    late[6:9] = late[8]
    assert stream_of(list(late), MESSAGE).bytes_per_s == pytest.approx(RATE, rel=0.02)


def test_two_rates_of_a_pair_must_agree() -> None:
    assert agree([1.0, 1.1])
    assert agree([1.0, 5.0, 1.1])
    assert not agree([1.0, 5.0])
    assert not agree([1.0])


def unequal(*host_rates: float) -> np.ndarray:
    rates = np.minimum.outer(np.array(host_rates), np.array(host_rates))
    np.fill_diagonal(rates, 0.0)
    return rates


def test_the_slowest_link_counts_where_hosts_differ() -> None:
    assert common_rate(unequal(1.0, 2.0, 3.0)) == 1.0
    almost = unequal(1.0, 0.99 * ALIKE, 0.99 * ALIKE, 0.99 * ALIKE)
    assert not differ(almost)
    assert common_rate(almost) == pytest.approx((1 + 0.99 * ALIKE) / 2)


def test_pairs_that_were_not_measured_take_what_both_ends_carry() -> None:
    rates = unequal(1.0, 2.0, 4.0, 4.0)
    partly = rates.copy()
    partly[2, 0] = partly[3, 1] = 0.0
    assert (filled(partly) == rates).all()


def test_rates_that_only_noise_tells_apart_are_one() -> None:
    found = without_noise(np.array([[0.0, 67.0, 67.4], [67.8, 0.0, 199.4], [65.8, 194.0, 0.0]]))
    low, high = (67.0 + 67.4) / 2, (199.4 + 194.0) / 2
    assert found.tolist() == [[0.0, low, low], [low, 0.0, high], [low, high, 0.0]]


def measured(rates: np.ndarray, ranks: Sequence[int], slowest: float) -> Any:
    """A group whose collectives took what formulas say over links of that rate."""
    group = MeasuredGroup(None, tuple(ranks), 0, torch.device("cpu"))  # type: ignore[arg-type]
    for collective in COLLECTIVES:
        for size in (1 << 10, 1 << 20):
            group.seconds[collective, size] = [1e-3 + size / slowest]
    return group


def cluster(rates: np.ndarray) -> Cluster:
    ranks = len(rates)
    group = measured(rates, range(ranks), rates[rates > 0].min())
    devices = [Device(name="cpu", memory_bytes=2**30)] * ranks
    hosts = [f"host{i}" for i in range(ranks)]
    sets = [("inter", [tuple(range(ranks))], group)]
    return _cluster(hosts, devices, sets, Interference(), rates)


def test_only_unequal_hosts_have_pairs() -> None:
    equal = cluster(unequal(1e7, 1.05e7, 1.1e7))
    assert not equal.pair_bytes_per_s
    made = cluster(unequal(1e7, 3e7, 9e7))
    assert made.pair_bytes_per_s == ((0.0, 1e7, 1e7), (1e7, 0.0, 3e7), (1e7, 3e7, 0.0))
    level = made.level("inter")
    assert level is not None
    assert level.bytes_per_s == 1e7
    assert level.curves[0].seconds.x == (1024.0, 2.0**20)  # they hold at the slowest link's rate


def test_fast_hosts_among_themselves_are_faster_than_the_curve_of_all() -> None:
    fabric = Fabric(cluster(unequal(1e7, 3e7, 9e7)), (0, 1, 2))
    slow = collective_s(fabric, rings(fabric, np.array([[0, 1]])), "all_to_all", 1e6)
    fast = collective_s(fabric, rings(fabric, np.array([[1, 2]])), "all_to_all", 1e6)
    assert slow == pytest.approx(0.1, rel=0.02)
    assert fast == pytest.approx(0.1 / 3, rel=0.05)
