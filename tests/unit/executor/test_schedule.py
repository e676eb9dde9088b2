"""The order in which slices leave, from the plan and from what is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshwright.executor.comm.control import Control
from meshwright.executor.comm.groups import Group, World
from meshwright.executor.comm.watchdog import Watchdog
from meshwright.executor.gradients import order as schedule
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.order import Orders, SendOrder
from meshwright.executor.gradients.slices import GradGroup, make_grad_groups
from meshwright.planner.schema.layout import Layout
from torch import nn

ALONE = Group((0,), 0, None, "exchange")
LARGE = 200_000  # elements: no two units share a group


def order_of(backward_s: float, exchange_s: float) -> tuple[SendOrder, list[GradGroup]]:
    """That of three units of two slices each whose times the plan says."""
    unit = SimpleNamespace(backward_s=backward_s, exchange_s=exchange_s)
    plan: Any = SimpleNamespace(units=[unit] * 3)
    params = [
        GradParam(name, nn.Parameter(torch.zeros(LARGE)), ALONE, 1, LARGE, None, at)
        for at, name in reversed(list(enumerate("abc")))
    ]
    grad_groups = make_grad_groups(params, 2 * LARGE)
    world = World(0, 1, 0, (0,), ALONE, {}, {1: ALONE}, {1: ALONE})
    return SendOrder(Orders(plan), grad_groups, Control(world, Watchdog(0, 1, 10.0))), grad_groups


def names_in_order(backward_s: float, exchange_s: float) -> list[str]:
    """Whose slices leave."""
    order, grad_groups = order_of(backward_s, exchange_s)
    return [grad_groups[slot.group].params[0].name for slot in order.slots]


def test_without_times_slices_leave_in_the_order_of_backward() -> None:
    assert names_in_order(0.0, 0.0) == ["c", "c", "b", "b", "a", "a"]


def test_with_times_the_more_urgent_overtakes_what_has_not_left() -> None:
    assert names_in_order(1.0, 3.0) == ["c", "b", "a", "a", "b", "c"]


class Underway:
    """A collective that has not come back."""

    def is_completed(self) -> bool:
        return False


def test_the_rate_of_a_step_is_that_of_the_wait_with_most_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, grad_groups = order_of(1.0, 3.0)
    for grad_group in grad_groups:
        for one in grad_group.slices:
            one.work = Underway()  # type: ignore[assignment]
    # c, b, a, a, b, c: behind both of a's lie four slices, behind b's last five, behind c's six.
    a, b, c = grad_groups
    for _ in range(2):
        clock = iter([10.0, 14.0, 16.0])
        monkeypatch.setattr(schedule.time, "perf_counter", lambda clock=clock: next(clock))
        order.end(grad_groups, 0.0)
        order.arrived(a, 1.0)
        order.arrived(c, 1.0)  # after 6 s
        order.arrived(b, 1.0)  # nothing new: fewer bytes were before it
    assert list(order._rates) == [pytest.approx(6.0 / (6 * 2 * LARGE))]
    order.begin()  # agreed after the second backward
    assert order._seconds[0] == [pytest.approx(1.0)] * 2


def test_a_rate_is_not_read_off_a_few_slices() -> None:
    order, grad_groups = order_of(1.0, 3.0)
    for one in grad_groups[0].slices:
        one.work = Underway()  # type: ignore[assignment]
    order.end(grad_groups, 0.0)
    for grad_group in grad_groups:
        order.arrived(grad_group, 1.0)
    order.end(grad_groups, 0.0)
    assert list(order._rates) == []


class Back:
    """A collective that has come back."""

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize(("took_s", "known"), [(1.5, True), (30.0, False)])
def test_a_link_that_has_carried_more_than_it_could_is_quicker(
    monkeypatch: pytest.MonkeyPatch, took_s: float, known: bool
) -> None:
    """Three units' slices of a second each, by the plan, that are back when backward is over."""
    order, grad_groups = order_of(1.0, 2.0)
    planned = order._seconds[0]
    for grad_group in grad_groups:
        grad_group.ready_s = 1.0
        for one in grad_group.slices:
            one.work = Back()  # type: ignore[assignment]
    for _ in range(2):
        monkeypatch.setattr(schedule.time, "perf_counter", lambda: 11.0 + took_s)
        order.end(grad_groups, 10.0)  # the first slice left after one second
    order.begin()
    expected = [took_s / 6] * 2 if known else planned
    assert order._seconds[0] == pytest.approx(expected)


def names_where(divided: int, *, idle: bool = False) -> list[str]:
    """Whose slices leave on a rank that has so many elements of seven parts of the second unit's
    parameter, divided among two members, after ranks have agreed on a rate and on times."""
    part = LARGE // 4
    mine = nn.Parameter(torch.zeros(divided * part))
    layout = Layout(groups=1, degree=2) if idle else None
    params = [
        GradParam("c", nn.Parameter(torch.zeros(LARGE)), ALONE, 1, LARGE, None, 2),
        GradParam("b", mine, ALONE, 2, 7 * part, None, 1, layout=layout, idle=idle),
        GradParam("a", nn.Parameter(torch.zeros(LARGE)), ALONE, 1, LARGE, None, 0),
    ]
    grad_groups = make_grad_groups(params, 2 * LARGE)
    plan: Any = SimpleNamespace(units=[SimpleNamespace(backward_s=1.0, exchange_s=1.0)] * 3)
    world = World(0, 1, 0, (0,), ALONE, {}, {1: ALONE}, {1: ALONE})
    order = SendOrder(Orders(plan), grad_groups, Control(world, Watchdog(0, 1, 10.0)))
    # The first unit gets ready between the ends of three and of four parts of the second.
    ready_s = 13 * part / schedule.LATE
    order._coming = SimpleNamespace(rows=lambda: [[1.0, ready_s, 0.0, 0.0]])  # type: ignore[assignment]
    order.begin()
    return [grad_groups[slot.group].params[0].name for slot in order.slots]


def test_all_ranks_find_one_order_however_much_they_have_of_a_parameter() -> None:
    """Of seven rows four and three; and where a unit leaves a rank idle, none."""
    assert names_where(4) == names_where(3) == names_where(0, idle=True)
    assert sorted(names_where(4)) == sorted("aabbcc")
