"""The order in which slices leave before anything is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from meshwright.executor.control import Control
from meshwright.executor.exchange import Entry
from meshwright.executor.groups import Group, World
from meshwright.executor.schedule import Orders
from meshwright.executor.slices import make_parcels
from meshwright.executor.watch import Watch
from torch import nn

ALONE = Group((0,), 0, None, "exchange")
LARGE = 200_000  # elements: no two units share a parcel


def names_in_order(backward_s: float, exchange_s: float) -> list[str]:
    """Whose slices leave, for three units of two slices each whose times the plan says."""
    unit = SimpleNamespace(backward_s=backward_s, exchange_s=exchange_s)
    plan: Any = SimpleNamespace(units=[unit] * 3)
    entries = [
        Entry(name, nn.Parameter(torch.zeros(LARGE)), ALONE, 1, LARGE, None, at)
        for at, name in reversed(list(enumerate("abc")))
    ]
    parcels = make_parcels(entries, 2 * LARGE)
    world = World(0, 1, 0, (0,), ALONE, {}, {1: ALONE}, {1: ALONE})
    order = Orders(plan).start(parcels, Control(world, Watch(0, 1, 10.0)))
    return [parcels[turn.load].entries[0].name for turn in order.turns]


def test_without_times_slices_leave_in_the_order_of_backward() -> None:
    assert names_in_order(0.0, 0.0) == ["c", "c", "b", "b", "a", "a"]


def test_with_times_the_more_urgent_overtakes_what_has_not_left() -> None:
    assert names_in_order(1.0, 3.0) == ["c", "b", "a", "a", "b", "c"]
