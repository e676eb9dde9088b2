"""Lightning Fabric, by the strategy that leaves the model to a function of the user's."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...models.compiled import unwrapped
from ...planner.schema.errors import InputError
from ..checkpoint.weights import replaced_by
from ..comm.agreement import rank_zero_decides, together
from ..parallel import (
    ParallelModule,
    full_optimizer_state_dict,
    full_state_dict,
    is_parallel,
    load_full_optimizer_state_dict,
    mix_in,
)
from .whole import check_saved_by

NAME = "Fabric"


class NoExchange:
    """Fabric's way to leave gradients unexchanged: what ``no_backward_sync`` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        own = unwrapped(module)
        if enabled and isinstance(own, ParallelModule):
            return own.no_sync()
        return nullcontext()


# An abstract class as Fabric's strategies are: Python changes the class of an object only where
# both are made from the same one.
class PlannedStrategy(ABC):  # noqa: B024
    """Mixed into the class of a ``ModelParallelStrategy``."""

    leaves_models_to_their_plan = True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Every rank feeds samples of its own, whatever mesh the strategy was told of.
        return {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}

    def setup_module(self, module: nn.Module) -> Any:
        made = super().setup_module(module)  # type: ignore[misc]
        if not is_parallel(made):
            raise InputError(
                "the function that parallelizes the model has applied no plan: let it return "
                "mw.auto_parallelize(model, optimizer, ...)[0]"
            )
        return made

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002  # as Fabric calls it
    ) -> None:
        """Writes what one process would have, from rank 0, whole or not at all."""
        model = _planned_in(state)
        check_saved_by(NAME, model)
        whole = {key: _kept(value, model) for key, value in state.items()}
        for key, wanted in (filter or {}).items():
            whole[key] = {name: value for name, value in whole[key].items() if wanted(name, value)}
        target = Path(path)
        rank_zero_decides(lambda: replaced_by(target, lambda partial: torch.save(whole, partial)))

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        """Loads what ``save_checkpoint`` has written, or a strategy of one process, each rank its
        part; what was not asked for is returned."""
        read = together(lambda: _read(Path(path), weights_only))
        if isinstance(state, nn.Module):
            state.load_state_dict(read.get("model", read), strict=strict)
            return {}
        if not state:
            return read
        model = _planned_in(state)
        missing = next((key for key in state if key not in read), None)
        if missing is not None and strict:
            raise InputError(
                f"{path} has no {missing!r}, only {', '.join(read)}: ask for what was saved, or "
                "load with strict=False"
            )
        for key in [key for key in state if key in read]:
            value, saved = state[key], read.pop(key)
            if isinstance(value, nn.Module):
                value.load_state_dict(saved, strict=strict)
            elif isinstance(value, Optimizer):
                load_full_optimizer_state_dict(model, value, saved)
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                state[key] = saved
        return read


def _planned_in(state: Mapping[str, Any]) -> nn.Module:
    found = [v for v in state.values() if isinstance(v, nn.Module) and is_parallel(v)]
    if len(found) != 1:
        raise InputError(
            f"this state has {len(found)} models with a plan, and a checkpoint holds one: save "
            "{'model': model, 'optimizer': optimizer} of fabric.setup"
        )
    return found[0]


def _kept(value: Any, model: nn.Module) -> Any:
    if isinstance(value, nn.Module):
        return full_state_dict(value) if is_parallel(value) else value.state_dict()
    if isinstance(value, Optimizer):
        return full_optimizer_state_dict(model, value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def _read(path: Path, weights_only: Any) -> dict[str, Any]:
    try:
        read = torch.load(path, map_location="cpu", weights_only=weights_only)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    if not isinstance(read, dict):
        raise InputError(f"{path} holds no checkpoint of Fabric: name what fabric.save has written")
    return read


def adapt_strategy(strategy: Any) -> None:
    """See ``adapt``."""
    if not isinstance(strategy, PlannedStrategy):
        mix_in(strategy, PlannedStrategy)
    strategy._backward_sync_control = NoExchange()
