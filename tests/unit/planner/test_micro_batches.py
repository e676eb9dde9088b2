"""More micro-batches, named where memory makes a plan slow."""

from dataclasses import replace

import msgspec
import pytest
from meshwright.executor.capability import CAPABILITY
from meshwright.planner.explain.what_if import quicker_in_parts
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.heuristic.checkpointing import limited_by_memory
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear

SAVED = 2**20


@pytest.fixture
def problem():
    """Feature maps of 16 MiB a rank, and units whose forward is worth as much as their backward."""
    units = [linear(f"u{i}", 64, 64, 1e-3, saved=float(SAVED)) for i in range(4)]
    return Problem(
        profile=chain_profile(units, 1024.0, 64),
        cluster=cluster(1, 2),
        goal=Goal(batch=8),
        capability=CAPABILITY,
    )


def within(problem, limit_bytes, **fields):
    goal = msgspec.structs.replace(problem.goal, memory_limit_bytes=limit_bytes, **fields)
    return replace(problem, goal=goal)


def test_a_plan_that_recomputes_names_the_micro_batches_that_are_quicker(problem):
    free = solve(problem, "heuristic").plan
    tight = within(problem, 2 * max(free.prediction.peak_bytes) // 3)
    slow = solve(tight, "heuristic").plan
    assert limited_by_memory(slow)
    better = quicker_in_parts(tight, slow)
    assert better is not None
    again = solve(within(tight, tight.goal.memory_limit_bytes, micro_batches=(1, better.value)))
    assert again.plan.micro_batches == better.value
    assert again.plan.prediction.step_s < 0.95 * slow.prediction.step_s
    assert f"--micro-batches 1,{better.value}" in better.sentence
    assert f"micro_batches=(1, {better.value})" in better.sentence
    assert "allow them" in better.sentence


def test_nothing_is_named_where_memory_holds_nothing_back(problem):
    free = solve(problem, "heuristic").plan
    assert not limited_by_memory(free)
    assert quicker_in_parts(problem, free) is None


def test_micro_batches_that_are_allowed_already_are_not_named_again(problem):
    free = solve(problem, "heuristic").plan
    limit = 2 * max(free.prediction.peak_bytes) // 3
    asked = within(problem, limit, micro_batches=(1, 2, 4))
    found = solve(asked, "heuristic").plan
    assert quicker_in_parts(asked, found) is None  # eight do not go into four samples a rank
