"""Priority exchange: the numbers of a barrier, steps that are lazy and never loose."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.gradients.buckets import GradParam, Votes
from meshwright.executor.gradients.pending import PendingParam, WaitingGradient
from meshwright.executor.launch.start import memory_bytes
from meshwright.executor.parallel import run_of
from meshwright.models import zoo as models
from meshwright.models.units.discover import discover
from meshwright.planner.schema.errors import RunError
from meshwright.planner.simulate.slicing import cut
from plans import plan, plan_for, scheduled, unit
from reference import optimizer_of
from torch import Tensor, nn
from torch.nn import functional as F

SLICE = 4096


def gently(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """At a rate at which single samples do not make training diverge."""
    optimizer.param_groups[0]["lr"] = 1e-4
    return optimizer


class Barrier:
    """The same training with its slices reduced one after the other when backward is over: it takes
    the local gradients as they are computed (a kernel run twice may round differently), reduces
    them and steps parameters of its own, which each forward must have met."""

    def __init__(self, model: nn.Module, optimizer: str, limit: int) -> None:
        self.grad_groups, self.limit = run_of(model).priority.grad_groups, limit
        self.twins = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
        self.optimizer = gently(optimizer_of(optimizer, self.twins.values()))
        self.waits = 0
        for parameter, twin in self.twins.items():
            twin.grad = torch.zeros_like(twin)
            parameter.register_hook(partial(self.keep, twin))
        for module in model.modules():
            module.register_forward_hook(self.check)

    @staticmethod
    def keep(twin: nn.Parameter, gradient: Tensor) -> None:
        twin.grad.copy_(gradient)

    def check(self, module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            assert not isinstance(parameter, PendingParam), f"{name} was used before its update"
            assert torch.equal(parameter.detach(), self.twins[parameter].detach()), name

    def step(self) -> None:
        self.waits += sum(isinstance(p, PendingParam) for p in self.twins)
        for grad_group in self.grad_groups:
            for spec in cut([e.shared_bytes for e in grad_group.params], self.limit):
                mine = [self.twins[grad_group.params[i].parameter] for i in spec.parameters]
                self.reduce([t.grad.view(-1) for t in mine], spec.part, spec.parts)
        self.optimizer.step()
        for twin in self.twins.values():
            twin.grad.zero_()

    def reduce(self, flats: list[Tensor], part: int, parts: int) -> None:
        bounds = [flats[0].numel() * (part + i) // parts for i in (0, 1)]
        wire = flats[0][bounds[0] : bounds[1]] if len(flats) == 1 else torch.cat(flats)
        dist.all_reduce(wire)
        wire /= dist.get_world_size()
        if len(flats) > 1:
            for flat, piece in zip(flats, wire.split([f.numel() for f in flats]), strict=True):
                flat.copy_(piece)


def equals_a_barrier(rank: int, name: str, optimizer: str, steps: int, size: int) -> int:
    """Bit for bit the training in which the same slices are reduced when backward is over."""
    torch.manual_seed(5)
    workload = models.build(name)
    model = workload.model.train()
    torch.manual_seed(100 + rank)
    limit, ours = 2**18, gently(optimizer_of(optimizer, model.parameters()))
    with scheduled("priority"):
        found = discover(model, workload.make_batch(size))
        chosen = plan_for(found, dist.get_world_size(), statistics="local", message_bytes=limit)
    apply(model, ours, chosen)
    barrier = Barrier(model, optimizer, limit)
    for _ in range(steps):
        batch = workload.make_batch(size)
        workload.loss(model(*batch.args, **batch.kwargs), batch.target).backward()
        ours.step()
        ours.zero_grad()
        barrier.step()
    waits = barrier.waits
    for label, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), barrier.twins[parameter].detach()), label
        assert parameter.isfinite().all(), label
    return waits


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("sgd", "mlp"),
        ("adamw", "gpt-tiny"),
        ("sgd", "seq2seq-tiny"),
        ("adamw", "cnn-digits"),
        pytest.param("adamw", "mlp", marks=pytest.mark.slow),
        pytest.param("sgd", "gpt-tiny", marks=pytest.mark.slow),
        pytest.param("adamw", "seq2seq-tiny", marks=pytest.mark.slow),
        pytest.param("sgd", "cnn-digits", marks=pytest.mark.slow),
    ],
)
def test_equals_a_barrier(ranks, optimizer, name):
    waited = ranks(2)(equals_a_barrier, name, optimizer, 20, 2)
    assert min(waited) > 0


TINY = ["mlp", "cnn-digits", "gpt-tiny", "seq2seq-tiny", "bert-tiny", "gpt2-tiny", "vit-tiny"]
THUMBNAILS = ["vgg11-32", "vgg16-32", "vgg16-32-narrow", "vgg19-32", "resnet50-32"]
SMALL = [*THUMBNAILS, "alexnet", "seq2seq-mini", "seq2seq", "gpt-mini"]
PUBLISHED = ["vgg11", "vgg16", "vgg19", "resnet50", "wide_resnet101", "gpt-small"]


BYTES_OF_PARAMETERS = 8
"""Beside 0.4 GB for torch, alexnet took 6 times its parameters on each of 2 and of 4 ranks,
gpt-small 8 times: parameters, gradients and momentum of both trainings are 6, the rest is passing.
"""
MEMORY_SHARE = 0.9
"""Of all memory, what a test may take."""


def bytes_needed(name: str, world: int) -> float:
    with torch.device("meta"):
        model = models.build(name).model
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return world * (BYTES_OF_PARAMETERS * parameters + 4e8)


def test_every_reference_workload_is_among_those_compared():
    assert sorted([*TINY, *SMALL, *PUBLISHED]) == sorted(models.names())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["resnet50-32", "vgg11-32", "gpt-mini"])
def test_equals_a_barrier_on_more(ranks, name):
    ranks(2)(equals_a_barrier, name, "sgd", 5, 1, limit_s=280)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [*TINY, *SMALL])
def test_equals_a_barrier_on_all(ranks, name, world):
    ranks(world)(equals_a_barrier, name, "sgd", 20, 1, limit_s=2900)


@pytest.mark.long
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_a_barrier_as_published(ranks, name, world):
    """One image of 224 pixels (or one text) for each rank and step. Two trainings of 140 million
    parameters on each of 4 ranks take 20 GB: the pair is skipped where there is not that much."""
    needed = bytes_needed(name, world) / 1e9
    here = MEMORY_SHARE * memory_bytes(torch.device("cpu")) / 1e9
    if needed > here:
        pytest.skip(f"{name} on {world} ranks takes {needed:.0f} GB, {here:.0f} GB can be used")
    ranks(world)(equals_a_barrier, name, "sgd", 20, 1, limit_s=5900)


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)


def prepared(kind=torch.optim.SGD, degree: int = 1, **options):
    """A model under priority exchange, a copy for one process, and their optimizers."""
    model = net().double()
    alone = copy.deepcopy(model)
    options = {"lr": 0.1, **options}
    ours, theirs = kind(model.parameters(), **options), kind(alone.parameters(), **options)
    world = dist.get_world_size()
    units = [unit("2", degree, "column", world)] if degree > 1 else []
    with scheduled("priority"):
        apply(model, ours, plan(world, units, message_bytes=64), timeout_s=20)
    return model, alone, ours, theirs


def loss_of(model: nn.Module, rank: int, seed: int = 0) -> Tensor:
    inputs, target = data(rank, seed)
    return F.cross_entropy(model(inputs.double()), target)


def whole_loss(model: nn.Module, seed: int = 0) -> Tensor:
    world = dist.get_world_size()
    return sum(loss_of(model, r, seed) for r in range(world)) / world


def step_both(rank, model, alone, ours, theirs, seed=0, clear=True):
    for m, o, loss in ((model, ours, loss_of(model, rank, seed)), (alone, theirs, None)):
        (whole_loss(m, seed) if loss is None else loss).backward()
        o.step()
        if clear:
            o.zero_grad()


def equal(model: nn.Module, alone: nn.Module) -> None:
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-9, atol=1e-12)


def reads_wait(rank: int) -> None:
    """Whatever touches a parameter after a step sees it updated, and only that unit waits."""
    touches = [
        lambda p: p.detach().clone(),
        lambda p: p.data.clone(),
        lambda p: copy.deepcopy(p).detach(),
        lambda p: torch.stack([p]).squeeze(0).detach(),
        lambda p: torch._foreach_mul([p], 1.0)[0].detach(),
        lambda p: torch.add(input=p, other=0).detach(),
    ]
    for touch in touches:
        model, alone, ours, theirs = prepared()
        step_both(rank, model, alone, ours, theirs)
        parameter = model[0].weight
        assert isinstance(parameter, PendingParam)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.shape == (6, 4)
        assert parameter.grad is None
        assert parameter in set(model.parameters())
        assert isinstance(parameter, PendingParam), "metadata must not wait"
        torch.testing.assert_close(touch(parameter), alone[0].weight.detach())
        assert not isinstance(parameter, PendingParam)
        equal(model, alone)


def replace_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)


def takes_over_what_was_said(rank: int) -> None:
    """Nothing that is changed after ``step`` changes the update."""
    changes = [
        lambda o: o.zero_grad(set_to_none=True),
        lambda o: o.zero_grad(set_to_none=False),
        lambda o: o.param_groups[0].update(lr=100.0),
        lambda o: [p.grad.mul_(5) for p in o.param_groups[0]["params"]],
        replace_gradients,
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5).step(),
    ]  # fmt: skip
    for change in changes:
        model, alone, ours, theirs = prepared(momentum=0.9)
        step_both(rank, model, alone, ours, theirs, clear=False)
        assert any(isinstance(p, PendingParam) for p in model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change(ours)
        equal(model, alone)


def zeros_are_zeros(rank: int) -> None:
    """Gradients that are cleared without a wait are zero, and the next ones add up from there."""
    model, alone, ours, theirs = prepared(momentum=0.9)
    for seed in range(3):
        for o in (ours, theirs):
            o.zero_grad(set_to_none=False)
        step_both(rank, model, alone, ours, theirs, seed, clear=False)
    ours.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    equal(model, alone)


def schedulers(rank: int) -> None:
    """A scheduler made before the plan was applied, one made after, and none warns."""
    for early, degree in itertools.product((True, False), (1, 2)):
        model, alone = net().double(), net().double()
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, alone))
        make = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731
        first = make(ours) if early else None
        units = [unit("2", degree, "column", 2)] if degree > 1 else []
        with scheduled("priority"):
            apply(model, ours, plan(2, units, message_bytes=64), timeout_s=20)
        plans = (first or make(ours), make(theirs))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(4):
                step_both(rank, model, alone, ours, theirs, seed)
                for scheduler in plans:
                    scheduler.step()
        if degree == 1:
            equal(model, alone)
        else:
            run_of(model).finish_steps()


def other_optimizers(rank: int) -> None:
    """Each of torch's that keep their state per parameter; others wait, and say so."""
    names = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta"]
    for name in names:
        model, alone, ours, theirs = prepared(getattr(torch.optim, name), lr=0.01)
        for seed in range(3):
            step_both(rank, model, alone, ours, theirs, seed)
        assert any(isinstance(p, PendingParam) for p in model.parameters()), name
        equal(model, alone)
    model, alone, ours, theirs = prepared(torch.optim.AdamW, fused=True)
    step_both(rank, model, alone, ours, theirs)
    step_both(rank, model, alone, ours, theirs, 1)
    equal(model, alone)


class Whole(torch.optim.SGD):
    """An optimizer that looks at all gradients together."""

    def step(self, closure=None):
        norm = sum(p.grad.norm() for g in self.param_groups for p in g["params"])
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad / norm)


def waits_for_unknown_optimizers(rank: int) -> None:
    model, alone, ours, theirs = prepared(Whole)
    with pytest.warns(UserWarning, match="Whole is not known to update each parameter by itself"):
        step_both(rank, model, alone, ours, theirs)
    assert not any(isinstance(p, PendingParam) for p in model.parameters())
    equal(model, alone)
    closing, _, ours, _ = prepared()
    loss_of(closing, rank).backward()
    ours.step(lambda: None)
    assert not any(isinstance(p, PendingParam) for p in closing.parameters())


def clips(rank: int) -> None:
    """Clipping by the global norm waits, and is that of one process."""
    model, alone, ours, theirs = prepared(momentum=0.9)
    for seed in range(3):
        loss_of(model, rank, seed).backward()
        whole_loss(alone, seed).backward()
        assert isinstance(model[0].weight.grad, WaitingGradient)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, alone)]
        torch.testing.assert_close(norms[0], norms[1])
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
    equal(model, alone)


def one_gradient_alone(rank: int) -> None:
    """Reading one gradient gives the average, and leaves others on their way."""
    model, alone, ours, theirs = prepared()
    loss_of(model, rank).backward()
    whole_loss(alone).backward()
    torch.testing.assert_close(model[4].weight.grad.clone(), alone[4].weight.grad)
    assert type(model[4].weight.grad) is Tensor
    ours.step()
    theirs.step()
    equal(model, alone)


def states_are_finished(rank: int) -> None:
    """``state_dict`` of model and optimizer wait; loading goes on from there."""
    model, alone, ours, theirs = prepared(torch.optim.AdamW)
    step_both(rank, model, alone, ours, theirs)
    saved = copy.deepcopy(ours.state_dict())
    for key, state in theirs.state_dict()["state"].items():
        torch.testing.assert_close(saved["state"][key]["exp_avg"], state["exp_avg"])
    step_both(rank, model, alone, ours, theirs, 1)
    for m, o in ((model, ours), (alone, theirs)):
        o.load_state_dict(copy.deepcopy(saved))
        m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})
    step_both(rank, model, alone, ours, theirs, 2)
    equal(model, alone)


def evaluation_makes_plain_state(rank: int) -> None:
    """The first touch may come under ``inference_mode``: what a step makes there can be changed."""
    model, alone, ours, theirs = prepared(torch.optim.AdamW)
    for seed in range(3):
        step_both(rank, model, alone, ours, theirs, seed)
        with torch.inference_mode():
            model.eval()
            model(data(rank)[0].double())
            model.train()
    equal(model, alone)


def averages_of_weights(rank: int) -> None:
    """torch's own moving average of the weights sees each step's result."""
    model, alone, ours, theirs = prepared(degree=1)
    averages = []
    for m in (model, alone):
        average = torch.optim.swa_utils.AveragedModel(
            m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        averages.append(average)
    for seed in range(3):
        step_both(rank, model, alone, ours, theirs, seed)
        for m, average in zip((model, alone), averages, strict=True):
            average.update_parameters(m)
    equal(*averages)


def agrees_on_a_new_order(rank: int) -> None:
    """After some steps all ranks change to one measured order, at the same step."""
    model, alone, ours, theirs = prepared()
    order = run_of(model).priority._orders
    before = list(order.slots)
    order._grad_groups[0].ready_s = 0.0
    seen = []
    for seed in range(12):
        step_both(rank, model, alone, ours, theirs, seed)
        seen.append([tuple(slot) for slot in order.slots])
    equal(model, alone)
    mine: list = [None, None]
    dist.all_gather_object(mine, seen)
    assert mine[0] == mine[1]
    assert sorted(before) == sorted(order.slots)


def leaves_nothing_to_collect(rank: int) -> None:
    """Gradients are freed when they have been applied: none is in a cycle of references."""
    model, alone, ours, theirs = prepared()
    step_both(rank, model, alone, ours, theirs)
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            step_both(rank, model, alone, ours, theirs, seed)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    equal(model, alone)


def threads_of_groups_do_not_interrupt(rank: int) -> None:
    """Those of the exchange's groups are batch threads; this one is not."""
    prepared()
    threads = Path("/proc/self/task").iterdir()
    gloo = [t.name for t in threads if "gloo" in (t / "comm").read_text()]
    kinds = {os.sched_getscheduler(int(t)) for t in gloo}
    assert kinds == {os.SCHED_BATCH, os.SCHED_OTHER}, "the default group is the user's own"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


class Spare(nn.Module):
    """With a large layer that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 160), nn.Linear(160, 3)
        self.spare = nn.Linear(160, 160, bias=False)  # not packed with others

    def forward(self, x: Tensor, *, spare: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.spare(x) if spare else x)


def sends_nothing_that_no_rank_computed(rank: int) -> None:
    """A layer that no rank has used, then one rank, then none again, then all."""
    torch.manual_seed(7)
    model = Spare().double()
    alone = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    with scheduled("priority"):
        units = [unit(name, 1, "none", 2) for name in ("first", "spare", "last")]
        apply(model, ours, plan(2, units, message_bytes=64), timeout_s=20)
    meter, sent = run_of(model).meter, []
    for step, users in enumerate([(), (0,), (), (0, 1)]):
        inputs, targets = zip(*(data(r, step) for r in range(2)), strict=True)

        def loss(m: nn.Module, r: int, at=(inputs, targets, users)) -> Tensor:
            return F.cross_entropy(m(at[0][r].double(), spare=r in at[2]), at[1][r])

        before = meter.exchanged_bytes
        loss(model, rank).backward()
        sent.append(meter.exchanged_bytes - before)
        (sum(loss(alone, r) for r in range(2)) / 2).backward()
        assert (model.spare.weight.grad is None) == (not users)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    equal(model, alone)
    spare = sum(p.nbytes for p in model.spare.parameters())
    assert sent == [sent[0], sent[0] + spare, sent[0], sent[0] + spare], (sent, spare)


def votes_hold_no_gradient_back(rank: int) -> None:
    """Votes travel behind all slices: what has arrived is applied before they are there, but for
    what is waited for last."""
    torch.manual_seed(7)
    model, world = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), dist.get_world_size()
    units = [unit(name, 1, "none", world) for name in ("0", "1", "2")]
    with scheduled("priority"):
        apply(model, torch.optim.SGD(model.parameters()), plan(world, units, message_bytes=2**16))
    model(torch.randn(4, 256)).square().mean().backward()
    exchange = run_of(model).priority
    votes, seen = exchange._votes, []

    def counted() -> set[GradParam]:
        seen.append(True)
        return votes.counted()

    exchange._votes = Votes(counted, lambda: False)
    *first, last = [group for group in exchange.grad_groups if group.in_flight]
    assert len(first) == 2
    for group in first:
        exchange.finish(group)
        assert not seen
    exchange.finish(last)
    assert seen


def other_backwards_are_told_of(rank: int) -> None:
    """A rank that counts other backwards is told of before any further one begins."""
    model, _, ours, _ = prepared()
    gradients = run_of(model).gradients
    gradients._number += rank
    loss_of(model, rank).backward()
    ours.step()
    with pytest.raises(RunError, match="ranks end different backwards"):
        [parameter.detach().clone() for parameter in model.parameters()]


CHECKS = [
    votes_hold_no_gradient_back,
    other_backwards_are_told_of,
    sends_nothing_that_no_rank_computed,
    leaves_nothing_to_collect,
    threads_of_groups_do_not_interrupt,
    reads_wait,
    takes_over_what_was_said,
    zeros_are_zeros,
    schedulers,
    other_optimizers,
    waits_for_unknown_optimizers,
    clips,
    one_gradient_alone,
    states_are_finished,
    evaluation_makes_plain_state,
    averages_of_weights,
    agrees_on_a_new_order,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_priority(ranks, check):
    ranks(2)(check)
