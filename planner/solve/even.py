"""Even shares of the batch for a plan whose shares were chosen for plain data parallelism."""

from ..cost.cost import CostModel
from .answer import choice, plan_of
from .problem import Problem, Result


def even_if_quicker(problem: Problem, found: Result) -> Result:
    """What was found, or the same decisions with even shares of the batch where these are quicker:
    where all units are divided, say, it does not matter who feeds how many samples. See [Note:
    Shares of unequal devices] in local_batches.py."""
    plan, decisions = found.plan, found.decisions
    if plan is None or decisions is None or not plan.local_batch_sizes:
        return found
    if all(unit.layout.groups == plan.world_size for unit in plan.units):
        return found  # plain data parallelism, for which they were chosen
    model = CostModel.of_plan(plan, problem.profile, problem.cluster, problem.goal)
    even = choice(model.with_local_batches(()), decisions, problem.schedule)
    assert found.objective_s is not None
    if not even.feasible or even.objective_s >= found.objective_s:
        return found
    made = plan_of(problem, even, found.solver, "heuristic", solve_s=plan.provenance.solve_s)
    return found._replace(
        plan=made, status="heuristic", objective_s=even.objective_s, bound_s=None, gap=None
    )
