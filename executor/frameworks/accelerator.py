"""Hugging Face's Accelerate, and with it transformers' Trainer, which is built on it."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...models.compiled import unwrapped
from ...planner.schema.errors import InputError
from ..comm.steps import counts_as_its_own
from ..parallel import full_state_dict, is_parallel, mix_in, run_of
from .whole import is_whole, loading_whole, pairs_of, saving_whole

NAME = "Accelerate"
# Accelerate's names for what it can divide models by itself with.
_OTHERS = {"FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"}
_MIXED = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}


class PlannedAccelerator:
    """Mixed into the class of an ``Accelerator``."""

    _models: list[nn.Module]
    _optimizers: list[Any]
    project_configuration: Any
    mixed_precision: str

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if is_parallel(model):
            # Accelerate's evaluation mode is all but DistributedDataParallel, which would exchange
            # gradients a second time: autocast and torch.compile. The model stays where it was
            # when the plan was applied, as ranks may hold no memory for its parameters now.
            device_placement, evaluation_mode = False, True
            self._tell_precision(model)
        return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        made = super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]
        # With a scaler Accelerate puts a step of its own there, to see whether the scaler calls it.
        counting = getattr(made, "_optimizer_patched_step_method", None)
        if counting is not None and isinstance(optimizer, Optimizer):
            counts_as_its_own(counting, optimizer)
        return made

    def _tell_precision(self, model: nn.Module) -> None:
        run = run_of(model)
        mixed, planned = _MIXED.get(self.mixed_precision), run.plan.precision
        if mixed is None or mixed == planned or run.world.rank:
            return
        warnings.warn(
            f"the plan was made for precision {planned or 'as built'}, and Accelerate computes in "
            f"{mixed}: steps will take other times than predicted; plan with --precision {mixed} "
            f"(precision={mixed!r})",
            stacklevel=4,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if not is_parallel(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        asked = unwrapped(model) if unwrap else model
        return asked.state_dict() if is_whole(model) else full_state_dict(asked)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._saving():
            return super().save_state(*args, **kwargs)  # type: ignore[misc]

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        # What reads the file compares it with state_dict() of the model first, on all ranks.
        whole = saving_whole(NAME, self._models, (), rank0_only=False)
        with whole, loading_whole(pairs_of(self._models, self._optimizers)):
            return super().load_state(*args, **kwargs)  # type: ignore[misc]

    def _saving(self) -> AbstractContextManager[None]:
        pairs = pairs_of(self._models, self._optimizers)
        everywhere = self.project_configuration.save_on_each_node
        return saving_whole(NAME, self._models, pairs, rank0_only=not everywhere)


def adapt_accelerator(accelerator: Any) -> None:
    """See ``adapt``."""
    kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if kind in _OTHERS:
        raise InputError(
            f"Accelerate is set to {kind}, which divides the model itself: run 'accelerate config' "
            "anew or unset its variables, so that the plan alone does that"
        )
    if not isinstance(accelerator, PlannedAccelerator):
        mix_in(accelerator, PlannedAccelerator)
