"""Text that every Python ships, as bytes: what the language models are trained on."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from ..workload import Batch, Workload
from .scoring import mean_cross_entropy, share_right

BYTES = 256
"""Vocabulary of byte-level text: one symbol per value of a byte."""

NO_BYTE = 0
"""A byte value that does not occur in the text, free for a start or a mask symbol."""

TEST_EVERY = 10
"""One window in ten is kept for the test."""


def windows(split: str, length: int) -> Tensor:
    """Consecutive pieces of the text, [window, ``length``], symbols 1..255 in int64.

    The text is the language reference behind Python's ``help()``, about 0.46 MB, topics in
    alphabetical order. Every tenth window is ``test``, the others ``train``. It changes a little
    from one version of Python to the next, so compare runs under the same version.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}: choose 'train' or 'test'")
    text = torch.frombuffer(bytearray(_reference()), dtype=torch.uint8).long()
    whole = text[: len(text) // length * length].view(-1, length)
    is_test = torch.arange(len(whole), device="cpu") % TEST_EVERY == TEST_EVERY - 1
    return whole[is_test if split == "test" else ~is_test]


@cache
def _reference() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some slimmed-down Pythons drop it
        raise ValueError(
            "the text data set needs pydoc_data, which this Python was installed without"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode().replace(b"\0", b" ")


def next_symbol_workload(name: str, model: nn.Module, vocabulary: int, length: int) -> Workload:
    """A language model: symbols [sample, ``length``] in, at each position the next one out."""

    def make_batch(size: int) -> Batch:
        return _shifted(torch.randint(vocabulary, (size, length + 1)))

    def data(split: str) -> Batch:
        return _shifted(windows(split, length + 1))

    return Workload(name, model, make_batch, mean_cross_entropy, data, share_right)


def _shifted(symbols: Tensor) -> Batch:
    return Batch((symbols[:, :-1].contiguous(),), symbols[:, 1:].contiguous())
