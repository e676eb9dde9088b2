"""One unit by itself: the inputs that it got in a forward of the model, and running it on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from .preserve import preserved
from .spec import UnitSpec
from .workload import Batch


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a unit's first module. Floating tensors require a gradient where they did in
    the model's forward.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, flattened."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _map(self, change: Any) -> Call:
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def fresh(self) -> Call:
        """A copy whose tensors are leaves without gradients."""
        return self._map(lambda t: t.detach().clone().requires_grad_(t.requires_grad))

    def double(self) -> Call:
        """A copy with floating tensors in double precision."""

        def change(t: Tensor) -> Tensor:
            wide = t.detach().double() if t.is_floating_point() else t.detach().clone()
            return wide.requires_grad_(t.requires_grad)

        return self._map(change)


def capture(model: nn.Module, batch: Batch, units: Sequence[UnitSpec]) -> dict[str, Call]:
    """The call of each unit (by name) in one forward of the model on ``batch``.

    The model, its buffers and the random state are left as they were.
    """
    calls: dict[str, Call] = {}
    handles = []
    for unit in units:
        if not unit.modules:
            continue

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = unit.name) -> None:
            calls[name] = Call(args, kwargs).fresh()

        first = model.get_submodule(unit.modules[0])
        handles.append(first.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with preserved(model), torch.enable_grad():
            model(*batch.args, **batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def run_modules(model: nn.Module, modules: Sequence[str], call: Call) -> Any:
    """The output of consecutive modules, the first called as ``call`` says."""
    output = model.get_submodule(modules[0])(*call.args, **call.kwargs)
    for name in modules[1:]:
        output = model.get_submodule(name)(output)
    return output


def run_unit(model: nn.Module, unit: UnitSpec, call: Call) -> Any:
    """The output of a unit on a call that ``capture`` recorded."""
    return run_modules(model, unit.modules, call)
