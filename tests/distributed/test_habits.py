"""What programs do with a model and an optimizer that have a plan, as with any other."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.parallel import (
    full_optimizer_state_dict,
    full_state_dict,
    is_parallel,
    load_full_optimizer_state_dict,
)
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(120)

SIZE = 8


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SIZE, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (SIZE,), generator=generator)


def share(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs, target = batch(seed)
    rows = slice(0, 5) if rank == 0 else slice(5, SIZE)
    return inputs[rows], target[rows]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


def whole(schedule: Any = "barrier") -> Plan:
    with scheduled(schedule):
        return plan(2, message_bytes=200)


def sharded(policy: Any, *names: str) -> Plan:
    with scheduled("priority"):
        units = [msgspec.structs.replace(unit(n, 1, "none", 2), exchange=policy) for n in names]
        return plan(2, units, message_bytes=300)


Trained = tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]
"""A model, its optimizer and a batch for it."""


def train(*several: Trained) -> None:
    """A step of each."""
    for model, optimizer, (inputs, target) in several:
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(model: nn.Module, alone: nn.Module) -> None:
    expected = alone.state_dict()
    for name, found in full_state_dict(model).items():
        torch.testing.assert_close(found, expected[name], msg=name)


# -- losses ----------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Notes a loss of its own in a list that all layers and the model share."""

    def __init__(self, noted: list[Tensor], where: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.linear, self.noted, self.where = nn.Linear(4, 4), noted, where

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        self.noted.append(made.square().mean())
        self.where["last"] = [made.abs().mean()]
        return made


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.noted: list[Tensor] = []
        self.where: dict[str, list[Tensor]] = {}
        self.layers = nn.ModuleList([Noting(self.noted, self.where) for _ in range(2)])
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.noted.clear()
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def shares_lists(rank: int, schedule: str) -> None:
    model, alone = Sharing().double(), Sharing().double()
    optimizer, other = sgd(model), sgd(alone)
    apply(model, optimizer, whole(schedule), timeout_s=20)
    noted = model.noted
    for seed in range(3):
        for used, step, part in (
            (model, optimizer, share(rank, seed)),
            (alone, other, batch(seed)),
        ):
            loss = F.cross_entropy(used(part[0]), part[1])
            (loss + sum(used.noted) + used.where["last"][0]).backward()
            step.step()
            step.zero_grad()
        assert len(model.noted) == 2
        assert all(layer.noted is noted for layer in (model, *model.layers))
        equal(model, alone)


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_lists_that_modules_share_stay_one(ranks, schedule):
    ranks(2)(shares_lists, schedule)


def penalised_later(rank: int, parts: str) -> None:
    """From the second step on the loss takes a divided parameter, or one that a rank has not."""
    model = net()
    if parts == "divided":
        chosen = plan(2, [unit("0", 2, "column", 2), unit("2", 2, "row", 2)], message_bytes=200)
    else:
        first = msgspec.structs.replace(unit("0", 1, "none", 2), layout=Layout(groups=1, degree=1))
        with scheduled("priority"):
            chosen = plan(2, [first], message_bytes=200)
    optimizer = sgd(model)
    apply(model, optimizer, chosen, timeout_s=20)
    for seed in range(2):
        inputs, target = share(rank, seed)
        loss = F.cross_entropy(model(inputs), target)
        with torch.no_grad():
            model[0].weight.norm()  # looked at
        if seed and (parts == "divided" or rank == 0):  # the rank that has none of it knows nothing
            with pytest.raises(InputError, match=r"the loss uses parameter '0\.weight'"):
                model[0].weight.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("parts", ["divided", "absent"])
def test_a_penalty_that_begins_later_is_refused_as_well(ranks, parts):
    ranks(2)(penalised_later, parts)


def derives_gradients(rank: int) -> None:
    model = net()
    apply(model, sgd(model), whole(), timeout_s=20)
    inputs, target = batch(0)
    rows = slice(4 * rank, 4 * rank + 4)
    loss = F.cross_entropy(model(inputs[rows]), target[rows])
    with pytest.raises(InputError, match="plan by priority"):
        loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_are_not_for_buckets(ranks):
    ranks(2)(derives_gradients)


# -- optimizers ------------------------------------------------------------------------------------


def clamps(rank: int, schedule: str, *, counted: bool) -> None:
    """A step that somebody has put on the optimizer is the one that is made, also where a scheduler
    has ``counted`` it before the plan came."""
    model, alone = net(), net()
    optimizer, other = sgd(model), sgd(alone)
    for used, step_of in ((model, optimizer), (alone, other)):
        own = step_of.step

        def step(self: Any, own: Any = own, used: Any = used) -> None:
            own()
            with torch.no_grad():
                for p in used.parameters():
                    p.clamp_(-0.05, 0.05)

        step_of.step = MethodType(step, step_of)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(other, 1)
    if counted:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    apply(model, optimizer, whole(schedule), timeout_s=20)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # marks the step as its own
    for seed in range(3):
        train((model, optimizer, share(rank, seed)), (alone, other, batch(seed)))
        equal(model, alone)
    assert max(float(p.detach().abs().max()) for p in model.parameters()) <= 0.05


@pytest.mark.parametrize("counted", [False, True], ids=["plain", "counted"])
@pytest.mark.parametrize("schedule", ["barrier", "priority"])
@pytest.mark.filterwarnings("ignore:optimizer SGD has been given a step of its own")
def test_a_step_that_was_given_to_the_optimizer_is_made(ranks, schedule, counted):
    ranks(2)(clamps, schedule, counted=counted)


def looks_before_it_steps(rank: int) -> None:
    """A forward with a graph, whose backward never comes, between a backward and its step."""
    model, alone = net(), net()
    optimizer, other = sgd(model), sgd(alone)
    units = [unit("0", 2, "column", 2), unit("2", 2, "row", 2)]
    with scheduled("priority"):
        apply(model, optimizer, plan(2, units, message_bytes=200), timeout_s=20)
    for seed in range(3):
        (inputs, target), (every, targets) = share(rank, seed), batch(seed)
        F.cross_entropy(model(inputs), target).backward()
        accuracy = (model(inputs).argmax(1) == target).double().mean()
        assert 0 <= accuracy <= 1
        F.cross_entropy(alone(every), targets).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        equal(model, alone)


def test_a_look_at_the_accuracy_before_the_step(ranks):
    ranks(2)(looks_before_it_steps)


def searches_along_a_line(rank: int, schedule: str, search: str | None) -> None:
    """LBFGS, which goes as far as the loss tells it, with uneven shares."""
    model, alone = net(), net()
    made = [
        torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
        for m in (model, alone)
    ]
    apply(model, made[0], whole(schedule), timeout_s=20)
    for seed in range(2):
        used = (model, made[0], share(rank, seed)), (alone, made[1], batch(seed))
        for one, optimizer, (inputs, target) in used:

            def closure(one: Any = one, inputs: Any = inputs, target: Any = target) -> Tensor:
                one.zero_grad()
                loss = F.cross_entropy(one(inputs), target)
                loss.backward()
                return loss

            optimizer.step(closure)
        equal(model, alone)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("schedule", ["barrier", "priority"])
@pytest.mark.filterwarnings("ignore:optimizer LBFGS is not known to update each parameter")
def test_lbfgs_goes_by_the_loss_of_the_whole_batch(ranks, schedule, search):
    ranks(2)(searches_along_a_line, schedule, search)


def shares_an_optimizer(rank: int) -> None:
    first, second = net(), net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    apply(first, optimizer, whole(), timeout_s=20)
    with pytest.raises(InputError, match="was given with another model to which a plan was appli"):
        apply(second, optimizer, whole(), timeout_s=20)
    apply(second, sgd(second), whole(), timeout_s=20)
    train((second, sgd(second), share(rank, 0)))


def test_an_optimizer_is_of_one_plan(ranks):
    ranks(2)(shares_an_optimizer)


def steps_in_backward(rank: int, schedule: str, whose: str) -> None:
    model = net()
    optimizer = sgd(model)
    apply(model, optimizer, whole(schedule), timeout_s=20)
    inputs, target = share(rank, 0)
    train((model, optimizer, (inputs, target)))
    parameter: Any = model[2].weight
    used = optimizer if whose == "given" else torch.optim.SGD([parameter], lr=0.1)
    hook = parameter.register_post_accumulate_grad_hook(lambda _: used.step())
    with pytest.raises(InputError, match="SGD steps while backward runs, before its gradients"):
        F.cross_entropy(model(inputs), target).backward()
    hook.remove()
    optimizer.zero_grad()
    train((model, optimizer, (inputs, target)))


@pytest.mark.parametrize("whose", ["given", "another"])
@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_steps_inside_backward_are_refused(ranks, schedule, whose):
    ranks(2)(steps_in_backward, schedule, whose)


def gets_groups(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    apply(model, optimizer, whole(), timeout_s=20)
    train((model, optimizer, share(rank, 0)))
    scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer.add_param_group({"params": [scale]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            inputs, target = share(rank, seed)
            F.cross_entropy(model(inputs) * scale, target).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [str(w.message) for w in caught if "nobody exchanges their gradients" in str(w.message)]
    assert len(told) == (rank == 0), [str(w.message) for w in caught]


def test_parameters_that_an_optimizer_gets_later_are_told_of(ranks):
    ranks(2)(gets_groups)


def loads_one_process(rank: int) -> None:
    """What one process has saved of its optimizer, into one whose parameters are divided."""
    made = [net() for _ in range(2)]
    alone, model = made
    other, optimizer = (torch.optim.Adam(m.parameters(), lr=0.1) for m in made)
    train((alone, other, batch(0)))
    divided = plan(2, [unit("0", 2, "column", 2), unit("2", 2, "row", 2)], message_bytes=200)
    apply(model, optimizer, divided, timeout_s=20)
    model.load_state_dict(alone.state_dict())
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    train((model, optimizer, share(rank, 1)), (alone, other, batch(1)))
    equal(model, alone)


def test_the_optimizer_of_one_process_goes_on_divided(ranks):
    ranks(2)(loads_one_process)


def converts(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    apply(model, optimizer, whole("priority"), timeout_s=20)
    message = "exchange its float64 parameters, and cannot become bfloat16: convert it before"
    with pytest.raises(InputError, match=message):
        model.bfloat16()
    with pytest.raises(InputError, match="cannot become float16"):
        model.to(torch.float16)
    assert model.to("cpu").double() is model
    train((model, optimizer, share(rank, 0)))


def test_a_planned_model_keeps_its_types(ranks):
    ranks(2)(converts)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.gate = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gate


def resumes_one_number(rank: int, policy: str) -> None:
    made = [nn.Sequential(Gated()).double() for _ in range(3)]
    steps = [torch.optim.Adam(m.parameters(), lr=0.1) for m in made]
    (model, again, alone), (optimizer, later, other) = made, steps
    for used, step in ((model, optimizer), (again, later)):
        apply(used, step, sharded(policy, "0"), timeout_s=20)
    for seed in range(4):
        if seed == 2:
            again.load_state_dict(copy.deepcopy(full_state_dict(model)))
            state = copy.deepcopy(full_optimizer_state_dict(model, optimizer))
            load_full_optimizer_state_dict(again, later, state)
            model, optimizer = again, later
        train((model, optimizer, share(rank, seed)), (alone, other, batch(seed)))
    equal(model, alone)


@pytest.mark.parametrize("policy", ["sharded", "fully_sharded"])
def test_a_parameter_of_one_number_goes_on_from_a_whole_state(ranks, policy):
    ranks(2)(resumes_one_number, policy)


# -- states and classes ----------------------------------------------------------------------------


def loads_the_first_ranks(rank: int, how: str, folder: str) -> None:
    """What rank 0 alone has saved, as a DDP script does, is no state of the other ranks."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    divided = plan(2, [unit("0", 2, "column", 2), unit("2", 2, "row", 2)], message_bytes=200)
    apply(model, optimizer, divided if how == "divided" else sharded("sharded", "2"), timeout_s=20)
    train((model, optimizer, share(rank, 0)))
    paths = [Path(folder) / f"{r}.pt" for r in range(2)]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, paths[rank])
    expected = full_state_dict(model)
    dist.barrier()
    own, first = (torch.load(path, weights_only=False) for path in (paths[rank], paths[0]))
    train((model, optimizer, share(rank, 1)))
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, expected[name]), name
    if rank == 0:
        return
    with pytest.raises(InputError, match="the part of rank 0 of 2, and is loaded on rank 1 of 2"):
        optimizer.load_state_dict(first["optimizer"])
    if how == "divided":
        with pytest.raises(InputError, match="the slice of rank 0, and is loaded on rank 1"):
            model.load_state_dict(first["model"])


@pytest.mark.parametrize("how", ["divided", "sharded"])
def test_what_one_rank_has_saved_is_no_others(ranks, tmp_path, how):
    ranks(2)(loads_the_first_ranks, how, str(tmp_path))


def keeps_the_best(rank: int) -> None:
    """A state that was copied or averaged loads back where it came from."""
    model = net()
    optimizer = sgd(model)
    apply(model, optimizer, sharded("fully_sharded", "0", "2", "4"), timeout_s=20)
    best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    expected = {name: value.clone() for name, value in full_state_dict(model).items()}
    inputs, target = share(rank, 0)
    F.cross_entropy(model(inputs), target).backward()
    optimizer.step()
    mean = {name: 0.5 * best[name] + 0.5 * value for name, value in model.state_dict().items()}
    moved = {name: value.clone() for name, value in full_state_dict(model).items()}
    model.load_state_dict(mean)
    for name, found in full_state_dict(model).items():
        torch.testing.assert_close(found, (expected[name] + moved[name]) / 2)
    model.load_state_dict(best)
    for name, found in full_state_dict(model).items():
        assert torch.equal(found, expected[name])


def test_copies_of_a_state_load_back(ranks):
    ranks(2)(keeps_the_best)


class Conditional(nn.BatchNorm1d):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.norm = nn.Linear(4, 3), Conditional(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x), scale=x[:, :1])


def normalises(rank: int) -> None:
    """A class of the user's takes more than torch's; a rank without samples keeps statistics."""
    model, alone = Conditioned().double(), Conditioned().double()
    apply(model, sgd(model), plan(2, statistics="local"), timeout_s=20)
    inputs, target = batch(0)
    rows = slice(0, SIZE) if rank == 0 else slice(SIZE, SIZE)
    F.cross_entropy(model(inputs[rows]), target[rows], reduction="sum").div(SIZE).backward()
    F.cross_entropy(alone(inputs), target).backward()
    before = Conditioned().double().norm.running_mean
    expected = alone.norm.running_mean if rank == 0 else before
    torch.testing.assert_close(model.norm.running_mean, expected)


def test_a_normalisation_with_more_arguments(ranks):
    ranks(2)(normalises)


class Registered(nn.Module):
    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if key in Registered.names:
            raise ValueError(f"{key!r} is registered twice")
        Registered.names.append(key)


class Listed(Registered, key="listed"):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def makes_others_of_its_class(rank: int) -> None:
    model = Listed()
    optimizer = sgd(model)
    apply(model, optimizer, whole("priority"), timeout_s=20)
    inputs, target = share(rank, 0)
    F.cross_entropy(model(inputs), target).backward()
    optimizer.step()
    assert Registered.names.count("listed") == 1
    another = type(model)(4)
    another.load_state_dict(full_state_dict(model))
    assert torch.equal(another(inputs), model(inputs))
    assert copy.copy(model).linear is model.linear
    assert is_parallel(model)


def is_pickled(rank: int, memory: Any = "keep") -> None:
    model, file = net(), io.BytesIO()
    units = [msgspec.structs.replace(unit(n, 1, "none", 2), memory=memory) for n in "024"]
    apply(model, sgd(model), plan(2, units), timeout_s=20)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Sequential
    assert not is_parallel(loaded)
    inputs, _ = share(rank, 0)
    assert torch.equal(loaded(inputs), model(inputs))


@pytest.mark.parametrize("check", [makes_others_of_its_class, is_pickled])
def test_its_class_stays_the_users(ranks, check):
    ranks(2)(check)


def test_a_plan_that_recomputes_is_pickled(ranks):
    ranks(2)(is_pickled, "recompute")
