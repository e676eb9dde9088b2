"""Feature maps that a search would recompute or offload for nothing are kept."""

from __future__ import annotations

import msgspec
import pytest
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve import needless_memory
from meshwright.planner.solve.answer import answer
from meshwright.planner.solve.choice import Choice, choice, fullest
from meshwright.planner.solve.needless_memory import without_needless_memory
from meshwright.planner.solve.problem import Problem

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


def found_with(problem: Problem, *memory: str) -> Choice:
    """A choice with those policies of the units."""
    model = problem.cost_model()
    policies = iter(memory)
    decisions = tuple(
        option._replace(memory=next(policies)) if unit.parameters else option
        for option, unit in zip(model.baseline, problem.profile.units, strict=True)
    )
    chosen = choice(model, decisions, problem.schedule)
    assert chosen.feasible
    return chosen


def policies_of(found: Choice) -> list[str]:
    return [option.memory for option in found.decisions if option.memory != "keep"]


def peak_of(*memory: str) -> int:
    """What those policies need, in bytes."""
    problem = problem_of()
    return problem.cluster.devices[0].memory_bytes + found_with(problem, *memory).over_bytes


@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_what_has_room_stays(policy):
    before = found_with(problem_of(), *[policy] * 4)
    after = without_needless_memory(problem_of(), before)
    assert policies_of(after) == []
    assert after.objective_s < before.objective_s
    assert after == choice(after.model, after.decisions, problem_of().schedule)


def test_a_solvers_answer_is_freed_of_it():
    before = found_with(problem_of(), *["offload"] * 4)
    bound = before.objective_s / 10
    after = answer(problem_of(), before, "heuristic", bound, proved=False)
    assert {unit.memory for unit in after.plan.units} == {"keep"}
    assert after.objective_s < before.objective_s
    assert (after.status, after.bound_s) == ("feasible", bound)
    assert after.gap == after.plan.provenance.gap == pytest.approx(1 - bound / after.objective_s)


def tight_problem() -> Problem:
    """Half of what keeping takes has room, so not all units can be kept."""
    return problem_of(limit=(peak_of(*["keep"] * 4) + peak_of(*["offload"] * 4)) // 2)


def test_only_what_has_no_room_is_left():
    before = found_with(tight_problem(), *["offload"] * 4)
    after = without_needless_memory(tight_problem(), before)
    assert 0 < len(policies_of(after)) < 4
    assert after.over_bytes <= 0
    assert after.objective_s < before.objective_s


def test_what_has_no_room_is_tried_once(monkeypatch):
    """All units together tell that none of them can stay; nobody tries their halves."""
    policies = ["recompute", "recompute", "keep", "keep"]
    tight = problem_of(limit=peak_of(*policies))
    found, trials = found_with(tight, *policies), []
    monkeypatch.setattr(needless_memory, "fullest", lambda *of: trials.append(of) or fullest(*of))
    assert without_needless_memory(tight, found) is found
    assert len(trials) == 1


def test_what_is_needed_stays_as_it_was():
    plain = found_with(problem_of(), *["keep"] * 4)
    assert without_needless_memory(problem_of(), plain) is plain
    before = found_with(tight_problem(), *["offload"] * 4)
    after = without_needless_memory(tight_problem(), before)
    assert without_needless_memory(tight_problem(), after) is after
