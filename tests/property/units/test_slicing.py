"""Slices of a parameter put together give the parameter, whatever the shape and the division."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.models.spec import ParameterCut
from meshwright.models.splits import join_parameter, slice_parameter


@st.composite
def divisions(draw: st.DrawFn) -> tuple[torch.Tensor, ParameterCut, int]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    blocks = draw(st.integers(1, 3))
    shape[dim] *= blocks
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return tensor, ParameterCut("weight", dim, blocks), draw(st.integers(1, 8))


@given(divisions())
def test_join_undoes_slice(division: tuple[torch.Tensor, ParameterCut, int]) -> None:
    tensor, cut, degree = division
    shards = [slice_parameter(tensor, cut, degree, member) for member in range(degree)]
    assert torch.equal(join_parameter(shards, cut, tensor.shape), tensor)
    assert sum(shard.numel() for shard in shards) == tensor.numel()


@given(divisions())
def test_every_block_is_sliced_alike_and_in_order(
    division: tuple[torch.Tensor, ParameterCut, int],
) -> None:
    tensor, cut, degree = division
    for member in range(degree):
        shard = slice_parameter(tensor, cut, degree, member)
        assert not shard.numel() or shard.data_ptr() != tensor.data_ptr()
        parts = [
            slice_parameter(block, ParameterCut("weight", cut.dim), degree, member)
            for block in tensor.chunk(cut.blocks, cut.dim)
        ]
        assert torch.equal(shard, torch.cat(parts, cut.dim))
