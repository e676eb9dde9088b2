"""What a step's units are seen to save."""

from __future__ import annotations

import torch
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.profiler.memory import measure_footprint
from torch import nn


class Shortcut(nn.Module):
    """Two layers; the sum with the input saves nothing of what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.first(x)
        return self.last(self.second(y) * 2)


def test_an_output_is_kept_if_somebody_saves_it():
    model, x = Shortcut(), torch.randn(4, 8)
    units = discover(model, Batch((x,), torch.zeros(4, 8))).units
    found = measure_footprint(
        model, units, Batch((x,), torch.zeros(4, 8)), nn.functional.mse_loss, torch.device("cpu")
    )
    assert found.discarded == {"first", "second"}  # the loss saves what the last layer gives
