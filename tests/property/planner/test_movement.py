"""The counted movement is that of ``ownership.transfers``, position by position."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.collectives import Fabric
from meshwright.planner.cost.movement import boxes, moved, overlaps
from meshwright.planner.cost.ownership import TensorPlacement, box, traffic, transfers
from meshwright.planner.schema.layout import Layout, lattice

from tests.strategies import cluster

FORMS = ("samples", "features", "whole")


@st.composite
def movements(draw):
    world = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    counts = tuple(draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)))
    layouts = list(lattice(world, complete=True))
    first, second = draw(st.sampled_from(layouts)), draw(st.sampled_from(layouts))
    shift = draw(st.integers(0, world - second.size))
    second = Layout(groups=second.groups, degree=second.degree, first=shift)
    source = TensorPlacement(first, draw(st.sampled_from(FORMS[:2])))
    target = TensorPlacement(second, draw(st.sampled_from(FORMS)))
    if draw(st.booleans()) and target.form != "whole":
        source, target = target, source
    return counts, source, target, draw(st.integers(1, 20))


@settings(max_examples=300, deadline=None)
@given(movements())
def test_as_many_elements_as_transfers(movement):
    counts, source, target, features = movement
    pieces, _ = overlaps(counts, source, target, features)
    sent, received = traffic(transfers(counts, source, target, features), len(counts))
    assert pieces.sum(axis=1).ravel().tolist() == sent
    assert pieces.sum(axis=2).ravel().tolist() == received


@settings(max_examples=100, deadline=None)
@given(movements())
def test_boxes_are_those_of_ownership(movement):
    counts, _, target, features = movement
    table = boxes(counts, target, features)
    for position in range(len(counts)):
        expected = box(counts, target, features, position)
        assert tuple(table[:, position]) == tuple(expected)


@settings(max_examples=100, deadline=None)
@given(movements(), st.data())
def test_loads_of_links_add_up(movement, data):
    counts, source, target, features = movement
    world = len(counts)
    per_node = data.draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    links = cluster(devices=(per_node,) * (world // per_node))
    fabric = Fabric(links, tuple(range(world)))
    found = moved(fabric, counts, source, target, features)
    pieces = transfers(counts, source, target, features)
    out, into = np.zeros(world // per_node), np.zeros(world // per_node)
    inside = [[0] * world, [0] * world]
    for move in pieces:
        a, b = move.source // per_node, move.target // per_node
        if a == b:
            inside[0][move.source] += move.box.area
            inside[1][move.target] += move.box.area
        else:
            out[a] += move.box.area
            into[b] += move.box.area
    assert found.inter == max(out.max(), into.max())
    assert found.intra == max(map(max, inside))
    assert (found.level == "inter") == bool(out.any())
