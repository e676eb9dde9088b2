"""The way from what a solver chose to its answer: freed of memory policies that it does not need,
simulated, checked and made into a Plan.

The value of a plan is that of the formulas of ``cost.step_time``, which are what is proved about;
the simulation of the schedule as it is run tells what the Plan predicts. What may differ between
the two, and why (anything else is a bug, and raises):

- The formula and the simulation of its own idealised schedule agree to rounding where gradients
  use one link; where they use several at once the formula is a lower bound.
- With slices of finite size and one gradient link the simulated step lies between the formula
  without waits for slices and the formula with them.
- Where computing and communicating slow each other, or gradients travel in buckets, the prediction
  is the simulation's alone.
"""

from typing import Literal

from ..cost.step_time import barrier_step, priority_step
from ..schema.plan import Plan, Status
from ..simulate.events import simulate
from ..simulate.schedule import ScheduleName, Step, plain_messages, slice_messages, work_of
from .choice import Choice
from .evaluate import plan_by
from .needless_memory import without_needless_memory
from .problem import Problem, Result

Proof = Literal["optimal", "feasible", "heuristic"]
TOLERANCE = 1e-6
"""Relative difference between two ways to compute the same figure that is rounding."""


class DisagreementError(AssertionError):
    """Two statements of the same plan's cost differ: a bug of the planner, never of its user."""


def check(chosen: Choice, schedule: ScheduleName) -> None:
    """Simulates what the formula describes; raises ``DisagreementError`` where they differ."""
    chain, times = chosen.model.chain(chosen.decisions), chosen.model.micro_batches
    chain = chain._replace(host_s=None)  # simulated is what devices do
    work = work_of(chain, times, schedule)
    # Where gradients use several links at once the formula is a lower bound only.
    one_link = sum(bool(row.any()) for row in chain.exchange_s) < 2
    plain = Step(work, plain_messages(chain), schedule, preempt=schedule == "priority")
    # Twice as many steps as an estimate takes to be steady by priority: here none may be missing.
    steps = None if schedule == "barrier" else 8
    ideal = simulate(plain, steps=steps).step_s
    if schedule == "barrier":
        low = barrier_step(chain, times)
        _agree("the barrier formula", low, ideal, exact=one_link)
        return
    low = priority_step(chain._replace(slice_s=None), times)
    _agree("the priority formula", low, ideal, exact=one_link)
    # A slice on its way is not stopped. The formula without waits for slices leaves that out, the
    # one with them counts the longest wait that there may be.
    sliced = Step(work, slice_messages(chosen.model, chosen.decisions), schedule)
    real = simulate(sliced, steps=steps).step_s
    _agree("the priority formula", low, real, exact=False)
    if one_link:
        _agree("the simulated slices", real, chosen.step_s, exact=False)


def _agree(what: str, low: float, high: float, *, exact: bool) -> None:
    margin = TOLERANCE * max(low, high) + 1e-12
    if high < low - margin or (exact and high > low + margin):
        raise DisagreementError(
            f"{what} gives {low!r} s and what it must not exceed is {high!r} s: "
            "this is a bug of the planner, please report it with the profile and the cluster"
        )


def plan_of(
    problem: Problem, chosen: Choice, solver: str, status: Status, **proof: float | None
) -> Plan:
    """The Plan of a choice; ``proof`` as in ``evaluate.plan_by``."""
    executor = problem.executor or problem.capability
    model, decisions = chosen.model, chosen.decisions
    return plan_by(model, decisions, problem.schedule, executor, solver, status, **proof)


def answer(
    problem: Problem,
    chosen: Choice,
    solver: str,
    bound_s: float | None,
    *,
    proved: bool,
) -> Result:
    """The result of a search that found ``chosen`` and proved ``bound_s``, both of the objective:
    the plan of what was found, but for memory policies that it does not need.

    ``proved`` says that nothing can be better by more than the gap that was allowed.
    """
    chosen = without_needless_memory(problem, chosen)
    check(chosen, problem.schedule)
    objective = chosen.objective_s
    gap = None
    if bound_s is not None:
        bound_s = min(bound_s, objective)
        gap = 1.0 - bound_s / objective if objective else 0.0
    status: Proof = "optimal" if proved else ("heuristic" if bound_s is None else "feasible")
    plan = plan_of(problem, chosen, solver, status, bound_s=bound_s, gap=gap)
    return Result(solver, status, objective, bound_s, gap, plan, chosen.decisions)
