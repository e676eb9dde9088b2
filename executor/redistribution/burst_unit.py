"""One unit that takes a part of the ranks: what it gets, and what it leaves where it was made. See
[Note: Burst units, idle ranks and the anchor] in bursts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...models.spec import SplitSpec
from ...planner.cost.ownership import box, input_placement, output_placement
from ...planner.schema.errors import RunError
from ...planner.schema.plan import UnitPlan
from .bursts import Bursts
from .cache import UnitInput, unit_input
from .lazy import LazyRedistributed


# A named tuple would be a node of the output's pytree, and taken apart.
@dataclass(frozen=True)
class _Description:
    """A tensor without its samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BurstUnit:
    """The ends of one unit, on a rank that runs it or one that it leaves idle."""

    def __init__(self, unit: UnitPlan, spec: SplitSpec | None, bursts: Bursts) -> None:
        self.unit, self.spec, self.bursts = unit, spec, bursts
        self.position = bursts.world.position
        self.idle = unit.layout.place(self.position) is None
        self.needs = input_placement(unit.layout, unit.style)
        self.leaves = output_placement(unit.layout, unit.style)
        # Of all members, where the output is sliced.
        sliced = self.leaves.form == "feature_shard" and spec is not None
        self._features = spec.features if sliced and spec is not None else 1
        self._feature_dim = spec.feature_dim if sliced and spec is not None else None
        self._parameters: list[nn.Parameter] = []
        self._in_place = False
        self._inputs: list[Tensor] = []
        self._key: tuple[object, ...] = ()

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Hooks the ends of the unit's modules, which are called one after another."""
        first, last = modules[0], modules[-1]
        self._in_place = bool(getattr(first, "inplace", False))
        self._parameters = [p for module in modules for p in module.parameters()]

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.enter(module, args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self.leave(output)

        first.register_forward_pre_hook(enter, with_kwargs=True)
        last.register_forward_hook(leave)
        if self.idle:
            for module in modules:
                # Hooks still run around it, so that this rank comes to every collective.
                module.forward = _skip

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call's inputs in the form that the unit needs. Collective."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        shapes = [(tuple(v.shape[1:]), v.dtype) for v in leaves if isinstance(v, Tensor)]
        # Not numbers, which may count a rank's own samples: ranks must have the same key.
        flags = [v for v in leaves if v is None or isinstance(v, bool | str)]
        self._key = (self.unit.name, *shapes, *flags, module.training)
        self._inputs = []
        for i, index in enumerate(self.unit.batched_inputs):
            if isinstance(leaves[index], Tensor):
                # Only the first input of a row unit is sliced.
                sliced = self.needs.form == "feature_shard" and i > 0
                form = "replicate" if sliced else self.needs.form
                need = unit_input(self.unit, self.spec, form, i)
                leaves[index] = self.bursts.redistribute(
                    leaves[index], need, changes=self._in_place
                )
                self._inputs.append(leaves[index])
        return pytree.tree_unflatten(leaves, structure)

    def leave(self, output: Any) -> Any:
        """The output as the rest of the model may use it."""
        local = self._empty() if self.idle else self._described(output)
        inputs, self._inputs = self._inputs, []
        return pytree.tree_map_only(Tensor, self._lazy, self._tie(local, inputs))

    def _described(self, output: Any) -> Any:
        """The output, whose shape idle ranks have been told."""
        rows = box(self.bursts.counts(), self.leaves, self._features, self.position)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != rows.hi - rows.lo):
                raise RunError(
                    f"unit {self.unit.name!r} leaves a tensor of shape {list(leaf.shape)} where it "
                    f"has {rows.hi - rows.lo} samples, and it leaves ranks idle: only tensors with "
                    "the samples in dim 0 can travel; give it all ranks"
                )

        def describe(tensor: Tensor) -> _Description:
            shape = list(tensor.shape)
            if self._feature_dim is not None:
                shape[self._feature_dim] = self._features
            return _Description(tuple(shape[1:]), tensor.dtype)

        self.bursts.describe(
            self.unit.layout, self._key, lambda: pytree.tree_map_only(Tensor, describe, output)
        )
        return output

    def _empty(self) -> Any:
        """What stands for the output where the unit is not run."""
        description = self.bursts.describe(self.unit.layout, self._key, lambda: None)
        device = next((t.device for t in self._inputs), torch.device("cpu"))

        def empty(one: _Description) -> Tensor:
            return torch.empty((0, *one.shape), dtype=one.dtype, device=device)

        return pytree.tree_map_only(_Description, empty, description)

    def _tie(self, output: Any, inputs: list[Tensor]) -> Any:
        """The output, with a graph whose moves are the same on every rank."""
        wanted = [p.requires_grad for p in self._parameters] + [t.requires_grad for t in inputs]
        if not (torch.is_grad_enabled() and any(wanted)):
            return output
        leaves, structure = pytree.tree_flatten(output)
        places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor) and _real(v)]
        if places:
            given = [leaves[i] for i in places]
            anchor = self.bursts.anchor
            tied = _Tie.apply(anchor, len(places), self.idle, *given, *inputs)  # type: ignore[no-untyped-call]
            for place, tensor in zip(places, tied, strict=True):
                leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def _lazy(self, local: Tensor) -> LazyRedistributed:
        """A tensor that stays where it was made until it is needed elsewhere."""
        bursts, features, dim = self.bursts, self._features, self._feature_dim
        start, stop, _, _ = box(bursts.counts(), bursts.outside_units, 1, self.position)
        shape = [stop - start, *local.shape[1:]]
        if dim is not None:
            dim %= local.ndim
            shape[dim] = features
        doing = f"the output of unit {self.unit.name!r}"
        outside = UnitInput("", 0, bursts.outside_units, features, dim, doing)

        def redistribute() -> Tensor:
            return bursts.move(local, self.leaves, outside)

        return LazyRedistributed.of(local, torch.Size(shape), dim, None, redistribute, self.leaves)


def _skip(*args: Any, **kwargs: Any) -> Any:
    """The forward of a module on a rank that its unit leaves idle."""
    return args[0] if args else None


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Tie(torch.autograd.Function):
    """The first ``count`` tensors; as if they depended on the others and on the anchor too.

    Where the unit is ``idle`` the others get gradients of their no samples: what made them here
    must have a gradient, even where nothing moves between it and this unit, as peers may wait for
    it in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, count: int, idle: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.others = [(t.shape, t.dtype, t.device, idle and _real(t)) for t in tensors[count:]]
        # Aliases that autograd does not know as views: the next unit may change them in place.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        others = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for shape, dtype, device, needed in ctx.others
        ]
        anchor = torch.zeros(1, dtype=torch.float32, device="cpu")
        return anchor, None, None, *gradients, *others
