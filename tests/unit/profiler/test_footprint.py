"""What a step's units are seen to save."""

from __future__ import annotations

import pytest
import torch
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.profiler import memory
from meshwright.profiler.memory import Footprint, measure_footprint
from torch import nn


class Shortcut(nn.Module):
    """Three layers; the sum with the input saves nothing of what it adds. One more is not called,
    and no gradient comes to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(8, 8)
        self.stopped = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.first(x) + self.stopped(x).detach()
        return self.last(self.second(y) * 2)


def test_what_is_saved_and_which_parameters_are_reached():
    model, x = Shortcut(), torch.randn(4, 8)
    units = discover(model, Batch((x,), torch.zeros(4, 8))).units
    found = measure_footprint(
        model, units, Batch((x,), torch.zeros(4, 8)), nn.functional.mse_loss, torch.device("cpu")
    )
    assert found.unreached == {"unused.weight", "unused.bias", "stopped.weight"}
    # No backward comes to it.
    assert found.workspace["stopped"] == found.never_together["stopped"] > 0
    assert found.discarded == {
        "first",
        "second",
        "stopped",
    }  # the loss saves what the last layer gives


class EveryOperator:
    """Says that each operator had so many bytes of scratch memory."""

    BYTES = 10_000

    def begin(self) -> None:
        pass

    def end(self) -> int:
        return self.BYTES


def test_scratch_memory_is_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Footprint:
        torch.manual_seed(0)
        model, batch = Shortcut(), Batch((torch.randn(4, 8),), torch.zeros(4, 8))
        units = discover(model, batch).units
        cpu = torch.device("cpu")
        return measure_footprint(model, units, batch, nn.functional.mse_loss, cpu)

    without = found()
    monkeypatch.setattr(memory, "scratch_of", lambda device: EveryOperator())
    scratched = found()
    assert scratched.saved == without.saved
    for name in ("first", "second", "last"):
        more = scratched.workspace[name] - without.workspace[name]
        assert 0 < more <= EveryOperator.BYTES
        assert more + scratched.saved[name] >= EveryOperator.BYTES  # beside what is not made yet
