"""Convolutions: by output channels (column) or input channels (row), on local slices.

DTensor is not used for the computation: in torch 2.13 it returns wrong results for a convolution
with sharded channels, without an error. Batch normalisation that follows is cut along with the
output channels, which it treats one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..spec import Reduce, SplitSpec
from .following import BATCH_NORMS, CONVOLUTIONS, bears_slices
from .hollow import Convolution, hollow_partial, make_hollow
from .recipe import Place, cuts_of

_PER_CHANNEL = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}


class ConvolutionRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """None for grouped convolutions."""
        first, *rest = (model.get_submodule(m) for m in modules)
        if type(first) not in CONVOLUTIONS:
            return []
        assert isinstance(first, CONVOLUTIONS)
        if first.groups != 1:
            return []
        assert isinstance(first, CONVOLUTIONS)
        outputs, inputs = first.out_channels, first.in_channels
        row = cuts_of(model, modules[0], {"weight": 1})
        found = [SplitSpec("row", inputs, True, inputs, 1, tuple(row))]
        if bears_slices(first, rest):
            column = cuts_of(model, modules[0], {"weight": 0, "bias": 0})
            for name, module in zip(modules[1:], rest, strict=True):
                if isinstance(module, BATCH_NORMS):
                    column += cuts_of(model, name, _PER_CHANNEL)
            found.insert(0, SplitSpec("column", outputs, True, outputs, 1, tuple(column)))
        return found

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        first = model.get_submodule(modules[0])
        assert isinstance(first, CONVOLUTIONS)
        if spec.style == "row":
            _patch_row(first, place.reduce)
        elif not first.weight.shape[0]:
            for name in modules:
                make_hollow(model.get_submodule(name))


def _patch_row(module: Convolution, reduce: Reduce) -> None:
    def forward(input: Tensor) -> Tensor:  # noqa: A002
        if module.weight.shape[1]:
            total = reduce(module._conv_forward(input, module.weight, None))
        else:
            total = reduce(hollow_partial(module, input))
        if module.bias is None:
            return total
        return total + module.bias.view(-1, *(1 for _ in module.kernel_size))

    module.forward = forward  # type: ignore[method-assign]
