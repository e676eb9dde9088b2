"""How a workload is made to compute in a precision, and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import meshwright as mw
import pytest
import torch
from meshwright.executor.capability import CAPABILITY
from meshwright.models.precision import (
    forbid_tf32,
    in_precision,
    measured_in,
    set_precision,
    surrounding_precision,
    tf32_kept,
    to_type,
)
from meshwright.models.target import try_out, workload
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.precision import PRECISIONS
from meshwright.planner.solve.request import problem_for
from meshwright.profiler.model import profile
from meshwright.profiler.sessions import _profile_key
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.strategies import cluster

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """A precision sets what is torch's for the whole process."""
    tf32, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    yield
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision(products)


class Seeing(nn.Linear):
    """A layer that notes the types which it is given and makes."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.seen = x.dtype, self.weight.dtype, made.dtype
        return made


def seeing() -> mw.Workload:
    model = nn.Sequential(Seeing(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return mw.Workload(
        "seeing", model, lambda n: mw.Batch((torch.randn(n, 6),), torch.randint(3, (n,))),
        nn.functional.cross_entropy,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "seen"),
    [
        ("float32", (torch.float32, torch.float32, torch.float32)),
        ("bf16", (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
        ("bf16-mixed", (torch.float32, torch.float32, torch.bfloat16)),
        ("fp16-mixed", (torch.float32, torch.float32, torch.float16)),
    ],
)
def test_the_model_computes_in_it(precision, seen):
    made = in_precision(seeing(), precision)
    batch = made.make_batch(4)
    loss = made.loss(made.model(*batch.args), batch.target)
    assert made.model[0].seen == seen
    # What is computed from it as well: under autocast a loss is float32.
    assert loss.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert not torch.is_autocast_enabled("cpu")


class Turned(nn.Module):
    """A layer with complex numbers: weights, and a table of angles."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.layer(x).to(self.weight.real.dtype).reshape(-1, 4, 2)
        made = torch.view_as_complex(pairs) * self.weight * self.turn
        return torch.view_as_real(made).flatten(1)


@pytest.mark.parametrize("precision", [*PRECISIONS, torch.float64])
@pytest.mark.filterwarnings("error")
def test_complex_numbers_stay_complex(precision):
    model = Turned()
    x, before = torch.randn(3, 8), {k: v.clone() for k, v in model.state_dict().items()}
    y = model(x)
    if precision is torch.float64:
        assert to_type(model, precision)(x.double()).dtype is torch.float64
        assert {t.dtype for t in model.state_dict().values()} == {torch.float64, torch.complex128}
        return
    set_precision(model, precision)
    for name in ("weight", "turn"):
        assert getattr(model, name).equal(before[name])
    dtype = getattr(torch, PRECISIONS[precision].parameters)
    assert model.layer.weight.dtype is dtype
    torch.testing.assert_close(model(x.to(dtype)), y, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_measuring_leaves_the_model_as_it_was(precision):
    made = seeing()
    made.model(made.make_batch(4).args[0]).sum().backward()
    before = copy.deepcopy(made.model.state_dict())
    gradients = [p.grad.clone() for p in made.model.parameters()]
    found = profile(replace(made, precision=precision), batches=(4, 8), repeats=1)
    assert found.precision == precision
    assert found.dtype == ("bfloat16" if precision == "bf16" else "float32")
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype
    for parameter, gradient in zip(made.model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert made.model(torch.randn(4, 6)).dtype == torch.float32


def test_measuring_a_model_that_trains_in_it_leaves_it_so():
    made = in_precision(seeing(), "bf16-mixed")
    with measured_in(made, None):
        pass
    assert made.model(torch.randn(4, 6)).dtype == torch.bfloat16


def test_a_forward_that_raises_leaves_autocast():
    made = in_precision(seeing(), "bf16-mixed")
    with pytest.raises(RuntimeError):
        made.model(torch.randn(4, 5))
    assert not torch.is_autocast_enabled("cpu")


def test_a_copy_computes_as_the_original():
    made = copy.deepcopy(in_precision(seeing(), "bf16-mixed").model)
    assert made(torch.randn(4, 6)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_feature_maps_and_parameters_follow_it():
    plain, mixed, low = (
        profile(replace(workload("gpt-tiny"), precision=name), batches=(2, 4), repeats=1)
        for name in (None, "bf16-mixed", "bf16")
    )
    assert mixed.parameter_bytes == plain.parameter_bytes == 2 * low.parameter_bytes

    def maps(found: mw.ModelProfile) -> float:
        return sum(u.whole.saved(4) - u.whole.saved(2) for u in found.units)

    assert maps(low) < 0.6 * maps(plain)
    assert maps(low) < maps(mixed) < 0.9 * maps(plain)


def test_what_is_measured_is_kept_apart_by_how_it_computes():
    made = workload("gpt-tiny")
    keys = {_profile_key(replace(made, precision=p), (2,), CPU) for p in (None, *PRECISIONS)}
    with torch.autocast("cpu", torch.bfloat16):
        assert surrounding_precision(CPU) == "bf16-mixed"
        around = _profile_key(made, (2,), CPU)
    assert len(keys) == 6
    assert around == _profile_key(replace(made, precision="bf16-mixed"), (2,), CPU)
    # What printing the model does not show.
    made.model.gradient_checkpointing = True
    assert _profile_key(made, (2,), CPU) not in keys


def attending(implementation: str) -> mw.Workload:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation=implementation,
    )  # fmt: skip

    def make_batch(size: int) -> mw.Batch:
        words = torch.randint(16, (size, 4))
        return mw.Batch((), None, {"input_ids": words, "labels": words})

    return mw.Workload("llama", LlamaForCausalLM(config), make_batch, lambda out, _: out.loss)


def test_how_attention_is_computed_is_part_of_what_is_measured():
    eager, fused = (_profile_key(attending(name), (2,), CPU) for name in ("eager", "sdpa"))
    assert eager != fused
    assert _profile_key(attending("eager"), (2,), CPU) == eager


def test_a_setting_may_be_of_another_type_in_the_configuration():
    made = attending("eager")
    made.model.model.config.layer = None
    made.model.model.layer = 1
    assert _profile_key(made, (2,), CPU) != _profile_key(attending("eager"), (2,), CPU)


def test_tf32_is_part_of_what_is_measured(monkeypatch):
    made, before = workload("gpt-tiny"), torch.get_float32_matmul_precision()
    plain = _profile_key(made, (2,), CPU)
    try:
        torch.set_float32_matmul_precision("high")
        products = _profile_key(made, (2,), CPU)
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    assert len({plain, products, _profile_key(made, (2,), CPU)}) == 3


def test_the_precision_of_a_profile_is_that_of_its_plan():
    found = profile(replace(seeing(), precision="bf16"), batches=(4, 8), repeats=1)
    made = mw.plan(found, cluster(2), Goal(batch=8))
    assert made.precision == "bf16"
    with pytest.raises(InputError, match="precision bf16, not bf16-mixed: profile it so"):
        mw.plan(found, cluster(2), Goal(batch=8), precision="bf16-mixed")


def test_scaled_gradients_are_used_whole():
    found = profile(replace(seeing(), precision="fp16-mixed"), batches=(4, 8), repeats=1)
    asked = problem_for(found, cluster(2), Goal(batch=8), CAPABILITY)
    assert CAPABILITY.early_release
    assert not asked.capability.early_release
    lossy = Goal(batch=8, allow_lossy=True, min_fidelity=0.1)
    with pytest.raises(InputError, match="leave --min-fidelity"):
        problem_for(found, cluster(2), lossy, CAPABILITY)


def test_an_unknown_precision_is_refused_by_name():
    with pytest.raises(InputError, match="'bf61' is not known: choose from float32, tf32, bf16"):
        workload("mlp", precision="bf61")


def test_a_workload_is_tried_in_its_precision():
    made = replace(seeing(), precision="bf16")
    try_out(made)
    assert made.model[0].seen[0] == torch.bfloat16
    assert made.model[0].weight.dtype == torch.float32


def test_what_is_compared_in_full_float32_puts_the_settings_back():
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
        with tf32_kept():
            assert forbid_tf32()
            assert not forbid_tf32()
            assert not torch.backends.cudnn.allow_tf32
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
