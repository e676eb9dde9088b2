"""What is sent over slow links: as much as they carry in the time that there is."""

from __future__ import annotations

import pytest
from meshwright.profiler.collectives import _next_s
from meshwright.profiler.interference import _stretch
from meshwright.profiler.overhead import EXCHANGE_S, WIDTHS, _large


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize("mbit", [70.0, 200.0, 900.0])
def test_a_large_toy_is_exchanged_in_the_time_that_it_has(ranks: int, mbit: float) -> None:
    toy = _large(ranks, mbit * 1e6 / 8)
    wire_s = 2 * (ranks - 1) / ranks * toy.bytes / (mbit * 1e6 / 8)
    assert wire_s == pytest.approx(EXCHANGE_S, rel=0.05)


def test_toys_are_neither_tiny_nor_huge() -> None:
    assert [_large(2, rate).width for rate in (1.0, float("inf"))] == list(WIDTHS)


def test_the_next_size_goes_as_the_last_bytes_went() -> None:
    assert _next_s([], 1) == _next_s([], 100) == 0.0
    assert _next_s([(1000, 0.5)], 16000) == 0.5  # one size does not tell latency from bandwidth
    # A bucket let the first 100 bytes through at once.
    assert _next_s([(100, 0.0), (200, 1.0)], 400) == pytest.approx(3.0)
    assert _next_s([(100, 1.0), (200, 0.5)], 400) == 0.5  # noise


@pytest.mark.parametrize(
    ("other", "over", "slowdown"),
    [
        (1.0, 0.6, 2.0),  # over before the other: all of it was slowed
        (0.2, 0.4, 2.0),  # 0.1 done in 0.2, the other 0.2 alone
        (0.2, 0.3, 1.0),
        (1.0, 0.1, 1.0),  # noise
    ],
)
def test_how_much_slower_work_was(other: float, over: float, slowdown: float) -> None:
    assert _stretch(0.3, other, over) == pytest.approx(slowdown)
