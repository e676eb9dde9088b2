"""Models whose parameters get their shapes in the first forward."""

from __future__ import annotations

import meshwright as mw
import pytest
import torch
from meshwright.models.target import from_model, workload
from meshwright.models.units.discover import discover
from torch import nn


class Net(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3)
        if unused:
            self.other = nn.LazyLinear(2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def lazy(model: nn.Module, width: int = 6) -> mw.Workload:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, width),), torch.randint(3, (size,)))

    return mw.Workload("lazy", model, make_batch, nn.functional.cross_entropy)


def test_a_lazy_model_gets_its_shapes_and_nothing_else() -> None:
    made = workload(lazy(Net()))
    model = made.model
    assert [tuple(p.shape) for p in model.parameters()] == [(8, 6), (8,), (8,), (8,), (3, 8), (3,)]
    assert model.training
    # Statistics as of a new layer: no samples have been seen.
    assert int(model.norm.num_batches_tracked) == 0
    assert not model.norm.running_mean.any()


def test_a_module_with_modes_of_its_own_trains_afterwards() -> None:
    class Switched(Net):
        def train(self, mode: bool = True) -> nn.Module:
            self.evaluates = not mode
            return super().train(mode)

    model = workload(lazy(Switched())).model
    assert (model.training, model.evaluates) == (True, False)


def test_a_bare_model_too() -> None:
    model = Net()
    from_model(model, torch.randn(4, 6))
    assert tuple(model.first.weight.shape) == (8, 6)


def test_what_no_forward_reaches_is_named() -> None:
    with pytest.raises(mw.InputError, match=r"parameter 'other.weight' has no shape yet.*call its"):
        workload(lazy(Net(unused=True)))


def test_a_model_that_fails_is_named_with_the_remedy() -> None:
    class Failing(Net):
        def forward(self, x):
            raise ValueError("no such input")

    with pytest.raises(mw.InputError, match=r"no shape yet.*no such input; run one batch through"):
        workload(lazy(Failing()))


def test_units_are_found_then() -> None:
    made = workload(lazy(Net()))
    assert {"first", "norm", "last"} <= {
        u.name for u in discover(made.model, made.make_batch(2)).units
    }
