"""Routes of all members of a group, played through in one process."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.redistribution.redistribute import Dims, _part, group_route
from meshwright.planner.cost.ownership import TensorPlacement
from meshwright.planner.schema.layout import Layout, data_parallel

from tests.transfers import box

counts_of_groups = st.lists(st.integers(0, 4), min_size=2, max_size=5).map(tuple)
FORMS = ("batch_shard", "feature_shard", "replicate")
# Where samples and features are among three dimensions.
DIMS = st.sampled_from([Dims(0, 2), Dims(1, 2), Dims(2, 0)])


def held(form: str, degree: int) -> TensorPlacement:
    return TensorPlacement(
        data_parallel(degree) if form == "batch_shard" else Layout(groups=1, degree=degree), form
    )


def locals_of(
    whole: torch.Tensor, counts: tuple[int, ...], form: str, dims: Dims
) -> list[torch.Tensor]:
    """What each member holds of ``whole``."""
    assert dims.features is not None
    features = whole.shape[dims.features]
    boxes = [box(counts, held(form, len(counts)), features, m) for m in range(len(counts))]
    return [_part(whole, b, dims) for b in boxes]


def pieces(ways: list, tensors: list[torch.Tensor], dims: Dims, *, back: bool) -> dict:
    """(source, target) to the piece that travels, for every piece of every route."""
    sent = {}
    for me, (way, tensor) in enumerate(zip(ways, tensors, strict=True)):
        for piece in way.receive if back else way.send:
            sent[me, piece.peer] = _part(tensor, piece.box, dims)
    return sent


@given(counts_of_groups, st.integers(1, 6), st.sampled_from(FORMS[:2]), DIMS, st.data())
def test_moves_bring_what_each_member_needs(counts, features, source, dims, data):
    target = data.draw(st.sampled_from([f for f in FORMS if f != source]))
    whole = torch.randn(sum(counts), 2, features).movedim((0, 2), dims)
    have, need = (locals_of(whole, counts, form, dims) for form in (source, target))
    ways = [group_route(counts, source, target, features, m) for m in range(len(counts))]
    sent = pieces(ways, have, dims, back=False)
    for me, way in enumerate(ways):
        result = torch.full_like(need[me], float("nan"))
        for piece in way.receive:
            _part(result, piece.box, dims).copy_(sent.pop((piece.peer, me)))
        assert torch.equal(result, need[me])
    assert not sent  # nothing travels that nobody takes


@given(counts_of_groups, st.integers(1, 6), st.sampled_from(FORMS[:2]), DIMS, st.data())
def test_the_way_back_is_the_transpose(counts, features, source, dims, data):
    """⟨move(x), y⟩ = ⟨x, back(y)⟩ for all x and y: the definition of a gradient's way."""
    target = data.draw(st.sampled_from([f for f in FORMS if f != source]))
    whole = torch.randn(sum(counts), 2, features, dtype=torch.float64).movedim((0, 2), dims)
    have, moved = (locals_of(whole, counts, form, dims) for form in (source, target))
    ways = [group_route(counts, source, target, features, m) for m in range(len(counts))]
    y = [torch.randn_like(t) for t in moved]
    sent = pieces(ways, y, dims, back=True)
    back = [torch.zeros_like(t) for t in have]
    for me, way in enumerate(ways):
        for piece in way.send:
            _part(back[me], piece.box, dims).add_(sent[piece.peer, me])
    there = sum((a * b).sum() for a, b in zip(moved, y, strict=True))
    home = sum((a * b).sum() for a, b in zip(have, back, strict=True))
    torch.testing.assert_close(there, home)
