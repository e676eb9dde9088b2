"""What a model computes, one record for each kernel that torch would start on a GPU.

Operators are seen below autograd and below autocast, so that a record has the type and the sizes
that are really computed with, in forward and backward alike, whatever the model's precision is.
Nothing needs values: on the meta device operators cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..models.units.storages import tensors_in

Kind = Literal["matmul", "conv", "conv_weight", "attention", "attention_back", "other", "stream"]
"""Kinds of kernels: matrix products, convolutions (and their inputs' gradients), the gradients of
their weights, fused attention, other arithmetic that torch can count, and all that only moves
bytes."""

Rate = Literal["float64", "float32", "tf32", "half"]
"""Which of a device's peak rates a kernel computes at."""


class Operation(NamedTuple):
    """One kernel: ``groups`` products of (m x k) by (k x n), or ``flops`` where these are not told;
    the bytes that it reads and writes, and those that are moved besides, before and after it."""

    kind: Kind
    rate: Rate
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    groups: float = 0.0
    flops: float = 0.0
    traffic: float = 0.0
    besides: float = 0.0

    def toward(self, other: Operation, part: float) -> Operation:
        """The same kernel ``part`` of the way to ``other``, beyond it above 1."""
        values = [max(a + part * (b - a), 0.0) for a, b in zip(self[2:], other[2:], strict=True)]
        return Operation(self.kind, self.rate, *values)


class OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs within the context: ``forward`` and ``backward`` by ``label()``."""

    def __init__(self, label: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: dict[str, list[Operation]] = {}
        self.backward: dict[str, list[Operation]] = {}
        self._label = label

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # As torch.utils.module_tracker tells; what a checkpoint runs again is in the backward.
        backward = torch._C._current_graph_task_id() != -1
        found = self.backward if backward else self.forward
        made = operations(func, args, kwargs or {}, result)
        found.setdefault(self._label(), []).extend(made)
        return result


def operations(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> list[Operation]:
    """The kernels of one call of an operator."""
    name = func._schema.name.removeprefix("aten::")
    read, written = _unique(tensors_in((args, kwargs))), _unique(tensors_in(result))
    if func.is_view or name in _NOTHING or not (read or written):
        return []
    if name == "convolution":
        return [_convolution(args[0], args[1], args[6], result)]
    if name == "convolution_backward":
        gradient, x, weight = args[:3]
        return _convolution_backward(gradient, x, weight, args[7], args[9], args[10])
    products = _PRODUCTS.get(name)
    if products is not None:
        a, b = args[products], args[products + 1]
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        groups = a.shape[0] if a.ndim == 3 else 1
        traffic = _bytes([a, b, result])
        return [Operation("matmul", rate_of(a), m, n, k, groups, traffic=traffic)]
    if "scaled_dot_product" in name:
        return [_attention(name, args, kwargs, _bytes([*read, *written]))]
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None and read:
        flops = float(counter(*args, **kwargs, out_val=result))
        traffic = _bytes([*read, *written])
        return [Operation("other", rate_of(read[0]), flops=flops, traffic=traffic)]
    return [Operation("stream", "float32", traffic=_streamed(name, args, read, written))]


def rate_of(tensor: Tensor, *, convolution: bool = False) -> Rate:
    """The rate for products of such numbers, as torch is set now: by default convolutions of
    float32 may use TF32, matrix products may not."""
    if tensor.dtype in (torch.float64, torch.complex128):
        return "float64"
    if tensor.dtype in (torch.float32, torch.complex64):
        backends = torch.backends
        allowed = backends.cudnn if convolution else backends.cuda.matmul
        return "tf32" if allowed.allow_tf32 else "float32"
    return "half"


# Operators that start no kernel though they are no views.
_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"),
    *("lift_fresh", "_local_scalar_dense", "set_", "resize_", "is_same_size", "sym_size"),
    *("_record_function_enter_new", "_record_function_exit", "result_type"),
}
# Where the first factor is among the arguments.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
# These read as much of their first input as they return, not all of it.
_INDEXING = {
    *("embedding", "index", "index_select", "gather", "take", "nll_loss_forward"),
    *("nll_loss2d_forward", "slice_scatter", "_index_put_impl_"),
}
# These overwrite what they are given and do not read it.
_FILLING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"}
# Batch normalisation reads its inputs twice, for the statistics and again to normalise (Jung et
# al., Restructuring Batch Normalization to Accelerate CNN Training, MLSys 2019, section 2).
_TWICE = {
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), 1),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward"), 2),
}
# Pooling moves its bytes slower than others by so much (fitted: see roofline).
_SLOWER = {
    "max_pool2d_with_indices_backward": 4.2,
    "avg_pool2d": 2.7,
    "avg_pool2d_backward": 8.7,
}
# How often a convolution's inputs and outputs are moved, in units of their bytes, where they do not
# lie with channels last; and how often its filters, forward and for each of the two gradients
# (fitted: see roofline).
_RELAID = 1.8
_FILTERS_FORWARD, _FILTERS_BACK = 8.5, 2.8


def _bytes(tensors: Iterable[Tensor]) -> float:
    """What reading or writing them moves; an expanded tensor has fewer bytes than elements."""
    return float(sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors))


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _streamed(name: str, args: Any, read: list[Tensor], written: list[Tensor]) -> float:
    if name in _INDEXING:
        return 2 * _bytes(written)
    traffic = _bytes(written)
    if name.startswith("_foreach") and not written:  # in place: the first list is written
        traffic += _bytes(tensors_in(args[0]))
    traffic += _bytes(read[1:] if name in _FILLING else read)
    traffic += _bytes(read[: _TWICE.get(name, 0)])
    return traffic * _SLOWER.get(name, 1.0)


def _convolution(x: Tensor, weight: Tensor, transposed: bool, y: Tensor) -> Operation:
    # A transposed one is the gradient of a plain one from y to x.
    small, large = (x, y) if transposed else (y, x)
    groups = large.shape[1] // weight.shape[1]
    rate = rate_of(x, convolution=True)
    rows = _positions(large if transposed else small)
    k = prod(weight.shape[1:]) if not transposed else _share(small, large, weight, groups)
    n = (y.shape[1]) // groups
    traffic, besides = _bytes([x, weight, y]), _relaid(rate, x, y, weight, _FILTERS_FORWARD)
    return Operation("conv", rate, rows, n, k, groups, 0.0, traffic, besides)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, transposed: bool, groups: int, mask: Any
) -> list[Operation]:
    rate = rate_of(x, convolution=True)
    traffic = _bytes([gradient, x, weight])
    besides = _relaid(rate, x, gradient, weight, _FILTERS_BACK)
    small, large = (x, gradient) if transposed else (gradient, x)
    found = []
    if mask[0]:
        k = prod(weight.shape[1:]) if transposed else _share(small, large, weight, groups)
        n = x.shape[1] // groups
        found.append(Operation("conv", rate, _positions(x), n, k, groups, 0.0, traffic, besides))
    if mask[1]:
        m, n, k = weight.shape[0] // groups, prod(weight.shape[1:]), _positions(small)
        found.append(Operation("conv_weight", rate, m, n, k, groups, 0.0, traffic, besides))
    if mask[2]:
        found.append(Operation("stream", rate, traffic=_bytes([gradient])))
    return found


def _positions(tensor: Tensor) -> int:
    return tensor.shape[0] * prod(tensor.shape[2:])


def _share(small: Tensor, large: Tensor, weight: Tensor, groups: int) -> float:
    """The length of the inner product for each of the larger side's positions: with a stride each
    gets a part of the kernel."""
    taps = prod(weight.shape[2:]) * small.shape[1] / groups
    return taps * _positions(small) / max(_positions(large), 1)


def _relaid(rate: Rate, x: Tensor, y: Tensor, weight: Tensor, filters: float) -> float:
    """Tensor cores take channels last; what lies otherwise is copied there and back."""
    last = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    if rate in ("float32", "float64") or (x.ndim == 4 and x.is_contiguous(memory_format=last)):
        return 0.0
    return _RELAID * _bytes([x, y]) + filters * _bytes([weight])


def _attention(name: str, args: Any, kwargs: dict[str, Any], traffic: float) -> Operation:
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    flags = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, bool)]
    # The first flag of all of them, forward and backward, is is_causal: half of the scores.
    part = 0.5 if flags and flags[0] and query.shape[-2] == key.shape[-2] else 1.0
    scores = prod(query.shape[:-1]) * key.shape[-2] * part
    flops = 2.0 * scores * (query.shape[-1] + value.shape[-1])
    # Backward has five products for the forward's two: the scores are computed again.
    kind: Kind = "attention_back" if backward else "attention"
    return Operation(
        kind, rate_of(query), flops=flops * (2.5 if backward else 1.0), traffic=traffic
    )
