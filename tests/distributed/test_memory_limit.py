"""What is planned to fit does fit under a hard limit, and what is refused would not have fitted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from meshwright import models
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.memory import budget
from meshwright.executor.ranks.agreement import rank_zero_decides
from meshwright.executor.train import optimizer_for, run_steps
from meshwright.planner.evaluate import evaluate
from meshwright.planner.goal import Goal
from meshwright.planner.plan import Plan
from meshwright.planner.problem import Problem
from meshwright.planner.profile import ModelProfile
from meshwright.planner.solver import solve
from meshwright.profiler.model import profile
from meshwright.units.storages import OverBudgetError, tensors_in

from tests.strategies import cluster

NAMES = ("mlp", "cnn-digits", "gpt-tiny", "seq2seq-mini")
SPARE = 1.1
"""What would fit in a limit a tenth lower must not be refused."""
STEPS = 3


class Triple(NamedTuple):
    """A model, a global batch and a limit as a share of what plain data parallelism needs."""

    name: str
    batch: int
    share: float
    optimizer: str


def triples(count: int, seed: int = 0) -> list[Triple]:
    """Random ones; those of one model follow each other, as it is profiled once."""
    draw = random.Random(seed)
    found = [
        Triple(
            draw.choice(NAMES),
            draw.randrange(4, 65),
            draw.uniform(0.25, 1.3),
            draw.choice(("sgd", "momentum", "adamw")),
        )
        for _ in range(count)
    ]
    return sorted(found)


def profiled(name: str) -> ModelProfile:
    """Rank 0's profile. Collective."""

    def measure() -> ModelProfile:
        torch.manual_seed(0)
        workload = models.build(name)
        return profile(workload, batches=(1, 2, 4, 8, 16, 32), repeats=1, degrees=(2,))

    return rank_zero_decides(measure)


def problem_of(found: ModelProfile, one: Triple) -> Problem:
    """What is asked for a triple."""
    links, goal = cluster(2), Goal(batch=one.batch, optimizer=one.optimizer)  # type: ignore[arg-type]
    plain = max(evaluate(found, links, goal).peak_bytes)
    goal = Goal(
        batch=one.batch,
        optimizer=one.optimizer,  # type: ignore[arg-type]
        memory_limit_bytes=int(one.share * plain),
        micro_batches=tuple(m for m in (1, 2, 4) if 2 * m <= one.batch),
    )
    return Problem(found, links, goal, CAPABILITY, executor=CAPABILITY, either=True)


def peak_under(plan: Plan, one: Triple, limit_bytes: int) -> int:
    """The most that tensors take in some steps under a plan, the first included; raises
    ``OverBudgetError`` above the limit. Collective."""
    torch.manual_seed(0)
    workload = models.build(one.name)
    optimizer = optimizer_for(plan.goal, workload.model.parameters())
    batches = [workload.make_batch(plan.goal.batch) for _ in range(STEPS + 3)]
    apart = tensors_in([(b.args, b.target) for b in batches])
    with budget(limit_bytes, workload.model.parameters(), apart) as live:
        live.add(workload.model.buffers())
        run_steps(workload, plan, STEPS, optimizer=optimizer, draw=lambda number: batches[number])
    return live.peak


def least_plan(asked: Problem) -> Plan | None:
    """The plan that needs least memory: limits are raised from the one that was refused."""
    limit = asked.goal.memory_limit_bytes
    assert limit is not None
    for raised in (1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 6.0):
        goal = Goal(
            batch=asked.goal.batch,
            optimizer=asked.goal.optimizer,
            memory_limit_bytes=int(limit * raised),
            micro_batches=asked.goal.micro_batches,
        )
        made = solve(replace(asked, goal=goal), "heuristic").plan
        if made is not None:
            return made
    return None


def keeps_limits(rank: int, chosen: list[Triple]) -> list[str]:
    """What went wrong with each triple."""
    wrong, known = [], dict[str, ModelProfile]()
    for one in chosen:
        if one.name not in known:
            known[one.name] = profiled(one.name)
        asked = problem_of(known[one.name], one)
        limit = asked.goal.memory_limit_bytes
        assert limit is not None
        made = solve(asked, "heuristic").plan
        if made is None:
            least = least_plan(asked)
            needed = peak_under(least, one, 2**40) if least is not None else 2**40
            if SPARE * needed <= limit:
                wrong.append(f"{one}: refused at {limit}, {needed} would do")
            continue
        try:
            peak_under(made, one, limit)
        except OverBudgetError as error:
            predicted = max(made.prediction.peak_bytes)
            raise AssertionError(f"{one}: {predicted} predicted, {error}") from error
    return wrong


@pytest.mark.slow
def test_a_sample_keeps_its_limits(ranks):
    assert not any(ranks(2)(keeps_limits, triples(50)[::7], limit_s=170))


@pytest.mark.long
def test_fifty_keep_their_limits(ranks):
    assert not any(ranks(2)(keeps_limits, triples(50), limit_s=1200))
