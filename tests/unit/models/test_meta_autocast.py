"""Autocast on the meta device, by the lists in the documentation of torch.amp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from meshwright.models.meta_autocast import MetaAutocast
from torch import Tensor, nn
from torch.nn import functional as F

BF16, FULL = torch.bfloat16, torch.float32

# Of what torch's documentation of torch.amp lists for CUDA, and what it does not list.
TYPES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "linear": (nn.Linear(8, 8, device="meta"), BF16),
    "conv": (lambda x: nn.Conv1d(4, 4, 3, device="meta")(x), BF16),
    "matmul": (lambda x: x @ x.transpose(1, 2), BF16),
    "bmm": (lambda x: x.bmm(x.mT), BF16),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), BF16),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), BF16),
    "self attention": (
        lambda x: nn.MultiheadAttention(8, 2, batch_first=True, device="meta")(x, x, x)[0],
        BF16,
    ),
    "lstm": (lambda x: nn.LSTM(8, 8, device="meta")(x)[0], BF16),
    "softmax of half": (lambda x: x.bfloat16().softmax(-1), FULL),
    "norm of half": (lambda x: nn.LayerNorm(8, device="meta")(x.bfloat16()), FULL),
    "sum of half": (lambda x: x.bfloat16().sum(), FULL),
    "gelu of half": (lambda x: F.gelu(x.bfloat16()), BF16),
    "gelu": (F.gelu, FULL),
    "half and full": (lambda x: x + x.bfloat16(), FULL),
    "float64": (lambda x: x.double() @ x.double().mT, torch.float64),
}


@pytest.mark.parametrize("what", TYPES)
def test_results_have_the_types_that_autocast_gives(what: str) -> None:
    made, expected = TYPES[what]
    with MetaAutocast(BF16):
        assert made(torch.empty(2, 4, 8, device="meta")).dtype == expected


def test_gradients_come_in_the_parameters_types_and_weights_are_cast_once() -> None:
    layer = nn.Linear(8, 8, device="meta")
    x = torch.empty(2, 8, device="meta", requires_grad=True)
    with MetaAutocast(BF16):
        y = layer(layer(x))
        casts = {id(n) for n in _nodes(y) if n.name() == "ToCopyBackward0"}
        F.cross_entropy(y, torch.zeros(2, dtype=torch.long, device="meta")).backward()
    assert len(casts) == 3  # the input, the weight and the bias
    assert layer.weight.grad is not None
    assert x.grad is not None
    assert layer.weight.grad.dtype == x.grad.dtype == FULL


def _nodes(tensor: Tensor) -> list[torch.autograd.graph.Node]:
    found, open_ = [], [tensor.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in found:
            found.append(node)
            open_ += [n for n, _ in node.next_functions]
    return found


def test_tensors_with_values_are_left_alone() -> None:
    x = torch.randn(2, 8)
    with MetaAutocast(BF16):
        assert (x @ x.T).dtype == FULL
