"""The memory that a model's units take in one step: what is saved for backward, and temporaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..units.spec import UnitSpec
from ..units.workload import Batch
from .timeline import Loss, Timeline


@dataclass
class Footprint:
    """Bytes by node: feature maps ``saved`` for backward, the largest ``gradient`` of feature maps
    alive at once, the largest ``workspace`` besides.
    """

    saved: dict[str, int] = field(default_factory=dict)
    gradient: dict[str, int] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)


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
    """The footprint of one forward on ``batch``. Gradients of a unit's feature maps are taken to be
    those of the inputs and outputs of its widest module, which are alive together; the workspace to
    be that module's output once more."""
    inputs = pytree.tree_leaves((batch.args, dict(batch.kwargs), batch.target))
    known = [*model.parameters(), *model.buffers(), *(t for t in inputs if isinstance(t, Tensor))]
    with Timeline(model, units, device) as timeline:
        saved = SavedTensors(known, lambda: timeline.node)
        widths = _Widths(model, lambda: timeline.node)
        with widths, torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
            timeline.mark(units[0].name)
            output = model(*batch.args, **batch.kwargs)
            timeline.mark(units[-1].name)
            value = loss(output, batch.target)
        del value, output
    return Footprint(saved.bytes, widths.gradient, widths.workspace)


class _Widths:
    """The widest module that each node calls."""

    def __init__(self, model: nn.Module, node: Callable[[], str]) -> None:
        self.gradient: dict[str, int] = {}
        self.workspace: dict[str, int] = {}
        self._model, self._node = model, node
        self._handles: list[Any] = []

    def __enter__(self) -> _Widths:
        for module in self._model.modules():
            if next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._see, prepend=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        node = self._node()
        into, out = _gradient_bytes(args), _gradient_bytes(output)
        self.gradient[node] = max(self.gradient.get(node, 0), into + out)
        self.workspace[node] = max(self.workspace.get(node, 0), out)


def _gradient_bytes(tree: Any) -> int:
    leaves = pytree.tree_leaves(tree)
    return sum(t.nbytes for t in leaves if isinstance(t, Tensor) and t.requires_grad)
