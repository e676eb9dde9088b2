"""Embeddings: by columns, a slice of every vector; as a pair, a slice of the vocabulary.

A member that holds a part of the vocabulary looks up the symbols that it has and leaves zeros for
the others, so the sum over members is the lookup. It needs the symbols whole and ends in a
reduction, which is what ``pair`` means. Its slice is that of an output layer by columns, so the
two can be tied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ...planner.cost.ownership import feature_bounds
from ..spec import ParameterCut, Reduce, SplitSpec
from .following import bears_slices
from .recipe import Place, qualified


class EmbeddingRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """None where vectors are renormalised (that needs them whole) or gradients sparse."""
        first, *rest = (model.get_submodule(m) for m in modules)
        if type(first) is not nn.Embedding:
            return []
        assert isinstance(first, nn.Embedding)
        if first.max_norm is not None or first.sparse or first.scale_grad_by_freq:
            return []
        symbols, width = first.num_embeddings, first.embedding_dim
        name = qualified(modules[0], "weight")
        by_symbol = (ParameterCut(name, 0),)
        found = [SplitSpec("pair", symbols, True, width, -1, by_symbol)]
        if bears_slices(first, rest):
            found.insert(0, SplitSpec("column", width, True, width, -1, (ParameterCut(name, 1),)))
        return found

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        if spec.style == "pair":
            module = model.get_submodule(modules[0])
            assert isinstance(module, nn.Embedding)
            first, _ = feature_bounds(module.num_embeddings, place.degree, place.member)
            _patch_symbols(module, first, place.reduce)


def _patch_symbols(module: nn.Embedding, first: int, reduce: Reduce) -> None:
    """``first`` is the symbol whose vector is in row 0 of the member's slice."""
    padding = None if module.padding_idx is None else module.padding_idx - first

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        count = module.weight.shape[0]
        local = input - first
        mine = (local >= 0) & (local < count)
        if count == 0:
            zeros = module.weight.new_zeros(*input.shape, module.weight.shape[1])
            return reduce(zeros + module.weight.sum())
        inside = padding if padding is not None and 0 <= padding < count else None
        vectors = F.embedding(local.clamp(0, count - 1), module.weight, inside)
        return reduce(vectors * mine.unsqueeze(-1))

    module.forward = forward  # type: ignore[method-assign]
