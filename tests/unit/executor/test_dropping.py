"""Which pieces of a gradient are sent, and what is held of the others."""

from __future__ import annotations

import torch
from meshwright.executor.comm.control import Control
from meshwright.executor.comm.groups import Group, World
from meshwright.executor.comm.watchdog import Watchdog
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.dropping import DroppedGradGroup, Dropping
from meshwright.executor.gradients.feedback import LossyGradGroup
from meshwright.executor.gradients.slices import GradGroup, make_grad_groups
from torch import nn

ALONE = Group((0,), 0, None, "exchange")


class Handle:
    """Stands for a process group; nothing is sent in these tests."""


TWO = Group((0, 1), 0, Handle(), "exchange")


def grad_param(
    name: str, *shape: int, ratio: float = 0.5, group: Group = TWO, unit: int = 0
) -> GradParam:
    parameter = nn.Parameter(torch.zeros(shape))
    whole = len(shape) <= 1
    numel = parameter.numel()
    degree = 3 - group.size
    return GradParam(name, parameter, group, degree, numel, None, unit, "dropped", ratio, whole)


def control() -> Control:
    world = World(0, 1, 0, (0,), ALONE, {}, {1: ALONE}, {1: ALONE})
    return Control(world, Watchdog(0, 1, 10.0))


def test_pieces_travel_alone_and_what_is_sent_whole_together():
    params = [
        grad_param("w", 100, 100),
        grad_param("b", 100),
        grad_param("v", 10, 10),
        grad_param("c", 10),
    ]
    slices = LossyGradGroup(0, params, 30_000).slices
    assert [[e.name for e in s.params] for s in slices] == [["b", "c"], ["w"], ["w"], ["v"]]


def test_a_group_is_made_for_its_policy_where_something_travels():
    kinds = {"dense": GradGroup, "dropped": DroppedGradGroup}
    made = make_grad_groups(
        [grad_param("b", 9, 9, unit=1, group=ALONE), grad_param("a", 9, 9)], 100, kinds
    )
    assert [type(p) for p in made] == [DroppedGradGroup, GradGroup]


def drop(first: GradParam, second: GradParam) -> tuple[DroppedGradGroup, Dropping]:
    grad_group = DroppedGradGroup(0, [first, second], 10**6)
    return grad_group, Dropping([grad_group], control(), patience=10)


def test_what_is_not_sent_is_held_and_goes_with_the_next():
    weight, other = grad_param("w", 2, 2), grad_param("v", 2, 2)
    grad_group, agreement = drop(weight, other)
    agreement._due = {other}
    for step, value in enumerate((1.0, -3.0)):
        grad_group.gradients = {weight: torch.full((2, 2), value), other: torch.ones(2, 2)}
        assert not grad_group.sends(weight)
        grad_group.hold(weight)
        assert grad_group.holds(weight)
        assert grad_group.feedback[weight].residual is not None
        assert grad_group.feedback[weight].residual.sum() == (4.0, -8.0)[step]
    agreement._due = {weight}
    grad_group.gradients = {weight: torch.full((2, 2), 10.0), other: torch.ones(2, 2)}
    grad_group._release()
    assert torch.equal(grad_group.gradients[weight], torch.full((2, 2), 8.0))
    assert not grad_group.holds(weight)


def test_the_first_backward_sends_all_and_the_next_what_is_largest():
    weight, other = grad_param("w", 2, 2), grad_param("v", 2, 2)
    grad_group, agreement = drop(weight, other)
    assert agreement.sends(weight)
    assert agreement.sends(other)
    grad_group.gradients = {weight: torch.full((2, 2), 1.0), other: torch.full((2, 2), -5.0)}
    grad_group._release()
    agreement.end()
    agreement.begin()
    assert not agreement.sends(weight)
    assert agreement.sends(other)
    # What is held counts with what will be added: 1 + 1 + 1 is not yet more than 5.
    grad_group.gradients = {weight: torch.full((2, 2), 3.0), other: torch.full((2, 2), 5.0)}
    grad_group._release()
    grad_group.hold(weight)
    agreement.end()
    agreement.begin()
    assert agreement.sends(weight)  # 3 held and 3 to come are more than 5
    assert not agreement.sends(other)


def test_the_agreement_goes_on_from_its_state():
    one, two = (drop(grad_param("w", 2, 2), grad_param("v", 2, 2)) for _ in range(2))
    for grad_group, agreement in (one, two):
        weight, other = grad_group.params
        for _ in range(3):
            grad_group.gradients = {weight: torch.ones(2, 2), other: torch.full((2, 2), 1.5)}
            agreement.begin()
            grad_group._release()
            for e in grad_group.params:
                if not grad_group.sends(e):
                    grad_group.hold(e)
            agreement.end()
    state = one[1].state()
    unloaded = drop(*one[0].params)[1]
    unloaded.load(state)
    assert unloaded.state() == state == two[1].state()
