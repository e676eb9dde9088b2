"""Moves between layouts that take different parts of the ranks: all get what they need."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.redistribution.redistribute import route
from meshwright.planner.cost.ownership import TensorPlacement, data_parallel_placement
from meshwright.planner.schema.layout import Layout

from tests.transfers import box, transfers

FEATURES = 5
FORMS = ("batch_shard", "feature_shard", "replicate")


@st.composite
def held(draw, world: int, forms: tuple[str, ...]) -> TensorPlacement:
    degree = draw(st.integers(1, world))
    groups = draw(st.integers(1, world // degree))
    first = draw(st.integers(0, world - groups * degree))
    layout = Layout(groups=groups, degree=degree, first=first)
    return TensorPlacement(layout, draw(st.sampled_from(forms)))


@st.composite
def moves(draw):
    world = draw(st.integers(1, 5))
    counts = tuple(draw(st.lists(st.integers(0, 4), min_size=world, max_size=world)))
    source = draw(st.one_of(st.just(data_parallel_placement(world)), held(world, FORMS[:2])))
    return counts, source, draw(held(world, FORMS))


@given(moves())
def test_pieces_make_up_what_is_needed(case):
    counts, source, target = case
    batch = torch.arange(sum(counts) * FEATURES).view(-1, FEATURES)
    ways = [route(counts, source, target, FEATURES, p, 0) for p in range(len(counts))]
    sent = {}
    for position, way in enumerate(ways):
        mine = _of(batch, box(counts, source, FEATURES, position))
        for piece in way.send:
            sent[position, piece.peer] = _of(mine, piece.box).clone()
    for position, way in enumerate(ways):
        need = box(counts, target, FEATURES, position)
        found = torch.full_like(_of(batch, need), -1)
        for piece in way.receive:
            _of(found, piece.box).copy_(sent.pop((piece.peer, position)))
        assert torch.equal(found, _of(batch, need))
    assert not sent
    moves = transfers(counts, source, target, FEATURES)
    assert {way.quiet for way in ways} == {not moves}


def _of(tensor, at):
    return tensor[at.lo : at.hi, at.left : at.right]
