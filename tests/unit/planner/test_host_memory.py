"""Offload within the hosts' memory, and the reserve of a device."""

from __future__ import annotations

import meshwright as mw
import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory.pinned import PINNED_ROUNDING
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.cluster import Cluster, Device, Node
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import FidelityProfile
from meshwright.planner.solve.evaluate import limits_bytes, make_plan, plan_by
from meshwright.planner.solve.host_memory import PINNED_SHARE
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import expand_pins, solve
from meshwright.planner.solve.unit_options import unit_options

from tests.strategies import chain_profile, cluster, linear

KIB = 1024
HOME = Option(data_parallel(1))
AWAY = HOME._replace(memory="offload")
SOLVERS = ("heuristic", "integer", "lagrangian")


def one(host: int | None = None, memory: int = 2**30, **more: int) -> Cluster:
    device = Device(name="gpu", memory_bytes=memory, host_bytes_per_s=1e9, **more)
    return Cluster(
        name="one", nodes=(Node(name="n", devices=(device,), host_memory_bytes=host),), levels=()
    )


def units(count: int = 4):
    """Each saves 64 KiB of one sample, and works a little longer than the one before."""
    made = [linear(f"u{i}", 4, 4, 1e-3 * (1 + i), 64.0 * KIB) for i in range(count)]
    return chain_profile(made, bytes_per_sample=4.0)


def room_for(count: float) -> int:
    """Host memory for the feature maps of so many units."""
    return int(count * 64 * KIB * PINNED_ROUNDING / PINNED_SHARE) + 1


def test_more_than_the_host_has_is_refused_in_a_sentence() -> None:
    decisions = (HOME, AWAY, AWAY, AWAY, AWAY, HOME)
    assert make_plan(units(), one(room_for(4)), Goal(batch=1), decisions)
    with pytest.raises(InputError, match=r"takes up to 512.*409.*--host-memory"):
        make_plan(units(), one(room_for(3.2)), Goal(batch=1), decisions)
    assert make_plan(units(), one(), Goal(batch=1), decisions)  # not known: no limit


def test_units_that_work_longest_come_first() -> None:
    model = CostModel(units(), one(room_for(2.5)), Goal(batch=1))
    offered = [
        any(o.memory == "offload" for o in unit_options(model, k, EVERYTHING)) for k in range(6)
    ]
    assert offered == [False, False, False, True, True, False]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("count", [1, 3])
def test_no_plan_takes_more_of_the_host(solver: str, count: int) -> None:
    # In the backward of the last unit: three that are kept, its own feature maps, their gradient,
    # and what comes back for the one before it. With one unit away it would be another one more.
    limit = 64 * KIB * 6 + 8 * KIB
    capability = msgspec.structs.replace(
        EVERYTHING, memory=("keep", "offload"), early_release=False, branches=False
    )
    problem = Problem(
        units(6), one(room_for(count), memory=limit), Goal(batch=1), capability=capability
    )
    found = solve(problem, solver, 20.0)
    if count == 1:
        assert found.plan is None
    else:
        assert found.plan is not None
        away = [u.name for u in found.plan.units if u.memory == "offload"]
        assert 1 <= len(away) <= 3


@pytest.mark.parametrize(("host_bytes_per_s", "taken"), [(1e7, "fully_sharded"), (1e13, "offload")])
def test_shards_are_taken_where_copies_would_take_longer(
    host_bytes_per_s: float, taken: str
) -> None:
    """What does not fit as it is fits with offload, and with parameters in shards."""
    units = [linear(f"u{i}", 512, 512, 1e-5, 512.0 * KIB) for i in range(4)]
    profile = chain_profile(units, bytes_per_sample=2048.0, features=512)
    links = cluster(4, inter=1e11)
    device = msgspec.structs.replace(links.devices[0], host_bytes_per_s=host_bytes_per_s)
    nodes = tuple(msgspec.structs.replace(node, devices=(device,)) for node in links.nodes)
    links = msgspec.structs.replace(links, nodes=nodes)
    free = make_plan(profile, links, Goal(batch=16), schedule="priority")
    limit = int(max(free.prediction.peak_bytes) * 0.97)
    goal = Goal(batch=16, memory_limit_bytes=limit, pins=(Pin(unit="*", only=(data_parallel(4),)),))
    capability = msgspec.structs.replace(
        EVERYTHING, memory=("keep", "offload"), early_release=False, branches=False,
        exchange=("dense", "sharded", "fully_sharded"),
    )  # fmt: skip
    problem = Problem(
        profile, links, goal, capability=capability, schedule="priority", shard_if_needed=True
    )
    plan = solve(expand_pins(problem), "integer", 20.0).checked()
    found = {unit.memory for unit in plan.units} | {unit.exchange for unit in plan.units}
    assert taken in found
    assert not {"offload", "fully_sharded"} <= found


MIRRORED = Option(data_parallel(2), exchange="topk", ratio=0.1, feedback="host_mirror")
SHARD = 4 * 64 * 64


def two(host: int | None) -> Cluster:
    """Two ranks with a host each."""
    links = cluster(2)
    device = msgspec.structs.replace(links.devices[0], host_bytes_per_s=1e9)
    nodes = (Node(name=n, devices=(device,), host_memory_bytes=host) for n in "ab")
    return msgspec.structs.replace(links, nodes=tuple(nodes))


def lossy(host: int | None, count: int = 4) -> CostModel:
    """Units whose gradients may travel in part, for SGD."""
    curve = FidelityProfile(exchange="topk", ratios=(0.1,), kept=(0.99,))
    made = [linear(f"u{i}", 64, 64, 1e-3, 64.0 * KIB) for i in range(count)]
    made = [msgspec.structs.replace(unit, fidelity=(curve,)) for unit in made]
    goal = Goal(batch=2, optimizer="momentum", allow_lossy=True, min_fidelity=0.5)
    return CostModel(chain_profile(made, features=64), two(host), goal, sliced=True)


def mirrors_for(count: float) -> int:
    """Host memory for the mirrors of so many units, beside the feature maps of four."""
    pinned = PINNED_ROUNDING * (4 * 64 * KIB + count * SHARD)
    return int(pinned / PINNED_SHARE) + 1


def ways(model: CostModel, k: int) -> set[str]:
    return {o.feedback for o in unit_options(model, k, EVERYTHING) if o.exchange == "topk"}


def test_mirrors_have_the_room_that_feature_maps_leave() -> None:
    with_room = lossy(mirrors_for(4))
    assert all(ways(with_room, k) == {"mirror", "host_mirror"} for k in range(1, 5))
    little = lossy(mirrors_for(1.5))
    assert sum("host_mirror" in ways(little, k) for k in range(1, 5)) == 1
    # What waits there in any case may be offloaded.
    assert all(
        any(o.memory == "offload" for o in unit_options(little, k, EVERYTHING)) for k in range(1, 5)
    )
    assert ways(lossy(None), 1) == {"mirror", "host_mirror"}


def test_mirrors_count_against_the_hosts_memory() -> None:
    home = Option(data_parallel(2))
    decisions = (home, *(MIRRORED._replace(memory="offload"),) * 4, home)
    model = lossy(mirrors_for(4))
    plan = plan_by(model, decisions, "priority", EVERYTHING)
    assert plan.prediction.pinned_bytes == (PINNED_ROUNDING * 4 * (64 * KIB + SHARD),) * 2
    with pytest.raises(InputError, match=r"offloaded or mirrored there takes up to .*--host-memor"):
        plan_by(lossy(mirrors_for(3)), decisions, "priority", EVERYTHING)
    kept = plan_by(model, (home,) * 6, "priority", EVERYTHING)
    assert kept.prediction.pinned_bytes == ()


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_plan_has_more_mirrors_than_the_host_has_room_for(solver: str) -> None:
    model = lossy(mirrors_for(2))
    free = plan_by(model, model.baseline, "priority", EVERYTHING)
    limit = int(max(free.prediction.peak_bytes) * 0.9)
    goal = msgspec.structs.replace(model.goal, memory_limit_bytes=limit)
    capability = msgspec.structs.replace(EVERYTHING, early_release=False, branches=False)
    problem = Problem(
        model.profile, model.cluster, goal, capability=capability, schedule="priority"
    )
    plan = solve(problem, solver, 20.0).checked()
    room = PINNED_SHARE * mirrors_for(2)
    assert max(plan.prediction.pinned_bytes, default=0) <= room


def test_the_reserve_is_taken_off_and_said() -> None:
    links, goal = one(memory=2**30, reserve_bytes=2**20), Goal(batch=1)
    assert limits_bytes(CostModel(units(), links, goal)) == (2**30 - 2**20,)
    assert make_plan(units(), links, goal).reserve_bytes == 2**20
    # A limit is what the user says.
    asked = msgspec.structs.replace(goal, memory_limit_bytes=2**29)
    assert limits_bytes(CostModel(units(), links, asked)) == (2**29,)
    assert make_plan(units(), links, asked).reserve_bytes == 0


def test_a_described_gpu_has_a_link_to_its_host_and_a_reserve() -> None:
    device = mw.describe_cluster(device="a100-sxm-40gb").devices[0]
    assert device.host_bytes_per_s == pytest.approx(0.8 * 32e9)
    assert device.usable_bytes == 37 * 2**30  # a context of 1 GiB, and a twentieth
    stated = mw.describe_cluster(
        device="v100-sxm2-16gb", reserve_bytes=5, host_gbyte_s=12.0, host_memory_bytes=2**40
    )
    assert stated.devices[0].reserve_bytes == 5
    assert stated.host_bytes_per_s == 12e9
    assert stated.host_memory_bytes == 2**40
    with pytest.raises(InputError, match=r"16.00 GiB leaves nothing.*--reserve"):
        mw.describe_cluster(device="v100-sxm2-16gb", reserve_bytes=2**34)
