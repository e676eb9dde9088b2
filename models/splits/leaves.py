"""How single layers are divided, with what follows them in a unit: linear layers, embeddings and
convolutions.

Linear layers are ``nn.Linear`` and transformers' ``Conv1D``, whose weight is transposed:

    column: y[:, j] = x W[:, j] + b[j]            row: y = Σ_j x[:, j] W[j, :] + b

(W as [in, out].) The bias of a row split is added after the reduction, once.

Embeddings by columns have a slice of every vector; as a pair, a slice of the vocabulary. A member
that holds a part of the vocabulary looks up the symbols that it has and leaves zeros for the
others, so the sum over members is the lookup. It needs the symbols whole and ends in a reduction,
which is what ``pair`` means. Its slice is that of an output layer by columns, so the two can be
tied.

Convolutions are divided by output channels (column) or input channels (row), on local slices. Batch
normalisation that follows is cut along with the output channels, which it treats one by one.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...planner.cost.ownership import feature_bounds
from ..spec import ParameterCut, Reduce, SplitSpec
from .recipe import GroupMember, Modules, cuts_of, qualified

# Work on each element by itself.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid,
    nn.Dropout, nn.AlphaDropout, nn.Identity,
)  # fmt: skip

# Work on each channel by itself.
PER_CHANNEL = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.Upsample,
)  # fmt: skip

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_ACTIVATION_SUFFIXES = ("Activation", "GELU", "GELUTanh", "ReLU", "SiLU", "Swish")


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module without parameters works on each element by itself."""
    return type(module) in ELEMENTWISE or is_lookalike(module)


def is_lookalike(module: nn.Module) -> bool:
    """Whether a module is taken for elementwise because of its name or what it is derived from."""
    # Libraries bring activations of their own (``GELUActivation``), and subclasses may have another
    # forward; that the guess is right is checked numerically with every split.
    if type(module) in ELEMENTWISE:
        return False
    leaf = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
    named = type(module).__name__.endswith(_ACTIVATION_SUFFIXES)
    return leaf and (named or isinstance(module, ELEMENTWISE))


def is_derived(module: nn.Module) -> bool:
    """Whether a module is of a subclass of what works channel by channel, which may do more."""
    known = (*PER_CHANNEL, *BATCH_NORMS)
    return isinstance(module, known) and type(module) not in known


def may_follow(first: nn.Module, module: nn.Module) -> bool:
    """Whether ``module`` joins the unit that ``first`` begins."""
    if isinstance(module, BATCH_NORMS):
        return isinstance(first, CONVOLUTIONS)
    return is_elementwise(module) or isinstance(module, PER_CHANNEL)


def works_on_slices(first: nn.Module, rest: Sequence[nn.Module]) -> bool:
    """Whether all that follows ``first`` works on a slice of its features as on the whole."""
    # After other layers the last dim is sliced, along which pooling works.
    channels = (*PER_CHANNEL, *BATCH_NORMS) if isinstance(first, CONVOLUTIONS) else ()
    return all(is_elementwise(m) or isinstance(m, channels) for m in rest)


def is_norm(module: nn.Module) -> bool:
    """Whether it normalises: known by its class's name, as models bring their own."""
    return "norm" in type(module).__name__.lower()


def is_linear(module: nn.Module) -> bool:
    """Whether the recipe knows the module."""
    return type(module) is nn.Linear or is_transposed(module) or is_subclass(module, (nn.Linear,))


def is_subclass(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether somebody else's class is derived from one of ``kinds`` and has no more parameters,
    modules and buffers but for single numbers: its forward may do the same in other words, or not,
    so that what is split is checked numerically."""
    if not isinstance(module, kinds) or type(module).__module__.startswith("torch."):
        return False
    own = {name for name, _ in module.named_parameters()}
    wide = any(buffer.numel() > 1 for buffer in module.buffers())
    return own <= {"weight", "bias"} and not wide and not [*module.children()]


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
    # ``nn.Linear`` goes by its weight; transformers' Conv1D shapes its output by an attribute.
    if is_transposed(module):
        module.nf = cast(Tensor, module.weight).shape[1]  # type: ignore[assignment]


def patch_row(module: nn.Module, reduce: Reduce) -> None:
    """Makes a layer with sliced inputs end in a reduction, then its bias."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        weight = cast(Tensor, module.weight)
        total = reduce(F.linear(input, weight.t() if is_transposed(module) else weight))
        bias = cast("Tensor | None", module.bias)
        return total if bias is None else total + bias.to(total.dtype)

    module.forward = forward


_PER_CHANNEL = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}


def _columns_and_rows(
    modules: Modules, inputs: int, outputs: int, out: int, feature_dim: int
) -> list[SplitSpec]:
    """Column where what follows the first layer allows it; row always. ``out`` is the dimension of
    output features of its weight, ``feature_dim`` that of features of the tensors."""
    (name, first), *rest = modules.items()
    row = cuts_of(name, first, {"weight": 1 - out})
    found = [SplitSpec("row", inputs, True, inputs, feature_dim, tuple(row))]
    if works_on_slices(first, [module for _, module in rest]):
        column = cuts_of(name, first, {"weight": out, "bias": 0})
        for follower, module in rest:
            if isinstance(module, BATCH_NORMS):
                column += cuts_of(follower, module, _PER_CHANNEL)
        found.insert(0, SplitSpec("column", outputs, True, outputs, feature_dim, tuple(column)))
    return found


class LinearRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        first = next(iter(modules.values()))
        if not is_linear(first):
            return []
        return _columns_and_rows(modules, *features_of(first), out_dim(first), -1)

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        first = next(iter(modules.values()))
        sync_width(first)
        if spec.style == "row":
            patch_row(first, member.reduce)


class EmbeddingRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        """None where vectors are renormalised (that needs them whole) or gradients sparse."""
        (name, first), *rest = modules.items()
        if not isinstance(first, nn.Embedding):
            return []
        if type(first) is not nn.Embedding and not is_subclass(first, (nn.Embedding,)):
            return []
        if first.max_norm is not None or first.sparse or first.scale_grad_by_freq:
            return []
        symbols, width = first.num_embeddings, first.embedding_dim
        weight = qualified(name, "weight")
        found = [SplitSpec("pair", symbols, True, width, -1, (ParameterCut(weight, 0),))]
        if works_on_slices(first, [module for _, module in rest]):
            cut = (ParameterCut(weight, 1),)
            found.insert(0, SplitSpec("column", width, True, width, -1, cut))
        return found

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        if spec.style == "pair":
            first = next(iter(modules.values()))
            assert isinstance(first, nn.Embedding)
            symbol, _ = feature_bounds(first.num_embeddings, member.degree, member.index)
            _patch_symbols(first, symbol, member.reduce)


def _patch_symbols(module: nn.Embedding, first: int, reduce: Reduce) -> None:
    """``first`` is the symbol whose vector is in row 0 of the member's slice."""
    lookup, count = module.forward, module.weight.shape[0]
    if module.padding_idx is not None:
        # Its vector gets no gradient; it may lie in another member's slice.
        padding = module.padding_idx - first
        module.padding_idx = padding if 0 <= padding < count else None

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        if count == 0:
            zeros = module.weight.new_zeros(*input.shape, module.weight.shape[1])
            return reduce(zeros + module.weight.sum())
        local = input - first  # rows of the slice; symbols of others are outside of it
        mine = (local >= 0) & (local < count)
        # What a class of its own does with vectors (Gemma scales them) it does with those found.
        return reduce(lookup(local.clamp(0, count - 1)) * mine.unsqueeze(-1))

    module.forward = forward  # type: ignore[method-assign]


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# A member whose slice of the channels is empty: torch's convolution refuses empty outputs and,
# given empty inputs, returns a wrong shape without an error; pooling and normalisation refuse no
# channels, too. Below, one channel of zeros stands in and is dropped again, and empty tensors are
# added as sums, so that autograd's graph reaches what it reaches on the other members, and they all
# make the same collectives.


def _allow_no_channels(module: nn.Module) -> None:
    """Lets a module of a column unit (convolution, normalisation, pooling) work on no channels."""
    original = module.forward

    def forward(x: Tensor) -> Tensor:
        if isinstance(module, CONVOLUTIONS):
            kernel = module.weight.new_zeros(1, *module.weight.shape[1:])
            channel: Tensor = module._conv_forward(x, kernel, None)
            return _attach(channel[:, :0], module)
        if isinstance(module, BATCH_NORMS):
            # The batch is counted as on the members that have channels.
            if module.training and isinstance(module.num_batches_tracked, Tensor):
                module.num_batches_tracked.add_(1)
            return _attach(x, module)
        empty: Tensor = original(_one_channel(x))[:, :0]
        return empty + x.sum()

    if isinstance(module, (*CONVOLUTIONS, *BATCH_NORMS, *PER_CHANNEL)):
        module.forward = forward  # type: ignore[method-assign, assignment]


def _one_channel(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 1, *x.shape[2:], dtype=x.dtype, device=x.device)


def _attach(x: Tensor, module: nn.Module) -> Tensor:
    """Adds the module's empty parameters, whose sums are zero."""
    for parameter in module.parameters(recurse=False):
        x = x + parameter.sum()
    return x


# DTensor is not used for the computation: in torch 2.13 it returns wrong results for a convolution
# with sharded channels, without an error.
class ConvolutionRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        """None for grouped convolutions."""
        first: Any = next(iter(modules.values()))
        known = type(first) in CONVOLUTIONS or is_subclass(first, CONVOLUTIONS)
        if not known or first.groups != 1:
            return []
        return _columns_and_rows(modules, first.in_channels, first.out_channels, 0, 1)

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        first = next(iter(modules.values()))
        assert isinstance(first, CONVOLUTIONS)
        if spec.style == "row":
            _patch_convolution_row(first, member.reduce)
        elif not first.weight.shape[0]:
            for module in modules.values():
                _allow_no_channels(module)


def _patch_convolution_row(module: Convolution, reduce: Reduce) -> None:
    def forward(input: Tensor) -> Tensor:  # noqa: A002
        if module.weight.shape[1]:
            total = reduce(module._conv_forward(input, module.weight, None))
        else:
            weight = module.weight
            kernel = weight.new_zeros(weight.shape[0], 1, *weight.shape[2:])
            zeros: Tensor = module._conv_forward(_one_channel(input), kernel, None)
            total = reduce(zeros + input.sum() + weight.sum())
        if module.bias is None:
            return total
        bias = module.bias.to(total.dtype)  # under autocast that of sixteen bits, as torch adds it
        return total + bias.view(-1, *(1 for _ in module.kernel_size))

    module.forward = forward  # type: ignore[method-assign]
