"""What a redistribution moves is what brute force says (``tests.transfers``)."""

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.collectives import Fabric, all_to_all_s
from meshwright.planner.cost.compute import batch_counts
from meshwright.planner.cost.ownership import (
    TensorPlacement,
    boxes,
    input_placement,
    output_placement,
)
from meshwright.planner.cost.redistribution import (
    Traffic,
    pair_overlaps,
    pair_traffic,
    position_transfers,
    redistribution_s,
    traffic,
)
from meshwright.planner.schema.layout import Layout, lattice

from tests import transfers
from tests.strategies import cluster

FORMS = ("batch_shard", "feature_shard", "replicate")


@st.composite
def redistributions(draw):
    world = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    counts = tuple(draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)))
    layouts = list(lattice(world, complete=True))
    first, second = draw(st.sampled_from(layouts)), draw(st.sampled_from(layouts))
    shift = draw(st.integers(0, world - second.size))
    second = Layout(groups=second.groups, degree=second.degree, first=shift)
    source = TensorPlacement(first, draw(st.sampled_from(FORMS[:2])))
    target = TensorPlacement(second, draw(st.sampled_from(FORMS)))
    if draw(st.booleans()) and target.form != "replicate":
        source, target = target, source
    return counts, source, target, draw(st.integers(1, 20))


@settings(max_examples=300, deadline=None)
@given(redistributions())
def test_as_many_elements_as_transfers(redistribution):
    counts, source, target, features = redistribution
    elements, _ = pair_overlaps(counts, source, target, features)
    moves = transfers.transfers(counts, source, target, features)
    sent, received = transfers.traffic(moves, len(counts))
    assert elements.sum(axis=1).ravel().tolist() == sent
    assert elements.sum(axis=2).ravel().tolist() == received


@settings(max_examples=100, deadline=None)
@given(redistributions())
def test_a_gradient_goes_back_beside_what_arrives_and_what_it_becomes(redistribution):
    """Everything that a position needed is a gradient, what it sent comes back, and what it had is
    made of both; nothing where nothing moves."""
    counts, source, target, features = redistribution
    if source.form == "replicate":
        return
    sent, _ = transfers.traffic(transfers.transfers(*redistribution), len(counts))
    held = [
        sum((b.hi - b.lo) * (b.right - b.left) for b in (way.have, way.need))
        for way in (position_transfers(*redistribution, p) for p in range(len(counts)))
    ]
    most = max(a + b for a, b in zip(held, sent, strict=True)) if any(sent) else 0
    fabric = Fabric(cluster(nodes=len(counts)), tuple(range(len(counts))))
    assert pair_traffic(fabric, counts, source, target, features)[-1] == most
    moved = traffic(fabric, counts, (source,), (target, target), features)
    assert moved.returning.tolist() == [[most, most]]


@settings(max_examples=100, deadline=None)
@given(redistributions())
def test_positions_send_and_receive_the_transfers(redistribution):
    counts, source, target, features = redistribution
    moves = transfers.transfers(counts, source, target, features)
    found = [position_transfers(counts, source, target, features, p) for p in range(len(counts))]
    for position, mine in enumerate(found):
        sent = {(m.target, m.box) for m in moves if m.source == position}
        received = {(m.source, m.box) for m in moves if m.target == position}
        assert {t for t in mine.send if t.peer != position} == sent
        assert {t for t in mine.receive if t.peer != position} == received
        assert mine.quiet == (not moves)


@settings(max_examples=100, deadline=None)
@given(redistributions())
def test_boxes_are_those_of_each_position(redistribution):
    counts, _, target, features = redistribution
    table = boxes(counts, target, features)
    for position in range(len(counts)):
        expected = transfers.box(counts, target, features, position)
        assert tuple(table[:, position]) == tuple(expected)


@settings(max_examples=100, deadline=None)
@given(redistributions(), st.data())
def test_loads_of_links_add_up(redistribution, data):
    counts, source, target, features = redistribution
    world = len(counts)
    per_node = data.draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    links = cluster(devices=(per_node,) * (world // per_node))
    fabric = Fabric(links, tuple(range(world)))
    found = Traffic(*pair_traffic(fabric, counts, source, target, features))
    out, into = np.zeros(world // per_node), np.zeros(world // per_node)
    inside = [[0] * world, [0] * world]
    for move in transfers.transfers(counts, source, target, features):
        a, b = move.source // per_node, move.target // per_node
        if a == b:
            inside[0][move.source] += move.box.area
            inside[1][move.target] += move.box.area
        else:
            out[a] += move.box.area
            into[b] += move.box.area
    assert found.inter == max(out.max(), into.max())
    assert found.intra == max(map(max, inside))
    assert found.level == int(out.any())


@pytest.mark.parametrize("seed", range(40))
def test_traffic_of_all_pairs_is_that_of_each_pair(seed):
    rng = np.random.default_rng(seed)
    nodes, devices = [(1, 4), (2, 2), (4, 1), (2, 3), (3, 2), (2, 4), (1, 6), (3, 3)][seed % 8]
    links = cluster(nodes, devices)
    world = links.world_size
    order = rng.permutation(world) if seed % 3 == 0 else np.arange(world)
    fabric = Fabric(links, tuple(int(r) for r in order))
    counts = batch_counts(int(rng.integers(1, 3 * world + 2)), world)
    layouts = [*lattice(world, complete=seed % 4 == 0), Layout(groups=1, first=world - 1)]
    sources = [TensorPlacement(y, form) for y in layouts for form in FORMS[:2]]
    targets = [TensorPlacement(y, form) for y in layouts for form in FORMS]
    sources = [sources[i] for i in rng.permutation(len(sources))[:6]]
    targets = [targets[i] for i in rng.permutation(len(targets))[:6]]
    # Of the larger ones not all products, and not all features, are numbers of 32 bits.
    features = int(rng.choice([1, 3, 7, 16, 2**30, 2**31]))
    found = traffic(fabric, counts, sources, targets, features)
    seconds = redistribution_s(fabric, found, 4.0)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            one = Traffic(*pair_traffic(fabric, counts, source, target, features))
            assert tuple(field[i, j] for field in found) == one
            expected = max(
                all_to_all_s(fabric.level(name), one.partners, elements * 4.0) if elements else 0.0
                for name, elements in (("intra", one.intra), ("inter", one.inter))
            )
            assert seconds[i, j] == pytest.approx(expected, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(redistributions(), st.data())
def test_measured_pairs_of_one_rate_are_the_levels_line(redistribution, data):
    counts, source, target, features = redistribution
    world = len(counts)
    per_node = data.draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    links = cluster(devices=(per_node,) * (world // per_node))
    rates = {name: links.level(name).bytes_per_s for name in ("intra", "inter")}
    paired = msgspec.structs.replace(
        links,
        pair_bytes_per_s=tuple(
            tuple(
                0.0 if i == j else rates["intra" if i // per_node == j // per_node else "inter"]
                for j in range(world)
            )
            for i in range(world)
        ),
    )
    order = tuple(range(world))
    one, other = (
        pair_traffic(Fabric(c, order), counts, source, target, features) for c in (links, paired)
    )
    assert one == pytest.approx(other)


def test_each_way_of_a_link_has_its_own_rate():
    """Host 0 sends at 1 and receives at 4; three samples go from it to the others, and back."""
    rates = ((0.0, 1.0, 1.0), (4.0, 0.0, 8.0), (4.0, 8.0, 0.0))
    fabric = Fabric(cluster(3, inter=1.0, latency_s=0.0, pairs=rates), (0, 1, 2))
    source = TensorPlacement(Layout(groups=1), "batch_shard")
    target = TensorPlacement(Layout(groups=3), "batch_shard")
    moved = traffic(fabric, (1, 1, 1), [source], [target], 1)
    assert redistribution_s(fabric, moved, 4.0).item() == 8.0
    assert redistribution_s(fabric, moved, 4.0, backward=True).item() == 2.0


def test_fast_hosts_do_not_wait_for_a_slow_one_that_has_no_part():
    rates = np.minimum.outer([1.0, 4.0, 4.0], [1.0, 4.0, 4.0])
    np.fill_diagonal(rates, 0.0)
    links = cluster(3, inter=1.0, latency_s=0.0, pairs=tuple(map(tuple, rates.tolist())))
    among = TensorPlacement(Layout(groups=2), "batch_shard")
    single = TensorPlacement(Layout(groups=1), "batch_shard")
    seconds = [
        redistribution_s(f, traffic(f, (1, 1, 0), [among], [single], 1), 4.0).item()
        for f in (Fabric(links, (1, 2, 0)), Fabric(links, (0, 1, 2)))
    ]
    assert seconds == [1.0, 4.0]


@pytest.mark.parametrize("per_node", [1, 8, 128])
def test_traffic_among_many_is_counted_as_among_few(per_node):
    links = cluster(128 // per_node, per_node)
    fabric = Fabric(links, tuple(range(128)))
    counts = (2,) * 60 + (1,) * 68
    layouts = [Layout(groups=g, degree=d) for g, d in ((128, 1), (16, 1), (4, 8), (1, 128), (3, 1))]
    left = [output_placement(y, "column" if y.degree > 1 else "none") for y in layouts]
    needed = [input_placement(y, "none") for y in layouts if y.degree == 1]
    for source, target in product(left, needed):
        few = pair_traffic(fabric, counts, source, target, 256)
        many = traffic(fabric, counts, (source,), (target,), 256)
        assert tuple(field.item() for field in many) == few
