"""A placement is never worse than the order of the hosts, or than a random one."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.placement import WORTH_IT, order_cost, place
from meshwright.planner.schema.layout import lattice

from tests.strategies import cluster, clusters


@st.composite
def paired(draw, sizes=(2, 4, 5, 6, 8, 9, 12, 18)):
    """Racks of hosts, near ones with fast links, measured with some noise."""
    world = draw(st.sampled_from(sizes))
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


def cost_of(links, order):
    return order_cost(links, order, list(lattice(links.world_size, bursts=False)))


@settings(max_examples=25, deadline=None)
@given(paired(sizes=(2, 3, 4, 5, 6)))
def test_the_best_order_of_few_hosts(links):
    """No order is better, but for the hundredth that another than the hosts' must save."""
    best = min(cost_of(links, order) for order in permutations(range(links.world_size)))
    assert cost_of(links, place(links)) <= best / WORTH_IT * (1 + 1e-9)
    if best < WORTH_IT * cost_of(links, range(links.world_size)):
        assert cost_of(links, place(links)) == best


@settings(max_examples=15, deadline=None)
@given(paired(sizes=(3, 4, 5)), st.integers(2, 4))
def test_the_best_order_of_few_hosts_of_several_devices(hosts, each):
    """Ranks of a host stay together; no order of whole hosts is better."""
    near, count = 1e11, hosts.world_size
    pairs = tuple(
        tuple(
            0.0
            if i == j
            else near
            if i // each == j // each
            else hosts.pair_bytes_per_s[i // each][j // each]
            for j in range(count * each)
        )
        for i in range(count * each)
    )
    links = cluster(nodes=count, devices=each, pairs=pairs)
    orders = ([n * each + d for n in order for d in range(each)]
              for order in permutations(range(count)))  # fmt: skip
    best = min(cost_of(links, order) for order in orders)
    assert cost_of(links, place(links)) <= best / WORTH_IT * (1 + 1e-9)


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
