"""Which elements are sent, the warm-up, and momentum before the choice."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.comm.groups import Group
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.feedback import ErrorFeedback, Lossy
from meshwright.executor.gradients.momentum import Momentum, check_momentum
from meshwright.executor.gradients.priority import PriorityExchange
from meshwright.executor.gradients.topk import (
    TopkGradGroup,
    TopkState,
    _unpacked,
    largest,
    packed,
    ratio_at,
    topk_elements,
)
from meshwright.planner.memory.gradient_buffers import FIRST_RATIO
from meshwright.planner.schema.errors import InputError, RunError
from torch import nn


class Handle:
    """Stands for a process group; nothing is sent in these tests."""


class Unfinished:
    """A collective that goes on."""

    def is_completed(self) -> bool:
        return False


TWO = Group((0, 1), 0, Handle(), "exchange")


def topk_group(*shapes: tuple[int, ...], ratio: float = 0.25) -> tuple[TopkGradGroup, TopkState]:
    params = []
    for i, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.zeros(shape))
        whole = len(shape) <= 1
        params.append(
            GradParam(str(i), parameter, TWO, 1, parameter.numel(), None, 0, "topk", ratio, whole)
        )
    grad_group = TopkGradGroup(0, params, 1000)
    return grad_group, TopkState([grad_group], Lossy(stages=0))


def sent_of(grad_group: TopkGradGroup, gradient: list[list[float]]) -> dict[int, float]:
    param = grad_group.params[0]
    values, index = grad_group._choose(param, torch.tensor(gradient), 1.0)
    return dict(zip(index.tolist(), values.tolist(), strict=True))


def test_the_largest_by_magnitude_are_sent_and_the_others_held():
    grad_group, _ = topk_group((2, 4), ratio=0.25)
    sent = sent_of(grad_group, [[1.0, -5.0, 2.0, 0.0], [4.0, -3.0, 0.5, 0.0]])
    assert sent == {1: -5.0, 4: 4.0}
    sent = sent_of(grad_group, [[1.5, 1.0, 0.5, 0.0], [0.0, -1.0, 0.0, 0.0]])
    assert sent == {5: -4.0, 0: 2.5} or sent == {5: -4.0, 2: 2.5}  # both are 2.5
    residual = grad_group.feedback[grad_group.params[0]].residual
    assert residual is not None
    assert residual.sum() == pytest.approx(1.0 + 2.5 + 0.5)


def test_at_least_one_element_is_sent():
    grad_group, topk = topk_group((3, 3), ratio=0.001)
    assert topk_elements(9, topk.share(grad_group.params[0])) == 1


@pytest.mark.parametrize("count", [1, 20, 700, 2000, 9000])
@pytest.mark.parametrize("kind", ["normal", "few are large", "equal", "in the sample only"])
def test_a_sampled_threshold_chooses_exactly_the_largest(kind, count):
    torch.manual_seed(0)
    flat = torch.randn(20_000)
    if kind == "few are large":
        flat[torch.randperm(20_000)[:30]] *= 1000
    elif kind == "equal":
        flat = flat.sign()
    elif kind == "in the sample only":
        flat[::61] *= 1000
    index = largest(flat, count)
    assert len(set(index.tolist())) == count
    assert torch.equal(flat[index].abs().sort().values, flat.abs().topk(count).values.sort().values)


@pytest.mark.parametrize("where", [0, 61, 77])
def test_what_is_no_number_is_chosen_first(where):
    """In the sample that tells the threshold, and outside of it."""
    torch.manual_seed(0)
    flat = torch.randn(20_000)
    flat[where], flat[where + 1] = torch.nan, -torch.inf
    assert {where, where + 1} <= set(largest(flat, 20).tolist())


def test_an_overflow_shows_at_once_and_leaves_nothing_behind():
    grad_group, _ = corrected()
    param = grad_group.params[0]
    sent_of(grad_group, [[1.0, 3.0, 0.0, 0.0]])
    (sent,) = sent_of(grad_group, [[torch.inf, 0.0, torch.nan, 2.0]]).values()
    assert not torch.tensor(sent).isfinite()
    held = grad_group.feedback[param].residual
    assert held is not None
    assert held.isfinite().all()
    assert held[0, 3] == 2.0
    assert grad_group.velocities[param].isfinite().all()
    (sent,) = sent_of(grad_group, [[0.0, 0.0, 0.0, 0.0]]).values()
    assert sent == 3.0  # 2 held, and half of it by the momentum


def test_elements_are_counted_as_they_lie_in_memory():
    feedback = ErrorFeedback()
    feedback.add(torch.arange(6.0).view(2, 3).t())
    assert feedback.take(torch.tensor([4])).tolist() == [4.0]
    assert feedback.residual is not None
    assert feedback.residual[1, 1] == 0


def test_the_share_falls_exponentially_to_the_plans():
    lossy = Lossy(first_ratio=0.25, stages=2, stage_backwards=10)
    shares = [ratio_at(0.01, n, lossy) for n in (0, 9, 10, 19, 20, 500)]
    assert shares == pytest.approx([0.25, 0.25, 0.05, 0.05, 0.01, 0.01])
    assert ratio_at(0.5, 0, lossy) == 0.5
    assert ratio_at(0.01, 0, Lossy(stages=0)) == 0.01


def test_small_parameters_share_a_dense_message_and_others_have_their_own():
    grad_group, _ = topk_group((10, 10), (10,), (5, 5), (7,))
    assert [[e.name for e in s.params] for s in grad_group.slices] == [["1", "3"], ["0"], ["2"]]
    dense, first, second = grad_group.slices
    assert dense.sent_bytes == 17 * 4
    assert first.sent_bytes == 25 * 8 + 8  # up to a multiple of 16
    assert second.sent_bytes == 7 * 8 + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_messages_hold_values_and_numbers(dtype):
    values, index = torch.tensor([1.5, -2.0, 3.0], dtype=dtype), torch.tensor([7, 0, 2**30])
    message = packed(values, index)
    assert 0 <= len(message) - 3 * (dtype.itemsize + 4) < 16
    assert len(message) % 16 == 0
    again, numbers = _unpacked(message, 3, dtype)
    assert torch.equal(again, values)
    assert numbers.tolist() == [7, 0, 2**30]


OPTIONS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "maximize": True, "nesterov": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_momentum_before_the_choice_is_that_of_torch(options):
    theirs = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    mine = nn.Parameter(theirs.detach().clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, **options)
    plain = torch.optim.SGD([mine], lr=0.1, **options)
    momentum = Momentum(plain, [mine])
    velocity = None
    for step in range(5):
        torch.manual_seed(step)
        gradient = torch.randn(3, 2, dtype=torch.float64)
        theirs.grad = gradient.clone()
        optimizer.step()
        momentum.begin()
        velocity, mine.grad = momentum.advance(mine, velocity, gradient.clone())
        kept, plain.param_groups = plain.param_groups, momentum.without_momentum(plain.param_groups)
        plain.step()
        plain.param_groups = kept
        momentum.stepped = False
        momentum.stepped = True
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_was_gathered_without_correction_goes_on():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    parameter.grad = torch.tensor([2.0, 4.0])
    optimizer.step()
    momentum = Momentum(optimizer, [parameter])
    momentum.stepped = True
    momentum.begin()  # the gradient that stands there was stepped with
    velocity, _ = momentum.advance(parameter, None, torch.ones(2))
    assert velocity.tolist() == [2.0, 3.0]


def corrected() -> tuple[TopkGradGroup, Momentum]:
    grad_group, topk = topk_group((1, 4), ratio=0.25)
    parameter = grad_group.params[0].parameter
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    topk.momentum = Momentum(optimizer, topk.parameters)
    topk.momentum.begin()
    return grad_group, topk.momentum


def test_held_elements_gather_momentum_and_lose_it_when_they_are_sent():
    grad_group, _ = corrected()
    param = grad_group.params[0]
    assert sent_of(grad_group, [[1.0, 3.0, 0.0, 0.0]]) == {1: 3.0}
    # Sent at once, its velocity stays; held back, it counts twice: 1 + (0.5 · 1 + 1).
    assert sent_of(grad_group, [[1.0, 0.0, 0.0, 0.0]]) == {0: 2.5}
    assert grad_group.velocities[param].tolist() == [[0.0, 1.5, 0.0, 0.0]]


def test_one_step_for_each_exchange():
    grad_group, momentum = corrected()
    momentum.stepped = False
    momentum.begin()  # gradients were set to None: the step was skipped
    grad_group.params[0].parameter.grad = torch.ones(1, 4)
    momentum.stepped = False
    with pytest.raises(RunError, match="exchanged twice before one step"):
        momentum.begin()
    momentum.stepped = True
    momentum.begin()


def test_dampening_is_refused():
    parameters = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(InputError, match=r"dampening of 0\.1"):
        check_momentum(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1))
    check_momentum(torch.optim.SGD(parameters, lr=0.1, dampening=0.1))
    check_momentum(torch.optim.Adam(parameters))


def test_the_planner_knows_how_much_leaves_at_first():
    assert Lossy().first_ratio == FIRST_RATIO


@pytest.mark.parametrize("feedback", ["residual", "in_place", "mirror"])
def test_what_is_copied_out_of_its_message_waits_for_those_before_it(feedback):
    """While a group comes others are updated, but none that needs new room for that."""
    mine = []
    for i, whole in enumerate((False, True, False)):
        weight = nn.Parameter(torch.zeros(4, 4))
        param = GradParam(str(i), weight, TWO, 1, 16, None, 0, "topk", 0.25, whole, feedback)
        grad_group = TopkGradGroup(i, [param], 1000)
        TopkState([grad_group], Lossy(stages=0))
        grad_group.sent, grad_group.update = 1, lambda: None
        mine.append(grad_group)
    mine[0].slices[0].work = Unfinished()
    arrived: list[TopkGradGroup] = []
    exchange = object.__new__(PriorityExchange)
    exchange.grad_groups = mine
    exchange._arrive = arrived.append
    exchange._work_while_waiting(mine[0])
    assert arrived == [mine[1]]
