"""What reference workloads are trained on: random samples to measure with, scikit-learn's digits
and the text that every Python ships to train on; and how classifications are scored."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..workload import Batch, Workload

# A target that is not scored: ``cross_entropy``'s own default for ``ignore_index``.
IGNORED = -100


def mean_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all scored targets; logits [..., class], target [...] class numbers.

    The loss of an empty batch is 0 where torch's is nan, and still has a gradient, so that a rank
    without samples adds nothing to a sum over ranks instead of spoiling it.
    """
    if target.numel() == 0:
        return logits.sum()
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def share_right(logits: Tensor, target: Tensor) -> float:
    """Share of scored targets whose class has the largest logit, 0 to 1; 0 where there is none."""
    scored = target != IGNORED
    right = (logits.argmax(-1) == target) & scored
    return float(right.sum()) / max(int(scored.sum()), 1)


# Vocabulary of byte-level text: one symbol per value of a byte.
BYTES = 256

# A byte value that does not occur in the text, free for a start or a mask symbol.
NO_BYTE = 0

# One window in ten is kept for the test.
TEST_EVERY = 10


def windows(split: str, length: int) -> Tensor:
    """Consecutive pieces of the text, [window, ``length``], symbols 1..255 in int64.

    The text is the language reference behind Python's ``help()``, about 0.46 MB, topics in
    alphabetical order. Every tenth window is ``test``, the others ``train``. It changes a little
    from one version of Python to the next, so compare runs under the same version.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}: choose 'train' or 'test'")
    # A bytearray, as torch warns of memory that must not be written.
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
    text = "\n".join(topics[name] for name in sorted(topics))
    return text.encode().replace(b"\0", b" ")  # so that ``NO_BYTE`` is none of its bytes


def next_symbol_workload(name: str, model: nn.Module, vocabulary: int, length: int) -> Workload:
    """A language model: symbols [sample, ``length``] in, at each position the next one out."""

    def make_batch(size: int) -> Batch:
        return _shifted(torch.randint(vocabulary, (size, length + 1)))

    def data(split: str) -> Batch:
        return _shifted(windows(split, length + 1))

    return Workload(name, model, make_batch, mean_cross_entropy, data, share_right)


def _shifted(symbols: Tensor) -> Batch:
    return Batch((symbols[:, :-1].contiguous(),), symbols[:, 1:].contiguous())


# Of 1797 digits: one in five.
TEST_SAMPLES = 360


class Pictures(NamedTuple):
    """What a network looks at: square pictures, ``pixels`` wide, and how many classes it tells."""

    channels: int
    pixels: int
    classes: int


def image_workload(name: str, model: nn.Module, pictures: Pictures) -> Workload:
    """A classifier of ``pictures``; the model maps [sample, channel, y, x] to [sample, class]."""

    def make_batch(size: int) -> Batch:
        images = torch.randn(size, pictures.channels, pictures.pixels, pictures.pixels)
        return Batch((images,), torch.randint(pictures.classes, (size,)))

    def data(split: str) -> Batch:
        return digits(split, pictures)

    return Workload(name, model, make_batch, mean_cross_entropy, data, share_right)


def digits(split: str, pictures: Pictures) -> Batch:
    """Handwritten digits 0..9 (UCI, shipped by scikit-learn) in the size that a model takes.

    1797 pictures of 8 × 8, standardised by the training part's mean and deviation, enlarged
    bilinearly, the one channel repeated (a view: it costs no memory until it is copied). The split
    is the same on every machine: 1437 ``train``, 360 ``test``, drawn at random, so a writer may
    occur in both and the accuracy is that of known hands.
    """
    images, labels = _shipped_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu")
    parts = {"test": order[:TEST_SAMPLES], "train": order[TEST_SAMPLES:]}
    if split not in parts:
        raise ValueError(f"unknown split {split!r}: choose 'train' or 'test'")
    # The test part by the training part's figures, of which a model may know.
    known, wanted = images[parts["train"]], images[parts[split]]
    wanted = ((wanted - known.mean()) / known.std())[:, None]
    if pictures.pixels != wanted.shape[-1]:
        wanted = F.interpolate(wanted, size=pictures.pixels, mode="bilinear", align_corners=False)
    return Batch((wanted.expand(-1, pictures.channels, -1, -1),), labels[parts[split]])


DIGITS = "datasets", "data", "digits.csv.gz"


def _shipped_digits() -> tuple[Tensor, Tensor]:
    """Pictures [sample, y, x] with grey levels 0..16 in float32, and their labels."""
    # From the file: importing scikit-learn takes each rank longer than the rest of its start.
    package = find_spec("sklearn")
    if package is None:
        raise ValueError("the digits data set needs scikit-learn: pip install 'meshwright[data]'")
    folders = package.submodule_search_locations or ()
    path = next((p for f in folders if (p := Path(f, *DIGITS)).exists()), None)
    if path is None:  # a version that has it elsewhere
        from sklearn.datasets import load_digits

        rows = torch.from_numpy(np.column_stack(load_digits(return_X_y=True)).astype(np.float32))
    else:
        rows = torch.from_numpy(np.loadtxt(path, np.float32, delimiter=","))
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].long()
