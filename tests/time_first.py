"""Models whose tensors have time in front of the batch, as torch's recurrent layers, attention and
Transformer take them by default."""

from __future__ import annotations

from collections.abc import Callable

import meshwright as mw
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SYMBOLS, STEPS, WIDTH = 11, 5, 8


class Recurrent(nn.Module):
    """A language model, [time, sample]."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        self.inner, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.lstm(self.symbols(x))[0])))


class Translator(nn.Module):
    """From [time, sample] to [time, sample]; the padding is [sample, time]."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(STEPS, 1, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 2 * WIDTH, dropout=0.0)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        made = self.transformer(
            self.source(source) + self.positions,
            self.target(target) + self.positions[: len(target)],
            tgt_mask=torch.full((len(target), len(target)), -torch.inf).triu(1).to(self.positions),
            src_key_padding_mask=padding,
        )
        return self.head(made)


class Attending(nn.Module):
    """A block of attention, [time, sample, feature]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x + self.attention(x, x, x)[0]
        return x + self.down(torch.relu(self.up(x)))


class Turned(nn.Module):
    """Takes and gives [sample, time, feature], with time in front inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.lstm = nn.Linear(WIDTH, 2 * WIDTH), nn.LSTM(2 * WIDTH, WIDTH)
        self.down, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.lstm(torch.tanh(self.up(x.transpose(0, 1))))[0]
        return self.head(torch.relu(self.down(made)).transpose(0, 1))


class Bags(nn.Module):
    """Bags of symbols one after the other, and where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(SYMBOLS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, symbols: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(symbols, offsets))


def symbols(*shape: int) -> Tensor:
    return torch.randint(SYMBOLS, shape)


def read(size: int) -> mw.Batch:
    return mw.Batch((symbols(STEPS, size),), symbols(STEPS, size))


def translated(size: int) -> mw.Batch:
    padding = torch.arange(STEPS) >= torch.randint(2, STEPS + 1, (size, 1))
    given = symbols(STEPS, size), symbols(STEPS - 1, size), padding
    return mw.Batch(given, symbols(STEPS - 1, size))


def noise(size: int) -> mw.Batch:
    shape = (STEPS, size, WIDTH)
    return mw.Batch((torch.randn(shape),), torch.randn(shape))


def turned(size: int) -> mw.Batch:
    shape = (size, STEPS, WIDTH)
    return mw.Batch((torch.randn(shape),), torch.randn(shape))


def bags(size: int) -> mw.Batch:
    lengths = torch.randint(1, 4, (size,))
    given = symbols(int(lengths.sum())), lengths.cumsum(0) - lengths
    return mw.Batch(given, torch.randint(3, (size,)))


def mean_cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), wanted.flatten())


MADE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], mw.Batch], object]] = {
    "recurrent": (Recurrent, read, mean_cross_entropy),
    "translator": (Translator, translated, mean_cross_entropy),
    "attending": (Attending, noise, F.mse_loss),
    "turned": (Turned, turned, F.mse_loss),
    "bags": (Bags, bags, F.cross_entropy),
}
DIMS = {
    "recurrent": (1, 1),
    "translator": (1, 1, 0, 1),
    "attending": (1, 1),
    "turned": (0, 0),
}
"""The dims of samples in args and target."""


def workload(name: str, dtype: torch.dtype = torch.float32) -> mw.Workload:
    """The model of that name, the same in every process."""
    make_model, make_batch, loss = MADE[name]
    torch.manual_seed(3)
    model = make_model().to(dtype)
    return mw.Workload(name, model, lambda size: make_batch(size).to(dtype=dtype), loss)
