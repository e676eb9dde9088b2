"""What a loss uses besides the model's output: attributes that modules keep, and parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

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


class TrainingOnly(Keeping):
    """Keeps its loss in training only, as many layers do."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if not self.training:
            self.losses.clear()
            del self.inner
        return made


def on_uneven_shares(
    rank: int, kind: type[Keeping], first: int
) -> tuple[Any, torch.optim.Optimizer, Tensor, Tensor, slice]:
    """A model, its optimizer, a batch of five samples, and which of them are this rank's: the
    ``first`` ones or the rest under a plan, all of them in one process (rank -1)."""
    torch.manual_seed(2)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [slice(0, 5)]
    if rank >= 0:
        parts = [slice(0, first), slice(first, 5)]
        apply(model, optimizer, plan_by_hand(2, (WHOLE,)))
    torch.manual_seed(3)
    (x,), target = make_batch(5).args, torch.arange(5) % 3
    return model, optimizer, x, target, parts[max(rank, 0)]


def validates_first(rank: int) -> dict[str, Tensor]:
    """Evaluates with gradients before it trains on uneven shares."""
    model, optimizer, x, target, part = on_uneven_shares(rank, TrainingOnly, 3)
    model.eval()
    model(x)
    model.train()
    plain = F.cross_entropy(model(x[part]), target[part])
    (plain + model.losses[0]).backward()
    optimizer.step()
    return mw.full_state_dict(model) if rank >= 0 else model.state_dict()


def test_a_loss_that_is_kept_in_training_only_is_weighted_after_an_evaluation(ranks):
    alone = validates_first(-1)
    for state in ranks(2)(validates_first):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, msg=name)


class Beginning(Keeping):
    """Whose loss of its own begins in a later forward."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: Tensor | None = None
        self.begins = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        self.aux_loss = torch.tanh(inner).square().mean() if self.begins else None
        return self.last(torch.relu(inner))


def begins_later(rank: int) -> dict[str, Tensor]:
    model, optimizer, x, target, part = on_uneven_shares(rank, Beginning, 4)
    for step in range(3):
        model.begins = step > 0
        loss = F.cross_entropy(model(x[part]), target[part])
        (loss if model.aux_loss is None else loss + model.aux_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return mw.full_state_dict(model) if rank >= 0 else model.state_dict()


def test_a_loss_that_is_kept_from_a_later_forward_on_is_weighted(ranks):
    alone = begins_later(-1)
    for state in ranks(2)(begins_later):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, msg=name)


# -- parameters that are not the model's -----------------------------------------------------------


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target)


def learns_a_loss(rank: int, *, planned: bool) -> list[str]:
    """What is said in two steps; ``planned``: the loss has a plan of its own."""
    model, criterion = Keeping(), Weighted()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    apply(model, optimizer, plan_by_hand(2, (WHOLE,)))
    if planned:
        apply(criterion, None, plan_by_hand(2))
    batch = make_batch(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            criterion(model(*batch.args), batch.target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def test_parameters_of_the_loss_are_told_of_once(ranks):
    said, other = ranks(2)(learns_a_loss, planned=False)
    assert len(said) == 1
    assert "updates parameters that are not of the model" in said[0]
    assert "their shapes: [3]" in said[0]
    assert other == []
    assert ranks(2)(learns_a_loss, planned=True) == [[], []]


def grows(rank: int) -> None:
    model = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, optimizer, plan_by_hand(2, (WHOLE,)))
    nn.Sequential(nn.Linear(2, 2))  # another model is nobody's business
    (x,) = make_batch(2).args
    model(x).sum().backward()
    model.last = nn.Sequential(model.last, nn.Linear(3, 3).requires_grad_(False))
    model(x).sum().backward()
    model.last.append(nn.Linear(3, 2))
    with torch.no_grad():
        model(x)
    with pytest.raises(mw.InputError, match=r"parameter 'last.2.weight' came.*before auto"):
        model(x)


def test_a_parameter_that_comes_late_is_refused(ranks):
    ranks(2)(grows)


@contextmanager
def noted(said: list[str], when: str) -> Iterator[None]:
    """Adds to what is ``said`` the warnings of what is done inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said += [f"{when}: {warning.message}" for warning in caught]


def sets_gradients(rank: int) -> list[str]:
    """What is said of a step on gradients that were taken and set, after one of a penalty on them
    and one of a backward."""
    model = Keeping()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    apply(model, optimizer, plan_by_hand(2, (WHOLE,)))
    batch = make_batch(2)
    said: list[str] = []
    for way in ("penalty", "backward", "set", "set"):
        with noted(said, way):
            loss = F.cross_entropy(model(*batch.args), batch.target)
            if way == "backward":
                loss.backward()
            else:
                taken = torch.autograd.grad(loss, parameters, create_graph=way == "penalty")
                if way == "penalty":
                    (loss + sum(g.square().sum() for g in taken)).backward()
                for parameter, gradient in zip(parameters, taken, strict=True):
                    parameter.grad = gradient if way == "set" else parameter.grad
            optimizer.step()
            optimizer.zero_grad()
    return said


def test_gradients_that_are_set_are_told_of_once(ranks):
    said, other = ranks(2)(sets_gradients)
    assert len(said) == 1
    assert said[0].startswith("set: the optimizer's step used gradients that no backward has made")
    assert other == []


def steps_in_no_sync(rank: int) -> list[str]:
    """What is said where the last batches of an epoch are too few to be exchanged."""
    model = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, optimizer, plan_by_hand(2, (WHOLE,)))
    batch = make_batch(2)
    said: list[str] = []
    for exchanged in ((False, True), (True,), (False,), (False,)):
        with noted(said, str(exchanged)):
            for exchanges in exchanged:
                with nullcontext() if exchanges else model.no_sync():
                    F.cross_entropy(model(*batch.args), batch.target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return said


def test_a_step_on_what_no_sync_has_left_is_told_of_once(ranks):
    said, other = ranks(2)(steps_in_no_sync)
    assert len(said) == 1
    assert said[0].startswith("(False,): the optimizer's step used gradients that were left")
    assert other == []


# -- a model that is not called --------------------------------------------------------------------


class WithStep(Keeping):
    def training_step(self, batch: mw.Batch) -> Tensor:
        return F.cross_entropy(self.forward(*batch.args), batch.target)


def steps_by_a_method(rank: int) -> list[str]:
    model = WithStep()
    apply(model, None, plan_by_hand(2, (WHOLE,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.training_step(make_batch(2)).backward()
    return [str(warning.message) for warning in caught]


def test_a_model_that_is_trained_and_not_called_is_told_of_once(ranks):
    said, other = ranks(2)(steps_by_a_method)
    assert len(said) == 1
    assert "the model itself was not called" in said[0]
    assert other == []


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


def sums(rank: int) -> list[str]:
    """What ``auto_parallelize`` and a launch without a script say of sums over samples."""

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


def test_a_sum_over_samples_is_refused_before_the_first_step(ranks):
    for said in ranks(2)(sums):
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
