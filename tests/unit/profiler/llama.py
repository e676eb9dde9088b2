"""Llama 2 (Touvron et al., arXiv 2307.09288), as plain as it is trained: RMS norms computed in
float32, rotary positions, fused causal attention, SwiGLU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from meshwright import Batch, Workload
from meshwright.planner.schema.precision import Precision
from torch import Tensor, nn
from torch.nn import functional as F


class Sizes(NamedTuple):
    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    vocabulary: int
    length: int


LLAMA2_7B = Sizes(32, 4096, 11008, 32, 32, 32000, 4096)
LLAMA3_8B = Sizes(32, 4096, 14336, 32, 8, 128256, 8192)


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
        self.repeats = s.heads // s.groups
        self.query = nn.Linear(s.width, s.heads * self.size, bias=False)
        self.key = nn.Linear(s.width, s.groups * self.size, bias=False)
        self.value = nn.Linear(s.width, s.groups * self.size, bias=False)
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
        q, k = self.rotated(q), self.rotated(k)
        if self.repeats > 1:
            k, v = (y.repeat_interleave(self.repeats, dim=1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        x = x + self.mlp(self.norm2(x))
        return x


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


def llama(s: Sizes, dtype: torch.dtype, precision: Precision | None) -> Workload:
    """A Llama of these sizes without memory, its parameters in ``dtype``."""
    with torch.device("meta"):
        model = Llama(s).to(dtype)

    def make_batch(size: int) -> Batch:
        symbols = torch.randint(s.vocabulary, (size, s.length + 1))
        return Batch((symbols[:, :-1].contiguous(),), symbols[:, 1:].contiguous())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Workload("llama", model, make_batch, loss, precision=precision)
