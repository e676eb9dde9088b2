"""Loss and accuracy of classifiers, whether they predict one class per sample or per token."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""A target that is not scored: ``cross_entropy``'s own default for ``ignore_index``."""


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
