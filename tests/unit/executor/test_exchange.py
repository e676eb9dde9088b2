"""Buckets: the same on every rank, in one order, views in the parameters' memory format."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.comm.groups import Group
from meshwright.executor.gradients.buckets import Bucket, GradParam, make_buckets
from torch import nn

ALONE = Group((0,), 0, None, "exchange")


def grad_param(
    name: str, numel: int, degree: int = 1, dtype=torch.float32, full: int = 0
) -> GradParam:
    parameter = nn.Parameter(torch.zeros(numel, dtype=dtype))
    return GradParam(name, parameter, ALONE, degree, full or numel)


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [[e.name for e in b.params] for b in buckets]


def test_buckets_are_filled_in_order_up_to_the_limit():
    params = [grad_param(n, size) for n, size in (("a", 10), ("b", 10), ("c", 30), ("d", 5))]
    assert names(make_buckets(params, 80)) == [["a", "b"], ["c"], ["d"]]
    assert names(make_buckets(params, 10**6)) == [["a", "b", "c", "d"]]


def test_what_cannot_travel_together_has_buckets_of_its_own():
    params = [
        grad_param("a", 1),
        grad_param("b", 1, degree=2),
        grad_param("c", 1, dtype=torch.float64),
        grad_param("d", 1),
    ]
    assert names(make_buckets(params, 100)) == [["b"], ["c"], ["a", "d"]]  # as they fill


def test_shards_count_with_their_full_size():
    """So that members with less, or with nothing, make the same buckets."""
    full = [grad_param("a", 6, 2, full=10), grad_param("b", 6, 2, full=10)]
    less = [grad_param("a", 4, 2, full=10), grad_param("b", 0, 2, full=10)]
    assert names(make_buckets(full, 50)) == names(make_buckets(less, 50)) == [["a"], ["b"]]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_views_in_the_parameters_format(layout):
    class Handle:
        """Stands for a process group; nothing is sent in this test."""

    group = Group((0, 1), 0, Handle(), "exchange")
    weights = [
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=layout)),
        nn.Parameter(torch.randn(5)),
    ]
    bucket = Bucket([GradParam(str(i), w, group, 1, w.numel()) for i, w in enumerate(weights)])
    for e, w in zip(bucket.params, weights, strict=True):
        w.grad = torch.randn_like(w)
        expected = w.grad.clone()
        bucket.fill(e)
        assert torch.equal(bucket.result(e), expected)
        assert bucket.result(e).stride() == w.stride()
    assert not bucket.missing
    bucket.average()
    assert torch.equal(bucket.result(bucket.params[0]) * 2, weights[0].grad)


def test_a_gradient_that_is_not_there_is_sent_as_zeros():
    class Handle:
        """Stands for a process group; nothing is sent in this test."""

    weight = nn.Parameter(torch.randn(3))
    bucket = Bucket([GradParam("a", weight, Group((0, 1), 0, Handle(), "exchange"), 1, 3)])
    bucket.fill(bucket.params[0])
    assert torch.equal(bucket.result(bucket.params[0]), torch.zeros(3))
