"""Models with time in front of the batch train as one process trains them, whatever is divided."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.micro import join, micro_batches
from meshwright.executor.parallel import full_state_dict
from meshwright.models.target import workload as workload_of
from meshwright.models.units.discover import discovered
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import Plan
from plans import by_columns_and_rows, plan_for, scheduled
from reference import assert_equal, train_alone, train_together, twin

from tests.sampling import sampled
from tests.time_first import DIMS, workload

KINDS = ("linear", "embedding", "attention", "mlp")
COUNTS = {2: (1, 3), 4: (2, 1, 0, 3)}
"""Samples of each rank: uneven, so that they must be counted where they are."""


def plans(given: mw.Workload, world: int) -> dict[str, Plan]:
    found, _ = discovered(given.model, given.make_batch)
    plain = plan_for(found, world)
    choose = by_columns_and_rows(given.model, 2, KINDS)
    divided = plan_for(found, world, choose)
    assert any(u.layout.degree > 1 and u.batch_dims for u in divided.units)
    units = [msgspec.structs.replace(u, memory="recompute") for u in plain.units]
    with scheduled("priority"):
        later = plan_for(found, world)
        both = plan_for(found, world, by_columns_and_rows(given.model, 2, KINDS))
    return {
        "plain": plain,
        "sharded": with_exchange(later, "sharded"),
        "fully sharded": with_exchange(later, "fully_sharded"),
        "recomputed": msgspec.structs.replace(plain, units=tuple(units)),
        "divided": divided,
        "divided, fully sharded": with_exchange(both, "fully_sharded"),
    }


def equals_one_process(rank: int, name: str, world: int) -> None:
    given = workload_of(workload(name, torch.float64))
    counts = COUNTS[world]
    if name != "attending":  # torch has no recurrent layer and no masks of no samples
        counts = tuple(max(count, 1) for count in counts)
    batches = [given.make_batch(sum(counts)) for _ in range(3)]
    expected = train_alone(twin(given.model), "sgd", batches, given.loss)
    for how, plan in plans(given, world).items():
        model = twin(given.model)
        found = train_together(rank, model, "sgd", batches, given.loss, plan, counts)
        try:
            assert_equal(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{how}: {error}") from error


@pytest.mark.parametrize("name", DIMS)
def test_equals_one_process(ranks, name):
    ranks(2)(equals_one_process, name, 2)


@pytest.mark.parametrize("name", sampled(list(DIMS), 1))
def test_groups_equal_one_process(ranks, name):
    ranks(4)(equals_one_process, name, 4, limit_s=120)


def plans_by_itself(rank: int, kind: str) -> tuple[int, Any]:
    """A bare model or a workload, from nothing but what the user has."""
    given = workload("recurrent")
    model = given.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = twin(model)
    if kind == "example":
        what, inputs = model, given.make_batch(4).args
    else:
        what, inputs = given, None
    made, optimizer, plan = mw.auto_parallelize(what, optimizer, example_inputs=inputs)
    torch.manual_seed(1)
    batch = workload_of(given).make_batch(4)
    mine = batch.slice(0, 1) if rank == 0 else batch.slice(1, 4)
    given.loss(made(*mine.args), mine.target).backward()
    optimizer.step()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    given.loss(expected(*batch.args), batch.target).backward()
    optimizer.step()
    for name, tensor in full_state_dict(made).items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-5, atol=1e-6)
    return plan.goal.batch, plan.unit("@input").batch_dims


@pytest.mark.parametrize(
    ("kind", "batch"), [pytest.param("example", 8, marks=pytest.mark.slow), ("workload", 64)]
)
def test_a_user_need_not_say_where_samples_are(ranks, kind, batch):
    # One tensor of inputs, whose samples are in dim 1.
    assert ranks(2)(plans_by_itself, kind, limit_s=120) == [(batch, (1,))] * 2


def cuts_batches(rank: int) -> None:
    given = workload_of(workload("recurrent", torch.float64))
    plan = plans(given, 2)["plain"]
    expected = twin(given.model)
    apply(given.model, None, plan)
    whole = given.make_batch(6)
    mine = whole.slice(3 * rank, 3 * rank + 3)
    for part in micro_batches(given.model, mine, 2):
        given.loss(given.model(*part.args), part.target).backward()
    given.loss(expected(*whole.args), whole.target).backward()
    gradients = {n: p.grad for n, p in expected.named_parameters()}
    for name, parameter in given.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10)
    bare = mw.Batch(mine.args, mine.target)
    for item in (bare, (mine.args[0], mine.target)):
        with pytest.raises(mw.InputError, match="batch_dims"):
            next(micro_batches(given.model, item, 2))
    sizes = [part.size for part in join(given.model, [mine] * (rank + 1))]
    assert sizes == ([3, 0] if rank == 0 else [3, 3])


def test_batches_are_cut_where_their_samples_are(ranks):
    ranks(2)(cuts_batches)
