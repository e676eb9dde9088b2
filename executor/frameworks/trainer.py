"""The ``Trainer`` of Hugging Face's transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...planner.schema.errors import InputError
from ..parallel import is_parallel, mix_in
from .accelerator import adapt_accelerator
from .whole import check_saved_by, loading_whole, pairs_of, saving_whole, tell_even_shares

NAME = "the Trainer"


class PlannedTrainer:
    """Mixed into the class of a ``Trainer``."""

    args: Any
    model: nn.Module
    optimizer: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self._saving():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    # These two are not public, but as old as the Trainer's checkpoints: all ranks call them, where
    # what they call in turn is rank 0's alone.
    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._saving():
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with loading_whole(pairs_of([self.model], [self.optimizer])):
            super()._load_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]

    def _saving(self) -> AbstractContextManager[None]:
        pairs = pairs_of([self.model], [self.optimizer])
        everywhere = self.args.save_on_each_node
        return saving_whole(NAME, [self.model], pairs, rank0_only=not everywhere)


def adapt_trainer(trainer: Any) -> None:
    """See ``adapt``."""
    _check(trainer)
    tell_even_shares(NAME, trainer.model)
    adapt_accelerator(trainer.accelerator)
    if not isinstance(trainer, PlannedTrainer):
        mix_in(trainer, PlannedTrainer)


def _check(trainer: Any) -> None:
    args = trainer.args
    if trainer.model_init is not None:
        raise InputError(
            "the Trainer builds its model anew by model_init, without a plan: pass the model"
        )
    if args.n_gpu > 1:
        raise InputError(
            f"the Trainer is one process for {args.n_gpu} GPUs: start one for each, by 'meshwright "
            "launch' or torchrun"
        )
    if trainer.optimizer is None or not is_parallel(trainer.model):
        raise InputError(
            "the Trainer's model and optimizer have no plan yet: call mw.auto_parallelize("
            "trainer.model, trainer.create_optimizer(), ...) before mw.adapt(trainer)"
        )
    if not args.accelerator_config.even_batches:
        # The Trainer weights each rank's loss itself, as if the plan did not.
        raise InputError(
            "accelerator_config has even_batches off, so that ranks feed different numbers of "
            "samples, which the Trainer and the plan would both make up for: leave it on"
        )
    if getattr(args.save_strategy, "value", args.save_strategy) != "no":
        check_saved_by(NAME, trainer.model)  # not after hours, at the first checkpoint
