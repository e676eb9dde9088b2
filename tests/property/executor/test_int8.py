"""Gradients in eight bits: what they stand for, what is left, and what is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.gradients import int8
from meshwright.planner.cost.exchange import INT8_BLOCK

LENGTHS = st.one_of(
    st.integers(0, 3 * INT8_BLOCK),
    st.sampled_from([int8._PIECE["cpu"] + d for d in (-1, 0, 1, 300)]),
)
SEEDS = st.integers(0, 2**16)


def drawn(length, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator, dtype=dtype)
    # Runs of very different sizes, some of nothing but zeros.
    scale = 10.0 ** torch.randint(-12, 6, (length // 100 + 1,), generator=generator)
    return values * scale.repeat_interleave(100)[:length].to(dtype)


@given(LENGTHS, SEEDS, st.sampled_from([torch.float32, torch.float64]))
def test_each_element_is_off_by_half_a_scale_at_most(length, seed, dtype):
    values = drawn(length, seed, dtype)
    sent = int8.quantize(values)
    off = (int8.dequantize(sent, dtype) - values).abs()
    scales = sent.scales.to(dtype).repeat_interleave(INT8_BLOCK)[:length]
    assert (off <= scales * 0.5001).all()
    for start in range(0, length, INT8_BLOCK):
        run = values[start : start + INT8_BLOCK].abs().max()
        assert sent.scales[start // INT8_BLOCK].item() == pytest.approx(float(run) / 127, rel=1e-6)


@given(LENGTHS, SEEDS, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_what_is_sent_and_what_is_left_are_what_was_computed(length, seed, dtype):
    values, residual = drawn(length, seed, dtype), drawn(length, seed + 1, dtype) * 1e-3
    computed = (values + residual).double()  # in their own type
    messages = int8.messages_for(values, 3)
    message = int8.pack(values.clone(), residual, messages[1])
    assert message.data_ptr() == messages[1].data_ptr()
    assert message.numel() == int8.message_bytes(length)
    assert message.numel() % 16 == 0
    assert 0 <= message.numel() - length - 4 * -(-length // INT8_BLOCK) < 16
    total = torch.empty(length, dtype=dtype)
    int8.average([message], total)
    apart = (total.double() + residual.double() - computed).abs()
    # The residual is half a scale at most, and rounded.
    assert (apart <= torch.finfo(dtype).eps * computed.abs() + 1e-30).all()


@given(LENGTHS.filter(bool), SEEDS, st.sampled_from([float("inf"), -float("inf"), float("nan")]))
def test_what_is_not_finite_shows_and_does_not_stay(length, seed, wrong):
    values, residual = drawn(length, seed), drawn(length, seed + 1)
    before = residual.clone()
    values[length // 2] = wrong
    message = int8.pack(values, residual)
    total = torch.empty(length)
    int8.average([message], total)
    run = slice(length // 2 // INT8_BLOCK * INT8_BLOCK, None)
    run = slice(run.start, min(run.start + INT8_BLOCK, length))
    assert not torch.isfinite(total[run]).any()
    assert torch.isfinite(residual).all()
    assert torch.equal(residual[run], before[run])


@given(st.integers(2, 4), LENGTHS, SEEDS)
def test_the_mean_of_messages(ranks, length, seed):
    values = [drawn(length, seed + rank) for rank in range(ranks)]
    total, expected = torch.empty(length), torch.zeros(length)
    for numbers, scales in map(int8.quantize, values):
        expected += int8.dequantize(int8.Quantized(numbers, scales / ranks), torch.float32)
    int8.average([int8.pack(each, torch.zeros(length)) for each in values], total)
    assert torch.equal(total, expected)
