"""Feature maps that a search would recompute or offload for nothing are kept."""

from __future__ import annotations

import msgspec
import pytest
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.answer import answer, choice
from meshwright.planner.solve.needless_memory import without_needless_memory
from meshwright.planner.solve.problem import Problem, Result

from tests.strategies import chain_profile, cluster, linear


def problem_of(limit: int | None = None) -> Problem:
    """A chain of four units, whose feature maps may wait on the host or be computed again."""
    units = [linear(f"fc{i}", 512, 512, 1e-4, saved=2.0**20) for i in range(4)]
    there = cluster(4)
    device = msgspec.structs.replace(there.devices[0], host_bytes_per_s=1e9)
    nodes = tuple(msgspec.structs.replace(node, devices=(device,)) for node in there.nodes)
    capability = msgspec.structs.replace(PLAIN, memory=("keep", "recompute", "offload"))
    goal = Goal(batch=64, optimizer="adam", micro_batches=(1,), memory_limit_bytes=limit)
    links = msgspec.structs.replace(there, nodes=nodes)
    return Problem(chain_profile(units), links, goal, capability=capability).placed()


def found_with(problem: Problem, *memory: str) -> Result:
    """A result with those policies of the units, which nothing is proved to be better than by more
    than nine tenths."""
    model = problem.cost_model()
    policies = iter(memory)
    decisions = tuple(
        option._replace(memory=next(policies)) if unit.parameters else option
        for option, unit in zip(model.baseline, problem.profile.units, strict=True)
    )
    chosen = choice(model, decisions, problem.schedule)
    assert chosen.feasible
    return answer(problem, chosen, "heuristic", chosen.objective_s / 10, proved=False)


def policies_of(result: Result) -> list[str]:
    return [unit.memory for unit in result.plan.units if unit.memory != "keep"]


@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_what_has_room_stays(policy):
    before = found_with(problem_of(), *[policy] * 4)
    after = without_needless_memory(problem_of(), before)
    assert policies_of(after) == []
    assert after.objective_s < before.objective_s
    assert (after.status, after.bound_s) == ("feasible", before.bound_s)
    assert after.gap == pytest.approx(1 - before.bound_s / after.objective_s)
    assert after.plan.provenance.gap == after.gap
    assert after.plan.prediction.step_s < before.plan.prediction.step_s


def test_only_what_has_no_room_is_left():
    needed = max(found_with(problem_of(), *["offload"] * 4).plan.prediction.peak_bytes)
    kept = max(found_with(problem_of(), *["keep"] * 4).plan.prediction.peak_bytes)
    tight = problem_of(limit=(needed + kept) // 2)
    before = found_with(tight, *["offload"] * 4)
    after = without_needless_memory(tight, before)
    assert 0 < len(policies_of(after)) < 4
    assert max(after.plan.prediction.peak_bytes) <= tight.goal.memory_limit_bytes
    assert after.objective_s < before.objective_s


def test_what_is_needed_stays_as_it_was():
    enough = max(found_with(problem_of(), *["offload"] * 4).plan.prediction.peak_bytes)
    tight = problem_of(limit=enough)
    after = without_needless_memory(tight, found_with(tight, *["offload"] * 4))
    assert policies_of(after)
    assert without_needless_memory(tight, after) is after
    plain = found_with(problem_of(), *["keep"] * 4)
    assert without_needless_memory(problem_of(), plain) is plain
    nothing = plain._replace(plan=None, decisions=None)
    assert without_needless_memory(tight, nothing) is nothing
