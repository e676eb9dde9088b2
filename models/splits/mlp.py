"""Linear layers, elementwise functions, one more linear layer: by columns, then by rows.

Nothing is exchanged between them. Recognised by the module's children: two linear layers, or three
where two make the factors of a product (gated units), the last as wide at its input as the others
at their outputs, all else elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..spec import ParameterCut, SplitSpec
from .following import is_elementwise
from .linear import features_of, is_linear, out_dim, patch_row, sync_width
from .recipe import Place, cuts_of, qualified


def layers_of(module: nn.Module) -> tuple[list[str], str] | None:
    """Names of the first layers and of the last of a module that looks like an MLP, else None."""
    children = list(module.named_children())
    *firsts, last = [name for name, child in children if is_linear(child)] or [""]
    rest = [child for _, child in children if not is_linear(child)]
    own = next(module.parameters(recurse=False), None)
    if len(firsts) not in (1, 2) or own is not None or not all(is_elementwise(c) for c in rest):
        return None
    return firsts, last


class MLPRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """A pair, if it is one."""
        module = model.get_submodule(modules[0])
        found = layers_of(module)
        if found is None or len(modules) > 1 or isinstance(module, nn.Sequential):
            return []
        last = module.get_submodule(found[1])
        inner, outputs = features_of(last)
        shapes = {features_of(module.get_submodule(name)) for name in found[0]}
        if len(shapes) != 1 or shapes.pop()[1] != inner:
            return []
        cuts: list[ParameterCut] = []
        for name in found[0]:
            dims = {"weight": out_dim(module.get_submodule(name)), "bias": 0}
            cuts += cuts_of(model, qualified(modules[0], name), dims)
        cuts += cuts_of(model, qualified(modules[0], found[1]), {"weight": 1 - out_dim(last)})
        return [SplitSpec("pair", inner, True, outputs, -1, tuple(cuts))]

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        module = model.get_submodule(modules[0])
        found = layers_of(module)
        assert found is not None
        for name in found[0]:
            sync_width(module.get_submodule(name))
        patch_row(module.get_submodule(found[1]), place.reduce)
