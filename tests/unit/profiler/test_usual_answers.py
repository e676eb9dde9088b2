"""Models that ask their tensors for a truth are estimated without memory, or with it."""

from __future__ import annotations

import pytest
import torch
from meshwright import Batch, Workload
from meshwright.planner.schema.errors import InputError
from meshwright.profiler import sessions
from meshwright.profiler.usual_answers import UsualAnswers
from torch import Tensor, nn

META = torch.device("meta")


def test_all_is_so_and_none_is_odd():
    x = torch.ones(3, 4, device=META)
    with UsualAnswers():
        assert (x > 0).all()
        assert torch.all(x == 1, dim=None).item()
        assert not x.isnan().any()
        assert (x > 0).sum() == x.numel()
        assert bool(torch.isfinite(x).all())
        for asked in (x.sum(), (x > 0).sum() == 5, x[0, 0], x.all(dim=0)[0]):
            with pytest.raises(RuntimeError):
                bool(asked)
    assert torch.zeros(2).any().logical_not()
    with UsualAnswers():  # what has values is asked itself
        assert not torch.zeros(2).all()
        assert torch.ones(2).any()


class Asking(nn.Module):
    """Asks whether all is finite, as models do before they clamp; or for an index."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.what == "finite" and not torch.isfinite(x).all():
            raise AssertionError("clamped")
        if self.what == "index":
            x = x * (x.abs().sum(dim=1).nonzero().numel() == len(x))
        return self.second(x)


def make_batch(size: int) -> Batch:
    return Batch((torch.randn(size, 8),), torch.zeros(size, dtype=torch.long))


def finite() -> Workload:
    return Workload("finite", Asking("finite"), make_batch, nn.functional.cross_entropy)


def index() -> Workload:
    return Workload("index", Asking("index"), make_batch, nn.functional.cross_entropy)


@pytest.mark.parametrize("name", ["finite", "index"])
def test_a_model_that_asks_is_estimated(name):
    """Made on the meta device, as factories are called there, and with memory where it must be."""
    found = sessions.profile(f"{__file__}:{name}", (2, 4), "t4", 1, None, None)
    assert [u.kind for u in found.units].count("linear") == 2
    assert found.origin == "estimated"


def test_values_that_do_not_fit_are_told(monkeypatch):
    monkeypatch.setattr(sessions, "room_bytes", lambda device: 1000.0)
    with pytest.raises(InputError, match=r"index' asks for some.*2\.5 KiB do not fit here"):
        sessions.profile(f"{__file__}:index", (2, 4), "t4", 1, None, None)


def test_a_bias_of_attention_that_is_learnt_has_a_gradient():
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 24)
            self.bias = nn.Embedding(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.proj(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
            bias = self.bias(torch.arange(5, device=x.device)).T[None, :, None]
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).mean((1, 2))

    def batch(size: int) -> Batch:
        return Batch((torch.randn(size, 5, 8),), torch.zeros(size, dtype=torch.long))

    workload = Workload("biased", Biased(), batch, nn.functional.cross_entropy)
    found = sessions.profile(workload, (2, 4), "t4", 1, None, None)
    reached = {p.name: p.reached for u in found.units for p in u.parameters}
    assert reached["bias.weight"]
