"""Batch normalisation over the whole batch, on any device.

The statistics of all ranks' samples are merged from each rank's mean and squared deviations (Chan,
Golub & LeVeque, 1983), in double precision about a common point, in one all-reduce each way.
torch's own ``SyncBatchNorm`` does this on accelerators only.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ...models.compiled import eager, forward_of_copy, not_traced
from ...planner.cost.collectives import ring_bytes
from ...planner.schema.errors import InputError
from ..comm.groups import Group
from ..comm.watchdog import Watchdog
from .lazy import materialize
from .redistribute import Meter


class Statistics:
    """All-reduces statistics among the ranks that hold other samples of the same channels."""

    def __init__(self, group: Group, watch: Watchdog, meter: Meter) -> None:
        self.group, self.watch, self.meter = group, watch, meter

    def sum(self, vector: Tensor, doing: str) -> Tensor:
        """The sum over ranks, in place. Collective."""
        if self.group.handle is None:
            return vector
        self.watch.issued(doing, self.group)
        work = dist.all_reduce(vector, group=self.group.handle, async_op=True)
        self.meter.seconds += self.watch.wait(work, self.group, doing)
        self.meter.sent_bytes += ring_bytes("all_reduce", self.group.size, vector.nbytes)
        return vector


class _NormForward:
    """Stands for the ``forward`` of a module that normalises; a copy of the module has its own."""

    def __init__(self, module: _BatchNorm, forward: Callable[..., Any]) -> None:
        self._module, self._forward, self._own = module, forward, module.forward

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return forward_of_copy(self._module, memo, self._own)


def normalise_globally(module: _BatchNorm, name: str, statistics: Statistics) -> None:
    """Makes ``module`` normalise by the statistics of all samples in the statistics' group. Its own
    forward runs, as a subclass's may do more than normalise (timm's ``BatchNormAct2d`` activates
    too): what it calls of torch normalises so instead."""
    # Of SyncBatchNorm that of its base, as its own synchronises too, on accelerators only.
    synchronises = isinstance(module, nn.SyncBatchNorm)
    original = partial(_BatchNorm.forward, module) if synchronises else module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not _by_batch(module):
            return original(*args, **kwargs)
        tracked = module.num_batches_tracked
        before = None if tracked is None else tracked.clone()
        within = _Intercepted(module, name, statistics)
        try:
            with within:
                result = original(*args, **kwargs)
        finally:
            # It has counted a batch, also where there was none: on idle ranks, or where it raised.
            if tracked is not None and before is not None:
                some = within.count
                tracked.copy_(before if some is None else torch.where(some > 0, tracked, before))
        if within.count is None:
            raise InputError(
                f"module {name!r} ({type(module).__name__}) normalises in a way of its own, not by "
                "torch's batch_norm, so its statistics cannot be made those of the whole batch: "
                "plan with batch_statistics 'local', or use one of torch's layers"
            )
        return result

    module.forward = _NormForward(module, eager(forward))  # type: ignore[method-assign]


class _Intercepted(TorchFunctionMode):
    """While a module's forward runs, what it normalises by the batch's statistics is normalised by
    those of all ranks."""

    def __init__(self, module: _BatchNorm, name: str, statistics: Statistics) -> None:
        super().__init__()
        self.module, self.name, self.statistics = module, name, statistics
        self.count: Tensor | None = None  # values of a channel, once something was normalised

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        given = _BATCH_NORM.bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        if not asked["training"]:
            return func(*args, **kwargs)
        x, weight, bias, eps = (asked[key] for key in ("input", "weight", "bias", "eps"))
        doing = f"batch statistics of {self.name!r}"
        x = materialize(x)  # as any function of torch does, for which this one stands
        moments = _moments(x, self.module.running_mean, self.statistics, doing)
        self.count = moments[0]
        _update(self.module, *moments)
        return _Normalise.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, eps, moments, self.statistics, self.name
        )


_BATCH_NORM = inspect.signature(F.batch_norm)


def tolerate_nothing(module: _BatchNorm) -> None:
    """Lets ``module`` (with each rank's own statistics) pass an empty batch without harm to its
    running statistics, which would become those of nothing.
    """
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # a class of the user's may take more
        given = (*args, *kwargs.values())
        x = next((value for value in given if isinstance(value, Tensor)), None)
        if x is None or x.numel() or not _by_batch(module):
            return original(*args, **kwargs)
        with _NormalisesNothing():
            return original(*args, **kwargs)

    module.forward = _NormForward(module, forward)  # type: ignore[method-assign]


class _NormalisesNothing(TorchFunctionMode):
    """While it is on, ``F.batch_norm`` of an empty batch leaves running statistics alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = _BATCH_NORM.bind(*args, **(kwargs or {}))
        x = given.arguments["input"]
        ones = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        given.arguments.update(running_mean=ones, running_var=ones, training=False)
        return func(*given.args, **given.kwargs)


def norms_of(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The modules whose result depends on which samples are together."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]


def _by_batch(module: _BatchNorm) -> bool:
    return module.training or (module.running_mean is None and module.running_var is None)


def _moments(
    x: Tensor, point: Tensor | None, statistics: Statistics, doing: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance of each channel over all ranks, in double precision."""
    # None is asked for its value: on a GPU the host would wait for all that was computed before.
    channels = x.shape[1]
    with torch.no_grad():
        about = torch.zeros(channels, device=x.device) if point is None else point
        # Deviations from a point that all ranks have alike and that is near the mean can be added
        # up without cancelling: running statistics are one.
        about = about.double()
        n = x.numel() // channels if channels else 0
        vector = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if n:
            variance, mean = torch.var_mean(x.to(_wide(x)), _others(x), correction=0)
            offset = mean.double() - about
            # Not ``vector[0] = n``, which copies a number of the host's: that waits for the device.
            vector[:1].fill_(n)
            vector[1 : channels + 1] = n * offset
            vector[channels + 1 :] = n * (variance.double() + offset.square())
        statistics.sum(vector, doing)
        count, offsets, squares = vector[0], vector[1 : channels + 1], vector[channels + 1 :]
        # As torch says for one process. Where this rank has more than one value the sum has, too,
        # and the host does not wait for ``count``.
        if n <= 1 and float(count) == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.size()}"
            )
        values = count.clamp_min(1)
        shift = offsets / values
        return count, about + shift, (squares / values - shift.square()).clamp_min(0)


def _wide(x: Tensor) -> torch.dtype:
    """In what type sums over a batch are made, as torch makes them: in sixteen bits they overflow,
    and deviations from a mean that is rounded add up."""
    return torch.promote_types(x.dtype, torch.float32)


def _others(x: Tensor) -> list[int]:
    """All dims but that of channels."""
    return [d for d in range(x.ndim) if d != 1]


@torch.no_grad()
def _update(module: _BatchNorm, count: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Running statistics as one process would keep them: with the unbiased variance. The batch has
    been counted."""
    if not module.training or not module.track_running_stats:
        return
    if module.momentum is not None:
        factor = torch.full_like(count, module.momentum)
    elif module.num_batches_tracked is not None:
        factor = 1 / module.num_batches_tracked.to(count.dtype)
    else:
        return
    factor = torch.where(count > 0, factor, 0)
    if module.running_mean is not None and module.running_var is not None:
        unbiased = variance * (count / (count - 1).clamp_min(1))
        for running, new in ((module.running_mean, mean), (module.running_var, unbiased)):
            running.lerp_(new.to(running.dtype), factor.to(running.dtype))


class _Normalise(torch.autograd.Function):
    """(x − mean)/√(variance + ε)·weight + bias; mean and variance depend on every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        moments: tuple[Tensor, Tensor, Tensor],
        statistics: Statistics,
        name: str,
    ) -> Tensor:
        count, mean, variance = moments
        dtype = x.dtype if weight is None else weight.dtype
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.statistics, ctx.name = count, statistics, name
        return F.batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = _wide(x)
        own_dtype, x, gradient = x.dtype, x.to(wide), gradient.to(wide)
        centred = x - mean.to(wide).view(shape)
        channels = x.shape[1]
        sums = torch.cat((gradient.sum(_others(x)), (gradient * centred).sum(_others(x)))).double()
        # This rank's own: gradients of parameters are averaged by the exchange. Cloned, as the sums
        # over ranks are made in place below.
        own_bias, own_weight = sums[:channels].clone(), sums[channels:] * inverse
        into_x = None
        # Wanted alike on every rank, as all ranks have the same graph, so the sum meets.
        if ctx.needs_input_grad[0]:
            doing = f"batch statistics of {ctx.name!r}, backward"
            all_g, all_gx = (ctx.statistics.sum(sums, doing) / ctx.count.clamp_min(1)).chunk(2)
            slope = (all_gx * inverse.square()).to(x.dtype).view(shape)
            scale = inverse if weight is None else inverse * weight.double()
            into_x = gradient - all_g.to(x.dtype).view(shape) - centred * slope
            into_x = (into_x * scale.to(x.dtype).view(shape)).to(own_dtype)
        return (
            into_x,
            own_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            own_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            *(None,) * 4,
        )
