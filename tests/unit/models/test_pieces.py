"""Which stretches of a forward can run again as one."""

from __future__ import annotations

import pytest
import torch
from meshwright.models import zoo as models
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.planner.schema.profile import PieceProfile
from torch import Tensor, nn


def pieces(model: nn.Module, width: int = 4) -> dict[str, PieceProfile]:
    """By their first module."""
    torch.manual_seed(0)
    found = discover(model, Batch((torch.randn(3, width),), None))
    return {piece.modules[0]: piece for piece in found.pieces}


def linear(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace))


class Model(nn.Module):
    """Two parts, and what the model does with them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


class Between(Model):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x) * 2)
        return result


class Residual(Model):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(self.first(x))
        return result


class Tupled(Model):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        result: Tensor = self.second(self.first(x))
        return (result,)


class Unpacking(Model):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)[0])
        return result


class Overwriting(Model):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        result: Tensor = self.second(self.first(x))
        return result


def test_modules_called_one_after_another_follow_each_other() -> None:
    found = pieces(Model(linear(), linear()))
    assert found["first.0"] == PieceProfile(
        modules=("first.0", "first.1"), first="first.0", last="first.0"
    )
    assert found["second.0"].follows == ("first", "first.0")
    assert found["second"].follows == ("first", "first.0")
    assert (found["first"].first, found["first"].last) == ("first.0", "first.0")
    assert "" not in found
    assert "first.1" not in found  # a part of the unit


def test_what_the_model_does_between_modules_parts_them() -> None:
    found = pieces(Between(linear(), linear()))
    assert found["second"].follows == found["second.0"].follows == ()


def test_a_block_has_the_glue_that_lies_in_it() -> None:
    found = pieces(nn.Sequential(Residual(linear(), linear()), Residual(linear(), linear())))
    assert (found["0"].first, found["0"].last) == ("0.first.0", "@glue.0")
    assert (found["1"].first, found["1"].last) == ("1.first.0", "@glue.1")
    assert found["1"].follows == ("0",)
    assert found["0.second"].follows == ("0.first", "0.first.0")
    # The first layer of the second block is called with what the first block returns.
    assert found["1.first"].follows == ("0",)


def test_glue_that_lies_in_a_block_in_part_is_not_the_block_s() -> None:
    class Outer(Model):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x) * 2)
            return result

    found = pieces(Outer(Residual(linear(), linear()), linear()))
    assert found["first"].last == "first.second.0"


def test_a_tuple_is_not_what_the_next_module_is_called_with() -> None:
    found = pieces(Unpacking(Tupled(linear(), linear()), linear()))
    assert found["second"].follows == ("first.second", "first.second.0")


def test_a_piece_that_changes_its_input_opens_no_segment() -> None:
    found = pieces(Model(linear(), Overwriting(linear(), linear())))
    assert found["first"].opens
    assert not found["second"].opens
    assert found["second.first"].opens
    assert found["second"].follows == ("first", "first.0")
    found = pieces(Model(linear(inplace=True), linear()))
    assert found["first"].opens  # it is its own result that it changes


def test_modules_that_are_called_twice_are_no_pieces() -> None:
    shared = linear()
    found = pieces(Model(shared, shared))
    assert "first" not in found


@pytest.mark.parametrize(
    ("name", "block", "count"), [("gpt-tiny", "h.1", 2), ("vgg11-32", "features.3", 0)]
)
def test_reference_workloads_have_pieces(name: str, block: str, count: int) -> None:
    workload = models.build(name)
    found = discover(workload.model, workload.make_batch(2))
    by_name = {piece.modules[0]: piece for piece in found.pieces}
    assert by_name[block].follows
    units = [unit.name for unit in found.units]
    inside = units[units.index(by_name[block].first) : units.index(by_name[block].last) + 1]
    assert sum(name.startswith("@") for name in inside) == count
