"""GPT-2 (Radford et al., 2019; sizes as in its table 2), trained on bytes of Python's manual.

Without dropout, as is now usual for pretraining. Module names are those of the published weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..workload import Workload
from .data import BYTES, next_symbol_workload


class GPTShape(NamedTuple):
    """Sizes of a model; ``length`` is the longest sequence, and that of every batch."""

    vocabulary: int
    length: int
    width: int
    layers: int
    heads: int


SHAPES = {
    "gpt-tiny": GPTShape(BYTES, length=32, width=64, layers=2, heads=4),
    "gpt-mini": GPTShape(BYTES, length=128, width=256, layers=6, heads=8),
    "gpt-small": GPTShape(50257, length=1024, width=768, layers=12, heads=12),
}


class Attention(nn.Module):
    """Causal self-attention, [sample, position, width] to the same.

    ``c_attn`` holds queries, keys and values, each a third of its outputs, head by head. How many
    heads there are is read off its output, so a ``c_attn`` cut to some heads (the same ones in each
    third), with a ``c_proj`` cut to match, computes those heads' part of the sum.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            third.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for third in self.c_attn(hidden).chunk(3, dim=-1)
        )  # each [sample, head, position, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, [..., width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(self.act(self.c_fc(hidden)))
        return projected


class Block(nn.Module):
    """Attention, then the MLP, each on normalised inputs and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        outputs: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return outputs


class GPT(nn.Module):
    """Symbols [sample, position] to logits [sample, position, symbol] of the symbol that follows.

    ``lm_head`` and ``wte`` share one weight.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.length, shape.width)
        self.h = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight  # tied, as published
        self._initialise(shape.layers)

    def forward(self, symbols: Tensor) -> Tensor:
        # Positions are looked up once per sample, so that every module's output has samples in
        # dim 0 and can be divided among ranks like any other.
        positions = torch.arange(symbols.shape[1], device=symbols.device).expand_as(symbols)
        hidden = self.wte(symbols) + self.wpe(positions)
        logits: Tensor = self.lm_head(self.ln_f(self.h(hidden)))
        return logits

    def _initialise(self, layers: int) -> None:
        """GPT-2's: deviation 0.02, and less by √(2·layers) where a result is added to the sum."""
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def workload(name: str) -> Workload:
    """The GPT of that name. Real text is bytes whatever the vocabulary, which they fit in."""
    shape = SHAPES[name]
    return next_symbol_workload(name, GPT(shape), shape.vocabulary, shape.length)
