"""Llama 2 (Touvron et al., arXiv 2307.09288) as it is trained eagerly: RMS norms computed in
float32, rotary positions, fused causal attention, SwiGLU. And MPT (MosaicML), a GPT without biases.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from meshwright import Batch, Workload
from torch import Tensor, nn
from torch.nn import functional as F


class Sizes(NamedTuple):
    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    length: int


LLAMA2_7B = Sizes(32, 4096, 11008, 32, 32000, 4096)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        scaled = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.size = s.width // s.heads
        self.query = nn.Linear(s.width, s.width, bias=False)
        self.key = nn.Linear(s.width, s.width, bias=False)
        self.value = nn.Linear(s.width, s.width, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        angles = torch.outer(
            torch.arange(s.length).float(),
            1 / 10000 ** (torch.arange(0, self.size, 2).float() / self.size),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        turned = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1)
        return turned.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        mixed = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(s.width, s.hidden, bias=False)
        self.up = nn.Linear(s.width, s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(s.width), Attention(s)
        self.norm2, self.mlp = RMSNorm(s.width), MLP(s)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.Sequential(*(Block(s) for _ in range(s.layers)))
        self.norm = RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.embedding(symbols))))
        return out


class MPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class MPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50368, width)
        self.blocks = nn.Sequential(*(MPTBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.embedding(symbols))), self.embedding.weight)


def language_model(model: nn.Module, vocabulary: int, length: int) -> Workload:
    """Next symbols are guessed in sequences of ``length``."""

    def make_batch(size: int) -> Batch:
        symbols = torch.randint(vocabulary, (size, length + 1))
        return Batch((symbols[:, :-1].contiguous(),), symbols[:, 1:].contiguous())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Workload("language-model", model, make_batch, loss, precision="bf16")
