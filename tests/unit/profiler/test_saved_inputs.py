"""Whose inputs are saved for backward by it alone, so that a divided unit has them no more."""

import gc
import weakref

import meshwright as mw
import pytest
import torch
from meshwright.models.precision import in_precision
from meshwright.models.units.discover import discover
from meshwright.profiler.memory import saved_inputs
from meshwright.profiler.shares import saved_ratio
from torch import nn
from torch.nn import functional as F

WIDTH, SAMPLES = 8, 5
WHOLE = 4 * WIDTH * SAMPLES
"""Bytes of a tensor of as many features for each sample."""


class Branches(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.norm, self.shared = nn.LayerNorm(WIDTH), shared
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return self.left(x) + (self.right(x) if self.shared else self.right(x * 2))


def kept(model: nn.Module) -> dict[str, int]:
    batch = mw.Batch((torch.randn(SAMPLES, WIDTH),), torch.zeros(SAMPLES, WIDTH))
    units = discover(model, batch).units
    found = saved_inputs(model, units, batch, F.mse_loss)
    return {name: inputs.kept for name, inputs in found.items()}


class Activated(nn.Module):
    """Autograd keeps the output of the activation, by whose graph it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def test_nothing_is_kept_of_the_model_and_its_batch():
    model = Activated()
    alive = weakref.ref(model)
    assert kept(model)
    del model
    gc.collect()
    assert alive() is None


def test_what_a_linear_layer_alone_saves_is_its_own():
    found = kept(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
    assert found == {"0": 0, "1": WHOLE}  # the first unit's is the batch, which stays anyway


def test_what_its_maker_saves_too_stays():
    # A ReLU saves its result.
    layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    assert kept(nn.Sequential(*layers))["2"] == 0


def test_what_two_units_save_stays_for_the_other():
    assert kept(Branches(shared=True)) == {"norm": 0, "left": 0, "right": 0}
    assert kept(Branches(shared=False)) == {"norm": 0, "left": WHOLE, "right": WHOLE}


def test_what_autocast_makes_of_an_input_is_no_input():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    batch = mw.Batch((torch.randn(SAMPLES, WIDTH),), torch.zeros(SAMPLES, WIDTH))
    units = discover(model, batch).units
    assert saved_inputs(model, units, batch, F.mse_loss)["1"].saved == WHOLE
    made = in_precision(mw.Workload("cast", model, lambda n: batch, F.mse_loss), "bf16-mixed")
    assert saved_inputs(model, units, batch, made.loss)["1"].saved == 0


def test_the_model_is_left_as_it_was():
    model = Branches(shared=True)
    kept(model)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("whole", "undivided", "member", "expected"),
    [
        (100.0, 100.0, 50.0, 0.5),
        (100.0, 0.0, 0.0, 0.5),  # others save the output: of half of the samples
        (100.0, 60.0, 60.0, 0.8),
        (50.0, 100.0, 50.0, 0.5),  # some of it counts to other units in the model
        (0.0, 0.0, 0.0, 1.0),
    ],
)
def test_what_a_member_saves(whole, undivided, member, expected):
    assert saved_ratio(whole, undivided, member, degree=2) == expected
