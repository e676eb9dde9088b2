"""Whether memory holds a plan back, and whether a model fits with recomputed units in segments,
where layouts are plain.

Division, and the other ways to save memory, are the solvers' to try; what they ask here is whether
data parallelism would do.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...cost.cost import CostModel
from ...memory.checkpoint_segments import any_window
from ...schema.options import Decisions, Option
from ...schema.plan import Plan
from ..answer import choice
from ..choices import may_have
from ..evaluate import limits_bytes
from ..problem import Problem
from .checkpointing import Checkpointing
from .space import Space


def has_segments(problem: Problem) -> bool:
    """Whether units of the model can be recomputed together."""
    return "recompute" in problem.capability.memory and any_window(problem.profile)


def limited_by_memory(plan: Plan) -> bool:
    """Whether a plan does something for the sake of memory, as far as it shows."""
    saves = any(
        unit.memory != "keep" or unit.early_release or unit.exchange == "fully_sharded"
        for unit in plan.units
    )
    return saves or not plan.baseline_fits


def fits_in_segments(problem: Problem, model: CostModel) -> bool:
    """Whether data parallelism under some policies keeps all limits with segments."""
    if not has_segments(problem):
        return False
    return any(_fits(problem, model, start) for start in plain_starts(problem, model))


def _fits(problem: Problem, model: CostModel, start: Decisions) -> bool:
    limit = min(limits_bytes(model.cluster, model.goal, model.placement))
    found = Checkpointing(model, start, problem.capability).fitting(limit)
    return found is not None and choice(model, found, problem.schedule).feasible


def plain_starts(problem: Problem, model: CostModel) -> Iterator[Decisions]:
    """Data parallelism as far as it may be had; the same with its exchange sharded, and with
    gradients released early."""
    start = Space(model, problem.capability).start
    changes: tuple[dict[str, object], ...] = (
        {}, {"exchange": "sharded"}, {"early_release": True},
    )  # fmt: skip
    found = (
        tuple(_changed(problem, model, k, option, change) for k, option in enumerate(start))
        for change in changes
    )
    yield from dict.fromkeys(found)


def _changed(
    problem: Problem, model: CostModel, k: int, option: Option, change: dict[str, object]
) -> Option:
    asked = option._replace(**change)  # type: ignore[arg-type]
    return asked if may_have(model, k, asked, problem.capability) else option
