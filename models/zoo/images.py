"""Image classification: random pictures to measure with, scikit-learn's digits to train on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..workload import Batch, Workload
from .scoring import mean_cross_entropy, share_right

TEST_SAMPLES = 360
"""Of 1797 digits: one in five."""


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
    known, wanted = images[parts["train"]], images[parts[split]]
    wanted = ((wanted - known.mean()) / known.std())[:, None]
    if pictures.pixels != wanted.shape[-1]:
        wanted = F.interpolate(wanted, size=pictures.pixels, mode="bilinear", align_corners=False)
    return Batch((wanted.expand(-1, pictures.channels, -1, -1),), labels[parts[split]])


def _shipped_digits() -> tuple[Tensor, Tensor]:
    """Pictures [sample, y, x] with grey levels 0..16 in float32, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "the digits data set needs scikit-learn: pip install 'meshwright[data]'"
        ) from error
    shipped = load_digits()
    images = torch.as_tensor(shipped.images, dtype=torch.float32, device="cpu")
    return images, torch.as_tensor(shipped.target, dtype=torch.int64, device="cpu")
