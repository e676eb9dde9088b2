"""Two linear layers with elementwise functions between: the first by columns, the second by rows.

Nothing is exchanged between the two. Recognised by the module's children: exactly two linear
layers, the second as wide at its input as the first at its output, all else elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..spec import SplitSpec
from .following import is_elementwise
from .linear import features_of, is_linear, out_dim, patch_row, sync_width
from .recipe import Place, cuts_of, qualified


def layers_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of the two layers of a module that looks like an MLP, else None."""
    children = list(module.named_children())
    linear = [name for name, child in children if is_linear(child)]
    rest = [child for _, child in children if not is_linear(child)]
    own = next(module.parameters(recurse=False), None)
    if len(linear) != 2 or own is not None or not all(is_elementwise(c) for c in rest):
        return None
    return linear[0], linear[1]


class MLPRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """A pair, if it is one."""
        module = model.get_submodule(modules[0])
        found = layers_of(module)
        if found is None or len(modules) > 1 or isinstance(module, nn.Sequential):
            return []
        first, second = (module.get_submodule(n) for n in found)
        inner = features_of(first)[1]
        if features_of(second)[0] != inner:
            return []
        cuts = [
            *cuts_of(model, qualified(modules[0], found[0]), {"weight": out_dim(first), "bias": 0}),
            *cuts_of(model, qualified(modules[0], found[1]), {"weight": 1 - out_dim(second)}),
        ]
        return [SplitSpec("pair", inner, True, features_of(second)[1], -1, tuple(cuts))]

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        module = model.get_submodule(modules[0])
        found = layers_of(module)
        assert found is not None
        sync_width(module.get_submodule(found[0]))
        patch_row(module.get_submodule(found[1]), place.reduce)
