"""Layers that a forward leaves out by chance are found, measured, and not divided."""

import random

import pytest
import torch
from meshwright.models.units.chance import every_layer, layer_drop_rates, may_be_left_out
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from torch import nn

WIDTH, LAYERS = 8, 4


class Config:
    """As a model's own settings, of which only one is a rate of layers."""

    def __init__(self, rate: float) -> None:
        self.encoder_layerdrop, self.hidden_dropout = rate, 0.1


class Encoder(nn.Module):
    def __init__(self, rate: float, *, configured: bool) -> None:
        super().__init__()
        if configured:
            self.config = Config(rate)
        else:
            self.layerdrop = rate
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.config.encoder_layerdrop if hasattr(self, "config") else self.layerdrop
        for layer in self.layers:
            if random.random() >= rate:
                x = layer(x).relu()
        return x


def model_of(rate: float, *, configured: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    random.seed(0)
    encoder = Encoder(rate, configured=configured)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), encoder, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("configured", [False, True])
def test_every_layer_is_a_unit_and_none_is_divided(configured):
    model = model_of(0.9, configured=configured)
    found = discover(model, Batch((torch.randn(4, WIDTH),), torch.zeros(4)))
    units = {u.name: u for u in found.units if u.modules}
    layers = [f"1.layers.{i}" for i in range(LAYERS)]
    assert list(units) == ["0", *layers, "2"]
    assert not any(units[name].splits for name in layers)
    assert units["0"].splits
    assert units["2"].splits
    assert [rate for *_, rate in rates_of(model)] == [0.9]


def test_without_a_rate_layers_are_divided():
    model = model_of(0.0)
    found = discover(model, Batch((torch.randn(4, WIDTH),), torch.zeros(4)))
    assert all(u.splits for u in found.units if u.modules)
    assert not may_be_left_out(model)


def rates_of(model):
    return [(holder, name, getattr(holder, name)) for _, holder, name in layer_drop_rates(model)]


def test_a_rate_comes_back_whatever_happens():
    model = model_of(0.5, configured=True)

    def stop() -> None:
        with every_layer(model):
            assert not rates_of(model)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop()
    assert [(name, rate) for _, name, rate in rates_of(model)] == [("encoder_layerdrop", 0.5)]
    assert may_be_left_out(model) == {f"1.layers.{i}" for i in range(LAYERS)}
