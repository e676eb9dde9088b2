"""Each search that follows the Lagrangian's own has a problem on which it wins."""

from meshwright.planner.solve.lagrangian import solver
from meshwright.planner.solve.lagrangian.judging import PlanJudge
from meshwright.planner.solve.lagrangian.lagrange import LagrangianSearch

from tests.problems import problem


def best(seed):
    """The objective of the best plan over all models of a problem; None without a plan."""
    made = problem(seed, most=3_000).placed()
    found = [
        solver.search_part(made, model, float("inf"), float("inf")).choice
        for model in made.cost_models()
    ]
    kept = [each.objective_s for each in found if each is not None and each.feasible]
    return min(kept, default=None)


def test_trying_the_options_of_single_units(monkeypatch):
    found = best(82)
    monkeypatch.setattr(PlanJudge, "polish", lambda self, plan, deadline: plan)
    assert found < 0.98 * best(82)


def test_the_restricted_integer_program(monkeypatch):
    found = best(56)
    monkeypatch.setattr(LagrangianSearch, "_solve_restricted", lambda self, mixture: None)
    assert found < 0.997 * best(56)


def test_searching_again_under_a_lower_limit_on_memory(monkeypatch):
    assert best(9) is not None
    monkeypatch.setattr(solver, "REPAIRS", 1)
    assert best(9) is None
