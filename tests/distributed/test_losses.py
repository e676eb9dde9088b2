"""Losses under lossy plans beside those of exact gradients."""

from __future__ import annotations

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.launch.losses import LossComparison, compare_losses_on_ranks
from meshwright.models.target import planned
from meshwright.planner.explain.compare import with_wire
from meshwright.planner.schema.errors import RunError
from meshwright.planner.schema.local_steps import LocalSteps
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from torch import nn


def tiny(seed: int) -> mw.Workload:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 8),), torch.randint(4, (size,)))

    return mw.Workload("tiny", model, make_batch, nn.functional.cross_entropy)


def lossy(**policy: object) -> Plan:
    with scheduled("priority"):
        units = [msgspec.structs.replace(unit(n, 1, "none", 2), **policy) for n in ("0", "2")]
        return plan(2, units)


def compares(rank: int, chosen: Plan, steps: int = 12) -> LossComparison:
    return compare_losses_on_ranks(chosen, tiny, steps=steps, seeds=2, learning_rate=0.1)


def test_rounding_changes_little_and_seeds_differ(ranks):
    found, other = ranks(2)(compares, with_wire(lossy(), "bf16"))
    assert found == other
    assert (found.steps, found.data, [one.seed for one in found.seeds]) == (12, False, [0, 1])
    first, second = found.seeds
    assert first.exact[0] != second.exact[0]
    assert first.exact[0] == pytest.approx(first.plan[0], rel=1e-6)  # before anything was sent
    assert first.exact != first.plan
    assert found.ratio == pytest.approx(1.0, abs=1e-3)
    assert found.error < 1e-3


def test_what_is_left_for_later_shows(ranks):
    (found, _) = ranks(2)(compares, lossy(exchange="topk", exchange_ratio=0.01))
    assert abs(found.ratio - 1) > 1e-4


def diverges(rank: int) -> None:
    def broken(seed: int) -> mw.Workload:
        workload = tiny(seed)
        with torch.no_grad():
            workload.model[0].weight.fill_(torch.nan)
        return workload

    with pytest.raises(RunError, match=r"with seed 0, exact gradients: the loss of step 1 is nan"):
        compare_losses_on_ranks(
            with_wire(lossy(), "bf16"), broken, steps=2, seeds=1, learning_rate=0.1
        )


def test_a_loss_that_is_not_finite_ends_it(ranks):
    ranks(2)(diverges)


def test_seeds_draw_other_parameters():
    weights = [next(planned("mlp", seed=seed).model.parameters()) for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_hosts_that_train_apart_are_compared_with_exact_gradients(ranks):
    local = LocalSteps(hosts=2, inner_steps=4)
    chosen = msgspec.structs.replace(lossy(), local_steps=local)
    goal = msgspec.structs.replace(chosen.goal, batch_statistics="local")
    chosen = msgspec.structs.replace(chosen, goal=goal)
    found, other = ranks(2)(compares, chosen)
    assert found == other
    first, _ = found.seeds
    # Of the whole batch, which both hosts have parts of, before the first step.
    assert first.exact[0] == pytest.approx(first.plan[0], rel=1e-6)
    assert first.exact[1] != pytest.approx(first.plan[1], rel=1e-6)
    assert 0.5 < found.ratio < 2
