"""Operations as they are recorded, and their seconds."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.profiler.catalogue import datasheet
from meshwright.profiler.memory import FusedAttention
from meshwright.profiler.operations import Operation, OperationLog
from meshwright.profiler.roofline import KERNEL_S, CountedWork, seconds
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

A100, H100 = datasheet("a100-sxm-80gb"), datasheet("h100-sxm")
META = torch.device("meta")


def recorded(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> OperationLog:
    x = torch.empty(*shape, device=META, dtype=dtype, requires_grad=True)
    module.zero_grad()
    with FusedAttention(), OperationLog() as log:
        module(x).sum().backward()
    return log


def every(log: OperationLog) -> list[Operation]:
    return [*log.forward[""], *log.backward[""]]


def flops(operations: list[Operation]) -> float:
    return sum(2 * op.m * op.n * op.k * op.groups + op.flops for op in operations)


MODULES = st.one_of(
    st.builds(
        nn.Conv2d,
        in_channels=st.sampled_from([8, 16]),
        out_channels=st.sampled_from([8, 24]),
        kernel_size=st.integers(1, 3),
        stride=st.integers(1, 2),
        padding=st.integers(0, 1),
        groups=st.sampled_from([1, 2, 8]),
        bias=st.booleans(),
    ),
    st.builds(
        nn.ConvTranspose2d,
        in_channels=st.sampled_from([8, 16]),
        out_channels=st.sampled_from([8, 24]),
        kernel_size=st.integers(1, 3),
        stride=st.integers(1, 2),
        groups=st.sampled_from([1, 2]),
    ),
    st.builds(nn.Linear, st.sampled_from([9, 32]), st.integers(1, 5), bias=st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(MODULES, st.integers(1, 4))
def test_products_are_as_many_as_torch_counts(module: nn.Module, batch: int) -> None:
    module.to(META)
    width = getattr(module, "in_features", None)
    shape = (batch, width) if width else (batch, module.in_channels, 9, 7)  # type: ignore[arg-type]
    log = recorded(module, *shape)
    with FlopCounterMode(display=False) as counter:
        module(torch.empty(*shape, device=META))
    forward = counter.get_total_flops()
    assert flops(log.forward[""]) == pytest.approx(forward)
    # The gradients of input and weight take as much each. (torch counts groups twice there.)
    assert flops(log.backward[""]) == pytest.approx(2 * forward)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], is_causal=True)
        out: Tensor = self.out(h).softmax(-1)
        return out


@pytest.mark.parametrize("batch", [3, 7, 64])
def test_other_batches_follow_from_two(batch: int) -> None:
    model = Everything().to(META)
    few, many, asked = (every(recorded(model, n, 3, 12, 12)) for n in (2, 4, batch))
    work = CountedWork((2, 4), few, many)
    exact = sum(seconds(op, H100) for op in asked)
    assert work.seconds(batch, H100) == pytest.approx(exact, rel=1e-9)


def test_what_differs_by_the_batch_follows_a_line() -> None:
    one, two = Operation("stream", "half", traffic=1e9), Operation("stream", "half", traffic=3e9)
    work = CountedWork((2, 4), [one], [two, two])
    a, b = seconds(one, A100), 2 * seconds(two, A100)
    assert work.seconds(2, A100) == pytest.approx(a)
    assert work.seconds(6, A100) == pytest.approx(2 * b - a)


def test_the_rate_is_that_of_the_numbers() -> None:
    """Under autocast too, forward and backward, where parameters are float32."""

    def rates(log: OperationLog) -> set[str]:
        return {op.rate for op in every(log) if op.kind == "matmul"}

    half = nn.Linear(8, 8, device=META, dtype=torch.bfloat16)
    assert rates(recorded(half, 2, 8, dtype=torch.bfloat16)) == {"half"}
    full = nn.Linear(8, 8)
    assert rates(recorded(full.to(META), 2, 8)) == {"float32"}
    cast, x = nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    with OperationLog() as log:
        with torch.autocast("cpu", torch.bfloat16):
            y = cast(x)
        y.float().sum().backward()
    assert rates(log) == {"half"}


def test_convolutions_use_tf32_by_default_and_products_where_they_may() -> None:
    def rates() -> list[str]:
        model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(6, 6)).to(META)
        return [op.rate for op in recorded(model, 2, 4, 6).forward[""] if op.kind != "stream"]

    assert rates() == ["tf32", "float32"]
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        assert rates() == ["tf32", "tf32"]
    finally:
        matmul.allow_tf32 = before


def product(m: int, n: int, k: int) -> float:
    return seconds(Operation("matmul", "half", m, n, k, 1), A100)


def test_an_edge_takes_a_whole_tile_and_a_last_wave_a_whole_wave() -> None:
    # One tile of 256 x 128 on each of 108 multiprocessors, and one more.
    assert product(256 * 108, 128, 4096) == product(256 * 108 - 100, 128, 4096)
    assert product(256 * 108 + 1, 128, 1 << 12) > 1.2 * product(256 * 108, 128, 1 << 12)
    # As many operations in a shape that leaves multiprocessors idle.
    assert product(64, 64, 1 << 16) > product(4096, 4096, 16)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_no_product_is_faster_than_the_device(m: int, n: int, k: int) -> None:
    assert product(m, n, k) >= KERNEL_S + 2 * m * n * k / (312e12 * A100.products)


def test_a_bf16_layer_on_an_h100_has_its_rate() -> None:
    """It was estimated at 40 TFLOP/s, 0.6 of the float32 rate."""
    layer = nn.Linear(8192, 8192, bias=False, device=META, dtype=torch.bfloat16)
    done = every(recorded(layer, 8192, 8192, dtype=torch.bfloat16))
    rate = flops(done) / sum(seconds(op, H100) for op in done)
    assert 350e12 < rate < 800e12


def test_channels_last_spares_moving_them() -> None:
    conv = nn.Conv2d(64, 64, 3, device=META)
    x = torch.empty(16, 64, 56, 56, device=META)
    taken = []
    for layout in (torch.contiguous_format, torch.channels_last):
        with torch.no_grad(), OperationLog() as log:
            conv(x.contiguous(memory_format=layout))
        taken.append([op for op in log.forward[""] if op.kind == "conv"])
    (plain,), (last,) = taken
    assert plain.besides > 0 == last.besides
    assert plain[2:8] == last[2:8]
    assert seconds(last, A100) < seconds(plain, A100)


def test_a_causal_mask_halves_attention() -> None:
    def attention(causal: bool) -> list[Operation]:
        q = torch.empty(2, 4, 64, 16, device=META, requires_grad=True)
        with FusedAttention(), OperationLog() as log:
            F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()
        found = chain(log.forward[""], log.backward[""])
        return [op for op in found if op.kind.startswith("attention")]

    half, whole = attention(True), attention(False)
    assert [op.kind for op in whole] == ["attention", "attention_back"]
    assert [op.flops for op in whole] == [4 * 8 * 64 * 64 * 16, 10 * 8 * 64 * 64 * 16]
    assert [2 * op.flops for op in half] == [op.flops for op in whole]


def test_grouped_queries_are_fused_too() -> None:
    q = torch.empty(2, 8, 64, 16, device=META, requires_grad=True)
    k = torch.empty(2, 2, 64, 16, device=META, requires_grad=True)
    with FusedAttention(), OperationLog() as log:
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
    assert "matmul" not in {op.kind for op in every(log)}
    assert log.forward[""][0].flops == 2 * 16 * 64 * 64 * 16
    assert k.grad is not None
    assert k.grad.shape == k.shape


def test_a_lookup_reads_what_it_returns() -> None:
    table = nn.Embedding(100_000, 64, device=META)
    with torch.no_grad(), OperationLog() as log:
        table(torch.empty(8, dtype=torch.long, device=META))
    (lookup,) = log.forward[""]
    assert lookup.traffic == 2 * 8 * 64 * 4
