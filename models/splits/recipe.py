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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ...planner.schema.errors import InputError
from ..spec import ParameterCut, Reduce, SplitSpec


@dataclass(frozen=True, eq=False)
class GroupMember:
    """Which member of a group this is, and how the group adds up partial sums."""

    degree: int
    index: int
    reduce: Reduce


# A unit's modules by their fully qualified names, in the order in which they are called.
Modules = Mapping[str, nn.Module]


class Recipe(Protocol):
    """How one kind of unit is divided."""

    def specs(self, modules: Modules) -> list[SplitSpec]:
        """The splits that the unit has, none if this recipe is not for it."""

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        """Changes the modules of a unit whose parameters have just been cut, so that they compute a
        member's part. Cut parameters have their new shapes, attributes of modules not yet."""


def cuts_of(
    name: str, module: nn.Module, dims: dict[str, int], blocks: int = 1
) -> list[ParameterCut]:
    """Cuts of those of a module's parameters and buffers that are there, by their dimensions."""
    return [
        ParameterCut(qualified(name, leaf), dim, blocks)
        for leaf, dim in dims.items()
        if getattr(module, leaf, None) is not None
    ]


def qualified(module: str, name: str) -> str:
    """The fully qualified name of something in a module; the model itself is named ``""``."""
    return f"{module}.{name}" if module else name


# An attribute of what was cut that says how: another use of a tied parameter comes to it again.
_MARK = "_meshwright_cut"


def slice_parameter(tensor: Tensor, cut: ParameterCut, degree: int, member: int) -> Tensor:
    """The slice of a whole parameter or buffer that a member holds, in memory of its own."""
    bounds = cut.bounds(tensor.shape[cut.dim], degree, member)
    return torch.cat(
        [tensor.narrow(cut.dim, left, right - left) for left, right in bounds], cut.dim
    )


def join_parameter(
    shards: Sequence[Tensor], cut: ParameterCut, full_shape: Sequence[int]
) -> Tensor:
    """The whole from all members' slices, in order of members: what ``slice_parameter`` undoes."""
    full = shards[0].new_empty(tuple(full_shape))
    for member, shard in enumerate(shards):
        start = 0
        for left, right in cut.bounds(full.shape[cut.dim], len(shards), member):
            piece = shard.narrow(cut.dim, start, right - left)
            full.narrow(cut.dim, left, right - left).copy_(piece)
            start += right - left
    return full


def cut_in_place(model: nn.Module, cut: ParameterCut, degree: int, member: int) -> None:
    """Replaces the content of a parameter or buffer by a member's slice; the object stays.

    A parameter tied between units is cut by the first of them, and the others must agree. Raises
    ``InputError`` where they do not, or where a gradient is there, which would not fit any more.
    """
    holder, _, name = cut.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(holder), name)
    wanted = (cut.dim, cut.blocks, degree, member)
    if getattr(tensor, _MARK, wanted) != wanted:
        raise InputError(
            f"parameter {cut.name!r} is tied and its units divide it differently: "
            "give all units that share it one layout"
        )
    if hasattr(tensor, _MARK):
        return
    if tensor.grad is not None:
        raise InputError(
            f"parameter {cut.name!r} has a gradient of its undivided shape: "
            "call zero_grad() before dividing it"
        )
    shard = slice_parameter(tensor.detach(), cut, degree, member)
    # Through ``.data``: the object is what optimizers, ties and the user's own code hold.
    forget_accumulator(tensor)
    tensor.data = shard
    setattr(tensor, _MARK, wanted)


def forget_accumulator(tensor: Tensor) -> None:
    """Lets the next backward make the tensor's gradient accumulator anew; its data are lost."""
    # A graph that is still alive (of a forward before, in profiling or the user's own) keeps the
    # accumulator, which remembers the shape from before the cut; torch 2.13 then refuses the
    # gradient. Storing data of another type makes torch drop it.
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
