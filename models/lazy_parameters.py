"""Parameters that have no shape before the model's first forward (``nn.LazyLinear``)."""

from contextlib import suppress

import torch
from torch import nn

from ..planner.schema.errors import InputError
from .failing import in_module
from .replay import held_buffers, put_back, put_modes_back
from .trial_sizes import SIZES, first_taken
from .workload import Batch, Workload, device_of


def first_lazy(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer that has no shape yet; None where all have one."""
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, t in named if nn.parameter.is_lazy(t)), None)


def given_shapes(model: nn.Module, batch: Batch) -> None:
    """Gives lazy parameters their shapes and first values by one forward, as the user's first
    would. Raises ``InputError`` where that fails, or does not reach all of them."""
    name = first_lazy(model)
    if name is None:
        return
    # Statistics and counters are put back; those of lazy modules are as new after evaluation.
    buffers = held_buffers(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        given = batch.to(device_of(model))
        with torch.enable_grad():
            with suppress(Exception):  # it may have no evaluation mode
                model.eval()
            model(*given.args, **given.kwargs)
    except Exception as error:
        raise InputError(
            f"parameter {name!r} has no shape yet, and the model failed on the batch that would "
            f"give it one{in_module(model, error)}: {type(error).__name__}: {error}; run one batch "
            "through the model first"
        ) from error
    finally:
        put_modes_back(modes)
        put_back(buffers)
    left = first_lazy(model)
    if left is not None:
        raise InputError(
            f"parameter {left!r} has no shape yet, as a forward does not use it: call its module "
            "in the model's forward, or remove it"
        )


def with_shapes(workload: Workload) -> Workload:
    """The same workload; lazy parameters of its model have their shapes."""
    if first_lazy(workload.model) is not None:

        def try_size(size: int) -> None:
            given_shapes(workload.model, workload.make_batch(size))

        first_taken(SIZES, try_size)
    return workload
