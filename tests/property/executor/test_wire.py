"""Gradients rounded in their own memory: what is sent is their rounding, and it comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.gradients import wire

LENGTHS = st.one_of(
    st.integers(0, 50),
    st.sampled_from([wire._PIECE["cpu"] * n + d for n in (1, 2) for d in (-1, 0, 1)]),
)


@given(LENGTHS, st.integers(0, 9), st.sampled_from([torch.float32, torch.float64]))
def test_a_message_is_the_rounded_gradient(length, start, dtype):
    whole = torch.randn(length + start + 3, dtype=dtype)
    before, gradient = whole.clone(), whole[start : start + length]
    rounded = gradient.to(torch.bfloat16)
    message = wire.encode(gradient, torch.bfloat16)
    assert torch.equal(message, rounded)
    if length:
        assert message.data_ptr() == gradient.data_ptr()  # no memory of its own
    message.mul_(2)  # as a sum over two ranks
    wire.decode(gradient, torch.bfloat16, divisor=2)
    assert torch.equal(gradient, rounded.to(dtype))
    # Nothing beside it was touched.
    assert torch.equal(whole[:start], before[:start])
    assert torch.equal(whole[start + length :], before[start + length :])


@given(st.integers(0, 50))
def test_its_own_type_is_sent_as_it_is(length):
    gradient = torch.randn(length)
    before = gradient.clone()
    message = wire.encode(gradient, torch.float32)
    assert torch.equal(message, before)
    wire.decode(gradient, torch.float32, divisor=4)
    assert torch.equal(gradient, before / 4)


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.complex64, torch.complex64),
    ],
)
def test_only_what_gets_smaller_is_rounded(own, sent):
    assert wire.wire_dtype("bf16", own) == sent
    assert wire.wire_dtype("exact", own) == own
