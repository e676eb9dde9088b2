"""After a run that lacked memory: a plan that would have fitted, looked for before it is named."""

from __future__ import annotations

import msgspec

from ...planner.schema import cache
from ...planner.schema.cluster import Cluster
from ...planner.schema.errors import MemoryRunError
from ...planner.schema.plan import Plan
from ...planner.schema.profile import ModelProfile
from ...planner.schema.text import seconds, size
from ...planner.solve.problem import Problem
from ...planner.solve.solver import solve
from ..capability import CAPABILITY
from ..headroom import command, forecast, less_than

MICRO_BATCHES = (1, 2, 4, 8)


def with_a_plan_that_fits(error: MemoryRunError, plan: Plan) -> MemoryRunError:
    """The error with what ``plan`` was predicted to hold, unless it says so already, and with a
    plan for the same batch that needs less, where one is found."""
    limit = min(error.limit_bytes or less_than(plan), less_than(plan))
    details = error.details or forecast(plan)
    return MemoryRunError(error.sentence, (*details, _remedy(plan, limit)), limit)


def _remedy(plan: Plan, limit_bytes: int) -> str:
    profile = cache.get(ModelProfile, plan.provenance.profile)
    cluster = cache.get(Cluster, plan.provenance.cluster)
    most = plan.goal.batch // plan.world_size
    counts = tuple(n for n in MICRO_BATCHES if n <= max(most, 1))
    if profile is None or cluster is None:
        return f"a plan that needs less: {command(plan, limit_bytes, counts)}"
    allowed = tuple(sorted({*counts, *plan.goal.micro_batches}))
    goal = msgspec.structs.replace(
        plan.goal, memory_limit_bytes=limit_bytes, micro_batches=allowed, slice_bytes=()
    )
    problem = Problem(profile, cluster, goal, CAPABILITY, executor=CAPABILITY, any_schedule=True)
    found = solve(problem, "heuristic")
    if found.plan is None:
        why = f": {found.infeasible.sentence}" if found.infeasible is not None else ""
        return f"with a tenth less memory{why}"
    needs = size(max(found.plan.prediction.peak_bytes, default=0))
    return (
        f"a plan that fits, predicted to take {needs} and {seconds(found.plan.prediction.step_s)} "
        f"a step: {command(plan, limit_bytes, counts)}"
    )
