"""What is planned to fit does fit under a hard limit, and what is refused would not have fitted."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
import torch
from meshwright.executor import headroom
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.headroom import account, overflowed
from meshwright.executor.launch.train import run_steps, train_step
from meshwright.executor.memory import offload
from meshwright.executor.optimizer.kinds import optimizer_for
from meshwright.executor.parallel import is_parallel
from meshwright.models import zoo as models
from meshwright.models.units.discover import discover
from meshwright.models.units.storages import LiveStorages, OverBudgetError, tensors_in
from meshwright.models.workload import Workload
from meshwright.models.zoo.data import next_symbol_workload
from meshwright.models.zoo.gpt import GPT, GPTShape
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.capability import Capability
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.options import Decisions
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import evaluate, rank_memory
from meshwright.planner.solve.heuristic.checkpointing import Checkpointing
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import searched
from meshwright.planner.solve.solver import solve
from meshwright.profiler.model import profile
from plans import plan_for
from torch import Tensor

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
        slice_bytes=(2**20,),
    )
    return Problem(
        found,
        links,
        goal,
        searched(CAPABILITY),
        executor=CAPABILITY,
        any_schedule=True,
        explains=False,
    )  # fmt: skip


def peak_under(plan: Plan, one: Triple, limit_bytes: int) -> int:
    """The most that tensors take in some steps under a plan, the first included (applying it before
    them, takes the whole model and a copy); raises ``OverBudgetError`` above the limit.
    Collective."""
    torch.manual_seed(0)
    return peak_of(models.build(one.name), plan, limit_bytes)


@contextmanager
def budget(
    limit_bytes: int, lasting: Iterable[Tensor], excluded: Iterable[Tensor] = ()
) -> Iterator[LiveStorages]:
    """Within it tensors may take ``limit_bytes``, the ``lasting`` ones included and the
    ``excluded`` not; the operator that passes the limit raises ``OverBudgetError``. Any device."""
    live = LiveStorages(limit_bytes=limit_bytes)
    with live:
        live.ignore(excluded)
        live.add(lasting)
        yield live


def peak_of(workload: Workload, plan: Plan, limit_bytes: int) -> int:
    """The same of a workload."""
    optimizer = optimizer_for(plan.goal.optimizer, workload.model.parameters())
    batches = [workload.make_batch(plan.goal.batch) for _ in range(STEPS + 3)]
    apart = tensors_in([(b.args, b.target) for b in batches])
    apply(workload.model, optimizer, plan)
    with budget(limit_bytes, workload.model.parameters(), apart) as live:
        live.add(workload.model.buffers())
        run_steps(workload, plan, STEPS, optimizer=optimizer, draw=lambda number: batches[number])
    return live.peak


def least_plan(asked: Problem) -> Plan | None:
    """The plan that needs least memory: limits are raised from the one that was refused.
    Collective."""
    limit = asked.goal.memory_limit_bytes
    assert limit is not None
    for raised in (1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 6.0):
        goal = Goal(
            batch=asked.goal.batch,
            optimizer=asked.goal.optimizer,
            memory_limit_bytes=int(limit * raised),
            micro_batches=asked.goal.micro_batches,
            slice_bytes=asked.goal.slice_bytes,
        )
        raised_to = replace(asked, goal=goal)
        made = rank_zero_decides(lambda asked=raised_to: solve(asked, "heuristic").plan)
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
        made = rank_zero_decides(lambda asked=asked: solve(asked, "heuristic").plan)
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


def deep() -> Workload:
    """A transformer of so many blocks that their outputs weigh more than the inside of one."""
    torch.manual_seed(0)
    shape = GPTShape(64, length=32, width=32, layers=12, heads=4)
    return next_symbol_workload("deep", GPT(shape), 64, 32)


def least_limit(found: ModelProfile, goal: Goal, kinds: Capability) -> int:
    """The lowest peak of data parallelism, whatever is kept, recomputed and in which segments."""
    model = CostModel(found, cluster(2), goal, sliced=True)
    return peak_with(model, Checkpointing(model, model.baseline, kinds).least())


def peak_with(model: CostModel, decisions: Decisions) -> int:
    return max(each.peak_bytes for each in rank_memory(model, decisions))


def in_segments_only(rank: int) -> tuple[int, int, int, list[tuple[str, ...]]]:
    """(the least that fits by units, the limit, the peak under it, the segments)."""
    found = rank_zero_decides(lambda: profile(deep(), batches=(1, 8), repeats=1, degrees=()))
    kinds = msgspec.structs.replace(searched(CAPABILITY), exchange=("dense",), early_release=False)
    goal = Goal(batch=16, optimizer="momentum")
    bare = msgspec.structs.replace(found, pieces=())
    by_units, least = (least_limit(each, goal, kinds) for each in (bare, found))
    limit = least + (by_units - least) // 4
    goal = msgspec.structs.replace(goal, memory_limit_bytes=limit)
    alone, together = (
        Problem(each, cluster(2), goal, kinds, executor=CAPABILITY, schedule="priority")
        for each in (bare, found)
    )
    assert rank_zero_decides(lambda: solve(alone, "heuristic").plan) is None
    made = rank_zero_decides(lambda: solve(together, "heuristic").checked())
    peak = peak_of(deep(), made, int(1.02 * limit))
    return by_units, limit, peak, list(dict.fromkeys(u.segment for u in made.units if u.segment))


@pytest.mark.slow
def test_a_plan_that_fits_in_segments_only_runs_so(ranks):
    for by_units, limit, peak, segments in ranks(2)(in_segments_only, limit_s=100):
        assert limit < 0.95 * by_units
        assert any(len(names) > 1 for names in segments)  # several blocks together
        assert 0.9 * limit < peak <= 1.02 * limit


def refuses_before_the_first_step(rank: int) -> None:
    workload = models.build("mlp")
    before = [p.clone() for p in workload.model.parameters()]
    needs = (2**30, 2**50)  # the rank at the second position has nothing like it
    found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
    plain = plan_for(found, 2)
    prediction = msgspec.structs.replace(plain.prediction, peak_bytes=needs)
    plan = msgspec.structs.replace(plain, prediction=prediction)
    with pytest.raises(InputError, match=r"rank 1 has .* free .* MESHWRIGHT_CHECK_MEMORY=0"):
        apply(workload.model, None, plan)
    assert not is_parallel(workload.model)
    for now, then in zip(workload.model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_what_is_not_free_is_refused_on_all_ranks(ranks):
    ranks(2)(refuses_before_the_first_step)


def refuses_what_hosts_cannot_pin(rank: int) -> None:
    workload = models.build("mlp")
    found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
    plain = plan_for(found, 2)
    # Each rank's part is there, and not what both need together.
    prediction = msgspec.structs.replace(plain.prediction, pinned_bytes=(2 * 2**27,) * 2)
    units = tuple(msgspec.structs.replace(u, memory="offload") for u in plain.units)
    plan = msgspec.structs.replace(plain, prediction=prediction, units=units)
    with pytest.MonkeyPatch.context() as patch:
        # As on a GPU, whose memory is not the host's.
        patch.setattr(headroom, "pins", lambda device: True)
        patch.setattr(headroom, "host_free_bytes", lambda: 3 * 2**27)
        patch.setattr(offload, "host_of", lambda device: object())
        with pytest.raises(InputError, match=r"^host .* ranks 0, 1 need .* --forbid offload"):
            apply(workload.model, None, plan)
        assert not is_parallel(workload.model)
        patch.setenv("MESHWRIGHT_CHECK_MEMORY", "0")
        apply(workload.model, None, plan)
    assert is_parallel(workload.model)


def test_what_hosts_cannot_pin_is_refused_on_all_ranks(ranks):
    ranks(2)(refuses_what_hosts_cannot_pin)


def accounts_for_what_it_held(rank: int) -> None:
    workload = models.build("mlp")
    found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)
    plan = msgspec.structs.replace(plan_for(found, 2), target="mlp")
    apply(workload.model, optimizer, plan)
    size = sum(p.nbytes for p in workload.model.parameters())
    batch = workload.make_batch(8)
    with budget(int(1.5 * size), workload.model.parameters()), pytest.raises(MemoryError) as caught:
        train_step(workload, plan, batch, optimizer)
    assert overflowed(caught.value)
    told = account(caught.value)
    assert told is not None
    assert f"rank {rank} ran out of memory" in told.sentence
    text = " ".join((*told.details, told.remedy))
    assert f"held now: weights {size / 2**20:,.1f} MiB" in text
    assert "--batch 8" in text
    assert f"--memory-limit {int(1.5 * size) // 2**20}MiB" in text


def test_a_run_that_lacks_memory_says_what_it_held(ranks):
    ranks(2)(accounts_for_what_it_held)


@pytest.mark.slow
def test_a_sample_keeps_its_limits(ranks):
    assert not any(ranks(2)(keeps_limits, triples(50)[::7], limit_s=170))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_fifty_keep_their_limits(ranks):
    assert not any(ranks(2)(keeps_limits, triples(50), limit_s=1200))
