"""Error feedback: what has been computed of a gradient and not been sent yet, kept for later.

Sent and held together are what was computed, element by element: what leaves is taken out of what
is held, nothing is rounded away between them (the memory of Stich et al., arXiv 1809.07599).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lossy:
    """Settings of the exchanges that send a part.

    ``patience``: a piece that was not sent in so many backwards is sent in the next. The share that
    top-k sends falls from ``first_ratio`` to the plan's exponentially, in ``stages`` of
    ``stage_backwards`` each (Deep Gradient Compression's warm-up, Lin et al., arXiv 1712.01887).
    """

    patience: int = 10
    first_ratio: float = 0.25
    stages: int = 4
    stage_backwards: int = 25


class Feedback(Protocol):
    """What one parameter's exchange holds back, wherever it is kept."""

    @property
    def held(self) -> Tensor | None:
        """What has not been sent, in the parameter's shape; None where that is nothing."""

    def add(self, computed: Tensor, rate: float = 1.0) -> Tensor:
        """Adds ``rate`` times what was computed, and returns what is held now. Takes ``computed``
        over."""

    def take(self, index: Tensor) -> Tensor:
        """Takes the elements at ``index`` (as they lie in memory) out, to be sent."""

    def take_all(self, gradient: Tensor) -> None:
        """Takes everything out and adds it to ``gradient``."""

    def restore(self, held: Tensor | None) -> None:
        """Holds that, as after a checkpoint."""


class Residual:
    """Feedback that is kept in a buffer of the gradient's size."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    @property
    def held(self) -> Tensor | None:
        """What has not been sent."""
        return self._held

    def add(self, computed: Tensor, rate: float = 1.0) -> Tensor:
        """Adds ``rate`` times what was computed, and returns what is held now. Takes ``computed``
        over."""
        if self._held is None:
            self._held = computed if rate == 1 else computed.mul_(rate)
        else:
            self._held.add_(computed, alpha=rate)
        return self._held

    def take(self, index: Tensor) -> Tensor:
        """Takes the elements at ``index`` (as they lie in memory) out, to be sent."""
        assert self._held is not None
        flat = flat_of(self._held)
        taken = flat[index]
        flat[index] = 0
        return taken

    def take_all(self, gradient: Tensor) -> None:
        """Takes everything out and adds it to ``gradient``."""
        if self._held is not None:
            gradient.add_(self._held)
        self._held = None

    def restore(self, held: Tensor | None) -> None:
        """Holds that, as after a checkpoint."""
        self._held = held


def flat_of(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def l1(tensor: Tensor) -> float:
    """The sum of absolute values."""
    return float(torch.linalg.vector_norm(flat_of(tensor), 1)) if tensor.numel() else 0.0
