"""A value that a refusal names is accepted, and where it is called the least, nothing less is."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.budget import single_device_batch_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.heuristic.heuristic import TRIES
from meshwright.planner.solve.heuristic.infeasible import DIGITS, LIFTED, needed, rounded_up
from meshwright.planner.solve.lagrangian import solver as lagrangian_solver
from meshwright.planner.solve.lagrangian.solver import LagrangianSolver
from meshwright.planner.solve.solver import solve

from tests.brute import best
from tests.problems import problem, value_of

SOME = settings(max_examples=5, deadline=None)
SHARE = 0.98
"""A value that is the least leaves no plan at this share of it."""


def free_of(made):
    """The problem without limits."""
    goal = msgspec.structs.replace(
        made.goal, memory_limit_bytes=None, amplification_limit=None, time_limit_s=None,
        unit_amplification_limit=None, objective="time",
    )  # fmt: skip
    return replace(made, goal=goal)


def limited(made, **limits):
    return replace(made, goal=msgspec.structs.replace(made.goal, **limits))


@st.composite
def refused(draw):
    """A problem without a plan, mostly, for the sake of one limit."""
    made = free_of(problem(draw(st.integers(0, 10**6)), most=400))
    found = best(made)
    share = draw(st.floats(0.5, 0.95))
    model_value = value_of(made, found)
    kind = draw(st.sampled_from(("memory", "device-seconds", "time", "unit")))
    if kind == "memory":
        return limited(made, memory_limit_bytes=max(int(found.least_bytes * share), 1))
    if kind == "time":
        return limited(made, time_limit_s=model_value.step_s * share)
    if kind == "unit":
        return limited(made, unit_amplification_limit=0.1 + 0.9 * draw(st.floats(0, 1)))
    single = single_device_batch_s(CostModel(made.profile, made.cluster, made.goal))
    return limited(made, amplification_limit=found.least_gpu_seconds / single * share)


def changed(made, change, share=1.0):
    """The problem with a remedy applied, or a share of it."""
    value = change.value * share
    if change.what in ("memory_limit_bytes", "batch"):
        value = int(value)
    return limited(
        made, **{change.what: (int(value),) if change.what == "micro_batches" else value}
    )


VALUES = ("memory_limit_bytes", "amplification_limit", "unit_amplification_limit", "time_limit_s")


@pytest.mark.parametrize("solver", ["integer", "lagrangian", "heuristic"])
@SOME
@given(refused())
def test_what_is_named_is_accepted_and_the_least_is_the_least(solver, made):
    result = solve(made, solver)
    if result.plan is not None:
        return  # limits on units may leave a plan
    why = result.infeasible
    for change in why.relaxations:
        assert solve(changed(made, change), solver).plan is not None, change.sentence
        if change.what not in VALUES:
            continue
        assert f"{change.value:,}" in change.sentence or f"{change.value:.4g}" in change.sentence
        if change.proved:
            assert "at least" in change.sentence
            assert not best(changed(made, change, SHARE)).decisions, change.sentence
        else:
            assert "enough" in change.sentence
    if solver != "heuristic" and why.limit in ("amplification_limit", "time_limit_s"):
        assert any(change.what == why.limit for change in why.relaxations)


@SOME
@given(refused())
def test_the_quickest_plan_needs_no_less_than_what_is_named(made):
    """A search for the least may end far above it, and the plan without the limit may need less."""
    why = solve(made, "heuristic").infeasible
    if why is None or why.limit not in LIFTED:
        return
    free = solve(limited(made, **{why.limit: None}), "heuristic")
    for change in why.relaxations:
        if change.what == why.limit and free.plan is not None:
            model = CostModel.of_plan(free.plan, made.profile, made.cluster, made.goal)
            quickest = choice(model, free.decisions, made.schedule)
            assert change.value <= rounded_up(needed(why.limit, quickest) * 1.02**TRIES)


@SOME
@given(refused())
def test_the_search_over_many_units_names_it_too(made):
    """Without the integer program that has the last word on small problems."""
    before, lagrangian_solver.FEW_UNITS = lagrangian_solver.FEW_UNITS, 0
    try:
        result = LagrangianSolver().solve(made, 20)
        if result.plan is not None:
            return
        why = result.infeasible
        for change in why.relaxations:
            if change.what == why.limit and change.what in VALUES[1:]:
                assert LagrangianSolver().solve(changed(made, change), 20).plan is not None
                if change.proved:
                    assert not best(changed(made, change, SHARE)).decisions, change.sentence
        if why.limit in ("amplification_limit", "time_limit_s"):
            assert why.relaxations
    finally:
        lagrangian_solver.FEW_UNITS = before


@given(st.floats(1e-9, 1e9))
def test_rounding_goes_up_and_not_far(value):
    found = rounded_up(value)
    assert value <= found <= value * (1 + 10.0 ** (1 - DIGITS)) * (1 + 1e-9)
    assert float(f"{found:.{DIGITS}g}") == found
