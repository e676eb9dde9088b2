"""Linear layers: ``nn.Linear`` and transformers' ``Conv1D``, whose weight is transposed.

    column: y[:, j] = x W[:, j] + b[j]            row: y = Σ_j x[:, j] W[j, :] + b

(W as [in, out].) The bias of a row split is added after the reduction, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from ..spec import Reduce, SplitSpec
from .following import bears_slices
from .recipe import Place, cuts_of


def is_linear(module: nn.Module) -> bool:
    """Whether the recipe knows the module."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out]: transformers' Conv1D, an optional dependency."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers")


def out_dim(module: nn.Module) -> int:
    """The weight's dimension of output features."""
    return 1 if is_transposed(module) else 0


def features_of(module: nn.Module) -> tuple[int, int]:
    """(input, output) features of the whole layer, also when a tied weight has been cut already."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return cast(int, module.nx), cast(int, module.nf)


def sync_width(module: nn.Module) -> None:
    """Tells the layer how many outputs it has now, where its forward asks."""
    if is_transposed(module):
        module.nf = cast(Tensor, module.weight).shape[1]  # type: ignore[assignment]


def patch_row(module: nn.Module, reduce: Reduce) -> None:
    """Makes a layer with sliced inputs end in a reduction, then its bias."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        weight = cast(Tensor, module.weight)
        total = reduce(F.linear(input, weight.t() if is_transposed(module) else weight))
        bias = cast("Tensor | None", module.bias)
        return total if bias is None else total + bias

    module.forward = forward


class LinearRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """Column where all that follows is elementwise; row always."""
        first, *rest = (model.get_submodule(m) for m in modules)
        if not is_linear(first):
            return []
        inputs, outputs = features_of(first)
        out = out_dim(first)
        row = cuts_of(model, modules[0], {"weight": 1 - out})
        found = [SplitSpec("row", inputs, True, inputs, -1, tuple(row))]
        if bears_slices(first, rest):
            column = cuts_of(model, modules[0], {"weight": out, "bias": 0})
            found.insert(0, SplitSpec("column", outputs, True, outputs, -1, tuple(column)))
        return found

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        module = model.get_submodule(modules[0])
        sync_width(module)
        if spec.style == "row":
            patch_row(module, place.reduce)
