"""Going on from a checkpoint: under the plan that wrote it bit for bit, under another with the same
parameters and optimizer's state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ...models.workload import device_of
from ...planner.schema.errors import InputError
from ..gradients.feedback import LossyGradGroup
from ..optimizer.chunks import MAIN_WEIGHTS
from ..parallel import exchange_state_dict, load_exchange_state_dict
from ..run import Run
from .boxes import HeldPart
from .capture import (
    EXCHANGE,
    MODEL,
    OPTIMIZER,
    Parts,
    exchange_name,
    parameter_names,
    set_random_state,
    with_extra_state,
)
from .holdings import Holding, StateTensor, holdings_of
from .index import CheckpointIndex, StoredTensor, state_file
from .storage import load
from .values import decode_value, dtype_name, dtype_of

PartT = TypeVar("PartT")


@dataclass
class _Restored:
    """What is being read: ``wanted`` from the files, and what was made for it to be read into, by
    parameter."""

    wanted: dict[str, StateTensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)


class Restoration:
    """One checkpoint and the run that goes on from it. Everything that may be wrong is found by
    ``check``, before anything is changed."""

    def __init__(
        self,
        checkpoint: Path,
        index: CheckpointIndex,
        model: nn.Module,
        run: Run,
        parts: Parts,
        *,
        same_plan: bool,
    ) -> None:
        self._index, self._checkpoint = index, checkpoint
        self._model, self._run, self._parts = model, run, parts
        self._same_plan = same_plan
        self._holdings = holdings_of(model, run)
        self._tensors = {tensor.name: tensor for tensor in index.tensors}
        self._states = [self._read_state(rank) for rank in range(index.world_size)]

    def _read_state(self, rank: int) -> dict[str, Any]:
        path = self._checkpoint / state_file(rank)
        try:
            state = decode_value(path.read_bytes(), str(path))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if not isinstance(state, dict):
            raise InputError(f"{path} is not a checkpoint's state: it is no mapping")
        return state

    @property
    def _own(self) -> dict[str, Any] | None:
        """What this rank has written, None where the run that wrote had fewer."""
        rank = self._run.world.rank
        return self._states[rank] if rank < len(self._states) else None

    # -- what may be wrong -------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ``InputError`` where the checkpoint is of another model or training."""
        try:
            self._check_all()
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(
                f"{self._checkpoint} has not what this version of Meshwright reads "
                f"({type(error).__name__}: {error}): go on from it with the version that saved it"
            ) from None

    def _check_all(self) -> None:
        self._check_model()
        shared = self._states[0].get("shared", {})
        for name in ("scheduler", "scaler"):
            if (getattr(self._parts, name) is None) != (name not in shared):
                self._refuse_part(name, saved=name in shared)
        if (self._parts.data is None) != ("data" not in self._states[0]):
            self._refuse_part("data", saved="data" in self._states[0])
        if (self._parts.optimizer is None) != ("groups" not in shared):
            self._refuse_part("optimizer", saved="groups" in shared)
        if self._parts.optimizer is not None:
            _check_groups(
                self._checkpoint,
                [group["params"] for group in shared["groups"]],
                parameter_names(self._parts.optimizer, self._holdings),
            )
        self._data_state()

    def _refuse_part(self, name: str, *, saved: bool) -> None:
        what = f"an {name}" if name == "optimizer" else f"a {name}"
        if name == "data":
            what = "the data"
        if saved:
            raise InputError(
                f"{self._checkpoint} has the state of {what}, which was not given: pass {name}, as "
                "in the run that saved it"
            )
        raise InputError(
            f"{self._checkpoint} has no state of {what}: leave {name} out, as in the run that "
            "saved it"
        )

    def _check_model(self) -> None:
        begin = f"{MODEL}/"
        saved = {n.removeprefix(begin): t for n, t in self._tensors.items() if n.startswith(begin)}
        here = {h.name: h for h in self._holdings if all(h.full_shape)}
        odd = sorted(saved.keys() ^ here.keys())
        if odd:
            has, lacks = ("it", "this model") if odd[0] in saved else ("this model", "it")
            self._refuse_model(f"{has} has {odd[0]!r} and {lacks} has not")
        for name, tensor in saved.items():
            holding = here[name]
            dtype = dtype_name(holding.tensor.dtype)
            if (tensor.shape, tensor.dtype) != (holding.full_shape, dtype):
                self._refuse_model(
                    f"its {name!r} has shape {list(tensor.shape)} and type {tensor.dtype}, this "
                    f"model's {list(holding.full_shape)} and {dtype}"
                )

    def _refuse_model(self, what: str) -> None:
        raise InputError(
            f"{self._checkpoint} is a checkpoint of another model ({what}): build the model that "
            "was saved, or name another folder"
        )

    def _data_state(self) -> Any:
        """The data's state for this rank."""
        if self._parts.data is None:
            return None
        states = [state["data"] for state in self._states]
        if len(states) == self._run.world.size:
            return states[self._run.world.rank]
        if any(not _equal(state, states[0]) for state in states):
            raise InputError(
                f"{self._checkpoint} has the data's positions of {len(states)} ranks, each its "
                f"own, and this run has {self._run.world.size}: leave data= out of the checkpoint "
                "and begin with the data of the step that resume() returns"
            )
        return states[0]

    # -- reading -----------------------------------------------------------------------------------

    def apply(self, group: dist.ProcessGroup | None) -> None:
        """Makes the run go on from the checkpoint. Collective."""
        self._run.finish_steps()
        restored = _Restored()
        with torch.no_grad():
            for holding in self._holdings:
                name = f"{MODEL}/{holding.name}"
                if holding.part is not None and name in self._tensors:
                    self._want(restored, name, *holding.destination())
            if self._parts.optimizer is not None:
                self._want_optimizer(restored, self._parts.optimizer)
            exchange = _Exchange(self._index, self._states, self._run, self._holdings)
            exchange.want(restored.wanted, self._model, same_plan=self._same_plan)
            load(self._checkpoint, self._index, restored.wanted, group)
            if self._parts.optimizer is not None:
                self._set_optimizer(restored, self._parts.optimizer)
            exchange.hold(self._model, self._parts.optimizer)
        self._set_small()

    def _want(self, restored: _Restored, name: str, local: Tensor, part: HeldPart) -> None:
        boxes = tuple(part.views(local))
        if boxes:
            stored = StateTensor(part.full_shape, local.dtype, boxes)
            restored.wanted[name] = stored

    def _want_optimizer(self, restored: _Restored, optimizer: Optimizer) -> None:
        records: dict[str, Any] = {}
        for state in self._states:
            records |= state.get(OPTIMIZER, {})
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        for holding in self._holdings:
            record = records.get(holding.name)
            if record is None or holding.tensor not in groups:
                continue
            state = dict(record["values"])
            for key in record["on_device"]:
                state[key] = state[key].to(holding.tensor.device)
            for key in record["stored"]:
                stored = self._tensors.get(f"{OPTIMIZER}/{holding.name}/{key}")
                # Where nobody updates chunks of it there are no main weights.
                if stored is not None and not (key == MAIN_WEIGHTS and holding.spec is None):
                    state[key] = self._memory_for(restored, holding, stored)
            restored.optimizer[holding.name] = state

    def _memory_for(self, restored: _Restored, holding: Holding, stored: StoredTensor) -> Tensor:
        """Memory for what this rank holds of an optimizer's tensor, which is read into it."""
        part, dtype = holding.state_part, dtype_of(stored.dtype)
        device = holding.tensor.device
        if part is None:  # a rank that the unit leaves idle counts its steps all the same
            return torch.empty(0, dtype=dtype, device=device)
        if stored.shape != part.full_shape:  # whole, as it was written
            part = HeldPart(stored.shape, stored.shape)
        if part.flat is not None:
            local = torch.empty(part.numel, dtype=dtype, device=device)
        elif part.shape == tuple(holding.tensor.shape):
            local = torch.empty_like(holding.tensor.detach(), dtype=dtype)
        else:
            local = torch.empty(part.shape, dtype=dtype, device=device)
        self._want(restored, stored.name, local, part)
        return local

    def _set_optimizer(self, restored: _Restored, optimizer: Optimizer) -> None:
        for holding in self._holdings:
            if holding.of_buffer:
                continue
            state = restored.optimizer.get(holding.name)
            optimizer.state.pop(holding.tensor, None)
            if state:
                if holding.spec is None:  # chunks may have had float32 state of 16-bit parameters
                    state = {k: _as_parameter(v, holding.tensor) for k, v in state.items()}
                optimizer.state[holding.tensor] = state
        saved = self._states[0]["shared"]["groups"]
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: v for key, v in values.items() if key != "params"})

    def _set_small(self) -> None:
        shared = self._states[0].get("shared", {})
        for path, module in with_extra_state(self._model):
            if path in shared["extra"]:
                module.set_extra_state(shared["extra"][path])
        for name in ("scheduler", "scaler"):
            part = getattr(self._parts, name)
            if part is not None:
                part.load_state_dict(shared[name])
        if self._parts.data is not None:
            self._parts.data.load_state_dict(self._data_state())
        # A rank that the run before had not goes on with the random numbers that it has.
        if self._own is not None:
            set_random_state(self._own["random"], device_of(self._model))


def _check_groups(
    checkpoint: Path, saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]
) -> None:
    if [set(names) for names in saved] == [set(names) for names in here]:
        return
    raise InputError(
        f"{checkpoint} was saved with an optimizer of {len(saved)} groups of "
        f"{', '.join(str(len(names)) for names in saved)} parameters, this one has {len(here)} of "
        f"{', '.join(str(len(names)) for names in here)}, or others: make it as in the run that "
        "saved it"
    )


def _as_parameter(value: Any, parameter: Tensor) -> Any:
    narrow = parameter.is_floating_point() and parameter.element_size() == 2
    if narrow and isinstance(value, Tensor) and value.ndim and value.dtype == torch.float32:
        return value.to(parameter.dtype)
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(type(one) is type(other) and one == other)


class _Exchange:
    """What the exchange of gradients has held back: each rank's own under the plan that wrote it,
    under another the mean over the ranks, so that what is sent in the end is the same."""

    # An exchange averages what its peers send. So the mean of what they hold is what the optimizer
    # has still to get, whoever sends it. The same with momentum that was applied before the choice.

    def __init__(
        self,
        index: CheckpointIndex,
        states: Sequence[dict[str, Any]],
        run: Run,
        holdings: Iterable[Holding],
    ) -> None:
        self._index, self._run = index, run
        self._states = [state.get(EXCHANGE, {"held": {}, "policies": {}}) for state in states]
        self._holdings = {holding.name: holding for holding in holdings}
        self._read: dict[tuple[str, str], list[tuple[Tensor, int]]] = {}
        """By parameter and kind, what ranks held and by how many it is divided."""
        self._same_plan = False

    def want(self, wanted: dict[str, StateTensor], model: nn.Module, *, same_plan: bool) -> None:
        """Adds what is to be read."""
        self._same_plan = same_plan
        stored = {tensor.name: tensor for tensor in self._index.tensors}
        for rank, state in enumerate(self._states):
            if same_plan and rank != self._run.world.rank:
                continue
            for name, held in state["held"].items():
                holding = self._holdings[name]
                if holding.part is None:
                    continue
                for kind in held["kinds"]:
                    tensor = stored[exchange_name(rank, kind, name)]
                    memory = torch.zeros(holding.part.shape, dtype=dtype_of(tensor.dtype))
                    peers = 1 if same_plan else held["peers"]
                    self._read.setdefault((name, kind), []).append((memory, peers))
                    boxes = _held_by_both(holding.part, memory, tensor)
                    if boxes:
                        wanted[tensor.name] = StateTensor(tensor.shape, memory.dtype, boxes)

    def hold(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Holds what was read."""
        state = exchange_state_dict(model)
        found: dict[str, dict[str, Tensor]] = {}
        dropped = []
        kinds = self._kinds()
        for (name, kind), parts in self._read.items():
            total = sum((memory / peers for memory, peers in parts[1:]), parts[0][0] / parts[0][1])
            if kind in kinds.get(name, ()):
                found.setdefault(name, {})[kind] = total
            elif kind != "velocity" or not self._to_momentum(name, total, optimizer):
                dropped.append(name)
        if dropped and self._run.world.rank == 0:
            names = sorted(set(dropped))
            warnings.warn(
                f"what the run before had computed of the gradients of {len(names)} parameters "
                f"({names[0]!r}, …) and not sent is left out: this plan sends these whole, or "
                "keeps back something else",
                stacklevel=2,
            )
        if "residuals" in state:
            policies = {n: self._policy(n, own) for n, own in state["policies"].items()}
            load_exchange_state_dict(model, {**state, "residuals": found, "policies": policies})

    def _kinds(self) -> dict[str, set[str]]:
        """What this plan can hold of each parameter."""
        priority = self._run.priority
        groups = priority.grad_groups if priority is not None else ()
        found: dict[str, set[str]] = {}
        for group in groups:
            if isinstance(group, LossyGradGroup):
                for param in group.feedback:
                    found[param.name] = group.kinds_held(param)
        return found

    def _to_momentum(self, name: str, velocity: Tensor, optimizer: Optimizer | None) -> bool:
        """Makes a velocity the optimizer's own momentum, where the plan leaves it to that."""
        holding = self._holdings[name]
        if not isinstance(optimizer, SGD) or holding.spec is not None:
            return False
        state = optimizer.state[holding.tensor]
        state.setdefault("momentum_buffer", torch.empty_like(holding.tensor).copy_(velocity))
        return True

    def _policy(self, name: str, own: Any) -> Any:
        """The state of a policy as it was saved, or as it is where that is of other parameters."""
        rank = self._run.world.rank if self._same_plan else 0
        saved = self._states[rank]["policies"].get(name)
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            return own
        if not self._same_plan and "waited" in own:
            alike = saved["waited"].keys() == own["waited"].keys()
            alike = alike and len(saved["credit_bytes"]) == len(own["credit_bytes"])
            return saved if alike else own
        return saved


def _held_by_both(part: HeldPart, memory: Tensor, stored: StoredTensor) -> Any:
    """The boxes of ``memory`` that a rank has stored: under another plan it held other slices."""
    found = []
    for box, view in part.views(memory):
        for chunk in stored.chunks:
            starts = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
            stops = [
                min(a + n, b + m)
                for a, n, b, m in zip(
                    box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                inner = view
                for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                    inner = inner.narrow(dim, start - box.offsets[dim], stop - start)
                found.append((type(box)(tuple(starts), tuple(inner.shape)), inner))
    return tuple(found)
