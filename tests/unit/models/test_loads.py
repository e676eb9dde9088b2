"""Edges of one source that carry the same tensors have one number."""

import torch
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from torch import Tensor, nn


class Two(nn.Module):
    """One unit with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, x - self.weight


class Users(nn.Module):
    """Two layers take one output of a unit, a third the other."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Two()
        self.a, self.b, self.c = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.two(x)
        return self.a(first) + self.b(first) + self.c(second)


def test_edges_with_the_same_tensors_are_known():
    torch.manual_seed(0)
    found = discover(Users(), Batch((torch.randn(2, 6),), torch.zeros(2)))
    number = {e.target: e.tensors for e in found.edges if e.source == "two"}
    assert number["a"] == number["b"] != number["c"]
