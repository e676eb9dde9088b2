"""What users' code and the graph may do to gradients while backward goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.parallel import exchange_state_dict, full_state_dict, run_of
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.errors import InputError, RunError
from meshwright.planner.schema.plan import ExchangePolicy, ScheduleName
from plans import SCHEDULES, plan, scheduled, unit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIDE = 200  # of a matrix too large to be packed


def applied(
    model: nn.Module, names: list[str], schedule: ScheduleName, policy: ExchangePolicy = "dense"
) -> torch.optim.Optimizer:
    with scheduled(schedule):
        chosen = plan(2, [unit(name, 1, "none", 2) for name in names])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if policy != "dense":
        chosen = with_exchange(chosen, policy)
    apply(model, optimizer, chosen, timeout_s=20)
    return optimizer


def raised(run: Callable[[], None]) -> str:
    try:
        run()
    except RunError as error:
        return str(error)
    return ""


# -- reading ---------------------------------------------------------------------------------------


def read_in_a_hook(rank: int, policy: ExchangePolicy) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    applied(model, ["0", "1"], "priority", policy)
    norms = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    return raised(lambda: model(torch.full((2, 3), 1.0 + rank)).square().mean().backward())


@pytest.mark.parametrize("policy", ["dense", "sharded", "fully_sharded"])
def test_a_gradient_that_is_read_in_backward_after_it_has_left_raises(ranks, policy):
    """It would be waited for, and what comes after it never be exchanged."""
    for found in ranks(2)(read_in_a_hook, policy):
        assert "was read or changed in backward after it had been sent" in found


class Twice(nn.Module):
    """One layer whose gradient comes in two parts: each segment has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


def reentrant(rank: int, schedule: ScheduleName) -> str:
    model = Twice()
    applied(model, ["layer"], schedule)
    x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    return raised(lambda: model(x).square().mean().backward())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_second_gradient_of_one_backward_raises(ranks, schedule):
    for found in ranks(2)(reentrant, schedule):
        assert "use checkpoint(..., use_reentrant=False)" in found


# -- after a backward that failed ------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ValueError("no memory, say")


def fail(_: Tensor) -> None:
    raise ValueError("no memory, say")


class MayFail(nn.Module):
    """Two layers; backward may fail between them, or between the first one's two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, 3)
        self.second = nn.Linear(3, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(Failing.apply(x) if self.fails else x)


def goes_on(rank: int, schedule: ScheduleName, policy: ExchangePolicy) -> list[dict[str, Tensor]]:
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = MayFail()
        optimizer = applied(model, ["first", "second"], schedule, policy)
        for step in range(3):
            x = torch.full((2, SIDE), 0.1 * (1.0 + rank + step))
            if fails and step == 1:
                model.fails = True
                with pytest.raises(ValueError, match="no memory"):
                    model(x).square().mean().backward()
                model.fails = False
                # Once more, when one of the first layer's two gradients is there.
                hook = model.first.weight.register_hook(fail)
                with pytest.raises(ValueError, match="no memory"):
                    model(3 * x).square().mean().backward()
                hook.remove()
                optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in full_state_dict(model).items()})
    return found


def holds_what_has_not_left(rank: int) -> None:
    """A unit of two matrices: of the later one top-k has chosen when the earlier one's fails."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 12, bias=False) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(12, 2, bias=False))
    with scheduled("priority"):
        chosen = plan(2, [unit(name, 1, "none", 2) for name in "01"])
    chosen = with_exchange(chosen, "topk", 0.1)
    units = [msgspec.structs.replace(one, feedback="in_place") for one in chosen.units]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = msgspec.structs.replace(chosen, units=tuple(units))
    apply(model, optimizer, chosen, timeout_s=20, lossy=Lossy(stages=0))

    def backward() -> None:
        model(torch.full((2, 12), 0.5 + rank)).square().mean().backward()

    def held() -> Tensor:
        return exchange_state_dict(model)["residuals"]["0.1.weight"]["residual"]

    backward()
    optimizer.step()
    optimizer.zero_grad()
    before, gradients = held(), []
    later = layers[1].weight.register_hook(lambda gradient: gradients.append(gradient.clone()))
    hook = layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="no memory"):
        backward()
    hook.remove()
    later.remove()
    optimizer.zero_grad()
    model(torch.zeros(2, 12))  # a new forward forgets the backward that failed
    torch.testing.assert_close(held(), before + gradients[0])


def test_what_was_chosen_when_a_backward_fails_is_held(ranks):
    ranks(2)(holds_what_has_not_left)


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [("barrier", "dense"), ("priority", "dense"), ("priority", "sharded")],
)
def test_ranks_that_all_fail_in_one_backward_go_on(ranks, schedule, policy):
    first, second = ranks(2)(goes_on, schedule, policy)
    for plain, after in (first, second):
        for name, value in plain.items():
            assert torch.equal(value, after[name])
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name])


def fails_between_slices(rank: int) -> str:
    model = MayFail()
    with scheduled("priority"):
        chosen = plan(2, [unit(["first", "second"], 1, "none", 2)], message_bytes=1024)
    apply(model, None, chosen, timeout_s=20)
    x = torch.full((2, SIDE), 0.1 * (1.0 + rank))
    model(x).square().mean().backward()
    exchange = run_of(model).priority
    send = type(exchange.grad_groups[-1]).send

    def fails(group, number: int) -> None:
        send(group, number)
        if number == 0 and len(group.slices) > 1:
            raise ValueError("no memory, say")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(exchange.grad_groups[-1]), "send", fails)
        with pytest.raises(ValueError, match="no memory"):
            model(x).square().mean().backward()
    model.zero_grad()
    return raised(lambda: model(x).square().mean().backward())


def test_a_backward_that_failed_between_the_slices_of_a_gradient_is_told(ranks):
    for found in ranks(2)(fails_between_slices):
        assert "a part of the gradient of" in found


# -- memory formats, norms -------------------------------------------------------------------------


def another_format(rank: int, policy: ExchangePolicy) -> str:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    applied(model, ["0", "2"], "priority", policy)
    x = torch.full((2, 3, 4, 4), 1.0 + rank)
    model.to(memory_format=torch.channels_last)
    try:
        model(x).square().mean().backward()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("policy", ["sharded", "fully_sharded"])
def test_another_memory_format_of_shared_elements_is_told(ranks, policy):
    for found in ranks(2)(another_format, policy):
        assert "the memory format of '0.weight' has changed" in found


def held_in_another_format(rank: int, policy: ExchangePolicy) -> dict[str, Tensor]:
    """At a share of one nothing is held back, and training is that of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    alone = copy.deepcopy(model)
    with scheduled("priority"):
        chosen = with_exchange(plan(2, [unit(name, 1, "none", 2) for name in "02"]), policy)
    made = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    apply(model, made[0], chosen, timeout_s=20, lossy=Lossy(stages=0))
    for step in range(4):
        if step == 2:
            model.to(memory_format=torch.channels_last)
        both = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        for net, steps, x in ((model, made[0], both[rank]), (alone, made[1], both.flatten(0, 1))):
            net(x).square().mean().backward()
            steps.step()
            steps.zero_grad()
    for name, value in full_state_dict(model).items():
        # Eight bits round.
        most = 1e-2 if policy == "int8" else 1e-5
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=most, atol=most)
    return {name: value.clone() for name, value in full_state_dict(model).items()}


@pytest.mark.parametrize("policy", ["topk", "int8"])
def test_what_is_held_follows_the_memory_format(ranks, policy):
    first, second = ranks(2)(held_in_another_format, policy)
    for name, value in first.items():
        assert torch.equal(value, second[name])


def norms(rank: int) -> list[float]:
    with scheduled("priority"):
        chosen = plan(2, [unit(name, 2, "column", 2) for name in ("0", "1")])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, SIDE), nn.Linear(SIDE, 2 * SIDE))
    apply(model, None, chosen, timeout_s=20)
    found = []
    for foreach in (None, True):
        model(torch.full((2, 3), 1.0 + rank)).square().mean().backward()
        next(model.parameters()).grad.sum()  # now it is a divided gradient, and the others wait
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=foreach)
        found.append(float(total))
        model.zero_grad()
    return found


def test_norms_of_divided_gradients_of_which_some_wait_are_those_of_the_whole(ranks):
    first, second = ranks(2)(norms)
    assert first == second
    assert first[0] == pytest.approx(first[1])


# -- gradients in one memory -----------------------------------------------------------------------


class Sum(nn.Module):
    """Autograd gives both parameters views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(1, SIDE, SIDE) / SIDE)
        self.b = nn.Parameter(torch.randn(SIDE * SIDE) / SIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a.squeeze(0) + self.b.view(SIDE, SIDE))


def of_one_memory(rank: int, schedule: ScheduleName, policy: ExchangePolicy) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Sum(), nn.Linear(SIDE, 2))
    alone = nn.Sequential(Sum(), nn.Linear(SIDE, 2))
    alone.load_state_dict(model.state_dict())
    optimizer = applied(model, ["0", "1"], schedule, policy)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    whole = torch.randn(8, SIDE)
    for _ in range(3):
        for net, steps, x in ((model, optimizer, whole[4 * rank :][:4]), (alone, other, whole)):
            net(x).square().mean().backward()
            steps.step()
            steps.zero_grad()
    found = full_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value)
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [("barrier", "dense"), ("priority", "dense"), ("priority", "sharded")],
)
def test_gradients_that_share_memory_are_averaged_each(ranks, schedule, policy):
    first, second = ranks(2)(of_one_memory, schedule, policy)
    for name, value in first.items():
        assert torch.equal(value, second[name])
