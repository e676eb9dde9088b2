"""The memory that a model's units take in one step: what is saved for backward, and temporaries."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..models.spec import UnitSpec
from ..models.units.storages import LiveStorages, tensors_in
from ..models.workload import Batch
from .timeline import Loss, Timeline


@dataclass
class Footprint:
    """Bytes by node: feature maps ``saved`` for backward, the largest ``gradient`` of feature maps
    alive at once, the largest ``workspace`` besides; ``fresh`` and ``spared`` as in
    ``ShareProfile``. ``discarded`` are the units whose output nobody saves.
    """

    saved: dict[str, int] = field(default_factory=dict)
    gradient: dict[str, int] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)
    fresh: dict[str, int] = field(default_factory=dict)
    spared: dict[str, int] = field(default_factory=dict)
    discarded: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        """All feature maps, and the most that a node has besides."""
        besides = [self.gradient.get(n, 0) + self.workspace.get(n, 0) for n in self.saved]
        return sum(self.saved.values()) + max(besides, default=0)


class SavedTensors:
    """Counts the storages that autograd saves, each once, without ``known`` ones (parameters,
    buffers, the batch)."""

    def __init__(self, known: Sequence[Tensor], node: Callable[[], str]) -> None:
        self.bytes: dict[str, int] = {}
        self._seen = {_storage(t) for t in known}
        self._alive: list[Tensor] = []
        self._node = node

    def pack(self, tensor: Tensor) -> Tensor:
        """The hook for ``torch.autograd.graph.saved_tensors_hooks``."""
        key = _storage(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._alive.append(tensor)  # or its address could be another tensor's later
            size = tensor.untyped_storage().nbytes()
            self.bytes[self._node()] = self.bytes.get(self._node(), 0) + size
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measure_footprint(
    model: nn.Module, units: Sequence[UnitSpec], batch: Batch, loss: Loss, device: torch.device
) -> Footprint:
    """The footprint of one step on ``batch``, whose gradients are freed again.

    Every storage belongs to the node that made it. What is alive when forward ends is ``saved``,
    the batch itself for the first node. The rest of what was alive at most while a node was at work
    is its ``workspace`` in forward; in backward, beyond that and the gradients of parameters of its
    own and of the nodes after it, its ``gradient`` (or ``spared``, where it is less), and ``fresh``
    is how much more it would be if gradients that are complete did not count.
    """
    walk = _Walk(model, units, device)
    inputs = tensors_in((batch.args, dict(batch.kwargs), batch.target))
    before = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with walk.timeline, walk.live:
            walk.live.add([*model.parameters(), *model.buffers()], _STANDING)
            walk.live.add(inputs, units[0].name)
            walk.step(batch, loss)
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
    return walk.footprint()


_STANDING = "standing"


class _Walk:
    """One step, and the most bytes alive while each node was at work, forward and backward."""

    def __init__(self, model: nn.Module, units: Sequence[UnitSpec], device: torch.device) -> None:
        self.model, self.units = model, units
        self.timeline = Timeline(model, units, device)
        self.live = LiveStorages(self._node, self._see)
        self._phase = "forward"
        self._most: dict[str, dict[str, int]] = {"forward": {}, "backward": {}, "apart": {}}
        self._complete = 0
        self._saved: dict[str, int] = {}
        self._outputs: dict[str, list[weakref.ref[Any]]] = {}
        self._discarded: set[str] = set()

    def _node(self) -> str:
        return self.timeline.node

    def _see(self, live: LiveStorages) -> None:
        self._raise(self._phase, live.now)
        if self._phase == "backward":
            self._raise("apart", live.now - self._complete)

    def _raise(self, phase: str, now: int) -> None:
        most, node = self._most[phase], self._node()
        most[node] = max(most.get(node, 0), now)

    def _gathered(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._complete += parameter.grad.untyped_storage().nbytes()

    def step(self, batch: Batch, loss: Loss) -> None:
        """Forward and backward."""
        timeline = self.timeline
        timeline.mark(self.units[0].name)
        with self._noting_outputs():
            output = self.model(*batch.args, **batch.kwargs)
        timeline.mark(self.units[-1].name)
        value = loss(output, batch.target)
        del output
        self._saved = self.live.held()
        for name, storages in self._outputs.items():
            if not any(storage() is not None for storage in storages):
                self._discarded.add(name)
        self._phase = "backward"
        # torch has not typed its hooks
        trained: list[Any] = [p for p in self.model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(self._gathered) for p in trained]
        try:
            value.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _noting_outputs(self) -> Iterator[None]:
        """Notes the storages that units leave, without holding them."""

        def note(name: str, output: Any) -> None:
            storages = [t.untyped_storage() for t in tensors_in(output)]
            self._outputs.setdefault(name, []).extend(weakref.ref(s) for s in storages)

        with ExitStack() as hooks:
            for unit in self.units:
                if unit.modules:
                    last = self.model.get_submodule(unit.modules[-1])
                    handle = last.register_forward_hook(
                        lambda _, args, output, name=unit.name: note(name, output)
                    )
                    hooks.callback(handle.remove)
            yield

    def footprint(self) -> Footprint:
        """What the step has shown."""
        found = Footprint(discarded=self._discarded)
        standing = self._saved.pop(_STANDING, 0)
        gradients, held = _gradients_from(self.model, self.units), 0
        for unit in self.units:
            name = unit.name
            held += self._saved.get(name, 0)
            always = standing + held
            forward = max(self._most["forward"].get(name, 0) - always, 0)
            found.saved[name], found.workspace[name] = self._saved.get(name, 0), forward
            if name not in self._most["backward"]:
                continue
            backward = self._most["backward"][name] - always - gradients[name]
            apart = self._most["apart"][name] - always
            found.gradient[name] = max(backward - forward, 0)
            found.spared[name] = max(forward - backward, 0)
            found.fresh[name] = max(apart - backward, 0)
        return found


def _gradients_from(model: nn.Module, units: Sequence[UnitSpec]) -> dict[str, int]:
    """For each unit the bytes of the gradients of its own parameters and of later units', those of
    tied ones at their first unit."""
    home: dict[nn.Parameter, str] = {}
    for unit in units:
        for module in unit.modules:
            for parameter in model.get_submodule(module).parameters():
                home.setdefault(parameter, unit.name)
    own = dict.fromkeys((unit.name for unit in units), 0)
    for parameter, name in home.items():
        own[name] += parameter.nbytes if parameter.requires_grad else 0
    total, found = 0, {}
    for name in reversed(own):
        total += own[name]
        found[name] = total
    return found
