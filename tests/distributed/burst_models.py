"""Small models whose units are given parts of the ranks, and what they are fed."""

from __future__ import annotations

from typing import Literal

import torch
from meshwright.models.units.discover import Discovery, discover
from meshwright.models.workload import Batch
from reference import twin
from torch import Tensor, nn
from torch.nn import functional as F

DtypeName = Literal["float64", "float32"]


class Chain(nn.Module):
    """One unit after another, with a shortcut over two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 7)
        self.third = nn.Linear(7, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.head(self.norm(y + self.third(torch.tanh(self.second(y)))))


class Branches(nn.Module):
    """Three branches of convolutions between a stem and a head, normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.ways = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Softplus(), nn.Conv2d(4, w, 3))
            for w in (2, 3, 4)
        )
        self.head = nn.Linear(9 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(torch.cat([way(y) for way in self.ways], 1).flatten(1))


class Block(nn.Module):
    """Attention and a block of two linear layers, each with its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    """Numbers in, one of them out; the last layer shares the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.block = Block()
        self.scores = nn.Linear(8, 10, bias=False)
        self.scores.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.block(self.embed(x))).mean(1)


def draw(name: str, size: int, dtype: DtypeName) -> Batch:
    """A batch for the model of that name. Random numbers are the same for both types."""
    if name == "tokens":
        x = torch.randint(10, (size, 4))
    elif name == "branches":
        x = torch.randn(size, 2, 4, 4, dtype=torch.float64)
    else:
        x = torch.randn(size, 5, dtype=torch.float64)
    return Batch((x,), torch.randint(3, (size,))).to(dtype=getattr(torch, dtype))


MODELS: dict[str, type[nn.Module]] = {"chain": Chain, "branches": Branches, "tokens": Tokens}
_found: dict[tuple[str, DtypeName], Discovery] = {}


def build(name: str, dtype: DtypeName) -> tuple[nn.Module, Discovery]:
    """A model of that name, the same on every rank, and its units."""
    torch.manual_seed(7)
    model = MODELS[name]().double().to(getattr(torch, dtype)).train()
    if (name, dtype) not in _found:
        _found[name, dtype] = discover(twin(model), draw(name, 4, dtype))
    return model, _found[name, dtype]
