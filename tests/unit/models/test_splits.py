"""Each way to divide a unit against the undivided operation: values and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from meshwright.models import zoo as models
from meshwright.models.replay import UnitCall, capture
from meshwright.models.spec import SplitSpec, UnitSpec
from meshwright.models.splits import apply_split, find_splits, join_parameter
from meshwright.models.splits.check import (
    SplitMembers,
    _shortened,
    is_equivalent,
    main_output,
)
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Style
from torch import Tensor, nn
from torch.nn import functional as F

Make = Callable[[], tuple[list[nn.Module], Tensor]]


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def unit_of(modules: Sequence[str], spec: SplitSpec) -> UnitSpec:
    return UnitSpec(modules[0], "other", tuple(modules), (0,), (spec,))


def split_of(model: nn.Module, modules: Sequence[str], style: Style) -> SplitSpec:
    return next(s for s in find_splits(model, modules) if s.style == style)


def randomised(model: nn.Module) -> nn.Module:
    """In double precision, no parameter or statistic zero, one or equal to another."""
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "var")):
            nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def compare(
    model: nn.Module,
    modules: Sequence[str],
    spec: SplitSpec,
    call: UnitCall,
    degree: int,
    batch_dims: tuple[int, ...] | None = None,
) -> None:
    """The members' outputs and gradients put together, against the whole unit's."""
    unit = replace(unit_of(modules, spec), batch_dims=batch_dims)
    whole_call, split_call = call.fresh(), call.fresh()
    whole: object = model.get_submodule(modules[0])(*whole_call.args, **whole_call.kwargs)
    for name in modules[1:]:
        whole = model.get_submodule(name)(whole)
    members = SplitMembers(copy.deepcopy(model), unit, spec, degree)
    output = members.run(split_call)
    torch.testing.assert_close(output, main_output(whole), rtol=1e-10, atol=1e-11)
    weight = torch.randn_like(output)
    (main_output(whole) * weight).sum().backward()
    (output * weight).sum().backward()
    for a, b in zip(whole_call.tensors(), split_call.tensors(), strict=True):
        if a.grad is not None:  # the sum of the members' partial gradients
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-11)
    cuts = {c.name: c for c in spec.cuts}
    own = [dict(m.named_parameters()) for m in members.models]
    for name, parameter in model.named_parameters():
        gradients = [p[name].grad for p in own]
        assert all(g is not None for g in gradients), name
        if name in cuts:
            got = join_parameter(gradients, cuts[name], parameter.shape)
        else:
            got = torch.stack(gradients).sum(0)
        torch.testing.assert_close(got, parameter.grad, rtol=1e-10, atol=1e-11)


def linear() -> tuple[list[nn.Module], Tensor]:
    return [nn.Linear(6, 9), nn.ReLU(), nn.Dropout()], torch.randn(5, 3, 6)


def linear_without_bias() -> tuple[list[nn.Module], Tensor]:
    return [nn.Linear(5, 4, bias=False), nn.GELU()], torch.randn(4, 5)


def transposed_linear() -> tuple[list[nn.Module], Tensor]:
    from transformers.pytorch_utils import Conv1D

    return [Conv1D(9, 6), nn.Tanh()], torch.randn(5, 3, 6)


def convolution() -> tuple[list[nn.Module], Tensor]:
    convolution = nn.Conv2d(5, 6, 3, stride=2, padding=1)
    return [convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)], torch.randn(5, 5, 9, 9)


def padded_convolution() -> tuple[list[nn.Module], Tensor]:
    convolution = nn.Conv1d(5, 5, 3, padding="same", padding_mode="circular", bias=False)
    return [convolution, nn.ReLU(inplace=True), nn.AdaptiveAvgPool1d(3)], torch.randn(4, 5, 8)


def embedding() -> tuple[list[nn.Module], Tensor]:
    return [nn.Embedding(11, 6, padding_idx=4), nn.Dropout()], torch.randint(11, (5, 7))


def small_embedding() -> tuple[list[nn.Module], Tensor]:
    return [nn.Embedding(5, 5)], torch.randint(5, (4, 7))


CASES: list[tuple[Make, Style]] = [
    (linear, "column"),
    (linear, "row"),
    (linear_without_bias, "column"),
    (linear_without_bias, "row"),
    (transposed_linear, "column"),
    (transposed_linear, "row"),
    (convolution, "column"),
    (convolution, "row"),
    (padded_convolution, "column"),
    (padded_convolution, "row"),
    (embedding, "column"),
    (embedding, "pair"),
    (small_embedding, "column"),
    (small_embedding, "pair"),
]


# Four members of five features: two, two, one and none.
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(("make", "style"), CASES)
def test_layers(make: Make, style: Style, degree: int) -> None:
    layers, inputs = make()
    model = randomised(nn.Sequential(*layers)).eval()
    if inputs.is_floating_point():
        inputs = inputs.double().requires_grad_()
    modules = [str(i) for i in range(len(layers))]
    compare(model, modules, split_of(model, modules, style), UnitCall((inputs,), {}), degree)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("workload", "module", "style"),
    [
        ("gpt-tiny", "h.0.attn", "pair"),
        ("gpt-tiny", "h.1.mlp", "pair"),
        ("gpt2-tiny", "transformer.h.0.attn", "pair"),
        ("gpt2-tiny", "transformer.h.1.mlp", "pair"),
        ("vit-tiny", "vit.layers.0.attention", "pair"),
        ("vit-tiny", "vit.layers.0.mlp", "pair"),
        ("bert-tiny", "bert.encoder.layer.0.attention.self", "column"),
    ],
)
def test_blocks(workload: str, module: str, style: Style, degree: int) -> None:
    built = models.build(workload)
    model = randomised(built.model).eval()
    spec = split_of(model, [module], style)
    batch = built.make_batch(5).to(dtype=torch.double)
    call = capture(model, batch, [unit_of([module], spec)])[module]
    alone = nn.Module()
    holder = alone
    *path, last = module.split(".")
    for part in path:
        holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    holder.add_module(last, model.get_submodule(module))
    compare(alone, [module], spec, call, degree)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("bias", "samples"), [(True, 4), (False, 4), (True, 0)])
def test_torchs_own_attention(degree: int, first: bool, bias: bool, samples: int) -> None:
    attention = nn.MultiheadAttention(8, 4, bias=bias, batch_first=first)
    model = randomised(nn.Sequential(attention))
    shape = (samples, 6, 8) if first else (6, samples, 8)
    x = torch.randn(shape, dtype=torch.double, requires_grad=True)
    padding = torch.zeros(samples, 6, dtype=torch.bool)
    padding[1:2, 4:] = True
    per_head = torch.randn(samples * 4, 6, 6, dtype=torch.double)
    causal = torch.ones(6, 6).triu(1).bool()
    spec = split_of(model, ["0"], "pair")
    masked = [
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": per_head, "key_padding_mask": padding.double() * -9.0},
        {"key_padding_mask": padding},
    ]
    for masks in ({}, *(masked if samples else ())):  # torch bears no masks without samples
        model.zero_grad()
        call = UnitCall((x, x, x), {**masks, "need_weights": False})
        compare(model, ["0"], spec, call, degree, None if first else (1,))


class GroupedQueries(nn.Module):
    """Four heads of queries share two of keys and values, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads = 3, 4
        self.q_proj, self.o_proj = nn.Linear(8, 12), nn.Linear(12, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), mixed


class WithSinks(GroupedQueries):
    """Each head may attend to nothing, with a logit of its own, as in gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(self.num_heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        logits = q @ k.mT
        to_none = self.sinks.view(-1, 1, 1).expand(len(x), -1, q.shape[2], 1)
        shares = torch.cat([logits, to_none], -1).softmax(-1)[..., :-1]
        return self.o_proj((shares @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """The product of two linear layers, one activated, into a third."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.act = nn.Linear(4, 10), nn.Linear(4, 10), nn.SiLU()
        self.down = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_fewer_keys_than_queries_limit_the_degree() -> None:
    model = randomised(nn.Sequential(GroupedQueries()))
    spec = split_of(model, ["0"], "pair")
    assert (spec.parts, spec.uneven) == (2, False)
    x = torch.randn(4, 5, 8, dtype=torch.double, requires_grad=True)
    compare(model, ["0"], spec, UnitCall((x,), {}), 2)
    with pytest.raises(InputError, match="2 parts, which 3 members cannot share"):
        apply_split(model, ["0"], spec, 3, 0, lambda partial: partial)


def test_logits_of_heads_are_cut_with_them() -> None:
    model = randomised(nn.Sequential(WithSinks()))
    spec = split_of(model, ["0"], "pair")
    assert ("0.sinks", 0) in [(cut.name, cut.dim) for cut in spec.cuts]
    x = torch.randn(4, 5, 8, dtype=torch.double, requires_grad=True)
    compare(model, ["0"], spec, UnitCall((x,), {}), 2)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gated_units(degree: int) -> None:
    model = randomised(nn.Sequential(Gated()))
    x = torch.randn(4, 4, dtype=torch.double, requires_grad=True)
    compare(model, ["0"], split_of(model, ["0"], "pair"), UnitCall((x,), {}), degree)


def test_buffers_are_cut_with_the_channels_and_stay_the_same_objects() -> None:
    model = randomised(nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)))
    before = {n: b.clone() for n, b in model.named_buffers()}
    objects = {n: id(b) for n, b in model.named_buffers()}
    spec = split_of(model, ["0", "1"], "column")
    apply_split(model, ["0", "1"], spec, 2, 1, lambda partial: partial)
    assert {n: id(b) for n, b in model.named_buffers()} == objects
    assert torch.equal(model[1].running_var, before["1.running_var"][3:])
    assert model[0].weight.shape == (2, 3, 1, 1)
    model.train()(torch.randn(4, 3, 2, 2, dtype=torch.double))
    assert int(model[1].num_batches_tracked) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def test_a_tied_parameter_is_cut_once_and_its_units_must_agree() -> None:
    model = Tied()
    whole = model.embed.weight.detach().clone()
    by_symbol, column = split_of(model, ["embed"], "pair"), split_of(model, ["head"], "column")
    for modules, spec in ((["embed"], by_symbol), (["head"], column)):
        apply_split(model, modules, spec, 2, 1, lambda partial: partial)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, whole[4:])
    assert find_splits(model, ["head"]) == find_splits(Tied(), ["head"])  # whole sizes
    other = Tied()
    apply_split(other, ["embed"], split_of(other, ["embed"], "column"), 2, 0, lambda p: p)
    with pytest.raises(InputError, match=r"'head.weight' is tied and its units divide it diff"):
        apply_split(other, ["head"], column, 2, 0, lambda p: p)


def test_a_gradient_of_the_whole_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(InputError, match=r"'0.weight' has a gradient of its undivided shape"):
        apply_split(model, ["0"], split_of(model, ["0"], "row"), 2, 0, lambda p: p)


def test_an_unknown_style_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    pair = SplitSpec("pair", 4, True, 4, -1, ())
    with pytest.raises(InputError, match="unit '0' cannot be divided by pair"):
        apply_split(model, ["0"], pair, 2, 0, lambda p: p)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Embedding(9, 4, max_norm=1.0),
        nn.Embedding(9, 4, sparse=True),
        nn.Embedding(9, 4, scale_grad_by_freq=True),
        nn.LayerNorm(4),
        nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
        nn.LSTM(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
)
def test_what_is_not_divided(module: nn.Module) -> None:
    assert find_splits(nn.Sequential(module), ["0"]) == ()


def test_a_unit_that_mixes_features_after_its_linear_layer_has_no_columns() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2))
    assert [s.style for s in find_splits(model, ["0", "1"])] == ["row"]


def test_the_check_finds_splits_that_do_not_hold() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1))
    call = UnitCall((torch.randn(4, 4, requires_grad=True),), {})
    column, row = (split_of(model, ["0"], s) for s in ("column", "row"))
    assert is_equivalent(model, unit_of(["0"], column), column, call)
    assert is_equivalent(model, unit_of(["0", "1"], row), row, call)
    deceived = nn.Sequential(nn.Linear(4, 6), _Hidden())
    assert not is_equivalent(deceived, unit_of(["0", "1"], column), column, call)


class _Hidden(nn.ReLU):
    """Passes for an activation and is none."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input.softmax(-1)


def test_a_split_of_a_model_as_wide_as_its_sequences_is_tried_on_few_positions():
    x, mask = torch.randn(2, 300, 300), torch.ones(300, 300)
    short = _shortened(UnitCall((x, mask), {}), nn.Linear(300, 4))
    # Only the middle dimension has the positions for certain.
    assert [tuple(t.shape) for t in short.tensors()] == [(2, 16, 300), (300, 300)]
    image = UnitCall((torch.randn(2, 300, 5, 5),), {})
    assert _shortened(image, nn.Conv2d(300, 4, 1)) is image
    either = _shortened(UnitCall((torch.randn(2, 300, 8), mask), {}), nn.Linear(8, 4))
    assert [tuple(t.shape) for t in either.tensors()] == [(2, 16, 8), (16, 16)]
