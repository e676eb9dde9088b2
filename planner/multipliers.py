"""The solver for many units on many ranks: plans with a proven bound, from ``lagrange``'s search.

Each number of micro-batches and each slice size is a search of its own; one whose bound is above a
plan already found is left early, so that the bound that is reported holds over all of them.

The objective is the step by formula (or its device-seconds), as that of the integer program; what
the plan predicts is the simulation of the schedule.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from .budget import energy_budget, gpu_seconds_limit
from .cost import CostModel, Decisions
from .evaluate import excess, limits_bytes, make_plan, provenance_of, rank_memory
from .infeasible import explain_infeasible
from .lagrange import Lagrangian, Outcome, Search
from .limits import INFINITE, Limits
from .memory import MemoryModel
from .rows import AT, bucket_share, rows
from .search import Space
from .sheet import Numbers, Sheet
from .solver import Problem, Result
from .splits import placed
from .splits import search as heuristic_search

GAP = 0.0075
"""The search ends when plan and bound are this close."""
TIME_LIMIT_S = 60.0
"""Where the caller gives none."""
REPAIRS = 3
"""How often a plan that is over the limit on another rank, or by its buckets, is searched anew
under a limit lowered by that much."""


class Part(NamedTuple):
    """The outcome for one number of micro-batches and one slice size."""

    model: CostModel
    decisions: Decisions
    objective: float
    feasible: bool
    bound: float


class Multipliers:
    """The solver of that name."""

    name = "multipliers"

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        start = time.perf_counter()
        deadline = start + (TIME_LIMIT_S if time_limit_s is None else time_limit_s)
        problem = placed(problem)
        parts: list[Part] = []
        models = models_of(problem)
        for i, model in enumerate(models):
            problem.report(_named(model), i / len(models))
            cutoff = min((p.objective for p in parts if p.feasible), default=INFINITE)
            parts.append(part(problem, model, deadline, cutoff))
        fitting = [p for p in parts if p.feasible]
        bound = min(p.bound for p in parts)
        if not fitting:
            return self._nothing(problem, bound, start)
        best = min(fitting, key=lambda p: p.objective)
        return self._result(problem, best, min(bound, best.objective), start)

    def _result(self, problem: Problem, best: Part, bound: float, start: float) -> Result:
        gap = 1.0 - bound / best.objective if best.objective else 0.0
        status = "optimal" if gap <= 1e-9 else "feasible"
        seconds = time.perf_counter() - start
        model = best.model
        timed = problem.goal.objective == "time"
        provenance = provenance_of(
            problem.profile, problem.cluster, self.name, status,
            bound_s=bound if timed else None, gap=gap, solve_s=seconds,
        )  # fmt: skip
        plan = make_plan(
            problem.profile,
            problem.cluster,
            problem.goal,
            best.decisions,
            model.micro_batches,
            model.placement,
            provenance=provenance,
            schedule=problem.schedule,
            bucket_bytes=model.bucket_bytes,
            executor=problem.executor or problem.capability,
        )
        return Result(self.name, status, best.objective, bound, gap, plan, best.decisions, seconds)  # type: ignore[arg-type]

    def _nothing(self, problem: Problem, bound: float, start: float) -> Result:
        """No plan that fits was found: the heuristic's closest says what is missing."""
        found = heuristic_search(problem)
        why = explain_infeasible(problem, found)
        seconds = time.perf_counter() - start
        return Result(self.name, "infeasible", None, bound, None, None, None, seconds, why)


def models_of(problem: Problem) -> list[CostModel]:
    """A cost model for each number of micro-batches and slice size that may be chosen."""
    goal, world = problem.goal, problem.cluster.world_size
    sliced = problem.schedule == "priority"
    sizes = goal.slice_bytes if sliced and goal.slice_bytes else (problem.bucket_bytes,)
    counts = [
        m
        for m in sorted(set(goal.micro_batches))
        if m == 1 or (problem.capability.micro_batches and goal.batch >= m * world)
    ]
    return [
        CostModel(problem.profile, problem.cluster, goal, m, problem.placement, size, sliced)
        for m in counts
        for size in sizes
    ]


def _named(model: CostModel) -> str:
    return f"{model.micro_batches} micro-batches, slices of {model.bucket_bytes:,} bytes"


def lagrangian_of(problem: Problem, model: CostModel) -> Lagrangian:
    """The tables and limits of a problem for one cost model, as the tightest position sees them."""
    limits = limits_bytes(model.cluster, model.goal, model.placement)
    position = min(range(len(limits)), key=lambda p: (limits[p], p))
    sheet = Sheet(Space(model, problem.capability), MemoryModel(model), position)
    exchanged = AT["exchanged"]
    most = sum(
        float(u.memory.figures[..., exchanged].max() + u.exchange.figures[..., exchanged].max())
        for u in sheet.units
    )
    found = rows(model.micro_batches, problem.schedule, bucket_share(most, model.bucket_bytes))
    goal = model.goal
    economical = goal.objective == "gpu_seconds"
    return Lagrangian(sheet, found, Limits(
        memory_bytes=limits[position],
        lost=energy_budget(model),
        gpu_s=gpu_seconds_limit(model),
        step_s=goal.time_limit_s if economical and goal.time_limit_s else INFINITE,
        devices=model.world_size,
        economical=economical,
    ))  # fmt: skip


def part(
    problem: Problem, model: CostModel, deadline: float, cutoff: float, gap: float = GAP
) -> Part:
    """The search for one cost model."""
    lagrangian = lagrangian_of(problem, model)
    baseline = lagrangian.sheet.numbers(model.baseline)
    first: list[Numbers] = [] if baseline is None else [baseline]
    bound, limits = 0.0, lagrangian.limits
    for _ in range(REPAIRS):
        outcome = Search(lagrangian, deadline, gap).run(first, cutoff)
        bound = max(bound, outcome.bound) if lagrangian.limits == limits else bound
        decisions = lagrangian.sheet.choose(outcome.best.numbers)
        over = excess(model, rank_memory(model, decisions)).over_bytes
        if over <= 0 or outcome.best.score.over:
            break
        tighter = lagrangian.limits._replace(memory_bytes=lagrangian.limits.memory_bytes - over)
        lagrangian = Lagrangian(lagrangian.sheet, lagrangian.rows, tighter)
    feasible = over <= 0 and not outcome.best.score.over
    return Part(model, decisions, outcome.best.score.objective, feasible, bound)


__all__ = ["Multipliers", "Outcome", "lagrangian_of", "models_of", "part"]
