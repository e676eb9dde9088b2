"""Models that do what few do are measured, or refused with the remedy."""

from __future__ import annotations

import meshwright as mw
import pytest
import torch
from meshwright.models.replay import preserved
from meshwright.models.target import check_batches, from_model, try_out, workload
from meshwright.models.units import stays_whole as why
from meshwright.models.units.discover import discover
from meshwright.profiler.model import profile
from meshwright.profiler.timing import update_rates
from torch import Tensor, nn

WIDTH = 6


def batch(size: int) -> mw.Batch:
    return mw.Batch((torch.randn(size, WIDTH),), torch.randn(size, 3))


def made(model: nn.Module, make_batch=batch) -> mw.Workload:
    return mw.Workload("odd", model, make_batch, lambda o, t: nn.functional.mse_loss(o, t))


def profiled(chosen: mw.Workload) -> mw.ModelProfile:
    return profile(workload(chosen), batches=(2, 3), repeats=1, degrees=(2,), optimizers=("sgd",))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Force(Net):
    """Takes a gradient in its forward, as models of energies do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force[:, :3]


class Mapped(Net):
    """Runs its layers under vmap, with weights for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


class Nested(Net):
    def forward(self, x: Tensor) -> Tensor:
        rows = [row.expand(1 + i % 2, WIDTH) for i, row in enumerate(x)]
        hidden = self.first(torch.nested.nested_tensor(rows, layout=torch.jagged))
        return self.last(torch.stack([part.mean(0) for part in hidden.unbind()]))


class Whole(Net):
    """Has frozen weights in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.table.to(x.dtype))


@pytest.mark.parametrize(
    "model", [Force(), Mapped(), Nested(), Whole()], ids=lambda m: type(m).__name__
)
def test_it_is_tried_and_profiled(model: nn.Module) -> None:
    chosen = made(model)
    assert try_out(workload(chosen)) == 2
    found = profiled(chosen)
    assert {"first", "last"} <= {unit.name for unit in found.units}


@pytest.mark.parametrize("model", [Mapped(), Nested()], ids=["vmap", "nested"])
def test_what_a_group_could_not_move_stays_whole(model: nn.Module) -> None:
    unit = discover(model, batch(2)).unit("first")
    assert not unit.splits
    assert unit.stays_whole == why.UNPLAIN


def test_sparse_inputs_are_cut_into_samples() -> None:
    class Sparse(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.sparse.mm(x, self.first.weight.T).tanh())

    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.eye(size, WIDTH).to_sparse(),), torch.randn(size, 3))

    part = make_batch(4).slice(1, 3)
    assert part.args[0].to_dense().tolist() == torch.eye(4, WIDTH)[1:3].tolist()
    assert profiled(made(Sparse(), make_batch)).batches == (2, 3)


def test_a_nested_input_is_refused() -> None:
    def make_batch(size: int) -> mw.Batch:
        rows = [torch.randn(1 + i, WIDTH) for i in range(size)]
        return mw.Batch((torch.nested.nested_tensor(rows, layout=torch.jagged),), None)

    with pytest.raises(mw.InputError, match=r"a nested tensor.*filled up to one length"):
        check_batches(made(Nested(), make_batch))
    with pytest.raises(mw.InputError, match=r"example_inputs of Nested hold a nested tensor"):
        from_model(Nested(), make_batch(4).args)


def test_a_class_with_a_call_of_its_own_is_refused() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, 3)

        def __call__(self, x: Tensor) -> Tensor:
            return self.first(x)

    with pytest.raises(mw.InputError, match=r"calling Called runs no forward.*its method forward"):
        discover(Called(), batch(2))


def test_frozen_parameters_are_not_updated() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    (rate,) = update_rates([weight], ("sgd",))
    assert rate.seconds_per_byte == 0.0


def test_a_buffer_that_a_forward_resizes_is_put_back() -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor([]))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.resize_(x.shape[1:]).copy_(x.amax(0))
            return x

    model = Observer()
    buffer = model.seen
    with preserved(model):
        model(torch.ones(2, 3))
        assert buffer.tolist() == [1.0, 1.0, 1.0]
    assert model.seen is buffer
    assert buffer.tolist() == []
