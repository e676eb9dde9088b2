"""One forward of the model: how many samples each rank feeds, and how its output is weighted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame  # torch has no public name for it

from ..models.compiled import not_traced
from ..models.opened import leaves_in, mapped
from ..planner.schema.errors import InputError
from ..planner.schema.plan import Plan
from .comm.control import Header, PendingGather


class Weight(NamedTuple):
    """How much this rank's loss counts: its share of all ranks' counts, times the world size.

    Losses are means over each rank's own samples, gradients are averaged over ranks; with this
    factor the average is the gradient of the mean over the whole batch, however uneven the shares.
    """

    own: float
    counts: Callable[[], Sequence[float]]

    @staticmethod
    def of(own: float, gathered: PendingGather) -> Weight:
        """By counts that ranks have gathered as rows of one number."""
        return Weight(own, lambda: [row[0] for row in gathered.rows()])

    def factor(self) -> float:
        """Exactly 1.0 for even shares; 0.0 where this rank has nothing. Waits for the counts."""
        counts = self.counts()
        total = sum(counts)
        return self.own * len(counts) / total if total else 0.0


class Forward:
    """What is known of one forward. ``synchronise`` is False inside ``no_sync``.

    ``begin`` starts the exchange of its ``header``; where nothing has needed it before, the
    backward does. ``weight`` is that of the samples unless it is given.
    """

    def __init__(
        self,
        samples: int,
        *,
        synchronise: bool,
        begin: Callable[[], Header],
        weight: Weight | None = None,
    ) -> None:
        self.synchronise, self.weight = synchronise, weight
        self.header: Header | None = None
        self._samples, self._begin = samples, begin

    def announce(self) -> Header:
        """Starts the exchange of headers if that has not happened yet."""
        if self.header is None:
            self.header = self._begin()
        return self.header

    def counts(self) -> tuple[int, ...]:
        """The samples of each rank, in rank order. Waits for the header."""
        return tuple(row.samples for row in self.announce().rows())

    def factor(self) -> float:
        """What the output's gradient is multiplied by. Waits for what it depends on."""
        self.announce().rows()  # ranks must be in one forward, whatever weighs it
        weight = self.weight or Weight(self._samples, self.counts)
        return weight.factor()


def input_dims(plan: Plan) -> dict[int, int]:
    """Which dim counts the samples, for those leaves of the model's flattened inputs that have
    some; empty where it is dim 0 of the first tensor."""
    ends = (unit for unit in plan.units if unit.kind == "input")
    return {i: unit.batch_dim(n) for unit in ends for n, i in enumerate(unit.batched_inputs)}


def samples_of(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Mapping[int, int]) -> int:
    """How many samples a call is given, by ``dims`` of its inputs (see ``input_dims``)."""
    for i, leaf in enumerate(leaves_in((args, kwargs))):
        dim = dims.get(i) if dims else 0
        if dim is not None and isinstance(leaf, Tensor) and leaf.ndim > dim:
            return int(leaf.shape[dim])
    if dims:
        raise InputError(
            f"none of the inputs with which the model was called has its samples in dim "
            f"{min(dims.values())}, as those had with which it was planned: call it with the same "
            "arguments, or plan again"
        )
    raise InputError(
        "the model was called without a tensor that has a batch dim: pass the batch as a tensor "
        "with its samples in dim 0"
    )


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Mapping[int, int]) -> str:
    """The inputs' shapes as text that can be compared between ranks."""
    # Without the samples: ranks may feed different numbers of them.
    return ";".join(
        f"{(*leaf.shape[: dims.get(i, 0)], *leaf.shape[dims.get(i, 0) + 1 :])}"
        f"{leaf.dtype}{leaf.requires_grad}"
        for i, leaf in enumerate(leaves_in((args, kwargs)))
        if isinstance(leaf, Tensor)
    )


class _Scale(torch.autograd.Function):
    """The identity; its backward multiplies by the forward's factor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Forward, began: Callable[[Forward], None]
    ) -> Any:
        ctx.record, ctx.began = forward, began
        # An alias that autograd does not know as a view: the user may change it in place.
        return tensor.detach()

    @staticmethod
    @not_traced
    def backward(ctx: Any, *gradients: Any) -> Any:
        # A function that is compiled with its backward is traced no further, as all hooks would be
        # with it; torch goes on tracing when that function has returned.
        eval_frame.set_eval_frame(None)
        (gradient,) = gradients
        # Before anything waits: what the last step left pending must be finished first.
        ctx.began(ctx.record)
        factor = ctx.record.factor()
        if factor == 1.0:
            return gradient, None, None
        if torch.is_grad_enabled():  # only where the graph of this backward is asked for
            raise InputError(
                "the loss takes a gradient of the model's output (a penalty), and ranks feed "
                "different numbers of samples, by which the output's gradient is weighted: feed "
                "equal shares, or take that gradient in the model's forward and return it"
            )
        # Zeros, not a product: the mean over no samples is not a number.
        scaled = gradient * factor if factor else torch.zeros_like(gradient)
        return scaled, None, None


def scale_output(output: Any, forward: Forward, began: Callable[[Forward], None]) -> Any:
    """``output`` with the gradient of each of its tensors weighted by the forward's factor.

    Tensors are found in whatever torch flattens, in dataclasses and in objects. ``began(forward)``
    is called in backward before the first gradient of this output goes on.
    """

    def scale(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        # What is no parameter and was given to the model has no gradient that anybody exchanges:
        # the loss may ask for one with respect to that very tensor.
        if leaf.grad_fn is not None or (leaf.requires_grad and isinstance(leaf, nn.Parameter)):
            return _Scale.apply(leaf, forward, began)  # type: ignore[no-untyped-call]
        return leaf

    return mapped(output, scale)


class _Unscale(torch.autograd.Function):
    """The identity; its backward divides by the forward's factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Forward) -> Any:
        ctx.record = forward
        return tensor.detach()  # an alias, as for the output

    @staticmethod
    @not_traced
    def backward(ctx: Any, *gradients: Any) -> Any:
        eval_frame.set_eval_frame(None)
        (gradient,) = gradients
        factor = ctx.record.factor()
        # Of no samples it is zero, and stays so.
        return (gradient if factor in (0.0, 1.0) else gradient / factor), None


def unscale_inputs(inputs: Any, forward: Forward) -> Any:
    """``inputs`` of which those that something else has computed get their gradient without the
    forward's factor: what computed them (another model with a plan, the same one before) has a
    factor of its own, and a gradient must not be weighted once for each that it crosses."""

    def computed(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.grad_fn is not None

    def unscale(leaf: Any) -> Any:
        return _Unscale.apply(leaf, forward) if computed(leaf) else leaf  # type: ignore[no-untyped-call]

    # Nearly all are data, which are handed on as they are.
    return mapped(inputs, unscale) if any(map(computed, leaves_in(inputs))) else inputs
