"""Every model parallel style against its unsharded operation, over even and uneven groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest
import torch
from between import Between, Softmax
from meshwright.executor.apply import apply
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.models.zoo.gpt import MLP, Attention
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import UnitPlan
from plans import SCHEDULES, plan, plan_for, scheduled, unit
from reference import assert_equal, train_alone, train_together, twin
from torch import Tensor, nn
from torch.nn import functional as F


class Tied(nn.Module):
    """Symbols to logits over the same embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, symbols: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embed(symbols))))


class Residual(nn.Module):
    """A column unit whose output glue touches, twice, before a row unit takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        summed = self.second(wide) + wide * 2 + x
        return self.last(summed)


def _double_some(x: Tensor) -> Tensor:
    """Changes a part of the tensor in place, through a view, and gives the tensor itself."""
    x[:, 1:4].mul_(2)
    return x


def _vectors(size: int) -> Tensor:
    return torch.randn(size, 6)


def _images(size: int) -> Tensor:
    return torch.randn(size, 3, 6, 6)


def _symbols(size: int) -> Tensor:
    return torch.randint(11, (size, 5))


def _sequences(size: int) -> Tensor:
    return torch.randn(size, 5, 12)


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 7, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(112, 5),
    )


Case = tuple[
    Callable[[], nn.Module],
    Callable[[int], Tensor],
    Callable[[int, int], list[UnitPlan]],
]

CASES: dict[str, Case] = {
    "linear column": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)),
        _vectors,
        lambda m, w: [unit(("0", "1"), m, "column", w)],
    ),
    "linear row": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)),
        _vectors,
        lambda m, w: [unit(("0", "1"), m, "row", w), unit("2", m, "row", w)],
    ),
    "linear column then row": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 5)),
        _vectors,
        lambda m, w: [
            unit(("0", "1"), m, "column", w),
            unit("2", m, "row", w),
            unit("3", m, "column", w),
        ],
    ),
    "linear column then column": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 5)),
        _vectors,
        lambda m, w: [unit(str(i), m, "column", w) for i in range(3)],
    ),
    "glue touches features": (
        Residual,
        _vectors,
        lambda m, w: [unit("first", m, "column", w), unit("second", m, "row", w)],
    ),
    "a function of the model's own, then row": (
        lambda: Between(Softmax.apply),
        _vectors,
        lambda m, w: [unit("first", m, "column", w), unit("second", m, "row", w)],
    ),
    "a function of the model's own, then column": (
        lambda: Between(Softmax.apply),
        _vectors,
        lambda m, w: [unit("first", m, "column", w), unit("second", m, "column", w)],
    ),
    "a function of the model's own, recomputed": (
        lambda: nn.Sequential(Between(Softmax.apply), nn.Linear(5, 3)),
        _vectors,
        lambda m, w: [
            msgspec.structs.replace(one, memory="recompute", segment=("0",))
            for one in (unit("0.first", m, "column", w), unit("0.second", m, "row", w))
        ],
    ),
    "features are normalised, then row": (
        lambda: Between(partial(torch.softmax, dim=-1)),
        _vectors,
        lambda m, w: [unit("first", m, "column", w), unit("second", m, "row", w)],
    ),
    "features are rolled, then row": (
        lambda: Between(partial(torch.roll, shifts=1, dims=-1)),
        _vectors,
        lambda m, w: [unit("first", m, "column", w), unit("second", m, "row", w)],
    ),
    "a view is written to, then row": (
        lambda: Between(_double_some),
        _vectors,
        lambda m, w: [unit("first", m, "column", w), unit("second", m, "row", w)],
    ),
    "convolution column with batch norm, then row": (
        _convolutions,
        _images,
        lambda m, w: [unit(("0", "1", "2"), m, "column", w), unit(("3", "4"), m, "row", w)],
    ),
    "convolution column then column": (
        _convolutions,
        _images,
        lambda m, w: [
            unit(("0", "1", "2"), m, "column", w),
            unit(("3", "4"), m, "column", w),
            unit("6", m, "column", w),
        ],
    ),
    "convolution with channels last": (
        lambda: _convolutions().to(memory_format=torch.channels_last),
        lambda size: _images(size).contiguous(memory_format=torch.channels_last),
        lambda m, w: [
            unit(("0", "1", "2"), m, "column", w),
            unit(("3", "4"), m, "column", w),
            unit("6", m, "column", w),
        ],
    ),
    "embedding column": (
        lambda: nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 3)),
        _symbols,
        lambda m, w: [unit("0", m, "column", w)],
    ),
    "embedding pair": (
        lambda: nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 3)),
        _symbols,
        lambda m, w: [unit("0", m, "pair", w)],
    ),
    "tied by symbols": (
        Tied,
        _symbols,
        lambda m, w: [unit("embed", m, "pair", w), unit("out", m, "column", w)],
    ),
    "tied by width": (
        Tied,
        _symbols,
        lambda m, w: [unit("embed", m, "column", w), unit("out", m, "row", w)],
    ),
    "attention pair": (
        lambda: nn.Sequential(Attention(12, 12), nn.Linear(12, 3)),
        _sequences,
        lambda m, w: [unit("0", m, "pair", w)],
    ),
    "mlp pair": (
        lambda: nn.Sequential(MLP(12), nn.Linear(12, 3)),
        _sequences,
        lambda m, w: [unit("0", m, "pair", w)],
    ),
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over samples, the same weight for each of a sample's outputs."""
    return F.cross_entropy(output.flatten(1)[:, :3] + output.flatten(1).sum(1, True), target) + (
        output.flatten(1).square().mean() * 0.1 if output.shape[0] else output.sum()
    )


def mean(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is one number in memory, seen as many."""
    return output.sum() / output.numel()


def style_equals_whole(
    rank: int,
    name: str,
    degree: int,
    counts: list[int],
    placement: list[int] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = loss,
) -> None:
    build, draw, units = CASES[name]
    torch.manual_seed(3)
    model = build().double()
    total = sum(counts)
    world = len(counts)
    data = [Batch((_double(draw(total)),), torch.randint(3, (total,))) for _ in range(2)]
    expected = train_alone(twin(model), "sgd", data, loss)
    chosen = plan(world, units(degree, world), placement=placement, message_bytes=400)
    found = train_together(rank, model, "sgd", data, loss, chosen, counts)
    assert_equal(found, expected)


def all_styles(
    rank: int,
    degree: int,
    counts: list[int],
    placement: list[int] | None = None,
    schedules: Sequence[str] = (),
) -> None:
    """Under both schedules, or those given in turn: how samples are shared out and which schedule
    there is have little to do with each other."""
    every = itertools.product(CASES, SCHEDULES)
    for name, schedule in zip(CASES, itertools.cycle(schedules)) if schedules else every:
        try:
            with scheduled(schedule):
                style_equals_whole(rank, name, degree, counts, placement)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{name} under {schedule}: {found}") from error


class Spare(nn.Module):
    """Has a second layer with the first one's weight, which is not called unless it is asked for,
    as models have heads that are tied to their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)
        self.spare.weight = self.first.weight
        self.called = False

    def forward(self, x: Tensor) -> Tensor:
        layer = self.spare if self.called else self.first
        return self.last(torch.tanh(layer(x)))


def divides_what_is_tied_to_no_use(rank: int) -> None:
    torch.manual_seed(3)
    model = Spare().double()
    data = [Batch((_vectors(6).double(),), torch.randint(3, (6,))) for _ in range(2)]
    found = discover(model, data[0])
    for style in ("column", "row"):
        divided = {"first": (2, style)}
        chosen = plan_for(found, 2, lambda unit, to=divided: to.get(unit.name, (1, "none")))
        assert chosen.units[1].style == style
        expected = train_alone(twin(model), "sgd", data, loss)
        assert_equal(train_together(rank, twin(model), "sgd", data, loss, chosen, [4, 2]), expected)
    parallel, _ = apply(model, None, chosen)
    model.called = True
    with pytest.raises(InputError, match="module 'spare' is called, which was not when"):
        parallel(data[0].args[0][:3])


def test_a_parameter_whose_other_module_is_not_called_is_divided(ranks):
    ranks(2)(divides_what_is_tied_to_no_use)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def test_styles_on_2_ranks(ranks):
    ranks(2)(all_styles, 2, [3, 3])


def test_a_gradient_that_is_one_number(ranks):
    ranks(2)(style_equals_whole, "linear column then column", 2, [3, 3], loss=mean)


def test_styles_on_uneven_shares(ranks):
    ranks(2)(all_styles, 2, [4, 1], schedules=SCHEDULES)


def test_styles_where_a_rank_has_no_samples(ranks):
    ranks(2)(all_styles, 2, [0, 4], schedules=SCHEDULES[::-1])


@pytest.mark.slow
def test_styles_on_3_ranks(ranks):
    ranks(3)(all_styles, 3, [2, 3, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "placement"),
    [([4, 1], None), ([0, 4], None), ([2, 1, 0, 3], [2, 0, 3, 1])],
)
def test_styles_on_unequal_shares_under_both_schedules(ranks, counts, placement):
    ranks(len(counts))(all_styles, 2, counts, placement)


def test_styles_in_two_groups(ranks):
    ranks(4)(all_styles, 2, [2, 1, 0, 3], [2, 0, 3, 1], schedules=SCHEDULES)


@pytest.mark.slow
def test_styles_on_4_ranks(ranks):
    ranks(4)(all_styles, 4, [2, 1, 2, 3])
