"""Makes a workload compute in a precision: its parameters and inputs become of its type, and its
forward and loss run under autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.schema.errors import InputError
from ..planner.schema.precision import PRECISIONS, Precision, PrecisionTraits, check_precision
from .compiled import unwrapped
from .meta_autocast import MetaAutocast
from .workload import Batch, Workload, device_of

# On a model that runs under autocast of ours: a second time would be the same, and what undoes it
# finds it here.
_AUTOCAST = "_meshwright_autocast"


def autocast_of(precision: Precision | None, device: torch.device) -> AbstractContextManager[None]:
    """Autocast as the precision has it, or nothing."""
    dtype = PRECISIONS[precision].autocast if precision is not None else None
    if dtype is None:
        return nullcontext()
    if device.type == "meta":  # for which torch has none
        return MetaAutocast(getattr(torch, dtype))
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def surrounding_precision(device: torch.device) -> Precision | None:
    """The precision of the autocast that the caller is in, if it is one."""
    if not torch.is_autocast_enabled(device.type):
        return None
    name = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    found = (p for p, traits in PRECISIONS.items() if traits.autocast == name)
    return next(found, None)


def in_precision(workload: Workload, precision: str | None = None) -> Workload:
    """``workload`` made to compute in ``precision``, or in its own where none is given.

    Its model is changed in place, and torch's settings for TF32 with it. Raises ``InputError`` for
    a precision that is not known.
    """
    chosen = check_precision(precision or workload.precision)
    if chosen is None:
        return workload
    traits = PRECISIONS[chosen]
    set_precision(workload.model, chosen)
    dtype = getattr(torch, traits.parameters)
    loss, make_batch, data = workload.loss, workload.make_batch, workload.data

    def cast_loss(output: Any, target: Any) -> Tensor:
        with autocast_of(chosen, device_of(workload.model)):
            return loss(output, target)

    def cast_batch(size: int) -> Batch:
        return _fed(make_batch(size), dtype)

    def cast_data(part: str) -> Batch:
        assert data is not None
        return _fed(data(part), dtype)

    return replace(
        workload,
        make_batch=cast_batch,
        loss=cast_loss if traits.autocast else loss,
        data=cast_data if data is not None else None,
        precision=chosen,
    )


def _fed(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its inputs in that type; what the loss compares with is left as it is."""
    cast = batch.to(dtype=dtype)
    return replace(cast, target=batch.target)


def check_conversion(
    model: nn.Module, precision: Precision, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raises ``InputError`` where ``set_precision`` would change parameters of which an optimizer
    has state already, which would be of another type."""
    parameters = PRECISIONS[precision].parameters
    dtype = getattr(torch, parameters)
    other = any(p.is_floating_point() and p.dtype != dtype for p in unwrapped(model).parameters())
    if other and optimizer is not None and optimizer.state:
        raise InputError(
            f"precision {precision} makes parameters {parameters}, and the optimizer has "
            "made steps with others: convert the model before its optimizer is made"
        )


def set_precision(
    model: nn.Module, precision: Precision, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Makes a model compute in ``precision``, in place: the same objects with other values. Raises
    ``InputError`` as ``check_conversion`` does."""
    check_conversion(model, precision, optimizer)
    model, traits = unwrapped(model), PRECISIONS[precision]
    dtype = getattr(torch, traits.parameters)
    to_type(model, dtype)
    _set_tf32(traits)
    _forget(model)
    if traits.autocast is not None:
        model.__dict__[_AUTOCAST] = _Autocast(model, precision)


def to_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model, whose floating tensors are made of that type in place. Complex ones stay as they
    are, but for float64, where they must not round what is computed with them."""

    # Module.to would make complex ones real: what is imaginary in them would be lost.
    def made(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128) if dtype is torch.float64 else tensor
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(made)  # type: ignore[no-untyped-call]
    return model


def _forget(model: nn.Module) -> None:
    known = model.__dict__.pop(_AUTOCAST, None)
    if known is not None:
        known.remove()


def _set_tf32(traits: PrecisionTraits) -> None:
    if traits.tf32 is not None:
        torch.backends.cudnn.allow_tf32 = traits.tf32
        torch.set_float32_matmul_precision("high" if traits.tf32 else "highest")


@contextmanager
def tf32_kept() -> Iterator[None]:
    """Afterwards torch's settings for TF32 are as they were."""
    convolutions = torch.backends.cudnn.allow_tf32
    products = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)


def forbid_tf32() -> bool:
    """From now on float32 is computed in full; whether some of it was not."""
    # By default torch lets convolutions have it, and products not.
    allowed = torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    _set_tf32(PRECISIONS["float32"])
    return allowed


@contextmanager
def measured_in(workload: Workload, precision: str | None) -> Iterator[Workload]:
    """``in_precision`` for as long as it is measured: afterwards the model and torch's settings are
    as they were."""
    model = unwrapped(workload.model)
    known = model.__dict__.get(_AUTOCAST)
    before = [(p, p.data, p.grad) for p in model.parameters()]
    # Modules put other objects in their buffers' place, unlike parameters'.
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    for parameter, _, _ in before:
        parameter.grad = None  # a gradient must be of its parameter's type
    try:
        with tf32_kept():
            yield in_precision(workload, precision)
    finally:
        _forget(model)
        if known is not None:  # it trains so already
            set_precision(model, known.precision)
        for parameter, values, gradient in before:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient
        for now, then in buffers:
            # One by one, as a scripted module's take no others.
            for name, buffer in then.items():
                now[name] = buffer


class _Autocast:
    """Hooks that run a model's forward under autocast, however it is called."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.precision = precision
        # A model may call itself: each call leaves what it entered.
        self._open: list[AbstractContextManager[None]] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            # Where the forward raises as well, or autocast would go on in the caller's code.
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: Any) -> None:
        context = autocast_of(self.precision, device_of(model))
        context.__enter__()
        self._open.append(context)

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
