"""Normalisation by the whole batch, of one rank: what torch's own gives, also in sixteen bits."""

import pytest
import torch
from meshwright.executor.comm.groups import Group
from meshwright.executor.redistribution.redistribute import Meter
from meshwright.executor.redistribution.statistics import Statistics, normalise_globally
from torch import nn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_those_of_torch(dtype):
    """Of values far from zero, of which a channel has more than sixteen bits can count."""
    group: Group = Group((0,), 0, None, "statistics")
    own, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    if dtype == torch.float64:
        own, plain = own.double(), plain.double()
    normalise_globally(own, "norm", Statistics(group, None, Meter()))
    x = (3 + torch.randn(64, 3, 40, 40, generator=torch.Generator().manual_seed(0))).to(dtype)
    # As under autocast: sixteen bits go in and come out, and parameters have thirty-two.
    found = []
    for norm in (own, plain):
        given = x.clone().requires_grad_()
        result = norm(given)
        result.backward(torch.ones_like(result))
        found.append((norm.bias.grad, norm.weight.grad, given.grad))
    for mine, wanted in zip(*found, strict=True):
        assert mine.dtype == wanted.dtype
        assert torch.isfinite(mine).all()
    (bias, weight, into), (plain_bias, plain_weight, plain_into) = found
    torch.testing.assert_close(bias, plain_bias)
    # Sums of deviations from the mean, which cancel: of 100,000 values of about 1.
    torch.testing.assert_close(weight, plain_weight, rtol=0, atol=1.0)
    torch.testing.assert_close(into, plain_into, rtol=0, atol=1e-4)
