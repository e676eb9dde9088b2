"""Every reason for which a unit stays whole is told, with the remedy."""

from __future__ import annotations

import re

import meshwright as mw
import pytest
import torch
from meshwright.cli.render.whole import whole_sentences
from meshwright.models.units import discover as discovery
from meshwright.models.units import stays_whole as why
from meshwright.models.units.discover import discover
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 8


class Made(nn.Module):
    """``first``, whatever else is given, and a last layer; ``run`` is its forward."""

    def __init__(self, run, first=None, **parts) -> None:
        super().__init__()
        self.first = first or nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)
        self.last = nn.Linear(WIDTH, 3)
        self.run = run

    def forward(self, x):
        return self.last(self.run(self, x))


class Block(nn.Module):
    """Two layers, and what ``run`` does with them."""

    def __init__(self, run) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(8, WIDTH))
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def keeping(self, x):
    self.kept = nn.functional.linear(x, self.weight)
    return self.kept


class Keeping(nn.Linear):
    forward = keeping


class Two(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, 2 * y


class Late(nn.Linear):
    """Draws before it uses its weight."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


class Other(nn.Linear):
    """Not what its class computes."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(-1, keepdim=True)


class Reading(nn.Linear):
    beside = None

    def forward(self, x):
        return super().forward(x + self.beside[0])


def reading(m, x):
    m.first.beside = [2 * m.before(x)]
    return m.first(x)


def hooked() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda *_: None)
    return layer


def borrowing(m, x):
    return m.first(x) @ m.first.weight


class Sub(nn.Linear):
    """A forward of its own, equal to its class's: its split is tried."""

    def forward(self, x):
        return super().forward(x)


class Foreign(nn.Linear):
    """Is given a parameter of another module."""

    def forward(self, x, weight):
        return super().forward(x) * weight[0]


class Dropping(nn.Module):
    """May leave layers of a list out."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        return self.layers[0](x)


def large_only(least):
    """Calls its first layer for batches of at least so many samples."""
    return lambda m, x: m.first(x) if len(x) >= least else x


CASES = {
    "mixed": (Made(lambda m, x: m.first(x.repeat(2, 1)).chunk(2)[0]), why.MIXED),
    "outputs": (Made(lambda m, x: sum(m.first(x)), Two(WIDTH, WIDTH)), why.ELSEWHERE),
    "reads": (Made(reading, Reading(WIDTH, WIDTH), before=nn.Linear(WIDTH, WIDTH)), why.READS),
    "shared": (Made(borrowing), why.SHARED),
    "draws": (Made(lambda m, x: m.first(x), Late(WIDTH, WIDTH)), why.DRAWS),
    "altered": (Made(lambda m, x: m.first(x), hooked()), why.ALTERED),
    "computed": (Made(lambda m, x: m.first(x), weight_norm(nn.Linear(WIDTH, WIDTH))), why.COMPUTED),
    "keeps": (Made(lambda m, x: m.first(x), Keeping(WIDTH, WIDTH, bias=False)), why.KEEPS),
    "foreign": (
        Made(lambda m, x: m.first(x, m.last.weight), Foreign(WIDTH, WIDTH)),
        why.FOREIGN,
    ),
    "absent": (Made(large_only(5)), why.ABSENT),
    "fewer": (Made(large_only(3), Sub(WIDTH, WIDTH)), why.FEWER),
    "not shown": (Made(lambda m, x: m.first(x), Other(WIDTH, WIDTH)), why.NOT_SHOWN),
}


def batch(size: int = 4) -> mw.Batch:
    return mw.Batch((torch.randn(size, WIDTH),), None)


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_divided_says_why(case):
    model, reason = CASES[case]
    # What is called for five samples only is found in the second forward if not in the first.
    unit = discover(model, batch(5 if case == "absent" else 4), batch(3)).unit("first")
    assert not unit.splits
    assert unit.stays_whole == reason


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: m.b(m.a(x * m.scale.sum(0))), "its own code uses 31% of its parameters, 'sc"),
        (lambda m, x: m.b(m.a(m.a(x))), "module 'a' in it is called 2 times in a forward: give"),
        (lambda m, x: m.b(m.a(m.b(m.a(x)))), "module 'a' in it is called 2 times in a forward: g"),
    ],
    ids=["own code", "one twice", "all twice"],
)
def test_what_is_not_finer_says_why(run, reason):
    found = discover(Made(lambda m, x: m.block(m.first(x)), block=Block(run)), batch())
    assert found.unit("block").stays_whole.startswith(reason)
    assert found.unit("first").stays_whole == ""
    assert found.unit("first").splits


def test_features_without_a_dimension_of_their_own_are_told(monkeypatch):
    monkeypatch.setattr(discovery, "_fits", lambda *_: False)
    assert (
        discover(Made(lambda m, x: m.first(x)), batch()).unit("first").stays_whole == why.FEATURES
    )


def test_what_may_be_left_out_says_so():
    found = discover(Made(lambda m, x: m.drop(m.first(x)), drop=Dropping()), batch())
    assert found.unit("drop.layers.0").stays_whole == why.LEFT_OUT


def test_what_no_recipe_knows_says_so_where_it_is_large():
    found = discover(nn.Sequential(nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), batch())
    assert found.unit("0").stays_whole == (
        "no way to divide a module of class GRUCell is known: make it of torch's own linear "
        "layers, convolutions and embeddings"
    )


def test_what_can_be_divided_or_is_a_norm_says_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    assert not any(unit.stays_whole for unit in discover(model, batch()).units)


def test_a_model_whose_units_are_not_found_is_one_unit(monkeypatch):
    def fails(*_):
        raise IndexError("of an odd model")

    monkeypatch.setattr(discovery, "_specs", fails)
    found = discover(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2)), batch())
    assert [unit.name for unit in found.units] == ["@input", "model", "@output"]
    unit = found.unit("model")
    assert re.search(r"runs\) \(.*, line \d+\) with IndexError: of an odd", unit.stays_whole)
    assert not unit.splits
    assert unit.batched_inputs == (0,)
    assert not found.outside


def test_the_command_tells_equal_reasons_once():
    from meshwright.cli.render.whole import whole_sentences

    layers = [Made(borrowing) for _ in range(3)]
    for layer in layers:
        layer.last = nn.Linear(WIDTH, WIDTH)
    profile = mw.profile(
        mw.Workload(
            "m", nn.Sequential(*layers), batch, lambda output, target: output.square().mean()
        ),
        device="a100-sxm-40gb",
    )  # fmt: skip
    assert whole_sentences(profile.units) == [
        f"Unit '0.first' and 2 more stay whole: {why.SHARED}."
    ]


class Calling(nn.Module):
    """Two layers, and what ``run`` calls between them."""

    def __init__(self, run, first=None, second=None) -> None:
        super().__init__()
        self.a, self.b = first or nn.Linear(WIDTH, WIDTH), second or nn.Linear(WIDTH, WIDTH)
        self.act, self.run = nn.ReLU(), run

    def forward(self, x):
        return self.b(self.run(self, self.a(x)))


def glue_reasons(model, x) -> list[str]:
    units = discover(model, mw.Batch((x,), torch.zeros(len(x)))).units
    return [unit.stays_whole for unit in units if unit.kind == "glue"]


def test_a_function_that_a_module_could_be_is_named():
    x = torch.randn(4, WIDTH)
    (reason,) = glue_reasons(Calling(lambda self, y: functional.gelu(y)), x)
    assert reason.startswith("gelu is a function between two units")
    assert "call nn.GELU instead" in reason
    (reason,) = glue_reasons(Calling(lambda self, y: functional.dropout(torch.relu_(y), 0.1)), x)
    assert "relu and dropout are functions" in reason
    assert "call nn.ReLU and nn.Dropout instead" in reason
    pictures, sides = torch.randn(4, 4, 8, 8), (nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    (reason,) = glue_reasons(
        Calling(lambda self, y: functional.max_pool2d(y.relu(), 2), *sides), pictures
    )
    assert "call nn.ReLU and nn.MaxPool2d instead" in reason


def test_three_functions_are_listed():
    def run(self, y):
        return torch.tanh(functional.dropout(functional.gelu(y), 0.1))

    (reason,) = glue_reasons(Calling(run), torch.randn(4, WIDTH))
    assert reason.startswith("gelu, dropout and tanh are functions")
    assert "call nn.GELU, nn.Dropout and nn.Tanh instead" in reason


def test_glue_is_told_by_the_unit_before_it():
    model = Calling(lambda self, y: functional.gelu(y))
    units = discover(model, mw.Batch((torch.randn(4, WIDTH),), None)).units
    (line,) = whole_sentences(units)
    assert line.startswith("What follows unit 'a' stays whole: gelu is a function")


def test_what_no_module_would_join_is_not():
    x = torch.randn(4, WIDTH)
    assert glue_reasons(Calling(lambda self, y: self.act(y)), x) == []  # it has joined
    assert glue_reasons(Calling(lambda self, y: y + 1), x) == [""]
    assert glue_reasons(Calling(lambda self, y: functional.softmax(y, -1)), x) == [""]
    assert set(glue_reasons(Calling(lambda self, y: functional.relu(y) + y), x)) == {""}
    twice = Calling(lambda self, y: self.act(y))
    twice.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), twice.act, nn.Linear(WIDTH, WIDTH))
    assert set(glue_reasons(twice, x)) == {""}  # a module that is called twice is no function
    dead = Calling(lambda self, y: functional.relu(y) if len(torch.sigmoid(y)) else y)
    assert glue_reasons(dead, x) == [""]
    between = Calling(lambda self, y: functional.relu(y + 0 * self.other(x).sum()))
    between.other = nn.Linear(WIDTH, WIDTH)
    assert set(glue_reasons(between, x)) == {""}
    sides = nn.Conv1d(4, 4, 1), nn.Linear(WIDTH, WIDTH)  # of which neither takes the other's slices
    pictures = torch.randn(4, 4, WIDTH)
    assert glue_reasons(Calling(lambda self, y: functional.relu(y), *sides), pictures) == [""]
    norm = nn.LayerNorm(WIDTH)
    assert glue_reasons(Calling(lambda self, y: functional.relu(y), second=norm), x) == [""]
