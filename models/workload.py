"""A workload: a model, the batches that it is fed, and the loss that it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..planner.schema.precision import Precision


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Batch:
    """What one forward is fed: ``model(*args, **kwargs)``, then ``loss(output, target)``.

    Each of the three may nest tensors in anything that torch flattens (tuples, lists, dicts, named
    tuples). A tensor whose dim 0 is the batch size holds one entry per sample; any other tensor
    is shared by all samples. A shared tensor whose dim 0 *happens* to equal the batch size cannot
    be told apart and is taken as one per sample: give it a leading dim of 1.
    """

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many samples: dim 0 of the first tensor that has one (args, kwargs, target)."""
        # As a dict: torch flattens no other mapping.
        for leaf in pytree.tree_leaves((self.args, dict(self.kwargs), self.target)):
            if isinstance(leaf, Tensor) and leaf.ndim > 0:
                return leaf.shape[0]
        raise ValueError("a batch needs a tensor with at least one dim, this one has none")

    def slice(self, lo: int, hi: int) -> Batch:
        """Samples ``lo`` to ``hi - 1`` as views; ``lo == hi`` is an empty batch."""
        if not 0 <= lo <= hi <= self.size:
            raise ValueError(f"cannot slice samples {lo}..{hi} out of a batch of {self.size}")
        return self._per_sample(lambda tensor: tensor[lo:hi])

    def copied(self) -> Batch:
        """The same in memory of its own."""
        return self._map(torch.clone)

    def take(self, index: Tensor) -> Batch:
        """Copies of the samples that ``index`` (1-d, integers) names, in that order."""
        return self._per_sample(lambda tensor: tensor[index.to(tensor.device)])

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Batch:
        """The batch on ``device``, its floating tensors (and no others) as ``dtype``."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return self._map(move)

    def _per_sample(self, pick: Callable[[Tensor], Tensor]) -> Batch:
        size = self.size

        def pick_if_batched(tensor: Tensor) -> Tensor:
            return pick(tensor) if tensor.ndim > 0 and tensor.shape[0] == size else tensor

        return self._map(pick_if_batched)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        args, kwargs, target = pytree.tree_map_only(
            Tensor, function, (self.args, dict(self.kwargs), self.target)
        )
        return Batch(args, target, kwargs)


@dataclass(frozen=True, eq=False)
class Workload:
    """A model with all that is needed to measure and train it.

    ``make_batch(size)`` draws ``size >= 0`` random samples from torch's default generator; the
    caller seeds. ``loss(output, target)`` is a mean over samples, or over tokens where every sample
    has the same count of them, so that shares of a batch combine by their sizes.
    ``data("train")`` and ``data("test")`` give all samples of a real data set as one batch, and
    ``accuracy(output, target)`` the share of right predictions, 0 to 1. ``precision`` is how the
    model computes; without it as it was built and as torch is set.
    """

    name: str
    model: nn.Module
    make_batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor]
    data: Callable[[str], Batch] | None = None
    accuracy: Callable[[Any, Any], float] | None = None
    precision: Precision | None = None
