"""A recurrent encoder and decoder with attention: the translation model of P3, in PyTorch.

P3 (arXiv 1905.03960) trains Sockeye on IWSLT15, where, unlike in image models, the *first* layer is
the heaviest: the gradient of an embedding is ready last and its value is needed first. As there,
two layers on each side, all 512 wide; the vocabularies are those of Stanford's English-Vietnamese
edition of IWSLT15. Simpler than Sockeye in three ways that leave the heavy layers where they are:
the encoder reads in one direction only; attention (Luong et al., arXiv 1508.04025, "general" score)
comes after the decoder's LSTM; what was attended to is not fed back into it. With teacher forcing
the whole decoder is then one call of ``nn.LSTM``.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..workload import Batch, Workload
from .data import BYTES, NO_BYTE, mean_cross_entropy, share_right, windows


class Seq2SeqShape(NamedTuple):
    """Sizes of a model; ``length`` is how many symbols each source and each target has."""

    source_vocabulary: int
    target_vocabulary: int
    length: int
    width: int
    layers: int


SHAPES = {
    "seq2seq-tiny": Seq2SeqShape(BYTES, BYTES, length=12, width=32, layers=2),
    "seq2seq-mini": Seq2SeqShape(BYTES, BYTES, length=24, width=256, layers=2),
    "seq2seq": Seq2SeqShape(17191, 7709, length=32, width=512, layers=2),
}


class Encoder(nn.Module):
    """Symbols [sample, position] to outputs [sample, position, width] and the final state.

    The state's halves are [sample, layer, width], not in ``nn.LSTM``'s order, so that everything
    that leaves the module has samples in dim 0 and can be divided among ranks.
    """

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, (hidden, cell) = self.lstm(self.embedding(source))
        return outputs, hidden.transpose(0, 1), cell.transpose(0, 1)


class Decoder(nn.Module):
    """Symbols [sample, position] and a state as ``Encoder`` leaves it to [..., width]."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, target: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        # Contiguous, as cuDNN refuses a state that is not.
        state = (hidden.transpose(0, 1).contiguous(), cell.transpose(0, 1).contiguous())
        outputs: Tensor = self.lstm(self.embedding(target), state)[0]
        return outputs


class LuongAttention(nn.Module):
    """Luong's: a mean of the encoder's outputs for each position of the decoder, joined to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width, bias=False)

    def forward(self, decoded: Tensor, encoded: Tensor) -> Tensor:
        weights = (self.score(decoded) @ encoded.transpose(1, 2)).softmax(-1)
        joined: Tensor = self.combine(torch.cat((weights @ encoded, decoded), dim=-1))
        return joined.tanh()


class Seq2Seq(nn.Module):
    """Source and preceding target symbols [sample, position] to logits [..., target symbol]."""

    def __init__(self, shape: Seq2SeqShape) -> None:
        super().__init__()
        self.encoder = Encoder(shape.source_vocabulary, shape.width, shape.layers)
        self.decoder = Decoder(shape.target_vocabulary, shape.width, shape.layers)
        self.attention = LuongAttention(shape.width)
        self.output = nn.Linear(shape.width, shape.target_vocabulary)

    def forward(self, source: Tensor, preceding: Tensor) -> Tensor:
        encoded, hidden, cell = self.encoder(source)
        decoded = self.decoder(preceding, hidden, cell)
        logits: Tensor = self.output(self.attention(decoded, encoded))
        return logits


def workload(name: str) -> Workload:
    """The translation model of that name.

    Its real data is a made-up language: pieces of Python's manual, byte by byte, "translated" into
    themselves backwards. Bytes fit in every vocabulary here and use only a part of the largest.
    """
    shape = SHAPES[name]

    def make_batch(size: int) -> Batch:
        source = torch.randint(1, shape.source_vocabulary, (size, shape.length))
        target = torch.randint(1, shape.target_vocabulary, (size, shape.length))
        return _teacher_forced(source, target)

    def data(split: str) -> Batch:
        source = windows(split, shape.length)
        return _teacher_forced(source, source.flip(1))

    model = Seq2Seq(shape)
    return Workload(name, model, make_batch, mean_cross_entropy, data, share_right)


def _teacher_forced(source: Tensor, target: Tensor) -> Batch:
    """The decoder is shown the right symbol before each one that it predicts; ``NO_BYTE`` first."""
    start = torch.full_like(target[:, :1], NO_BYTE)
    return Batch((source, torch.cat((start, target[:, :-1]), dim=1)), target)
