"""Other shares of the batch for a plan whose shares were chosen for plain data parallelism."""

from ..cost.cost import CostModel
from .answer import plan_of
from .choice import choice
from .local_batches import balanced_batches
from .problem import Problem, Result


def with_quicker_shares(problem: Problem, found: Result) -> Result:
    """What was found, or the same decisions with other shares of the batch where these are quicker:
    even ones, as where all units are divided it does not matter who feeds how many samples, or
    those with which no rank computes long, as the exchange that plain data parallelism waits for
    may be gone. See [Note: Shares of unequal devices] in local_batches.py."""
    plan, decisions = found.plan, found.decisions
    if plan is None or decisions is None or not plan.local_batch_sizes:
        return found
    if all(unit.layout.groups == plan.world_size for unit in plan.units):
        return found  # plain data parallelism, for which they were chosen
    model = CostModel.of_plan(plan, problem.profile, problem.cluster, problem.goal)
    shares = {(), balanced_batches(model, problem.schedule, computing=True) or ()}
    others = [choice(model.with_local_batches(s), decisions, problem.schedule) for s in shares]
    fitting = [other for other in others if other.feasible]
    best = min(fitting, key=lambda other: other.objective_s, default=None)
    assert found.objective_s is not None
    if best is None or best.objective_s >= found.objective_s:
        return found
    made = plan_of(problem, best, found.solver, "heuristic")
    return found._replace(
        plan=made, status="heuristic", objective_s=best.objective_s, bound_s=None, gap=None
    )
