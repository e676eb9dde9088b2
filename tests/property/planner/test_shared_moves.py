"""Every solver where units of a graph take one tensor alike: held against every combination."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from meshwright.planner.memory.rows import slice_waits, values
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.heuristic.space import OptionSpace, ScoredDecisions
from meshwright.planner.solve.ilp.solver import IntegerSolver
from meshwright.planner.solve.lagrangian.solver import LagrangianSolver, lagrangian_of

from tests import brute, problems

QUICK = range(1, 4)


def forked(seed, most=3_000):
    """A problem on a graph with forks, in which all edges of a source carry the same tensors."""
    for number in range(seed * 1000, seed * 1000 + 400):
        made = problems.problem(number, most=most)
        sizes = {}
        edges = [
            msgspec.structs.replace(
                edge,
                bytes_per_sample=sizes.setdefault(edge.source, edge).bytes_per_sample,
                gradient_bytes_per_sample=sizes[edge.source].gradient_bytes_per_sample,
            )
            for edge in made.profile.edges
        ]
        profile = msgspec.structs.replace(made.profile, edges=tuple(edges))
        goal = msgspec.structs.replace(made.goal, memory_limit_bytes=None)
        found = replace(made, profile=profile, goal=goal)
        if any(shares(model, found) for model in found.placed().cost_models()):
            return found
    raise AssertionError("no problem was drawn in which two units could share")


def shares(model, problem):
    """Whether some plan of the model moves a tensor once for two units."""
    rng, space = np.random.default_rng(0), OptionSpace(model, problem.capability)
    if not all(space.options):
        return False
    for _ in range(200):
        chosen = tuple(row[rng.integers(len(row))] for row in space.options)
        for e, (a, b) in enumerate(model.ends):
            moved = model.edge(e, chosen[a], chosen[b]).forward.seconds > 0
            if moved and model.arrival(e, chosen).forward.seconds == 0:
                return True
    return False


@pytest.mark.parametrize("seed", QUICK)
def test_solvers_agree_with_every_combination(seed):
    made = forked(seed)
    best = brute.best(made)
    exact = IntegerSolver().solve(replace(made, tie_tolerance=0.0))
    scaled = LagrangianSolver().solve(made, 20)
    if best.objective_s == float("inf"):
        assert exact.plan is None
        assert scaled.plan is None
        return
    assert exact.objective_s == pytest.approx(best.objective_s, rel=1e-6)
    assert scaled.bound_s <= best.objective_s * (1 + 1e-9) + 1e-15
    assert scaled.objective_s >= best.objective_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", QUICK)
def test_every_way_to_add_up_a_plan_is_the_cost_model(seed):
    """Tables of the search over many units, and decisions that are changed unit by unit."""
    made, rng = forked(seed).placed(), np.random.default_rng(seed)
    for model in made.cost_models():
        lagrangian = lagrangian_of(made, model)
        if lagrangian is None:
            continue
        table, space = lagrangian.table, OptionSpace(model, made.capability)
        scored = ScoredDecisions(space, made.schedule)
        for _ in range(10):
            numbers = np.array([rng.choice(u.numbers()) for u in table.units])
            figures = table.plan_figures(numbers)
            chosen = choice(model, table.choose(numbers), made.schedule)
            step_s = values(lagrangian.rows, figures).step_s(slice_waits(figures))
            assert step_s == pytest.approx(chosen.step_s, rel=1e-9)
            scored.move_to(chosen.decisions)
            fresh = model.chain(chosen.decisions)
            for mine, theirs in zip(scored.chain, fresh, strict=True):
                np.testing.assert_allclose(mine, theirs)
