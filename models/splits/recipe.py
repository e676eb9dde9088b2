"""What a recipe is: how one kind of unit is divided.

The conventions that all recipes keep, for a member of a group:

- The input is whole (``column``, ``pair``) or a slice of features (``row``), with all samples of
  the group. The gradient that the member computes for a whole input is *partial*: the sum over the
  members is the truth, and whoever gathered the input adds it up.
- Gradients of cut parameters are complete for the group's samples. Parameters without a cut are
  used after the reduction only, on the member's own samples, so their gradients are sums over
  these.
- The only collective is ``reduce``, called where partial sums are made. What follows it in the
  unit sees the member's own samples.
- Nothing that draws random numbers runs on activations that all members hold, so dropout needs no
  shared seed: before the reduction members have different features, after it different samples.
- A member whose slice is empty makes the same calls and the same graph as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ..spec import ParameterCut, Reduce, SplitSpec


@dataclass(frozen=True, eq=False)
class Place:
    """Which member of a group this is, and how the group adds up partial sums."""

    degree: int
    member: int
    reduce: Reduce


class Recipe(Protocol):
    """How one kind of unit is divided. ``modules`` are fully qualified names, the unit's own."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """The splits that the unit has, none if this recipe is not for it."""

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """Changes the modules of a unit whose parameters have just been cut, so that they compute a
        member's part. Cut parameters have their new shapes, attributes of modules not yet."""


def cuts_of(
    model: nn.Module, module: str, dims: dict[str, int], blocks: int = 1
) -> list[ParameterCut]:
    """Cuts of those of a module's parameters and buffers that are there, by name and dimension."""
    holder = model.get_submodule(module)
    return [
        ParameterCut(qualified(module, name), dim, blocks)
        for name, dim in dims.items()
        if getattr(holder, name, None) is not None
    ]


def qualified(module: str, name: str) -> str:
    """The fully qualified name of something in a module; the model itself is named ``""``."""
    return f"{module}.{name}" if module else name
