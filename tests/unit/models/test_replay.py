"""One unit by itself gives what it gave inside its model."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from meshwright.models import replay
from meshwright.models import zoo as models
from meshwright.models.replay import (
    UnitCall,
    _held_frozen,
    capture,
    copied,
    preserved,
    run_modules,
)
from meshwright.models.splits.check import main_output
from meshwright.models.units.discover import discover
from torch import Tensor, nn


@pytest.mark.parametrize("name", ["cnn-digits", "gpt-tiny", "bert-tiny", "seq2seq-tiny"])
def test_a_captured_unit_repeats_its_output(name: str) -> None:
    torch.manual_seed(0)
    workload = models.build(name)
    model, batch = workload.model.eval(), workload.make_batch(3)
    units = [u for u in discover(model, batch).units if u.modules]
    outputs: dict[str, Tensor] = {}
    handles = []
    for unit in units:

        def note(_: nn.Module, args: object, output: object, name: str = unit.name) -> None:
            outputs[name] = main_output(output).detach().clone()

        handles.append(model.get_submodule(unit.modules[-1]).register_forward_hook(note))
    calls = capture(model, batch, units)
    for handle in handles:
        handle.remove()
    assert set(calls) == {u.name for u in units}
    for unit in units:
        call = calls[unit.name].fresh()
        again = main_output(run_modules(model, unit.modules, call))
        torch.testing.assert_close(again.detach(), outputs[unit.name])
        wanted = [t for t in call.tensors() if t.requires_grad]
        if wanted:  # cut from the model's graph, and differentiable by itself
            assert all(t.is_leaf for t in wanted)
            gradients = torch.autograd.grad(again.sum(), wanted, allow_unused=True)
            assert any(g is not None for g in gradients)


def test_inputs_are_copies_from_before_they_are_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 2))
    inputs = torch.randn(3, 4)
    batch = models.build("mlp").make_batch(3)
    batch = type(batch)((inputs,), None)
    found = discover(model, batch)
    call = capture(model, batch, found.units)["0"]
    assert torch.equal(call.args[0], inputs)
    assert call.args[0] is not inputs


def test_another_precision_keeps_integers_and_what_requires_a_gradient() -> None:
    call = UnitCall((torch.ones(2, requires_grad=True), torch.ones(2).long()), {"k": None})
    wide = call.to(torch.float64)
    assert [t.dtype for t in wide.tensors()] == [torch.double, torch.long]
    assert [t.requires_grad for t in wide.tensors()] == [True, False]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_that_keeps_what_it_computes_is_copied() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[1].weight = model[1].weight
    x = torch.randn(3, 4)
    expected = model(x)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    alone = copied(model)
    assert torch.equal(alone(x), expected)
    alone[0].weight_g.data.zero_()
    assert torch.equal(model(x), expected)
    both = copied([model, model[1]])
    assert both[0][1] is both[1]


def test_what_cannot_be_copied_is_had_in_common() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.lock, model[1].drawn = threading.Lock(), (i for i in range(3))
    model[1].settings = {"width": 4}
    alone = copied(model)
    assert alone.lock is model.lock
    assert alone[1].drawn is model[1].drawn
    # All else is its own.
    assert alone[1].settings is not model[1].settings
    assert alone[1].weight is not model[1].weight
    assert torch.equal(alone[1].weight, model[1].weight)


class Merging(nn.Linear):
    """Adds to its weight for evaluation, as some layers of LoRA do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.more, self.merged = nn.Parameter(torch.ones(4, 4)), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -self.more if mode else self.more
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.merged else self.weight + self.more
        return nn.functional.linear(x, weight, self.bias)


def test_modules_go_back_to_training_by_their_own_methods() -> None:
    model = nn.Sequential(Merging(), nn.Sequential(Merging(), nn.Dropout()))
    model[1].eval()  # a part that is frozen stays as it is
    modes = [module.training for module in model.modules()]
    expected = [p.detach().clone() for p in model.parameters()]
    with preserved(model):
        model.eval()
        assert model[0].merged
    assert [module.training for module in model.modules()] == modes
    assert (model[0].merged, model[1][0].merged) == (False, True)
    for parameter, before in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), before)


class Averaging(nn.Module):
    """Its frozen parts follow the trained one in each forward, each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.mean = nn.Parameter(torch.ones(4), requires_grad=False)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.data = 0.9 * self.target.weight.data + 0.1 * self.online.weight
            self.target.bias.lerp_(self.online.bias, 0.1)
            self.mean.data[:] = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.last(self.online(x) - self.target(x) + self.mean)


def test_frozen_parameters_that_a_forward_moves_go_back(monkeypatch) -> None:
    model = Averaging()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with preserved(model):
        made = model(torch.randn(3, 4))
        assert not model.target.weight.equal(expected["target.weight"])
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())
    made.sum().backward()
    # Of a large model that is adapted no copies are made.
    model.base = nn.Linear(16, 16).requires_grad_(False)
    assert len(_held_frozen(model)) == 5
    monkeypatch.setattr(replay, "_FEW_BYTES", 100)
    assert _held_frozen(model) == []
