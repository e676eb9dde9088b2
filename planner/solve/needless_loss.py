"""Loss that does not pay: a plan with lossy or rounded gradients beside the same plan without.

Solvers choose by the formula. What is predicted is simulated, and where gradients are sent in part
or rounded for little, coding them may take what they save.
"""

from dataclasses import replace

from ..cost.cost import CostModel
from ..schema.options import Option
from .answer import plan_of
from .choice import choice
from .problem import Problem, Result


def without_needless_loss(problem: Problem, found: Result) -> Result:
    """What was found, or the same layouts and policies with whole and exact gradients, where these
    are predicted to be as quick and keep all limits."""
    plan, decisions = found.plan, found.decisions
    if plan is None or decisions is None or plan.local_steps is not None:
        return found
    exact = tuple(map(_exact, decisions))
    if exact == decisions:
        return found
    model = CostModel.of_plan(plan, problem.profile, problem.cluster, problem.goal)
    other = choice(model, exact, plan.schedule)
    if not other.feasible:
        return found
    decided = replace(problem, schedule=plan.schedule)  # which the problem may have left open
    made = plan_of(decided, other, found.solver, "heuristic")
    if made.prediction.step_s > plan.prediction.step_s:
        return found
    replaced = found._replace(
        plan=made, decisions=exact, status="heuristic", objective_s=other.objective_s,
        bound_s=None, gap=None,
    )  # fmt: skip
    return replaced.took(found.seconds)


def _exact(option: Option) -> Option:
    if option.lossy:
        option = option._replace(exchange="dense", ratio=1.0, feedback="residual")
    return option._replace(wire="exact")
