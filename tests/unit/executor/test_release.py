"""Early release: where its slices stand in the order, and what stands in place of a gradient."""

from dataclasses import dataclass, field

import pytest
import torch
from meshwright.executor.gradients.release import (
    EarlyUpdates,
    Release,
    ReleasedGradient,
    place_released,
)
from meshwright.planner.schema.errors import InputError
from meshwright.planner.simulate.slicing import SendSlot
from torch import nn


@dataclass(eq=False)
class OfUnit:
    unit: int


@dataclass(eq=False)
class GradGroup:
    unit: int
    slices: tuple
    params: tuple
    released: bool = False
    sent: int = 0
    gradients: dict = field(default_factory=dict)


def grad_groups(*released, units=4, slices=2):
    every = range(units)
    return [GradGroup(k, tuple(range(slices)), (OfUnit(k),), k in released) for k in every]


def test_without_release_the_order_stays():
    slots = [
        SendSlot(3, 0),
        SendSlot(2, 0),
        SendSlot(3, 1),
        SendSlot(2, 1),
        SendSlot(1, 0),
        SendSlot(0, 0),
    ]
    assert place_released(slots, grad_groups()) == slots


def test_a_released_unit_leaves_before_what_is_ready_later():
    """Unit 2's slices: after those of unit 3 that leave early, before those of 1 and 0."""
    slots = [
        SendSlot(3, 0),
        SendSlot(1, 0),
        SendSlot(0, 0),
        SendSlot(0, 1),
        SendSlot(1, 1),
        SendSlot(3, 1),
    ]
    found = place_released(slots, grad_groups(2))
    assert found == [SendSlot(3, 0), SendSlot(2, 0), SendSlot(2, 1), *slots[1:]]


def test_all_released_leave_as_backward_comes_to_them():
    found = place_released([], grad_groups(0, 1, 2, 3, slices=1))
    assert found == [SendSlot(3, 0), SendSlot(2, 0), SendSlot(1, 0), SendSlot(0, 0)]


@pytest.mark.parametrize("released", [(0,), (1,), (3,), (0, 2), (1, 2, 3), (0, 1, 3)])
def test_nothing_before_a_released_unit_is_ready_later(released):
    """Else the ranks that wait for it would wait for what they have yet to compute."""
    mine = grad_groups(*released)
    urgent = [SendSlot(k, n) for n in range(2) for k in (1, 3, 0, 2) if k not in released]
    found = place_released(urgent, mine)
    assert sorted(found) == sorted(SendSlot(k, n) for k in range(4) for n in range(2))
    assert [t for t in found if t.group not in released] == urgent
    for i, slot in enumerate(found):
        if slot.group in released:
            assert all(before.group >= slot.group for before in found[:i])


def test_each_group_is_due_once_in_a_backward():
    mine = grad_groups(1, 2)
    release = Release(mine)
    for _ in range(2):
        release.begin()
        assert list(release.due(ended=False)) == []
        assert not any(release.is_applied(p) for p in mine)
        mine[2].sent = 2
        mine[2].gradients = dict.fromkeys(mine[2].params)
        assert list(release.due(ended=False)) == [mine[2]]
        assert list(release.due(ended=True)) == []
        assert release.is_applied(mine[2])
        assert not release.is_applied(mine[1])
        mine[2].sent, mine[2].gradients = 0, {}


def test_no_part_of_a_unit_is_due_while_others_are_to_come():
    """Unit 1's bias has its gradient first, and travels with unit 2's."""
    weight, bias, other = OfUnit(1), OfUnit(1), OfUnit(2)
    early = GradGroup(1, (0,), (bias, other), released=True)
    late = GradGroup(1, (0,), (weight,), released=True)
    release = Release([late, early])
    release.begin()
    early.sent, early.gradients = 1, {bias: None, other: None}
    assert list(release.due(ended=False)) == []
    late.sent, late.gradients = 1, {weight: None}
    assert set(release.due(ended=False)) == {early, late}
    release.begin()
    late.sent, late.gradients = 0, {}  # nobody has a gradient of it
    assert list(release.due(ended=False)) == []
    assert list(release.due(ended=True)) == [early]


RELEASED = r"'layer.weight' was applied and freed in backward.*forbidden=\['early-release'\]"


def released():
    layer = nn.Linear(2, 2)
    layer.weight.grad = ReleasedGradient.of(layer.weight, "layer.weight")
    return layer


@pytest.mark.parametrize(
    "touch",
    [
        lambda layer: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
        lambda layer: torch.nn.utils.clip_grad_value_(layer.parameters(), 1.0),
        lambda layer: layer.weight.grad.norm(),
        lambda layer: layer.weight.grad.mul_(2),
        lambda layer: float(layer.weight.grad.sum()),
        lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
        lambda layer: layer(torch.ones(1, 2)).sum().backward(),
    ],
)
def test_what_reads_it_is_told(touch):
    with pytest.raises(InputError, match=RELEASED):
        touch(released())


def test_it_can_be_looked_at_and_cleared():
    layer = released()
    gradient = layer.weight.grad
    assert gradient.shape == (2, 2)
    assert repr(gradient) == "ReleasedGradient('layer.weight')"
    layer.zero_grad(set_to_none=False)
    layer.zero_grad()
    assert layer.weight.grad is None


@dataclass(eq=False)
class Param:
    name: str
    parameter: nn.Parameter


def test_a_step_must_be_as_gradients_were_applied():
    layer = nn.Linear(2, 2)
    others = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([layer.weight, layer.bias], lr=0.5)
    seen = []
    early = EarlyUpdates(optimizer, seen.append)
    others.grad = torch.ones(2)
    early.update([Param("weight", layer.weight), Param("others", others)])
    assert seen == [[layer.weight]]
    assert torch.equal(others.grad, torch.ones(2)), "another optimizer's"
    with pytest.raises(InputError, match="no step"):
        early.begin_backward()
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(InputError, match=r"lr was 0.5 in backward.*is 0.25"):
        early.end(closure=False, scaled=False)
    optimizer.param_groups[0]["lr"] = 0.5
    early.end(closure=False, scaled=False)
    assert layer.weight.grad is None
    early.begin_backward()
    with pytest.raises(InputError, match="gradient scaler"):
        early.end(closure=False, scaled=True)
