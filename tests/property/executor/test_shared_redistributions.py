"""What the planner counts once is what the executor moves once."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.executor.redistribution.cache import RedistributionCache, UnitInput
from meshwright.planner.cost.ownership import input_placement

from tests.strategies import decided


@st.composite
def forked(draw):
    """(cost model, decisions): edges of one source are often alike."""
    model, chosen = draw(decided())
    sizes = {u.name: draw(st.sampled_from([64.0, 512.0])) for u in model.profile.units}
    edges = []
    for edge in model.profile.edges:
        size, number = sizes[edge.source], draw(st.integers(0, 1))
        edges.append(
            msgspec.structs.replace(
                edge, bytes_per_sample=size * (1 + number), features=64, tensors=number,
                gradient_bytes_per_sample=size,
            )
        )  # fmt: skip
    profile = msgspec.structs.replace(model.profile, edges=tuple(edges))
    return model.with_profile(profile), chosen


@settings(max_examples=200, deadline=None)
@given(forked(), st.integers(1, 3))
def test_the_executor_brings_what_the_planner_charges(case, forwards):
    model, chosen = case
    charged = {e for e in range(len(model.ends)) if not model.redistributed_before(e, chosen)}
    for prefetch in (False, True):
        cache = RedistributionCache(model.world_size, prefetch=prefetch)
        for _ in range(forwards):  # the first tells which tensors have several users
            assert moved_through(cache, model, chosen) == charged


def moved_through(cache, model, chosen):
    """The edges whose tensors the executor moves in one forward."""
    tensors, edges = {}, {}
    moved = set()

    def move(tensor, need):
        moved.add(edges[need.unit, need.number])
        return torch.empty(0)

    ends = sorted(range(len(model.ends)), key=lambda e: (model.ends[e][1], e))
    needs = [need_of(model, chosen, e) for e in ends]
    edges = {(need.unit, need.number): e for need, e in zip(needs, ends, strict=True)}
    cache.begin()
    for e, need in zip(ends, needs, strict=True):
        edge = model.profile.edges[e]
        tensor = tensors.setdefault((edge.source, edge.tensors), torch.empty(0))
        cache.get(tensor, need, move)
    cache.end(complete=True)
    return moved


def need_of(model, chosen, e):
    edge, (_, target) = model.profile.edges[e], model.ends[e]
    placement = input_placement(*chosen[target][:2])
    sliced = placement.form == "feature_shard"
    features, dim = (edge.features, 1) if sliced else (1, None)
    number = e - min(model.edges_into[target])
    return UnitInput(model.profile.units[target].name, number, placement, features, dim, "moving")
