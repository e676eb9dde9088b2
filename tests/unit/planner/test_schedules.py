"""When the exchange is sharded, and by which schedule gradients travel."""

import time
from dataclasses import replace

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.cluster import Device, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import decisions_of, evaluate
from meshwright.planner.solve.heuristic import schedules
from meshwright.planner.solve.heuristic.heuristic import Heuristic
from meshwright.planner.solve.heuristic.schedules import in_shards, without_shards
from meshwright.planner.solve.problem import INTEGER_PAIRS, Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear

SHARDS = msgspec.structs.replace(
    PLAIN, styles=("none",), exchange=("dense", "sharded"), priority=True, in_buckets=("dense",)
)


def problem_of(update_s_per_byte, **changes):
    """Four linear units of 1 MiB, data parallel on four ranks, by priority."""
    units = [linear(f"fc{i}", 512, 512, 1e-4) for i in range(4)]
    profile = chain_profile(units, updates=(("adam", update_s_per_byte),))
    goal = Goal(batch=64, optimizer="adam", slice_bytes=(2**19,))
    return replace(
        Problem(
            profile, cluster(4, inter=1e9), goal, SHARDS, schedule="priority", shard_if_needed=True
        ),
        **changes,
    )


def exchanges(result):
    return {u.exchange for u in result.plan.units if u.parameter_bytes}


@pytest.mark.parametrize("either", [False, True])
def test_a_long_update_is_shared_out(either):
    """Each rank updates a quarter of 1 MiB in 1.3 ms instead of 5.2 ms, four times."""
    problem = problem_of(5e-9, any_schedule=either, shard_if_needed=not either)
    found = solve(problem, "heuristic")
    assert exchanges(found) == {"sharded"}
    assert found.plan.schedule == "priority"
    assert "took sharded exchange" in found.reason
    plain = solve(without_shards(replace(problem, shard_if_needed=False)), "heuristic")
    assert found.plan.prediction.step_s < 0.95 * plain.plan.prediction.step_s


@pytest.mark.parametrize("either", [False, True])
def test_a_short_update_is_not(either):
    found = solve(problem_of(1e-11, any_schedule=either, shard_if_needed=not either), "heuristic")
    assert exchanges(found) == {"dense"}


def test_nor_where_streams_wait_for_the_last_gradient():
    problem = problem_of(5e-9)
    profile = msgspec.structs.replace(problem.profile, device_type="cuda")
    assert exchanges(solve(replace(problem, profile=profile), "heuristic")) == {"dense"}


def test_what_does_not_fit_otherwise_is_sharded():
    problem = problem_of(1e-11)
    decisions = decisions_of(solve(problem, "heuristic").plan)
    asked = problem.profile, problem.cluster, problem.goal, decisions
    whole = evaluate(*asked, schedule="priority", message_bytes=2**19)
    goal = msgspec.structs.replace(
        problem.goal, memory_limit_bytes=max(whole.peak_bytes) - 3 * 2**19
    )
    found = solve(replace(problem, goal=goal), "heuristic")
    assert "sharded" in exchanges(found)


@pytest.mark.parametrize("either", [False, True])
def test_gradients_are_released_early_where_nothing_else_fits(either):
    """Even where that is quicker: what was applied in backward cannot be clipped."""
    capability = msgspec.structs.replace(
        SHARDS, exchange=("dense",), memory=("keep", "recompute"), early_release=True
    )
    ample = problem_of(
        1e-11, capability=capability, any_schedule=either, shard_if_needed=not either
    )
    decisions = decisions_of(solve(ample, "heuristic").plan)
    assert not any(option.early_release for option in decisions)
    asked = ample.profile, ample.cluster, ample.goal, decisions
    whole = evaluate(*asked, schedule="priority", message_bytes=2**19)
    goal = msgspec.structs.replace(ample.goal, memory_limit_bytes=max(whole.peak_bytes) - 2**20)
    found = solve(replace(ample, goal=goal), "integer")
    assert any(unit.early_release for unit in found.plan.units)
    assert found.plan.schedule == "priority"


def test_exchange_by_host_is_looked_at_too():
    """Where slices gain little by themselves: what is sent takes most of the step."""
    device = Device(name="cpu", memory_bytes=2**40)
    nodes = tuple(Node(name=name, devices=(device,) * 4) for name in "ab")
    links = msgspec.structs.replace(cluster(2, 4, inter=12.5e6), nodes=nodes)
    capability = msgspec.structs.replace(SHARDS, exchange=("dense",), by_host=True)
    problem = problem_of(1e-11, cluster=links, capability=capability, any_schedule=True)
    found = solve(problem, "heuristic")
    assert found.plan.schedule == "priority"
    assert {u.peers_per_host for u in found.plan.units if u.parameter_bytes} == {4}
    barrier = solve(replace(problem, any_schedule=False, schedule="barrier"), "heuristic")
    assert found.plan.prediction.step_s < 0.7 * barrier.plan.prediction.step_s


@pytest.mark.parametrize("pairs", [INTEGER_PAIRS, 0])
def test_priority_is_taken_where_other_decisions_are_clearly_quicker_so(monkeypatch, pairs):
    """The best plan by barrier keeps away from exchanges, so that priority gains it nothing."""
    monkeypatch.setattr(schedules, "INTEGER_PAIRS", pairs)
    units = [linear(f"fc{i}", 512, 512, 1e-5) for i in range(4)]
    profile = chain_profile(units, bytes_per_sample=4e3)
    capability = msgspec.structs.replace(PLAIN, exchange=("dense",), priority=True)
    goal = Goal(batch=64, slice_bytes=(2**18,))
    either = Problem(profile, cluster(4, inter=1e9), goal, capability, any_schedule=True)
    barrier, priority = (
        solve(replace(either, any_schedule=False, schedule=schedule), "integer").plan
        for schedule in ("barrier", "priority")
    )
    again = evaluate(
        profile, either.cluster, goal, decisions_of(barrier),
        schedule="priority", message_bytes=2**18,
    )  # fmt: skip
    assert again.step_s > 0.95 * barrier.prediction.step_s > priority.prediction.step_s
    found = solve(either, "integer")
    assert found.plan.schedule == "priority"
    assert found.plan.prediction.step_s == priority.prediction.step_s


def test_only_what_exchanges_something_is_sharded():
    problem = problem_of(5e-9)
    model = CostModel(
        problem.profile, problem.cluster, problem.goal, message_bytes=2**19, sliced=True
    )
    found = [o.exchange for o in in_shards(model, model.baseline, SHARDS)]
    assert found == ["dense", *["sharded"] * 4, "dense"]
    assert in_shards(model, model.baseline, PLAIN) == model.baseline


@pytest.mark.parametrize("slow", ["by barrier", "by priority"])
def test_the_seconds_that_are_told_are_those_of_all_searches(monkeypatch, slow):
    """Of a plan by priority, which was planned by barrier first."""
    search = Heuristic.solve

    def slowly(self, problem, time_limit_s=None):
        if problem.schedule == ("barrier" if slow == "by barrier" else "priority"):
            time.sleep(1.0)
        return search(self, problem, time_limit_s)

    monkeypatch.setattr(Heuristic, "solve", slowly)
    problem = problem_of(5e-9, any_schedule=True, shard_if_needed=False)
    start = time.perf_counter()
    found = solve(problem, "heuristic")
    assert found.plan.schedule == "priority"
    assert 1.0 <= found.seconds <= time.perf_counter() - start
    assert found.plan.provenance.solve_s == found.seconds
