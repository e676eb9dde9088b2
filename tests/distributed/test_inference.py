"""Divided units, and some on a part of the ranks, in inference mode, which counts no changes."""

from __future__ import annotations

import msgspec
import torch
from meshwright.executor.apply import apply
from meshwright.planner.schema.layout import Layout
from plans import plan, unit
from torch import Tensor, nn


class Changing(nn.Module):
    """Changes what a unit has left before two others take it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h[:, :4] = 0
        first = self.side(h)
        h.mul_(2)
        return self.down(h) + first


def changes(rank: int, divided: bool) -> None:
    torch.manual_seed(0)
    model, alone = Changing(), Changing()
    alone.load_state_dict(model.state_dict())
    if divided:
        units = [unit("up", 2, "column", 2), unit("side", 2, "row", 2), unit("down", 2, "row", 2)]
    else:
        units = [unit(name, 1, "none", 2) for name in ("up", "side", "down")]
        places = Layout(groups=1), Layout(groups=1, first=1), Layout(groups=1, first=1)
        units = [
            msgspec.structs.replace(u, layout=place) for u, place in zip(units, places, strict=True)
        ]
    apply(model, None, plan(2, units), timeout_s=20)
    model.eval()
    for seed in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + rank))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(model(x), alone(x), msg=f"{mode.__name__} {seed}")


def test_changes_in_place_count(ranks):
    ranks(2)(changes, True)


def test_changes_in_place_count_on_other_ranks(ranks):
    ranks(2)(changes, False)
