"""From the seconds of what exchanges do to a gradient to the rates that plans are charged by."""

import msgspec
import pytest
import torch
from meshwright.planner.schema.profile import CompressionRate
from meshwright.profiler import compression
from meshwright.profiler.compression import Coding
from meshwright.profiler.fidelity import RATIOS


def nothing() -> None:
    pass


def test_what_a_dense_exchange_does_too_is_left_out():
    coding = Coding("bf16", nothing, nothing, nothing)
    rate = compression._rate(coding, 1000, before=2.0, after=5.0, plain=1.0)
    assert rate.ratio is None
    assert rate.seconds_per_byte == pytest.approx(2e-3)
    assert rate.received_seconds_per_byte == pytest.approx(4e-3)
    assert rate.gathered_seconds_per_byte == 0.0


def test_what_is_gathered_costs_something_once_and_something_for_each_peer():
    coding = Coding("int8", nothing, nothing, nothing, peers=4)
    rate = compression._rate(coding, 1000, before=2.0, after=10.0, plain=4.0)  # 2 each, and 2 once
    assert rate.gathered_seconds_per_byte == pytest.approx(2e-3)
    assert rate.received_seconds_per_byte == pytest.approx(2e-3)


def test_disturbed_times_give_no_negative_rates():
    coding = Coding("topk", nothing, nothing, nothing, ratio=0.1, peers=4)
    quick = compression._rate(coding, 1000, before=2.0, after=3.0, plain=4.0)
    assert quick.gathered_seconds_per_byte == 0.0
    assert quick.received_seconds_per_byte == pytest.approx(4e-3)
    slow = compression._rate(coding, 1000, before=2.0, after=13.0, plain=1.0)
    assert slow.received_seconds_per_byte == 0.0


def test_a_line_through_two_sizes_has_nothing_negative():
    made = CompressionRate(exchange="dropped", seconds_per_byte=0.0)
    large, small = (
        msgspec.structs.replace(made, seconds_per_byte=each) for each in (2e-9, 2e-7)
    )  # 2 and 3 ms: the smaller one took longer
    found = compression._line(large, 1_000_000, small, 15_000)
    assert found.seconds_per_byte == 0.0
    assert found.fixed_s == pytest.approx(3e-3)


def test_topk_is_timed_at_each_share_that_plans_may_have():
    codings = list(compression.part_codings(torch.randn(2**12)))
    assert [c.ratio for c in codings if c.exchange == "topk"] == list(RATIOS["topk"])
    others = [c.exchange for c in codings if c.exchange != "topk"]
    assert others == ["low_rank", "low_rank", "dropped", "int8"]
    for coding in codings:
        for part in coding.parts:
            part()
