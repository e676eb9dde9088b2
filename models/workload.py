"""A workload: a model, the batches that it is fed, and the loss that it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.schema.errors import InputError
from ..planner.schema.precision import Precision
from .opened import map_tensors, tensors_in


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Batch:
    """What one forward is fed: ``model(*args, **kwargs)``, then ``loss(output, target)``.

    Each of the three may nest tensors in anything that torch flattens (tuples, lists, dicts, named
    tuples), in dataclasses and in objects that hold tensors. ``batch_dims`` says, for each tensor
    of args, kwargs and target in this order, which of its dims counts the samples; None for a
    tensor that all samples share. Without it, as in what ``make_batch`` returns, Meshwright finds
    them (models/units/batch_dims.py); where it cannot, a tensor whose dim 0 is as long as that of
    the first tensor holds one entry per sample.
    """

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_dims: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.batch_dims is None:
            return
        tensors = self.tensors()
        if len(self.batch_dims) != len(tensors):
            raise InputError(
                f"batch_dims={self.batch_dims} has {len(self.batch_dims)} entries for "
                f"{len(tensors)} tensors: give one for each tensor of args, kwargs and target, "
                "None where samples share it"
            )
        pairs = list(zip(tensors, self.batch_dims, strict=True))
        shapes = [list(t.shape) for t in tensors]
        if any(d is not None and not 0 <= d < t.ndim for t, d in pairs):
            raise InputError(
                f"batch_dims={self.batch_dims} names dims that tensors of shapes {shapes} do not "
                "have: count them from 0"
            )
        if len({t.shape[d] for t, d in pairs if d is not None}) != 1:
            raise InputError(
                f"batch_dims={self.batch_dims} of tensors of shapes {shapes} do not agree on one "
                "number of samples: name the dim of each that counts them"
            )

    def tensors(self) -> list[Tensor]:
        """The tensors of args, kwargs and target, in this order."""
        # As a dict: torch flattens no other mapping.
        return tensors_in((self.args, dict(self.kwargs), self.target))

    @property
    def size(self) -> int:
        """How many samples, as the first tensor that has some counts them."""
        tensors = self.tensors()
        dims = self.batch_dims or [0 if t.ndim else None for t in tensors]
        for tensor, dim in zip(tensors, dims, strict=True):
            if dim is not None:
                return tensor.shape[dim]
        raise ValueError("a batch needs a tensor with at least one dim, this one has none")

    def slice(self, lo: int, hi: int) -> Batch:
        """Samples ``lo`` to ``hi - 1`` as views (sparse ones as copies); ``lo == hi`` is an empty
        batch."""
        if not 0 <= lo <= hi <= self.size:
            raise ValueError(f"cannot slice samples {lo}..{hi} out of a batch of {self.size}")
        return self._per_sample(lambda tensor, dim: _part(tensor, dim, lo, hi - lo))

    def copied(self) -> Batch:
        """The same in memory of its own."""
        return self._map(torch.clone)

    def take(self, index: Tensor) -> Batch:
        """Copies of the samples that ``index`` (1-d, integers) names, in that order."""
        return self._per_sample(lambda t, dim: t.index_select(dim, index.to(t.device)))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Batch:
        """The batch on ``device``, its floating tensors (and no others) as ``dtype``. A copy to a
        GPU is one of those that its stream makes in their order: the host does not wait for it."""
        to_gpu = device is not None and torch.device(device).type == "cuda"

        def move(tensor: Tensor) -> Tensor:
            wanted = dtype if tensor.is_floating_point() else None
            # From other memory the host would wait for all that the device has to do before.
            source = tensor.pin_memory() if to_gpu and tensor.device.type == "cpu" else tensor
            return source.to(device=device, dtype=wanted, non_blocking=to_gpu)

        return self._map(move)

    def _per_sample(self, pick: Callable[[Tensor, int], Tensor]) -> Batch:
        size = self.size
        known = self.batch_dims or [0 if t.shape[:1] == (size,) else None for t in self.tensors()]
        dims = iter(known)

        def pick_if_batched(tensor: Tensor) -> Tensor:
            dim = next(dims)
            return tensor if dim is None else pick(tensor, dim)

        return self._map(pick_if_batched)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        given = (self.args, dict(self.kwargs), self.target)
        args, kwargs, target = map_tensors(given, function)
        return replace(self, args=args, target=target, kwargs=kwargs)


def _part(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    if tensor.layout is torch.strided:
        return tensor.narrow(dim, start, length)
    return tensor.narrow_copy(dim, start, length)


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
