"""What divided units have been brought in the forward that runs: the next one that needs the same
tensor in the same form gets the same, and nothing moves again (see
``planner/cost/shared_redistribution``).

Only where a backward may follow: what a unit was brought it has saved then, and the next one saves
no more. The first forward of a kind tells which tensors have several takers, so that later ones
hold no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.cost.ownership import TensorPlacement
from .lazy import LazyRedistributed


class SharedRedistribution(NamedTuple):
    """Which input of which unit takes a tensor, and how it is needed; ``features`` along ``dim``
    are sliced (1 and None: none are)."""

    unit: str
    number: int
    wanted: TensorPlacement
    features: int
    dim: int | None

    @property
    def form(self) -> tuple[TensorPlacement, int, int | None]:
        """What two takers of one tensor can share."""
        return self.wanted, self.features, self.dim


First = tuple[str, int, int]
"""The first taking of a tensor in a forward: the unit, which of its inputs, which of its calls."""


class _Got(NamedTuple):
    """What takers got, as it arrived."""

    tensor: Tensor
    version: int


@dataclass
class _Tensor:
    """A tensor as it was when it was first taken, who took it first, and what the takers got."""

    tensor: Tensor
    version: int
    first: First
    got: dict[tuple[TensorPlacement, int, int | None], _Got] = field(default_factory=dict)
    takers: int = 0


class RedistributionCache:
    """The tensors of one forward after the other."""

    def __init__(self) -> None:
        self._taken: dict[int, _Tensor] = {}
        self._calls: dict[tuple[str, int], int] = {}
        self._open = False
        self._several: set[First] = set()
        self._known: set[First] = set()

    def begin(self) -> None:
        """Before a forward."""
        self._taken, self._calls, self._open = {}, {}, True

    def end(self, *, whole: bool) -> None:
        """After a forward, which ran to its end if it was ``whole``."""
        for one in self._taken.values() if whole else ():
            self._known.add(one.first)
            if one.takers > 1:
                self._several.add(one.first)
        self._taken, self._open = {}, False

    def get(
        self, tensor: Tensor, taking: SharedRedistribution, bring: Callable[[], Tensor]
    ) -> Tensor:
        """The tensor as ``taking`` needs it: what another got, or what ``bring`` fetches."""
        if not (self._open and torch.is_grad_enabled()):
            return bring()  # in backward, what runs again holds nothing beyond its own unit
        one = self._taken.get(id(tensor))
        if one is None or one.version != version_of(tensor):
            first = self._first(taking)
            if first in self._known and first not in self._several:
                return bring()
            one = self._taken[id(tensor)] = _Tensor(tensor, version_of(tensor), first)
        one.takers += 1
        there = one.got.get(taking.form)
        if there is None or version_of(there.tensor) != there.version:  # changed by who got it
            arrived = bring()
            there = one.got[taking.form] = _Got(arrived, version_of(arrived))
        return there.tensor

    def _first(self, taking: SharedRedistribution) -> First:
        key = taking.unit, taking.number
        self._calls[key] = self._calls.get(key, 0) + 1
        return *key, self._calls[key]


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place."""
    if isinstance(tensor, LazyRedistributed):
        return tensor.changes
    return 0 if tensor.is_inference() else tensor._version
