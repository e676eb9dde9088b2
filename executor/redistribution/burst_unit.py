"""One unit that takes a part of the ranks: what it is given, and what it leaves where it was made.

On a rank that it leaves idle its modules are not run. What they would have returned is known from a
rank that ran them: every rank is told once, for each shape of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...models.spec import SplitSpec
from ...planner.cost.ownership import Form, box, input_placement, output_placement, sample_bounds
from ...planner.schema.errors import RunError
from ...planner.schema.plan import UnitPlan
from .bursts import Bursts, Want, want
from .lazy import LazyRedistributed


@dataclass(frozen=True)
class _Looks:
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
        self._parameters: list[nn.Parameter] = []
        self._in_place = False
        self._moved: list[Tensor] = []
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
                module.forward = _skip

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call's inputs in the form that the unit needs. Collective."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        looks = [(tuple(v.shape[1:]), v.dtype) for v in leaves if isinstance(v, Tensor)]
        # Not numbers, which may count a rank's own samples: ranks must have the same key.
        told = [v for v in leaves if v is None or isinstance(v, bool | str)]
        self._key = (self.unit.name, *looks, *told, module.training)
        self._moved = []
        for i, index in enumerate(self.unit.batched_inputs):
            if isinstance(leaves[index], Tensor):
                sliced = self.needs.form == "features" and i > 0
                wanted = self._want("whole" if sliced else self.needs.form, i)
                leaves[index] = self.bursts.bring(leaves[index], wanted, alone=self._in_place)
                self._moved.append(leaves[index])
        return pytree.tree_unflatten(leaves, structure)

    def _want(self, form: Form, index: int) -> Want:
        return want(self.unit, self.spec, form, f"the input of unit {self.unit.name!r}", index)

    def leave(self, output: Any) -> Any:
        """The output as the rest of the model may use it."""
        local = self._empty() if self.idle else self._described(output)
        moved, self._moved = self._moved, []
        return pytree.tree_map_only(Tensor, self._hold, self._tie(local, moved))

    def _described(self, output: Any) -> Any:
        """The output, which idle ranks have been told the looks of."""
        rows = box(self.bursts.counts(), self.leaves, self._length, self.position)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != rows.hi - rows.lo):
                raise RunError(
                    f"unit {self.unit.name!r} leaves a tensor of shape {list(leaf.shape)} where it "
                    f"has {rows.hi - rows.lo} samples, and it leaves ranks idle: only tensors with "
                    "the samples in dim 0 can travel; give it all ranks"
                )
        self.bursts.describe(
            self.unit.layout, self._key, lambda: pytree.tree_map_only(Tensor, self._looks, output)
        )
        return output

    @property
    def _length(self) -> int:
        """The length of the sliced dimension, of all members."""
        return self.spec.features if self.leaves.form == "features" and self.spec else 1

    def _looks(self, tensor: Tensor) -> _Looks:
        shape = list(tensor.shape)
        if self.leaves.form == "features" and self.spec is not None:
            shape[self.spec.feature_dim] = self.spec.features
        return _Looks(tuple(shape[1:]), tensor.dtype)

    def _empty(self) -> Any:
        """What stands for the output where the unit is not run."""
        looks = self.bursts.describe(self.unit.layout, self._key, lambda: None)
        device = next((t.device for t in self._moved), torch.device("cpu"))

        def empty(of: _Looks) -> Tensor:
            return torch.empty((0, *of.shape), dtype=of.dtype, device=device)

        return pytree.tree_map_only(_Looks, empty, looks)

    def _tie(self, output: Any, moved: list[Tensor]) -> Any:
        """The output, with a graph whose moves are the same on every rank."""
        able = [p.requires_grad for p in self._parameters] + [t.requires_grad for t in moved]
        if not (torch.is_grad_enabled() and any(able)):
            return output
        leaves, structure = pytree.tree_flatten(output)
        places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor) and _real(v)]
        if places:
            given = [leaves[i] for i in places]
            tied = _Tie.apply(self.bursts.anchor, len(places), self.idle, *given, *moved)  # type: ignore[no-untyped-call]
            for place, tensor in zip(places, tied, strict=True):
                leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def _hold(self, local: Tensor) -> LazyRedistributed:
        """A tensor that stays where it was made until it is needed elsewhere."""
        bursts, source, length = self.bursts, self.leaves, self._length
        start, stop = sample_bounds(bursts.counts(), bursts.home.layout, self.position)
        shape, dim = [stop - start, *local.shape[1:]], None
        if source.form == "features" and self.spec is not None:
            dim = self.spec.feature_dim % local.ndim
            shape[dim] = length
        doing = f"the output of unit {self.unit.name!r}"
        goal = Want("", 0, bursts.home, length, dim, doing)

        def bring() -> Tensor:
            return bursts.travel(local, source, length, dim, goal)

        return LazyRedistributed.of(local, torch.Size(shape), dim, None, bring, source)


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
