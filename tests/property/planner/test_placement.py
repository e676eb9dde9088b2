"""A placement is never worse than the order of the hosts, or than a random one."""

from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.layout import lattice
from meshwright.planner.placement import WORTH_IT, order_cost, place

from tests.strategies import cluster, clusters


@st.composite
def paired(draw):
    """Racks of hosts, near ones with fast links, measured with some noise."""
    world = draw(st.sampled_from((2, 4, 5, 6, 8, 9, 12)))
    rack = draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    noise = st.floats(0.9, 1.1)
    pairs = tuple(
        tuple(
            0.0 if i == j else (1e9 if rack[i] == rack[j] else 1e8) * draw(noise)
            for j in range(world)
        )
        for i in range(world)
    )
    return cluster(nodes=world, pairs=pairs)


@settings(max_examples=40, deadline=None)
@given(st.one_of(paired(), clusters()), st.randoms(use_true_random=False))
def test_never_worse_than_hosts_or_chance(links, random):
    layouts = list(lattice(links.world_size, bursts=False))
    order = place(links)
    hosts = list(range(links.world_size))
    assert sorted(order) == hosts
    cost = order_cost(links, order, layouts)
    assert cost <= order_cost(links, hosts, layouts) * (1 + 1e-9)
    for _ in range(5):
        random.shuffle(hosts)
        assert cost * WORTH_IT <= order_cost(links, hosts, layouts) * (1 + 1e-9)
