"""From a solver's decisions to an answer: evaluated again, simulated, checked, made into a Plan.

What may differ, and why (anything else is a bug, and raises):

- The formula and the simulation of its own idealised schedule agree to rounding where gradients
  use one link; where they use several at once the formula is a lower bound.
- With slices of finite size and one gradient link the simulated step lies between the formula
  without waits for slices and the formula with them.
- Where computing and communicating slow each other, or gradients travel in buckets, the prediction
  is the simulation's alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..cost.cost import CostModel
from ..cost.step_time import barrier_step, priority_step
from ..schema.options import Decisions
from ..schema.plan import Plan, Status
from ..simulate.events import simulate
from ..simulate.schedule import ScheduleName, Step, plain_messages, slice_messages, work_of
from .evaluate import make_plan, provenance_of
from .objective import Value, value
from .problem import Problem, Result

Proof = Literal["optimal", "feasible", "heuristic"]
TOLERANCE = 1e-6
"""Relative difference between two ways to compute the same figure that is rounding."""


class DisagreementError(AssertionError):
    """Two statements of the same plan's cost differ: a bug of the planner, never of its user."""


class Choice(NamedTuple):
    """Decisions under one model (micro-batches and slice size), and their value."""

    model: CostModel
    decisions: Decisions
    value: Value

    @property
    def objective_s(self) -> float:
        """What the goal wants least."""
        return self.value.objective_s(self.model)

    @property
    def feasible(self) -> bool:
        """Whether all limits are kept."""
        return self.value.feasible(self.model)


def choice(model: CostModel, decisions: Decisions, schedule: ScheduleName) -> Choice:
    """The decisions with their value."""
    return Choice(model, decisions, value(model, decisions, schedule))


def check(chosen: Choice, schedule: ScheduleName) -> None:
    """Simulates what the formula describes; raises ``DisagreementError`` where they differ."""
    chain = chosen.model.chain(chosen.decisions)
    times = chosen.model.micro_batches
    work = work_of(chain, times, schedule)
    one_link = sum(bool(row.any()) for row in chain.exchange_s) < 2
    plain = Step(work, plain_messages(chain), schedule, preempt=schedule == "priority")
    steps = None if schedule == "barrier" else 8
    ideal = simulate(plain, steps=steps).step_s
    if schedule == "barrier":
        low = barrier_step(chain, times)
        _agree("the barrier formula", low, ideal, exact=one_link)
        return
    low = priority_step(chain._replace(slice_s=None), times)
    _agree("the priority formula", low, ideal, exact=one_link)
    sliced = Step(work, slice_messages(chosen.model, chosen.decisions), schedule)
    real = simulate(sliced, steps=steps).step_s
    _agree("the priority formula", low, real, exact=False)
    if one_link:
        _agree("the simulated slices", real, chosen.value.step_s, exact=False)


def _agree(what: str, low: float, high: float, *, exact: bool) -> None:
    near = TOLERANCE * max(low, high) + 1e-12
    if high < low - near or (exact and high > low + near):
        raise DisagreementError(
            f"{what} gives {low!r} s and what it must not exceed is {high!r} s: "
            "this is a bug of the planner, please report it with the profile and the cluster"
        )


def plan_of(
    problem: Problem, chosen: Choice, solver: str, status: Status, **proof: float | None
) -> Plan:
    """The Plan of a choice; ``proof`` as in ``provenance_of``."""
    model = chosen.model
    return make_plan(
        problem.profile,
        problem.cluster,
        problem.goal,
        chosen.decisions,
        model.micro_batches,
        model.placement,
        provenance=provenance_of(problem.profile, problem.cluster, solver, status, **proof),
        schedule=problem.schedule,
        bucket_bytes=model.message_bytes,
        executor=problem.executor or problem.capability,
    )


def answer(
    problem: Problem,
    chosen: Choice,
    solver: str,
    bound_s: float | None,
    *,
    proved: bool,
    seconds: float,
) -> Result:
    """The result of a search that found ``chosen`` and proved ``bound_s``, both of the objective.

    ``proved`` says that nothing can be better by more than the gap that was allowed.
    """
    check(chosen, problem.schedule)
    objective = chosen.objective_s
    gap = None
    if bound_s is not None:
        bound_s = min(bound_s, objective)
        gap = 1.0 - bound_s / objective if objective else 0.0
    status: Proof = "optimal" if proved else ("heuristic" if bound_s is None else "feasible")
    plan = plan_of(problem, chosen, solver, status, bound_s=bound_s, gap=gap, solve_s=seconds)
    return Result(
        solver,
        status,
        objective,
        bound_s,
        gap,
        plan,
        chosen.decisions,
        seconds,
    )
