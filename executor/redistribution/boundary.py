"""A unit's ends: its inputs in the form that it needs, and its output as others can use it.

Only divided units (``Boundary``) and units that take a part of the ranks (``BurstUnit``) have these
hooks. All other code sees each rank's own samples and needs none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...models.compiled import eager, not_traced
from ...models.spec import SplitSpec
from ...models.trees import leaves_of, map_only
from ...planner.cost.ownership import (
    Form,
    TensorPlacement,
    box,
    input_placement,
    output_placement,
)
from ...planner.schema.errors import RunError
from ...planner.schema.plan import UnitPlan
from .bursts import Bursts
from .cache import RedistributionCache, UnitInput, unit_input
from .lazy import LazyRedistributed, may_be_lazy
from .redistribute import Dims, Mover, group_route


class Boundary:
    """One divided unit on one member.

    ``counts()`` are the samples of each member of its group in the forward that runs. ``keeps``
    tells that the next unit may take the output in the form in which this one leaves it. Where the
    plan leaves ranks idle in some units, ``bursts`` moves what enters; else it moves in the group,
    through ``cache``.
    """

    def __init__(
        self,
        unit: UnitPlan,
        spec: SplitSpec,
        mover: Mover,
        counts: Callable[[], tuple[int, ...]],
        *,
        keeps: bool = False,
        bursts: Bursts | None = None,
        cache: RedistributionCache | None = None,
    ) -> None:
        self.unit, self.spec, self.mover, self._counts = unit, spec, mover, counts
        self.keeps = keeps and unit.style == "column"
        self.bursts, self.cache = bursts, cache

    def attach(self, first: nn.Module, last: nn.Module) -> None:
        """Registers the hooks at the unit's first and last module."""

        # Closures: ``copy.deepcopy`` of a module takes functions as they are, and would copy what a
        # bound method or a partial holds, down to process groups.
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.enter(args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return map_only(Tensor, self._leave, output)

        first.register_forward_pre_hook(enter, with_kwargs=True)
        if self.unit.style == "column":  # the others' outputs are the member's own samples
            last.register_forward_hook(leave)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """The call's inputs in the form that the unit needs. Collective over the group."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # One tensor that is several inputs (attention's query, key and value) moves once, also
        # where the cache keeps nothing, and stays one tensor.
        moved: dict[tuple[int, Form], Tensor] = {}
        for i, index in enumerate(self.unit.batched_inputs):
            given = leaves[index]
            if isinstance(given, Tensor):
                row = self.unit.style == "row" and i == 0
                form: Form = "feature_shard" if row else "replicate"
                if (id(given), form) not in moved:
                    need = unit_input(self.unit, self.spec, form, i)
                    moved[id(given), form] = self._redistribute(given, need)
                leaves[index] = moved[id(given), form]
        return pytree.tree_unflatten(leaves, structure)

    def _redistribute(self, tensor: Tensor, need: UnitInput) -> Tensor:
        if self.bursts is not None:
            return self.bursts.redistribute(tensor, need)
        assert self.cache is not None, "what has hooks has a cache"
        return self.cache.get(tensor, need, self._move)

    def _move(self, tensor: Tensor, need: UnitInput) -> Tensor:
        """The tensor as it is needed, moved among the members."""
        if isinstance(tensor, LazyRedistributed):
            direct = self._move_direct(tensor, need)
            if direct is not None:
                return direct
            tensor = tensor.materialize()
        member = self.mover.group.member
        route = group_route(self._counts(), "batch_shard", need.target.form, need.features, member)
        return self.mover.move(tensor, route, need.dims, need.doing)

    def _move_direct(self, lazy: LazyRedistributed, need: UnitInput) -> Tensor | None:
        """The tensor as it is needed out of its slices, where the same members hold them."""
        if lazy.owner is not self.mover.group or lazy.changes:
            return None
        if need.dim is not None:
            return lazy.local if need.takes_slices_of(lazy) else None
        dim = lazy.sharded_dim
        assert dim is not None, "all ranks take part, so features are sliced"
        features, member = int(lazy.shape[dim]), self.mover.group.member
        route = group_route(self._counts(), "feature_shard", "replicate", features, member)
        return self.mover.move(lazy.local, route, Dims(need.batch_dim, dim), need.doing)

    def _leave(self, local: Tensor) -> Tensor:
        """A column unit's output as the rest of the model may use it."""
        counts, group = self._counts(), self.mover.group
        features, dim = self.spec.features, self.spec.feature_dim % local.ndim
        dims = Dims(self.unit.batch_dim(), dim)
        route = group_route(counts, "feature_shard", "batch_shard", features, group.member)

        def redistribute() -> Tensor:
            return self.mover.move(local, route, dims, f"the output of unit {self.unit.name!r}")

        if not (self.keeps and may_be_lazy()):
            return redistribute()
        shape = list(local.shape)
        shape[dims.batch], shape[dim] = counts[group.member], features
        source = TensorPlacement(self.unit.layout, "feature_shard")
        return LazyRedistributed.of(local, torch.Size(shape), dim, group, redistribute, source)

    @eager
    def reduce(self, partial: Tensor) -> Tensor:
        """A member's partial sums over its group's samples to the sum for its own samples."""
        member = self.mover.group.member
        # The sum of partial results is the transpose of a gather: its boxes, the other way, added.
        gather = group_route(self._counts(), "batch_shard", "replicate", 1, member)
        doing = f"the sum inside unit {self.unit.name!r}"
        dims = Dims(self.unit.batch_dim(), None)
        return self.mover.move(partial, gather.reversed(), dims, doing, add=True)


def keeps_features(unit: UnitPlan, following: Sequence[UnitPlan]) -> bool:
    """Whether the next unit can take this one's features as they are: same division."""
    divided = unit.style == "column" and unit.layout.degree > 1
    return divided and bool(following) and following[0].layout == unit.layout


def leaves_to_other_division(unit: UnitPlan, following: Sequence[UnitPlan]) -> bool:
    """Whether what a unit leaves as a feature shard goes straight to a unit that is divided
    otherwise."""
    if unit.style != "column" or not following or keeps_features(unit, following):
        return False
    return following[0].layout.degree > 1


# A named tuple would be a node of the output's pytree, and taken apart.
@dataclass(frozen=True)
class _Description:
    """A tensor without its samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BurstUnit:
    """The ends of a unit that takes a part of the ranks, on one that runs it or that it leaves
    idle: what it gets, and what it leaves where it was made. See [Note: Burst units, idle ranks and
    the anchor] in bursts.py."""

    def __init__(self, unit: UnitPlan, spec: SplitSpec | None, bursts: Bursts) -> None:
        self.unit, self.spec, self.bursts = unit, spec, bursts
        self.position = bursts.world.position
        self.idle = unit.layout.place(self.position) is None
        self.needs = input_placement(unit.layout, unit.style)
        self.leaves = output_placement(unit.layout, unit.style)
        self._features, self._feature_dim = 1, None  # of all members, where the output is sliced
        if self.leaves.form == "feature_shard" and spec is not None:
            self._features, self._feature_dim = spec.features, spec.feature_dim
        self._parameters: list[nn.Parameter] = []
        self._in_place = False
        self._inputs: list[Tensor] = []
        self._key: tuple[object, ...] = ()

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Hooks the ends of the unit's modules, which are called one after another."""
        first, last = modules[0], modules[-1]
        self._in_place = bool(getattr(first, "inplace", False))
        self._parameters = [p for module in modules for p in module.parameters()]

        # Closures, as in ``Boundary.attach``.
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
                moved = self.bursts.redistribute(leaves[index], need, changes=self._in_place)
                leaves[index] = moved
                self._inputs.append(moved)
        return pytree.tree_unflatten(leaves, structure)

    def leave(self, output: Any) -> Any:
        """The output as the rest of the model may use it."""
        local = self._empty() if self.idle else self._described(output)
        inputs, self._inputs = self._inputs, []
        return map_only(Tensor, self._lazy, self._tie(local, inputs))

    def _described(self, output: Any) -> Any:
        """The output, whose shape idle ranks have been told."""
        rows = box(self.bursts.counts(), self.leaves, self._features, self.position)
        for leaf in leaves_of(output):
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


@not_traced
def _skip(*args: Any, **kwargs: Any) -> Any:
    """The forward of a module on a rank that its unit leaves idle."""
    return args[0] if args else None


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Tie(torch.autograd.Function):
    """The first ``count`` tensors, as if they depended on the others and on the anchor too."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, count: int, idle: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # On ranks on which the unit is idle its other inputs get empty gradients: what made these
        # inputs must have a backward, as peers may wait for it there, even where nothing moves
        # between it and this unit.
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
