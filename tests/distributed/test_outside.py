"""What a loss uses besides the model's output: attributes that modules keep, and parameters."""

from __future__ import annotations

import os
from pathlib import Path

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.cli.app import run
from meshwright.executor.apply import apply
from meshwright.executor.launch.verify import verify_on_ranks
from meshwright.models.units.discover import discover
from meshwright.planner.schema.plan import UnitPlan
from plans import plan as plan_by_hand
from plans import unit
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(120)

COLUMN = unit("first", 2, "column", 2)
WHOLE = unit("first", 1, "none", 2)


class Keeping(nn.Module):
    """Keeps losses of its own, as layers with auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        self.inner = inner  # as the unit leaves it
        self.losses.clear()
        self.losses.append(torch.tanh(inner).square().mean())
        return self.last(torch.relu(inner))


def make_batch(size: int) -> mw.Batch:
    return mw.Batch((torch.randn(size, 6),), torch.randint(3, (size,)))


def workload(kind: str) -> mw.Workload:
    torch.manual_seed(2)
    model = Keeping()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        plain = F.cross_entropy(output, target)
        if kind == "list":
            return plain + model.losses[0]
        if kind == "attribute":
            return plain + model.inner.square().mean()
        return plain + 0.1 * sum(p.square().sum() for p in model.parameters())

    return mw.Workload(kind, model, make_batch, loss)


def verified(rank: int, kind: str, units: tuple[UnitPlan, ...]) -> tuple[bool, str]:
    found = verify_on_ranks(plan_by_hand(2, units), workload(kind))
    return found.passed, str(found.deviations)


# Uneven shares, of which the second batch has one, tell whether each is weighted.
@pytest.mark.parametrize("kind", ["list", "attribute"])
@pytest.mark.parametrize("units", [(WHOLE,), (COLUMN,)], ids=["whole", "column"])
def test_a_loss_of_what_modules_keep_is_weighted_like_the_output(ranks, kind, units):
    passed, why = ranks(2)(verified, kind, units)[0]
    assert passed, why


def test_parameters_in_the_loss_are_right_where_they_are_whole(ranks):
    passed, why = ranks(2)(verified, "decay", (WHOLE,))[0]
    assert passed, why


def refused(rank: int) -> tuple[str, bool]:
    with pytest.raises(mw.InputError) as caught:
        verify_on_ranks(plan_by_hand(2, (COLUMN,)), workload("decay"))
    return str(caught.value), True


def test_a_part_of_a_parameter_is_not_taken_for_the_whole(ranks):
    assert all(
        "the loss uses parameter 'first.weight', which is divided over ranks" in said
        for said, _ in ranks(2)(refused)
    )


def trained(rank: int) -> list[str]:
    """Reads divided parameters in ways that take nothing for the whole, then trains on."""
    given = workload("list")
    optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1)
    apply(given.model, optimizer, plan_by_hand(2, (COLUMN,)))
    batch = make_batch(2)
    kinds = []
    for _ in range(2):
        value = given.loss(given.model(*batch.args), batch.target)
        norm = given.model.first.weight.detach().norm()
        with torch.no_grad():
            norm = norm + sum(p.square().sum() for p in given.model.parameters())
        assert norm.isfinite()
        value.backward()
        kinds.append(type(given.model.first.weight).__name__)
        optimizer.step()
        optimizer.zero_grad()
    return kinds


def test_reading_without_a_gradient_is_as_it_was(ranks):
    assert ranks(2)(trained) == [["Parameter"] * 2] * 2


class Within(nn.Module):
    """An MLP that keeps what its members would have a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x))
        self.loss = inner.square().mean()
        return self.down(inner)


def test_a_unit_that_keeps_a_result_is_not_divided():
    found = discover(nn.Sequential(nn.Linear(6, 6), Within(), nn.Linear(6, 3)), make_batch(4))
    assert not found.unit("1").splits
    assert found.unit("0").splits


def sums(rank: int, cache: str) -> list[str]:
    """What ``auto_parallelize`` and a launch without a script say of sums over samples."""
    os.environ["MESHWRIGHT_CACHE"] = cache

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    model, example = Keeping(), make_batch(4)
    plan = plan_by_hand(2, (WHOLE,))
    said = []
    for given in ({}, {"plan": plan}):
        with pytest.raises(mw.InputError) as caught:
            mw.auto_parallelize(model, example_inputs=example, loss=loss, **given)
        said.append(str(caught.value))
    with pytest.raises(mw.InputError) as caught:
        mw.auto_parallelize(mw.Workload("sum", model, make_batch, loss), plan=plan)
    said.append(str(caught.value))
    # The same model is as it was, and trains with a mean.
    mw.auto_parallelize(workload("decay"), plan=plan)
    return said


def test_a_sum_over_samples_is_refused_before_the_first_step(ranks, tmp_path):
    for said in ranks(2)(sums, str(tmp_path)):
        assert all("is a sum over samples" in sentence for sentence in said)
        assert [s.split("'")[1] for s in said] == ["Keeping", "Keeping", "sum"]


SUMMING = """
import torch
from torch import nn
from meshwright import Batch, Workload


def summing():
    make = lambda size: Batch((torch.randn(size, 3),), torch.zeros(size, 2))
    return Workload("s", nn.Linear(3, 2), make, nn.MSELoss(reduction="sum"))
"""


def test_a_launch_refuses_a_sum_in_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SUMMING)
    plan = msgspec.structs.replace(plan_by_hand(2), target="mine.py:summing")
    mw.save(plan, "plan.json")
    assert run(["launch", "plan.json", "--steps", "1"]) == 2
    told = capfd.readouterr().err
    assert "'mine.py:summing' is a sum over samples" in told
    assert "Traceback" not in told
