"""Whether more micro-batches would make quicker what memory makes slow.

A plan that had to recompute, to shard or to divide so as to fit may be slower than the same batch
in more micro-batches, which hold fewer feature maps at a time. They are the user's to allow, since
the training loop goes through them; so they are tried and named, not taken.
"""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from ..schema.plan import Plan
from ..solve.heuristic.fitting import held_back
from ..solve.heuristic.schedules import WORTHWHILE
from ..solve.problem import Problem, Relaxation
from ..solve.solver import solve

MOST = 8
"""More micro-batches than this are not tried: a unit's samples get few and its kernels slow."""
EFFORT_S = 5.0
"""Seconds after which no further number is tried."""


def quicker_in_parts(problem: Problem, plan: Plan) -> Relaxation | None:
    """The number of micro-batches beyond those that the goal allows with which a plan by the
    heuristic is quickest, by so much that it is worth the change; None where there is none, or
    where memory does not hold the plan back.

    ``problem`` is the one that ``plan`` answers. Every number is planned for.
    """
    allowed = problem.goal.micro_batches
    if not (problem.capability.micro_batches and held_back(plan)):
        return None
    end, best = time.perf_counter() + EFFORT_S, None
    step_s = plan.prediction.step_s * (1 - WORTHWHILE)
    count = 2 * max(allowed)
    while count <= MOST and count * problem.cluster.world_size <= problem.goal.batch:
        goal = msgspec.structs.replace(problem.goal, micro_batches=(count,))
        asked = replace(problem, goal=goal, progress=None, explains=False)
        found = solve(asked, "heuristic").plan
        if found is not None and found.prediction.step_s < step_s:
            best, step_s = found, found.prediction.step_s
        count *= 2
        if time.perf_counter() > end:
            break
    return None if best is None else _named(plan, best)


def _named(plan: Plan, better: Plan) -> Relaxation:
    count = better.micro_batches
    counts = ",".join(map(str, dict.fromkeys((*plan.goal.micro_batches, count))))
    took, takes = (_milliseconds(p.prediction.step_s) for p in (plan, better))
    sentence = (
        f"in {count} micro-batches the same batch would take {takes} a step under this memory "
        f"limit, where this plan takes {took}: allow them with --micro-batches {counts}"
    )
    return Relaxation("micro_batches", count, sentence)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
