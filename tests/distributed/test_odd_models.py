"""Models that do what few do train as in one process, or are refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.models.workload import Batch
from meshwright.planner.schema.errors import InputError
from plans import SCHEDULES, plan, scheduled, unit
from reference import train_alone, train_together
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN = 6, 8


@torch.jit.script
def scripted(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x + bias)


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum(0)


class Net(nn.Module):
    """Two layers, to be divided, a parameter between units, and what ``between`` does with it."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.bias = nn.Parameter(torch.randn(HIDDEN))
        self.between = between
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self.first(x), self.bias))


class First(Net):
    """A scripted function is the first to use the parameter."""

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(torch.zeros_like(x[:, :1]), self.bias) + self.first(x))


class Checkpointed(nn.Module):
    """The first of two layers runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, self.stem(x), use_reentrant=True))


class Nested(nn.Module):
    """Sequences of several lengths in one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        # Of one, two, one, … steps, all like the first.
        rows = [row.expand(1 + i % 2, WIDTH) for i, row in enumerate(x)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        made = self.first(nested)
        return self.second(torch.stack([part.mean(0) for part in made.unbind()]))


class Twice(nn.Module):
    """One layer under two names, called by the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.layers = nn.ModuleList([self.first])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.layers[0](x).tanh())


class Transformed(nn.Module):
    """Layers run inside ``torch.func.vmap``, for each sample and for each entry of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.shifts = nn.Parameter(torch.randn(2, HIDDEN))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        each = torch.func.vmap(lambda shift: (self.first(x) + shift).tanh())(self.shifts)
        return self.second(each.mean(0))


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapped(Net):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__(scripted)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


def normal(made: Tensor) -> Normal:
    return Normal(made, F.softplus(made) + 0.1)


def complex_and_real(made: Tensor) -> tuple[Tensor, Tensor]:
    return torch.complex(made, made.tanh()), made


@dataclass
class Guess:
    """A mixture, whose parts hold distributions that hold the tensors."""

    of: MixtureSameFamily


def mixture(made: Tensor) -> Guess:
    parts = Normal(torch.stack([made, -made], 1), F.softplus(made).unsqueeze(1) + 0.1)
    return Guess(MixtureSameFamily(Categorical(logits=made[:, :2]), Independent(parts, 1)))


def nll(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, Guess):
        return -output.of.log_prob(F.one_hot(target, 3)).mean()
    if isinstance(output, Normal):
        return -output.log_prob(F.one_hot(target, 3)).mean()
    if isinstance(output, tuple):
        signal, made = output
        return F.cross_entropy(made, target) + (signal - 1j).abs().square().mean()
    return F.cross_entropy(getattr(output, "logits", output), target)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scripted function": lambda: Net(scripted),
    "scripted function first": lambda: First(scripted),
    "function of its own": lambda: Net(Shifted.apply),
    "reentrant checkpoint": Checkpointed,
    "two names": Twice,
    "object": lambda: Wrapped(Answer),
    "distribution": lambda: Wrapped(normal),
    "mixture": lambda: Wrapped(mixture),
    "transformed": Transformed,
    "complex numbers": lambda: Wrapped(complex_and_real),
}


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    # Uneven shares too.
    return [
        Batch(
            (torch.randn(n, WIDTH, dtype=torch.float64, generator=generator),),
            torch.randint(3, (n,), generator=generator),
        )
        for n in (4, 5, 4)
    ]


def trains_as_one_process(rank: int, name: str, schedule: str, *, divided: bool) -> None:
    build = MODELS[name]
    losses, state = train_alone(build(), "sgd", batches(), nll)
    first = unit("first", 2, "column", 2)
    if name == "transformed":  # what runs in a transform is not divided
        first = unit("first", 1, "none", 2)
    units = [first, unit("second", 2, "row", 2)] if divided else []
    with scheduled(schedule):
        made = plan(2, units or [unit("first", 1, "none", 2), unit("second", 1, "none", 2)])
    found, ours = train_together(rank, build(), "sgd", batches(), nll, made)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))
    assert ours.keys() == state.keys()
    for key, tensor in state.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-9, atol=1e-10, msg=key)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_in_one_process(ranks, name, divided, schedule):
    ranks(2)(trains_as_one_process, name, schedule, divided=divided)


# -- values that are waited for --------------------------------------------------------------------


def nested_takes_new_values(rank: int) -> None:
    """A nested tensor's own functions see parameters that have been updated."""
    build = Nested
    alone, model = build(), build()
    with scheduled("priority"):
        made = plan(2, [unit("first", 1, "none", 2), unit("second", 1, "none", 2)])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    apply(model, optimizers[1], made, timeout_s=20)
    for batch in batches()[::2]:
        (x,) = batch.args
        part = slice(2 * rank, 2 * rank + 2)
        nll(alone(x), batch.target).backward()
        nll(model(x[part]), batch.target[part]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.detach(), a.detach(), rtol=1e-9, atol=1e-10, msg=name)


def test_a_nested_tensor_takes_new_values(ranks):
    ranks(2)(nested_takes_new_values)


# -- gradients in the loss -------------------------------------------------------------------------


class WithInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        return self.second(self.first(x).tanh()), x


def penalised(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    made, x = output
    (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return F.cross_entropy(made, target) + (slope.norm(dim=1) - 1).square().mean()


def takes_a_gradient_in_the_loss(rank: int) -> None:
    even, uneven = batches()[::2], batches()[1:2]
    made = plan(2, [unit("first", 2, "column", 2), unit("second", 2, "row", 2)])
    _, state = train_alone(WithInput(), "sgd", even, penalised)
    _, ours = train_together(rank, WithInput(), "sgd", even, penalised, made)
    for key, tensor in state.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-9, atol=1e-10, msg=key)
    # Its own weight would be in the slope, and the penalty another one.
    with pytest.raises(InputError, match=r"takes a gradient of the model's output.*equal shares"):
        train_together(rank, WithInput(), "sgd", uneven, penalised, made)


def test_a_gradient_that_the_loss_takes(ranks):
    ranks(2)(takes_a_gradient_in_the_loss)


# -- what is refused -------------------------------------------------------------------------------


def refuses(rank: int) -> None:
    made = plan(2, [unit("first", 2, "column", 2), unit("second", 2, "row", 2)])
    model = Net(scripted)
    apply(model, None, made, timeout_s=20)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    for call in (model.forward, model.first):
        with pytest.raises(InputError, match=r"outside of the model's own call.*model\(x\)"):
            call(x)
    model(x)
    with pytest.raises(InputError, match=r"outside of the model's own call"):
        model.first(x)
    wrapped = DistributedDataParallel(copy.deepcopy(Twice()))
    with pytest.raises(InputError, match="DistributedDataParallel, which exchanges gradients"):
        apply(wrapped, None, plan(2), timeout_s=20)


def test_what_cannot_be_is_refused_in_a_sentence(ranks):
    ranks(2)(refuses)
