"""Ways to divide a unit's parameters over the members of a group, one module for each kind."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...planner.errors import InputError
from ..spec import Reduce, SplitSpec
from .attention import AttentionRecipe
from .convolution import ConvolutionRecipe
from .embedding import EmbeddingRecipe
from .following import is_lookalike
from .linear import LinearRecipe
from .mlp import MLPRecipe
from .recipe import Recipe
from .slicing import cut_in_place, join_parameter, slice_parameter

__all__ = [
    "apply_split",
    "block_kind",
    "find_splits",
    "guessed",
    "join_parameter",
    "slice_parameter",
]

BLOCKS: dict[str, Recipe] = {"attention": AttentionRecipe(), "mlp": MLPRecipe()}
"""Recipes for modules with children, which become one unit because of them."""

LEAVES: tuple[Recipe, ...] = (LinearRecipe(), EmbeddingRecipe(), ConvolutionRecipe())


def block_kind(model: nn.Module, module: str) -> str | None:
    """The kind of unit that a module with children is as a whole, None if it is not known."""
    for kind, recipe in BLOCKS.items():
        if recipe.specs(model, [module]):
            return kind
    return None


def find_splits(model: nn.Module, modules: Sequence[str]) -> tuple[SplitSpec, ...]:
    """The ways in which the unit made of ``modules`` can be divided, by the look of it.

    ``check.holds`` says whether such a split computes what the whole unit does.
    """
    found = _find(model, modules)
    return found[1] if found else ()


def guessed(model: nn.Module, modules: Sequence[str]) -> bool:
    """Whether ``find_splits`` went by names and shapes, not by types that it knows."""
    if any(recipe.specs(model, modules) for recipe in BLOCKS.values()):
        return True
    return any(is_lookalike(model.get_submodule(name)) for name in modules[1:])


def _find(model: nn.Module, modules: Sequence[str]) -> tuple[Recipe, tuple[SplitSpec, ...]] | None:
    for recipe in (*BLOCKS.values(), *LEAVES):
        if specs := recipe.specs(model, modules):
            return recipe, tuple(specs)
    return None


def apply_split(
    model: nn.Module,
    modules: Sequence[str],
    spec: SplitSpec,
    degree: int,
    member: int,
    reduce: Reduce,
) -> None:
    """Makes the unit one member's part of itself, in place: parameters are cut (the objects stay,
    so optimizers and ties do), and forwards that must end in ``reduce`` are replaced on the
    instances.
    """
    found = _find(model, modules)
    if found is None or spec.style not in [s.style for s in found[1]]:
        raise InputError(
            f"unit {modules[0]!r} cannot be divided by {spec.style}: plan it anew for this model"
        )
    if not spec.uneven and spec.parts % degree:
        raise InputError(
            f"unit {modules[0]!r} has {spec.parts} parts, which {degree} members cannot share "
            "evenly: choose a degree that divides them"
        )
    for cut in spec.cuts:
        cut_in_place(model, cut, degree, member)
    found[0].patch(model, modules, spec, degree, reduce)
