"""Which pieces of a gradient are sent, and what is held of the others."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.comm.control import Control
from meshwright.executor.comm.groups import Group, World
from meshwright.executor.comm.watchdog import Watchdog
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.dropping import (
    Budget,
    DropCandidate,
    DroppedGradGroup,
    Dropping,
    choose,
)
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


def test_the_largest_means_go_first_until_the_credit_is_used_up():
    candidates = [
        DropCandidate(100, 0.1, 0),
        DropCandidate(50, 0.4, 0),
        DropCandidate(30, 0.3, 0),
        DropCandidate(20, 0.2, 0),
    ]
    assert choose(candidates, 80, 10) == ([False, True, True, False], 0)
    assert choose(candidates, 60, 10) == ([False, True, True, False], -20)  # overdrawn by the last
    assert choose(candidates, 0, 10) == ([False] * 4, 0)
    assert choose(candidates, 200, 10) == ([True] * 4, 0)


def test_what_has_waited_too_long_goes_first_and_is_paid_for():
    candidates = [DropCandidate(100, 0.1, 3), DropCandidate(50, 0.4, 2)]
    assert choose(candidates, 60, 3) == ([True, False], -40)
    assert choose(candidates, 120, 3) == ([True, True], -30)


def test_equal_means_are_sent_in_their_order():
    assert choose([DropCandidate(10, 1.0, 0)] * 3, 15, 9)[0] == [True, True, False]


def test_the_share_that_is_sent_is_the_ratio_over_time_whatever_the_sizes():
    """One piece is most of the bytes, so no single backward can send a fifth."""
    sizes = {"a": (40, 20), "b": (10, 10), "c": (10, 10)}
    candidates = [grad_param(name, *shape) for name, shape in sizes.items()]
    fixed = [grad_param("bias", 20)]
    budget = Budget(0.2, candidates, fixed)
    held = dict.fromkeys(candidates, 0)
    steps, sent_bytes = 200, 0
    for _ in range(steps):
        means = {e: 1.0 + held[e] for e in candidates}  # each new gradient as large as the last
        sent = budget.choose(means, held, 50)
        held = {e: 0 if e in sent else held[e] + 1 for e in candidates}
        sent_bytes += 4 * (sum(e.full_numel for e in sent) + 20)
    whole = 4 * (800 + 100 + 100 + 20)
    assert sent_bytes / (steps * whole) == pytest.approx(0.2, rel=0.02)


def test_a_piece_waits_no_longer_than_allowed():
    candidates = [grad_param("large", 10, 10), grad_param("small", 10, 10)]
    budget = Budget(0.5, candidates, [])
    waited = dict.fromkeys(candidates, 0)
    longest = 0
    for _ in range(30):
        sent = budget.choose({candidates[0]: 100.0, candidates[1]: 0.0}, waited, 4)
        waited = {e: 0 if e in sent else waited[e] + 1 for e in candidates}
        longest = max(longest, waited[candidates[1]])
    assert longest == 4


def test_debts_for_stale_pieces_do_not_grow_for_ever():
    """With a patience of 1 every other backward sends all, far more than the ratio of a tenth."""
    candidate = grad_param("a", 10, 10)
    budget = Budget(0.1, [candidate], [])
    for step in range(50):
        budget.choose({candidate: 1.0}, {candidate: step % 2}, 1)
    assert budget.credit_bytes >= -2 * 400


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
