"""Branches side by side: taken where they win, described as they run, refused where they cannot."""

from dataclasses import replace

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.capability import EVERYTHING, PLAIN
from meshwright.planner.schema.cluster import Device, Node
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.profile import EdgeProfile
from meshwright.planner.solve.answer import answer
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.heuristic.branches import regions, side_by_side
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.planner.solve.unit_options import all_may_have

from tests.strategies import chain_profile, cluster, linear

LAUNCHES = msgspec.structs.replace(PLAIN, idle_positions=True, branches=True)


def flat(name, seconds, rows=4):
    """A unit whose kernels take as long for one sample as for many."""
    unit = linear(name, rows, rows)
    curve = Curve(x=(1.0, 64.0), y=(seconds, seconds))
    share = msgspec.structs.replace(unit.whole, forward=curve, backward=curve)
    return msgspec.structs.replace(unit, shares=(share,), splits=())


def profile(*pairs, seconds):
    """Units by name, joined by the pairs; the first takes the input, the last gives the output."""
    units = [flat(name, s) for name, s in seconds.items()]
    chain = chain_profile(units, bytes_per_sample=16.0, features=4)
    edges = [
        EdgeProfile(source=a, target=b, bytes_per_sample=16.0, gradient_bytes_per_sample=16.0)
        for a, b in pairs
    ]
    ends = [e for e in chain.edges if "put" in e.source + e.target]
    return msgspec.structs.replace(chain, edges=(*ends, *edges))


def diamond(**more):
    pairs = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    made = profile(*pairs, seconds={"a": 1e-3, "b": 8e-3, "c": 8e-3, "d": 1e-3})
    goal = Goal(batch=8, **more)
    links = cluster(4, inter=1e12, intra=1e12, latency_s=1e-6)
    return Problem(made, links, goal, LAUNCHES, tie_tolerance=0.0)


@pytest.mark.parametrize("solver", ["heuristic", "integer", "lagrangian"])
@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_branches_are_dealt_out_where_that_wins(solver, schedule):
    problem = replace(diamond(), schedule=schedule)
    found = solve(problem, solver)
    turns = solve(replace(problem, capability=replace_branches()), solver)
    assert turns.plan.prediction.step_s == pytest.approx(36e-3, rel=0.02)
    assert found.plan.prediction.step_s == pytest.approx(20e-3, rel=0.02)
    assert found.status == "heuristic"
    assert found.bound_s is None
    assert "side by side" in found.reason
    places = {found.plan.unit(n).layout.first for n in "bc"}
    assert places == {0, 2}
    # all four devices all the time, but for what a and d may leave idle
    assert 4 * 17e-3 <= found.plan.prediction.gpu_seconds <= 4 * 20e-3 * 1.01
    assert found.objective_s == found.plan.prediction.step_s


def replace_branches():
    return msgspec.structs.replace(LAUNCHES, branches=False)


def test_they_stay_in_turns_where_moving_costs_more():
    problem = diamond()
    slow = cluster(4, inter=1e3, intra=1e3, latency_s=1e-6)
    found = solve(replace(problem, cluster=slow), "heuristic")
    assert all(u.layout.first == 0 for u in found.plan.units)


def test_three_branches_on_two_halves():
    pairs = [("a", x) for x in "bcd"] + [(x, "e") for x in "bcd"]
    seconds = {"a": 1e-3, "b": 8e-3, "c": 4e-3, "d": 4e-3, "e": 1e-3}
    problem = replace(diamond(), profile=profile(*pairs, seconds=seconds))
    found = solve(problem, "heuristic")
    assert found.plan.prediction.step_s == pytest.approx(20e-3, rel=0.02)
    first = {n: found.plan.unit(n).layout.first for n in "bcd"}
    assert first["c"] == first["d"] != first["b"]


def test_a_pinned_unit_stays():
    pin = Pin(unit="b", only=(Layout(groups=4),))
    found = solve(diamond(pins=(pin,)), "heuristic")
    assert found.plan.unit("b").layout == Layout(groups=4)


def test_limited_device_seconds_keep_branches_in_turns():
    found = solve(diamond(amplification_limit=100.0), "heuristic")
    assert all(u.layout.first == 0 for u in found.plan.units)


def test_a_chain_has_no_regions_and_a_skip_is_none():
    chain = profile(("a", "b"), ("b", "c"), seconds={"a": 1e-3, "b": 1e-3, "c": 1e-3})
    skip = profile(("a", "b"), ("b", "c"), ("a", "c"), seconds={"a": 1e-3, "b": 1e-3, "c": 1e-3})
    for made in (chain, skip):
        assert regions(CostModel(made, cluster(4), Goal(batch=8))) == []


@pytest.mark.parametrize(
    "policy", [{"peers_per_host": 2}, {"early_release": True}, {"exchange": "sharded"}]
)
def test_what_moves_gives_up_what_needs_all_ranks(policy):
    """An exchange by host, and what the executor has only for layouts of all ranks."""
    capability = msgspec.structs.replace(
        LAUNCHES, exchange=("dense", "sharded"), early_release=True, by_host=True, priority=True,
        idle_exchange=("dense",), idle_release=False,
    )  # fmt: skip
    hosts = tuple(
        Node(name=name, devices=(Device(name="cpu", memory_bytes=2**40),) * 2) for name in "ab"
    )
    links = cluster(2, 2, inter=1e10, intra=1e12, latency_s=1e-9)
    links = msgspec.structs.replace(links, nodes=hosts)
    problem = replace(
        diamond(optimizer="adam"), capability=capability, cluster=links, schedule="priority"
    )
    model = problem.cost_model()
    start = tuple(
        o._replace(**policy) if unit.parameters else o
        for o, unit in zip(model.baseline, problem.profile.units, strict=True)
    )
    assert all_may_have(model, start, capability)
    turns = answer(problem, choice(model, start, "priority"), "heuristic", None, proved=False)
    found = side_by_side(problem, turns)
    assert {found.plan.unit(n).layout.first for n in "bc"} == {0, 2}
    assert capability.refusals(turns.plan) == capability.refusals(found.plan) == ()


def test_what_the_executor_cannot_run_is_said():
    found = solve(replace(diamond(), executor=PLAIN), "heuristic")
    assert any("starts at another position" in reason for reason in found.plan.hypothetical)
    assert EVERYTHING.refusals(found.plan) == ()
