"""What the planner counts once is what the executor moves once."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.executor.redistribution.cache import RedistributionCache, SharedRedistribution
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
    return model.of(profile), chosen


@settings(max_examples=200, deadline=None)
@given(forked(), st.integers(1, 3))
def test_the_executor_brings_what_the_planner_charges(case, forwards):
    model, chosen = case
    charged = {e for e in range(len(model.ends)) if not model.brought_before(e, chosen)}
    brought = RedistributionCache()
    for _ in range(forwards):  # the first tells which tensors have several takers
        assert brought_by(brought, model, chosen) == charged


def brought_by(brought, model, chosen):
    """The edges whose tensors the executor fetches in one forward."""
    tensors = {}
    found = set()
    brought.begin()
    for e in sorted(range(len(model.ends)), key=lambda e: (model.ends[e][1], e)):
        edge, (_, target) = model.profile.edges[e], model.ends[e]
        tensor = tensors.setdefault((edge.source, edge.tensors), torch.empty(0))
        wanted = input_placement(*chosen[target][:2])
        sliced = wanted.form == "features"
        features, dim = (edge.features, 1) if sliced else (1, None)
        number = e - min(model.edges_into[target])
        taking = SharedRedistribution(
            model.profile.units[target].name, number, wanted, features, dim
        )

        def fetch(e=e):
            found.add(e)
            return torch.empty(0)

        brought.get(tensor, taking, fetch)
    brought.end(whole=True)
    return found
