"""Ways to divide a unit's parameters over the members of a group: single layers and blocks."""

from collections.abc import Sequence

from torch import nn

from ...planner.schema.errors import InputError
from ...planner.schema.profile import UnitKind
from ..spec import Reduce, SplitSpec
from .blocks import AttentionRecipe, MLPRecipe, MultiheadRecipe
from .experts import ExpertsRecipe
from .leaves import (
    CONVOLUTIONS,
    ConvolutionRecipe,
    EmbeddingRecipe,
    LinearRecipe,
    is_derived,
    is_lookalike,
    is_subclass,
)
from .recipe import (
    GroupMember,
    Modules,
    Recipe,
    cut_in_place,
    join_parameter,
    slice_parameter,
)

__all__ = [
    "BLOCK_KINDS",
    "LEAF_KINDS",
    "apply_split",
    "block_kind",
    "find_splits",
    "guessed",
    "join_parameter",
    "slice_parameter",
]

# Recipes for modules with children, which become one unit because of them.
BLOCKS: tuple[tuple[UnitKind, Recipe], ...] = (
    ("attention", MultiheadRecipe()),
    ("attention", AttentionRecipe()),
    ("mlp", MLPRecipe()),
    ("experts", ExpertsRecipe()),
)

BLOCK_KINDS = frozenset(kind for kind, _ in BLOCKS)

LEAVES: tuple[Recipe, ...] = (LinearRecipe(), EmbeddingRecipe(), ConvolutionRecipe())
LEAF_KINDS: frozenset[UnitKind] = frozenset({"linear", "embedding", "conv"})
"""Kinds of these, which an activation, dropout or normalisation that follows joins."""


def block_kind(model: nn.Module, module: str) -> UnitKind | None:
    """The kind of unit that a module with children is as a whole, None if it is not known."""
    modules = {module: model.get_submodule(module)}
    return next((kind for kind, recipe in BLOCKS if recipe.specs(modules)), None)


def find_splits(model: nn.Module, modules: Sequence[str]) -> tuple[SplitSpec, ...]:
    """The ways in which the unit made of ``modules`` (fully qualified names, in order) can be
    divided, by the look of it.

    Discovery offers only those that compute what the whole unit does (see [Note: Splits are
    proved] in models/splits/check.py).
    """
    found = _find(_modules(model, modules))
    return tuple(s for s in found[1] if s.parts > 1) if found else ()


def guessed(model: nn.Module, modules: Sequence[str]) -> bool:
    """Whether ``find_splits`` goes by names and shapes here, not by types that it knows."""
    named = _modules(model, modules)
    if any(recipe.specs(named) for _, recipe in BLOCKS):
        return True
    first, *followers = named.values()
    return is_subclass(first, (nn.Linear, nn.Embedding, *CONVOLUTIONS)) or any(
        is_lookalike(module) or is_derived(module) for module in followers
    )


def _modules(model: nn.Module, names: Sequence[str]) -> Modules:
    return {name: model.get_submodule(name) for name in names}


def _find(modules: Modules) -> tuple[Recipe, list[SplitSpec]] | None:
    for recipe in (*(recipe for _, recipe in BLOCKS), *LEAVES):
        if specs := recipe.specs(modules):
            return recipe, specs
    return None


def apply_split(
    model: nn.Module,
    modules: Sequence[str],
    spec: SplitSpec,
    degree: int,
    member: int,
    reduce: Reduce,
) -> None:
    """Makes the unit one member's part of itself, in member.

    Parameters and buffers are cut (the objects stay, so optimizers and ties do), forwards that
    must end in ``reduce`` are replaced on the instances. ``recipe`` says what a member then takes
    and leaves. Raises ``InputError`` where the unit cannot be divided so, or a tied parameter has
    been divided in another way.
    """
    named = _modules(model, modules)
    found = _find(named)
    if found is None or spec.style not in [s.style for s in found[1]]:
        raise InputError(
            f"unit {modules[0]!r} cannot be divided by {spec.style}: plan it anew for this model"
        )
    if not spec.uneven and spec.parts % degree:
        raise InputError(
            f"unit {modules[0]!r} has {spec.parts} parts, which {degree} members cannot share "
            "evenly: choose a degree that divides them"
        )
    # Before the patch: recipes expect parameters in their new shapes.
    for cut in spec.cuts:
        cut_in_place(model, cut, degree, member)
    found[0].patch(named, spec, GroupMember(degree, member, reduce))
