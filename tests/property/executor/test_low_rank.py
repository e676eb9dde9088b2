"""Thin matrices: what they stand for and what they leave out is what there was, and directions turn
to where gradients are largest."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.comm.groups import Group
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.low_rank import Directions, LowRankSlice
from meshwright.planner.simulate.slicing import SliceSpec
from torch import Tensor, nn

sides = st.integers(1, 24)


def drawn(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def started(rows: int, columns: int, rank: int) -> Directions:
    return Directions(rows, columns, rank, torch.float64, torch.device("cpu"), "weight")


@given(
    rows=sides,
    columns=sides,
    rank=st.integers(1, 24),
    steps=st.integers(1, 6),
    seed=st.integers(0, 999),
    on_stream=st.booleans(),
)
def test_what_is_sent_and_what_is_left_is_what_there_was(
    rows, columns, rank, steps, seed, on_stream
):
    directions = started(rows, columns, min(rank, rows, columns))
    residual = torch.zeros(rows, columns, dtype=torch.float64)
    sent, computed = torch.zeros_like(residual), torch.zeros_like(residual)
    for step in range(steps):
        values = drawn(rows, columns, seed + step)
        computed += values
        before = residual.clone()
        made = directions.thin(values.clone(), residual, on_stream=on_stream)
        average = torch.empty_like(values)
        directions.take(made, average)
        sent += average
        torch.testing.assert_close(average + residual, values + before)
        # What stands for it is its part in some directions: never more than there was.
        assert average.norm() <= (values + before).norm() * (1 + 1e-9)
        for side in (directions.left, directions.right):
            torch.testing.assert_close(side.T @ side, torch.eye(side.shape[1]).double())
    torch.testing.assert_close(sent + residual, computed)


def test_a_member_without_a_part_of_a_parameter_sends_nothing_of_it():
    empty = GradParam(
        "weight", nn.Parameter(torch.zeros(0, 8)), Group((0,), 0, None, "alone"), 4, 8
    )
    one = LowRankSlice([empty], SliceSpec((0,)))
    assert one.directions == {}
    assert one.bytes == 0
    one.send_thin([])
    assert one.is_completed


@given(rows=st.integers(4, 24), columns=st.integers(4, 24), seed=st.integers(0, 99))
def test_directions_turn_to_a_gradient_that_stays(rows, columns, seed):
    """After two steps a gradient of the same rank is sent whole, and all that was left."""
    gradient = drawn(rows, 2, seed) @ drawn(2, columns, seed + 1)
    directions = started(rows, columns, 2)
    residual, sent = torch.zeros_like(gradient), torch.zeros_like(gradient)
    for _ in range(4):
        average = torch.empty_like(gradient)
        directions.take(directions.thin(gradient.clone(), residual), average)
        sent += average
    torch.testing.assert_close(sent, 4 * gradient, rtol=1e-5, atol=1e-6)
    assert residual.norm() <= 1e-5 * gradient.norm()


@given(seed=st.integers(0, 99), bad=st.sampled_from([torch.inf, torch.nan]), stream=st.booleans())
def test_what_overflows_shows_and_leaves_nothing(seed, bad, stream):
    directions, residual = started(5, 7, 2), drawn(5, 7, seed)
    before = residual.clone()
    values = drawn(5, 7, seed + 1)
    values[1, 2] = bad
    made = directions.thin(values, residual, on_stream=stream)
    assert torch.equal(residual, before)
    average = torch.empty_like(residual)
    directions.take(made, average)
    assert not torch.isfinite(average).all()
    assert torch.isfinite(directions.left).all()
    assert not directions.by_rows


def test_peers_begin_alike_and_draw_from_nobodys_random_state():
    before = torch.get_rng_state()
    one, other = started(5, 7, 2), started(5, 7, 2)
    assert torch.equal(one.left, other.left)
    assert torch.equal(torch.get_rng_state(), before)


def test_of_nothing_no_directions_are_made():
    directions = started(5, 7, 2)
    before = directions.left.clone()
    directions.take(torch.zeros(5, 2, dtype=torch.float64), torch.empty(5, 7).double())
    assert torch.equal(directions.left, before)
