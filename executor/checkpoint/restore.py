"""Going on from a checkpoint: under the plan that wrote it bit for bit, under another with the same
parameters and optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.workload import device_of
from ...planner.schema.errors import InputError
from ..comm.steps import parameters_of
from ..gradients.pending import bare
from ..optimizer.chunks import MAIN_WEIGHTS
from ..run import Run
from .boxes import HeldPart
from .capture import (
    Parts,
    kind_name,
    parameter_names,
    set_random_state,
    with_extra_state,
)
from .held_back import HeldBack
from .holdings import Holding, StateTensor, holdings_of
from .index import EXCHANGE, MODEL, OPTIMIZER, CheckpointIndex, StoredTensor, state_file
from .storage import load
from .values import decode_value, dtype_name, dtype_of


@dataclass
class _Restored:
    """What is being read: ``wanted`` from the files, and what was made for it to be read into, by
    parameter."""

    wanted: dict[str, StateTensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    narrowed: set[str] = field(default_factory=set)
    """The parameters whose state was float32 beside main weights, and is here of their own type."""


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
            _check_kind(self._checkpoint, shared, self._parts.optimizer)
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
        for name, holding in here.items():
            tensor = saved[name]
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
            load(self._checkpoint, self._index, restored.wanted, group)
            if self._parts.optimizer is not None:
                self._set_optimizer(restored, self._parts.optimizer)
            states = [state[EXCHANGE] for state in self._states]
            held_back = HeldBack(self._index, states, self._run, self._holdings)
            for rank in held_back.ranks(same_plan=self._same_plan):
                wanted = held_back.wanted_of(rank, alone=self._same_plan)
                load(self._checkpoint, self._index, wanted, group)
                held_back.add()
            held_back.hold(self._model, self._parts.optimizer)
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
        optimized = parameters_of(optimizer)
        for holding in self._holdings:
            record = records.get(holding.name)
            if record is None or holding.tensor not in optimized:
                continue
            state = dict(record["values"])
            for key in record["on_device"]:
                state[key] = state[key].to(holding.tensor.device)
            for key in record["stored"]:
                # Where nobody updates chunks of it there are no main weights.
                if key != MAIN_WEIGHTS or holding.spec is not None:
                    name = f"{OPTIMIZER}/{holding.name}/{key}"
                    state[key] = self._memory_for(restored, holding, self._tensors.get(name))
            restored.optimizer[holding.name] = state
            if MAIN_WEIGHTS in record["stored"] and holding.spec is None:
                restored.narrowed.add(holding.name)

    def _memory_for(
        self, restored: _Restored, holding: Holding, stored: StoredTensor | None
    ) -> Tensor:
        """Memory for what this rank holds of an optimizer's tensor, which is read into it."""
        part, like = holding.state_part, bare(holding.tensor)
        if stored is None:  # of a parameter without elements
            return torch.empty_like(like)
        device, dtype = like.device, dtype_of(stored.dtype)
        if part is None:  # a rank that the unit leaves idle counts its steps all the same
            return torch.empty(0, dtype=dtype, device=device)
        if stored.shape != part.full_shape:  # whole, as it was written
            part = HeldPart(stored.shape, stored.shape)
        if part.flat is not None:
            local = torch.empty(part.numel, dtype=dtype, device=device)
        elif part.shape == tuple(like.shape):
            local = torch.empty_like(like, dtype=dtype)
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
                if holding.name in restored.narrowed:
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


def _check_kind(checkpoint: Path, shared: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raises ``InputError`` where another kind of optimizer was saved, whose state and settings
    mean something else."""
    here, saved = kind_name(optimizer), shared.get("kind")
    # Before the kind was saved, settings told it: those of another kind are others.
    known = {key for group in shared["groups"] for key in group}
    if saved == here or (saved is None and set(optimizer.defaults) <= known):
        return
    raise InputError(
        f"{checkpoint} was saved with {saved or 'another kind of optimizer'}, and this is {here}: "
        "make the optimizer as in the run that saved it, or begin anew in another folder"
    )


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
    return value.to(parameter.dtype) if isinstance(value, Tensor) and value.ndim else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(type(one) is type(other) and one == other)
