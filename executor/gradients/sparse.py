"""The average of what top-k has sent, kept as it came: the few elements of each peer.

Where nothing reads the gradient, a mirrored parameter is moved by them as they are, and no dense
gradient is ever made. Who reads ``grad`` gets a dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.schema.errors import RunError
from ..redistribution.shard_gradient import ShardGradient
from .buckets import GradParam
from .feedback import mirrors
from .flat_shard import flat
from .pending import WaitingGradient, vacating

Groups = list[dict[str, Any]]
Part = tuple[Tensor, Tensor]
"""The values that one peer has sent, and their numbers as they lie in memory."""


class SparseAverage:
    """What all peers have sent of one parameter, divided by their number. ``rate`` is what the
    values were multiplied with: the learning rate of a mirror, else 1. ``like`` has the form of the
    dense gradient."""

    def __init__(self, param: GradParam, rate: float, like: Tensor) -> None:
        self.name, self.rate, self.updates = param.name, rate, mirrors(param)
        # Not the GradParam: it holds the parameter, whose grad will hold this, and Python's garbage
        # collector does not see through a parameter's grad.
        self._peers, self._members = param.group.size, param.members
        self._form = like.shape, like.stride(), like.dtype, like.device
        self._parts: list[Part] | None = None

    @property
    def filled(self) -> bool:
        """Whether it has come."""
        return self._parts is not None

    def fill(self, parts: Sequence[Part]) -> None:
        """Takes what has come, in the order of ranks."""
        self._parts = list(parts)

    def zeros(self) -> Tensor:
        """A dense gradient of nothing, as the user sees it."""
        return self._shown(self._empty().zero_())

    def dense(self) -> Tensor:
        """The gradient as the user sees it: the average before it was multiplied with the rate."""
        assert self._parts is not None
        gradient = self._empty().zero_()
        elements = flat(gradient)
        for values, index in self._parts:
            elements.index_add_(0, index, values)
        elements.div_(self._peers)
        if self.rate:  # a rate of zero has sent zeros
            elements.div_(self.rate)
        return self._shown(gradient)

    def _empty(self) -> Tensor:
        shape, stride, dtype, device = self._form
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def _shown(self, gradient: Tensor) -> Tensor:
        return gradient if self._members is None else ShardGradient.of(gradient, self._members)

    def move(self, parameter: nn.Parameter, rate: float) -> None:
        """Subtracts updates from the parameter, as plain SGD would with that learning rate."""
        assert self._parts is not None
        assert self.updates
        elements = flat(parameter.detach())
        scale = rate / self.rate if self.rate else 0.0
        for values, index in self._parts:
            elements.index_add_(0, index, values, alpha=-scale / self._peers)


class SparseGradient(WaitingGradient):
    """Stands in ``grad`` for an average that has not been made dense."""

    average: SparseAverage


def stand_for(
    average: SparseAverage, param: GradParam, like: Tensor, finish: Callable[[], None]
) -> SparseGradient:
    """What stands in a parameter's ``grad``, in the form of ``like``; ``finish()`` waits until the
    average has come."""

    def arrive() -> Tensor:
        if not average.filled:
            finish()
        if not average.filled:
            raise RunError(
                f"the gradient of {average.name!r} was touched in backward before it was sent: "
                "read gradients after backward"
            )
        return average.dense()

    waiting = SparseGradient.of(like, arrive, vacating(param.parameter, average.zeros))
    waiting.average = average
    return waiting


def completed(parameter: nn.Parameter) -> None:
    """Makes the gradient of a parameter an ordinary one, where it is an average in parts."""
    if isinstance(parameter.grad, SparseGradient):
        parameter.grad = parameter.grad.complete()


def moved(parameter: nn.Parameter, gradient: Tensor, groups: Groups) -> bool:
    """Moves a mirrored parameter by what was sent, in a step of these groups. False where the
    optimizer has to do it."""
    if not isinstance(gradient, SparseGradient) or not gradient.average.updates:
        return False
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    before = {group["momentum"], group["weight_decay"]}
    assert before == {0}, "momentum and weight decay come before the choice"
    rate = float(group["lr"])
    gradient.average.move(parameter, -rate if group["maximize"] else rate)
    return True
