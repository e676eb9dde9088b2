"""Top-k exchange on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from lossy import Training, assert_equal_on_all_ranks, lossy_plan, net, share
from meshwright.executor.apply import apply
from meshwright.executor.gradients.feedback import Lossy
from meshwright.planner.schema.errors import InputError, RunError
from meshwright.planner.schema.plan import FeedbackPolicy
from plans import plan, scheduled, unit
from test_dropped import Branches, resumes, unused_on_some_ranks
from torch import Tensor, nn
from torch.nn import functional as F

AT_ONCE = Lossy(stages=0)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def hooked(parameters):
    """Step hooks make it run synchronously."""
    optimizer = momentum(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


OPTIMIZERS = {f.__name__: f for f in (plain, momentum, nesterov, hooked, adamw)}


def the_whole_is_dense(rank: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    dense = Training(lossy_plan("dense", 1.0), make, dtype=torch.float64)
    whole = Training(lossy_plan("topk", 1.0), make, dtype=torch.float64)
    for a, b in zip(dense.steps(range(15)), whole.steps(range(15)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
    assert (whole.run.priority.policies[0].momentum is not None) == (optimizer != "adamw")


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.filterwarnings("ignore:optimizer SGD has step hooks")
def test_ratio_one_equals_dense(ranks, optimizer):
    ranks(2)(the_whole_is_dense, optimizer)


def ranks_stay_equal(rank: int, optimizer: str, world: int) -> None:
    dense = Training(lossy_plan("dense", 1.0, world), OPTIMIZERS[optimizer])
    sparse = Training(lossy_plan("topk", 0.05, world), OPTIMIZERS[optimizer], lossy=AT_ONCE)
    dense.steps(range(20))
    for parameters in sparse.steps(range(20)):
        assert_equal_on_all_ranks(parameters)
    elements = {p.ndim: 0 for p in sparse.model.parameters()}
    for parameter in sparse.model.parameters():
        elements[parameter.ndim] += (
            parameter.numel() if parameter.ndim == 1 else -(-parameter.numel() // 20)
        )
    by_ring = 2 * (world - 1) * 4 * elements[1] // world
    assert sparse.run.meter.sent_bytes == pytest.approx(
        20 * (by_ring + (world - 1) * 8 * elements[2]), rel=0.02
    )
    assert sparse.run.meter.sent_bytes < 0.35 * dense.run.meter.sent_bytes


@pytest.mark.parametrize(
    ("optimizer", "world"),
    [("nesterov", 2), ("adamw", 2), pytest.param("momentum", 4, marks=pytest.mark.slow)],
)
def test_ranks_agree_and_send_less(ranks, optimizer, world):
    ranks(world)(ranks_stay_equal, optimizer, world)


def learns(rank: int) -> None:
    """A twentieth of the gradient trains nearly as well, with momentum before the choice."""
    found = {}
    for exchange, ratio in (("dense", 1.0), ("topk", 0.05)):
        training = Training(lossy_plan(exchange, ratio), momentum, lossy=Lossy(stage_backwards=10))
        training.steps(range(150))
        right = 0.0
        for step in range(900, 910):
            inputs, target = share(0, step, torch.float32)
            right += float((training.model(inputs).argmax(1) == target).float().mean()) / 10
        found[exchange] = right
    assert found["topk"] >= found["dense"] - 0.1, found


def test_a_twentieth_of_the_gradient_trains(ranks):
    ranks(2)(learns)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks):
    ranks(2)(resumes, "topk", 0.1)


def test_parameters_unused_on_some_ranks_or_on_all(ranks):
    ranks(2)(unused_on_some_ranks, "topk")


def decays(rank: int, gathered: float, share_of_decay: float) -> None:
    """One step in which rank 0 alone uses a branch, with a gradient of zero."""
    torch.manual_seed(3)
    model = Branches()
    chosen = lossy_plan("topk", 1.0)
    names = ("head", "branches.0", "branches.1", "branches.2")
    units = [
        msgspec.structs.replace(u, modules=(n,), name=n)
        for u, n in zip(chosen.units, names, strict=True)
    ]
    chosen = msgspec.structs.replace(chosen, units=tuple(units))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=gathered, weight_decay=0.5)
    apply(model, optimizer, chosen, timeout_s=20, lossy=AT_ONCE)
    before = model.branches[0].weight.detach().clone()
    (0 * model(torch.randn(2, 4), rank).sum()).backward()
    optimizer.step()
    after = model.branches[0].weight.detach()
    torch.testing.assert_close(after, before * (1 - 0.1 * 0.5 * share_of_decay))


def test_who_does_not_use_a_parameter_adds_no_decay_before_the_choice(ranks):
    """With momentum each rank decays what it has used; without, the optimizer decays it all."""
    ranks(2)(decays, 0.9, 0.5)
    ranks(2)(decays, 0.0, 1.0)


def closures(rank: int) -> None:
    """A step with a closure applies the momentum once."""
    with_closure, without = (
        Training(lossy_plan("topk", 0.3), momentum, dtype=torch.float64, lossy=AT_ONCE)
        for _ in range(2)
    )
    expected = without.steps(range(6))
    for step in range(6):
        inputs, target = share(rank, step, torch.float64)

        def closure(inputs=inputs, target=target) -> torch.Tensor:
            with_closure.optimizer.zero_grad()
            loss = F.cross_entropy(with_closure.model(inputs), target)
            loss.backward()
            return loss

        assert with_closure.optimizer.step(closure) > 0
        torch.testing.assert_close(with_closure.parameters(), expected[step], rtol=0, atol=0)


def test_closures(ranks):
    ranks(2)(closures)


def two_backwards(rank: int, accumulate: bool) -> None:
    training = Training(lossy_plan("topk", 0.3), momentum)
    inputs, target = share(rank, 0, torch.float32)
    if accumulate:
        with training.model.no_sync():
            F.cross_entropy(training.model(inputs), target).backward()
        F.cross_entropy(training.model(inputs), target).backward()
        training.optimizer.step()
        assert_equal_on_all_ranks(training.parameters())
        return
    F.cross_entropy(training.model(inputs), target).backward()
    with pytest.raises(RunError, match="exchanged twice before one step"):
        F.cross_entropy(training.model(inputs), target).backward()


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_that_accumulate_are_exchanged_once(ranks, accumulate):
    ranks(2)(two_backwards, accumulate)


def refuses_dampening(rank: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(InputError, match=r"without the dampening of 0\.5"):
        apply(model, optimizer, lossy_plan("topk", 0.5))


def test_dampening_is_refused_before_anything_changes(ranks):
    ranks(2)(refuses_dampening)


class Ways(nn.Module):
    """Takes one of two ways, as a layer that is left out or an expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.ways = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


def takes_turns(rank: int, nesterov: bool, feedback: FeedbackPolicy) -> None:
    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.1)

    with scheduled("priority"):
        units = [
            msgspec.structs.replace(
                unit(f"ways.{i}", 1, "none", 2), exchange="topk", feedback=feedback
            )
            for i in range(2)
        ]
        chosen = plan(2, units)
    model = Ways()
    alone = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(alone.parameters())
    apply(model, optimizer, chosen, timeout_s=20, lossy=Lossy(stages=0))
    for step in range(4):
        both = [share(r, step, torch.float32)[0] for r in range(2)]
        with model.no_sync():
            model(both[rank], 0).square().mean().backward()
        model(both[rank], 1).square().mean().backward()
        for way in range(2):
            alone(torch.cat(both), way).square().mean().backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.detach() * 1, q.detach(), msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("feedback", ["residual", "in_place", "mirror"])
def test_what_only_an_earlier_micro_batch_has_used_counts(ranks, nesterov, feedback):
    ranks(2)(takes_turns, nesterov, feedback)
