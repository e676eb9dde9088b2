"""What an exchange by host costs, and when it is planned: hand-computed."""

from __future__ import annotations

import meshwright as mw
import msgspec
import numpy as np
import pytest
from meshwright.executor.capability import CAPABILITY
from meshwright.planner.cost.collectives import Fabric, run_on_host
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.capability import Capability
from meshwright.planner.schema.cluster import Cluster, CollectiveCurve, Device, Level, Node
from meshwright.planner.schema.curve import proportional
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.pins import parse_wishes
from meshwright.planner.schema.plan import UnitPlan
from meshwright.planner.solve.unit_options import all_options

from tests.strategies import chain_profile, linear

FLAT = Option(Layout(groups=4, degree=1))
BY_HOST = FLAT._replace(peers_per_host=2)


def cluster(
    sizes: tuple[int, ...] = (2, 2), device: str = "cpu (test)", intra: float = 1e9
) -> Cluster:
    """Hosts with a slow network between them, without latency."""
    one = Device(name=device, memory_bytes=2**40)
    return Cluster(
        name="hosts",
        nodes=tuple(Node(name=f"host-{i}", devices=(one,) * n) for i, n in enumerate(sizes)),
        levels=(
            Level(name="intra", latency_s=0.0, bytes_per_s=intra),
            Level(name="inter", latency_s=0.0, bytes_per_s=1e8),
        ),
    )


def model(of: Cluster, *, sliced: bool = True) -> CostModel:
    return CostModel(
        chain_profile([linear("a", 1000, 1000)]), of, mw.Goal(batch=8), message_bytes=10**6,
        sliced=sliced,
    )  # fmt: skip


def test_hosts_exchange_what_their_ranks_have_added_up() -> None:
    costs = model(cluster())
    size = 1e6
    # A ring through four ranks sends 2 · 3/4 of it over a host's interface.
    assert costs.exchange(FLAT, size).seconds == pytest.approx(1.5 * size / 1e8)
    # Two rings of two ranks send half of it each, 2 · 1/2 times.
    found = costs.exchange(BY_HOST, size)
    assert found.seconds == pytest.approx(size / 1e8)
    assert found.link == costs.exchange(FLAT, size).link
    # Half to the host's other rank, half back, and the half that a rank owns to the other host.
    assert found.sent_bytes == pytest.approx(1.5 * size)


def test_slices_wait_for_slow_links_inside_hosts() -> None:
    size = 1e6
    slow = model(cluster(intra=5e7)).exchange(BY_HOST, size)
    assert slow.seconds == pytest.approx(2 * 0.5 * size / 5e7)


def test_only_the_crossing_is_rounded() -> None:
    size = 1e6
    found = model(cluster()).exchange(BY_HOST._replace(wire="bf16"), size)
    assert found.seconds == pytest.approx(0.5 * size / 1e8)
    assert found.sent_bytes == pytest.approx(1.25 * size)


@pytest.mark.parametrize(
    ("of", "sliced", "each"),
    [
        (cluster(), True, 2),
        (cluster(), False, 1),  # buckets travel flat
        (cluster((4,)), True, 1),
        (cluster((1, 1, 1, 1)), True, 1),
        (cluster((3, 1)), True, 1),
        (cluster(device="a100-sxm-40gb"), True, 1),  # NCCL looks after hosts itself
    ],
)
def test_it_is_offered_where_it_is_quicker(of: Cluster, sliced: bool, each: int) -> None:
    assert model(of, sliced=sliced).peers_per_host(FLAT.layout) == each


def test_measured_curves_decide() -> None:
    def curve(ranks: int, seconds_per_byte: float) -> CollectiveCurve:
        return CollectiveCurve(
            collective="all_reduce", ranks=ranks, seconds=proportional(seconds_per_byte),
            latency_s=0.0, bytes_per_s=1 / seconds_per_byte,
        )  # fmt: skip

    of = cluster()
    intra, inter = of.levels
    # As quick by a ring through all, say by a library that looks after hosts itself.
    good = msgspec.structs.replace(inter, curves=(curve(2, 1e-8), curve(4, 0.9e-8)))
    poor = msgspec.structs.replace(inter, curves=(curve(2, 1e-8), curve(4, 1.1e-8)))
    found = [
        model(msgspec.structs.replace(of, levels=(intra, one))).peers_per_host(FLAT.layout)
        for one in (good, poor)
    ]
    assert found == [1, 2]


@pytest.mark.parametrize(
    ("placement", "rows", "each"),
    [
        ((0, 1, 2, 3), [[0, 1, 2, 3]], 2),
        ((0, 2, 1, 3), [[0, 1, 2, 3]], 1),
        ((0, 1, 2, 3), [[0, 2], [1, 3]], 1),
        ((0, 1, 2, 3), [[0, 1], [2, 3]], 1),
    ],
)
def test_neighbours_on_one_host(placement: tuple[int, ...], rows: list, each: int) -> None:
    assert run_on_host(Fabric(cluster(), placement), np.array(rows)) == each


def test_runs_are_of_different_hosts() -> None:
    fabric = Fabric(cluster((4, 2)), (0, 1, 4, 5, 2, 3))
    assert run_on_host(fabric, np.array([[0, 1, 2, 3, 4, 5]])) == 1


def test_units_may_have_it_unless_it_is_forbidden() -> None:
    costs = model(cluster())

    def offered(capability: Capability) -> set[int]:
        return {option.peers_per_host for option in all_options(costs, capability)[1]}

    assert offered(CAPABILITY) == {1, 2}
    assert offered(msgspec.structs.replace(CAPABILITY, by_host=False)) == {1}
    assert parse_wishes((), ("by-host",)).without == ("by-host",)


def test_peers_divide_into_hosts():
    UnitPlan(name="fc", kind="linear", modules=(), layout=FLAT.layout, peers_per_host=2)
    with pytest.raises(ValueError, match="has 4 peers, which do not divide into 3 on each host"):
        UnitPlan(name="fc", kind="linear", modules=(), layout=FLAT.layout, peers_per_host=3)
