"""What a rank writes of a run: the tensors and small state that go on from step to step."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.workload import device_of
from ...planner.schema.errors import InputError
from ..parallel import exchange_state_dict
from ..run import Run
from .boxes import TensorBox
from .holdings import Holding, StateTensor, holdings_of
from .index import EXCHANGE, MODEL, OPTIMIZER


@dataclass(frozen=True)
class Parts:
    """What takes part in a training, besides the model: each may be missing."""

    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    data: Any = None


@dataclass
class Captured:
    """What this rank writes: ``tensors`` by the names under which they are stored, ``state`` for
    what is small."""

    tensors: dict[str, StateTensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def capture(model: nn.Module, run: Run, parts: Parts) -> Captured:
    """This rank's part of what goes on, between two steps; the memory is that of the run. It
    communicates nothing, but under lossy exchange call it on all ranks: what is on its way is
    waited for."""
    run.finish_steps()
    holdings = holdings_of(model, run)
    captured = Captured()
    with torch.no_grad():
        for holding in holdings:
            if holding.part is not None:
                _add(captured, f"{MODEL}/{holding.name}", holding, *holding.values())
        if parts.optimizer is not None:
            captured.state[OPTIMIZER] = _optimizer_state(captured, holdings, parts.optimizer)
        captured.state[EXCHANGE] = _exchange_state(captured, holdings, model, run)
    captured.state["random"] = random_state(device_of(model))
    if parts.data is not None:
        captured.state["data"] = parts.data.state_dict()
    if run.world.rank == 0:
        captured.state["shared"] = _shared_state(model, holdings, parts)
    return captured


def _add(captured: Captured, name: str, holding: Holding, local: Tensor, part: Any) -> None:
    boxes = tuple(holding.written(local, part))
    if boxes:
        captured.tensors[name] = StateTensor(holding.full_shape, local.dtype, boxes)


# -- the optimizer ---------------------------------------------------------------------------------


def _optimizer_state(
    captured: Captured, holdings: Iterable[Holding], optimizer: Optimizer
) -> dict[str, Any]:
    """By parameter, what of its state is stored as tensors and what is small. Tensors go to
    ``captured``."""
    found = {}
    for holding in holdings:
        state = optimizer.state.get(holding.tensor, {})
        if holding.of_buffer or holding.part is None or not state:
            continue
        stored, values, on_device = [], {}, []
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                values[key] = value
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.append(key)
                continue
            stored.append(key)
            _add_state(captured, holding, key, value)
        found[holding.name] = {"stored": stored, "values": values, "on_device": on_device}
    return found


def _add_state(captured: Captured, holding: Holding, key: str, value: Tensor) -> None:
    name, part = f"{OPTIMIZER}/{holding.name}/{key}", holding.state_part
    assert part is not None
    shape = part.shape if part.flat is None else (part.numel,)
    if tuple(value.shape) == shape:
        _add(captured, name, holding, value, part)
        return
    # Adafactor's rows and columns, say: of a whole parameter they are whole.
    if part.flat is not None or part.pieces:
        raise InputError(
            f"the optimizer's {key!r} of {holding.name!r} has shape {list(value.shape)} and this "
            f"rank has {list(shape)} of the parameter, so it means something on this rank alone: "
            "use an optimizer that works element by element, such as AdamW, or plan with data "
            "parallelism only"
        )
    if holding.is_writer:
        box = TensorBox((0,) * value.ndim, tuple(value.shape))
        captured.tensors[name] = StateTensor(tuple(value.shape), value.dtype, ((box, value),))


def parameter_names(optimizer: Optimizer, holdings: Iterable[Holding]) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group. Raises ``InputError`` where the model
    has no such parameter."""
    names = {holding.tensor: holding.name for holding in holdings if not holding.of_buffer}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        strange = next((p for p in group["params"] if p not in names), None)
        if strange is not None:
            raise InputError(
                f"group {number} of this {type(optimizer).__name__} has a parameter of shape "
                f"{list(strange.shape)} that is not the model's: no checkpoint would hold it; make "
                "it a part of the model"
            )
        found.append([names[p] for p in group["params"]])
    return found


# -- the exchange of gradients ---------------------------------------------------------------------


def exchange_name(rank: int, kind: str, parameter: str) -> str:
    """Under which name a rank stores what its exchange holds of a parameter."""
    return f"{EXCHANGE}/{rank}/{kind}/{parameter}"


def _exchange_state(
    captured: Captured, holdings: Iterable[Holding], model: nn.Module, run: Run
) -> dict[str, Any]:
    state = exchange_state_dict(model)
    by_name = {holding.name: holding for holding in holdings}
    held = {}
    for name, parts in state.get("residuals", {}).items():
        holding = by_name[name]
        assert holding.part is not None
        for kind, tensor in parts.items():
            boxes = tuple(holding.part.views(tensor))
            stored = StateTensor(holding.full_shape, tensor.dtype, boxes)
            captured.tensors[exchange_name(run.world.rank, kind, name)] = stored
        held[name] = {"kinds": list(parts), "peers": holding.peers}
    return {"policies": state.get("policies", {}), "held": held}


# -- small state -----------------------------------------------------------------------------------


def _shared_state(model: nn.Module, holdings: Iterable[Holding], parts: Parts) -> dict[str, Any]:
    """What is the same on all ranks."""
    shared: dict[str, Any] = {
        "extra": {path: module.get_extra_state() for path, module in with_extra_state(model)}
    }
    if parts.optimizer is not None:
        groups = parts.optimizer.param_groups
        named = zip(groups, parameter_names(parts.optimizer, holdings), strict=True)
        shared["groups"] = [{**group, "params": names} for group, names in named]
        shared["kind"] = kind_name(parts.optimizer)
    for name in ("scheduler", "scaler"):
        part = getattr(parts, name)
        if part is not None:
            shared[name] = part.state_dict()
    return shared


def kind_name(optimizer: Optimizer) -> str:
    """The class of an optimizer: of torch's, where somebody's own stands around or below it."""
    own = type(getattr(optimizer, "optimizer", optimizer))
    kinds = (kind for kind in own.__mro__ if kind is not Optimizer)
    found = next((kind for kind in kinds if kind.__module__.startswith("torch.optim.")), own)
    return found.__qualname__


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that add state of their own to a ``state_dict``."""
    for path, module in model.named_modules():
        own: Any = type(module).get_extra_state
        if own is not nn.Module.get_extra_state:
            yield path, module


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all generators that models draw from on this rank."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Goes on with the random numbers that followed ``random_state``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
