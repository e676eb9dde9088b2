"""What a user has compiled: taken off a model, put back, and compiled in regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshwright.executor.gradients.pending import WaitingGradient
from meshwright.models.compiled import (
    CompiledRegions,
    Uncompiled,
    ancestors,
    described,
    eager,
    is_compiled_anew,
    regions,
    uncompiled,
    unwrapped,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.second(torch.relu(self.first(x)))
        return made


def blocks(count: int = 2) -> Any:
    return nn.Sequential(*(Block() for _ in range(count)))


def test_wrappers_are_taken_off_and_put_back():
    model = blocks()
    model[0] = torch.compile(model[0], backend="eager")
    model[1].compile(backend="eager", dynamic=True)
    whole: Any = torch.compile(model, backend="aot_eager")
    wrapper = model[0]
    with uncompiled(whole) as own:
        assert own is model
        assert next(name for name, _ in own.named_parameters()) == "0.first.weight"
        assert own[1]._compiled_call_impl is None
        assert [(name, how.split()[0]) for name, how in described(own)] == [
            ("", "aot_eager"), ("0", "eager"), ("1", "eager"),
        ]  # fmt: skip
        assert described(own)[2][1].endswith("dynamic=True")
    assert model[0] is wrapper
    assert model[1]._compiled_call_impl is not None
    assert described(model) == []


def test_a_disabled_compilation_is_none():
    model = blocks()
    model.compile(disable=True)
    assert described(Uncompiled(model).model) == []
    assert not is_compiled_anew(model.modules())


def test_what_torch_leaves_alone_stays():
    model = torch.compiler.disable(blocks())
    assert unwrapped(model) is model
    assert Uncompiled(model).model is model


def test_regions_are_the_largest_unbroken_modules():
    model = blocks()
    model.compile(backend="eager")
    Uncompiled(model)
    assert list(regions(model, ())) == [model]
    found = list(regions(model, ancestors(["0.first"])))
    assert found == [model[0].first, model[0].second, model[1]]


def test_equal_blocks_are_compiled_once():
    counter = CompileCounter()
    model = blocks(10)  # more than torch compiles of one function
    for block in model:
        block.compile(backend=counter)
    x = torch.randn(3, 4, requires_grad=True)  # as what the first block leaves
    with uncompiled(model) as own:
        expected = own(x)
        with CompiledRegions(own, ()):
            assert torch.equal(own(x), expected)
        assert counter.frame_count == 1
        assert "forward" not in vars(own[0])


def test_unequal_ones_do_not_use_up_one_limit():
    counter = CompileCounter()
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(1, 15)))
    model.compile(backend=counter)
    with uncompiled(model), CompiledRegions(model, ancestors(str(i) for i in range(14))):
        model(torch.randn(2, 1))
    assert counter.frame_count == 14


def test_eager_functions_break_the_graph_and_see_no_compiler():
    counter = CompileCounter()
    seen: list[Any] = []

    @eager
    def collective(x: Tensor) -> Tensor:
        seen.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        return x + 1

    @torch.compile(backend=counter)
    def traced(x: Tensor) -> Tensor:
        return collective(x * 2) * 3

    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 9.0))
    assert seen == [None]
    assert counter.frame_count == 2


@pytest.mark.parametrize("anew", [True, False])
def test_new_compilation_is_noticed(anew):
    model = blocks()
    modules = list(model.modules())
    if anew:
        model[1] = torch.compile(model[1], backend="eager")
    assert is_compiled_anew(modules) is anew


def test_what_is_compiled_sees_no_gradients():
    counter = CompileCounter()
    model = nn.Linear(4, 4)
    model.compile(backend=counter)
    looked: list[bool] = []

    def arrive() -> Tensor:
        looked.append(True)
        return torch.zeros(20)[:16].view(4, 4)

    # On its way, as under a plan, and to be put in a place of a larger buffer.
    waiting = WaitingGradient.of(model.weight, arrive, lambda _: torch.zeros(4, 4))
    model.weight.grad = waiting
    with uncompiled(model), CompiledRegions(model):
        model(torch.randn(2, 4))
    assert counter.frame_count == 1
    assert model.weight.grad is waiting
    assert not looked
