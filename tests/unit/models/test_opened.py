"""Tensors are found in whatever a model takes and returns, and put back into a copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from meshwright.models.opened import leaves_in, map_tensors, tensors_in
from meshwright.models.target import default_loss
from meshwright.models.workload import Batch
from torch import nn
from torch.distributions import Independent, Normal


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    note: str = "as it is"
    more: object = None


@dataclass(slots=True)
class Slotted:
    logits: torch.Tensor


class Named(NamedTuple):
    logits: torch.Tensor
    count: int


class Custom(dict):
    pass


def ones(width: int = 3) -> torch.Tensor:
    return torch.ones(2, width)


@pytest.mark.parametrize(
    ("tree", "tensors"),
    [
        (Answer(ones(), more=[Answer(ones())]), 2),
        (Slotted(ones()), 1),
        ({"a": Named(ones(), 4), "b": None, "c": [3, ones()]}, 2),
        (Custom(logits=ones(), n=1), 1),
        (SimpleNamespace(logits=ones(), deep=SimpleNamespace(more=(ones(), "x"))), 2),
        (Independent(Normal(ones(), ones()), 1), 2),
        ((nn.Linear(2, 2), torch.Generator(), Answer, print), 0),
    ],
)
def test_all_tensors_are_found_and_replaced_in_a_copy(tree: object, tensors: int) -> None:
    found = tensors_in(tree)
    assert len(found) == tensors
    twice = map_tensors(tree, lambda t: 2 * t)
    assert [float(t.sum()) for t in tensors_in(twice)] == [12.0] * tensors
    assert all(bool((t == 1).all()) for t in tensors_in(tree))
    assert len(leaves_in(twice)) == len(leaves_in(tree))


def test_what_does_not_change_stays_the_same_object() -> None:
    answer = Answer(ones())
    assert map_tensors((answer,), lambda t: t)[0] is answer
    changed = map_tensors(answer, torch.neg)
    assert isinstance(changed, Answer)
    assert changed.note == "as it is"


def test_an_object_that_knows_itself_ends() -> None:
    knot = SimpleNamespace(logits=ones())
    knot.own = knot
    assert any(t is knot.logits for t in tensors_in(knot))


def test_a_batch_takes_its_samples_out_of_objects() -> None:
    batch = Batch((Answer(torch.arange(8.0).reshape(4, 2)),), torch.arange(4))
    assert batch.size == 4
    half = batch.slice(2, 4)
    assert half.args[0].logits.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert half.args[0].note == "as it is"


def test_a_bare_model_may_return_objects() -> None:
    weight = nn.Parameter(ones())
    default_loss(Answer(weight * 2), None).backward()
    # The mean over the 6 elements of twice the weight.
    torch.testing.assert_close(weight.grad, torch.full((2, 3), 2 / 6))
