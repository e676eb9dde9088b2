"""A divided unit's ends: its inputs in the form that it needs, and its output as others can use it.

Only divided units have these hooks. All other code sees each rank's own samples and needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...models.spec import SplitSpec
from ...planner.cost.ownership import Form, TensorPlacement
from ...planner.schema.plan import UnitPlan
from .bursts import Bursts
from .cache import RedistributionCache, UnitInput, unit_input
from .lazy import LazyRedistributed
from .redistribute import Mover, group_route


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

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.enter(args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return pytree.tree_map_only(Tensor, self._leave, output)

        first.register_forward_pre_hook(enter, with_kwargs=True)
        if self.unit.style == "column":
            last.register_forward_hook(leave)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """The call's inputs in the form that the unit needs. Collective over the group.

        One tensor that is several inputs (attention's query, key and value) moves once and stays
        one tensor.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        moved: dict[tuple[int, Form], Tensor] = {}
        for i, index in enumerate(self.unit.batched_inputs):
            given = leaves[index]
            if isinstance(given, Tensor):
                row = self.unit.style == "row" and i == 0
                form: Form = "feature_shard" if row else "replicate"
                if (id(given), form) not in moved:
                    moved[id(given), form] = self._redistribute(given, form, i)
                leaves[index] = moved[id(given), form]
        return pytree.tree_unflatten(leaves, structure)

    def _redistribute(self, tensor: Tensor, form: Form, index: int) -> Tensor:
        need = unit_input(self.unit, self.spec, form, index)
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
        return self.mover.move(tensor, route, need.dim, need.doing)

    def _move_direct(self, lazy: LazyRedistributed, need: UnitInput) -> Tensor | None:
        """The tensor as it is needed out of its slices, where the same members hold them."""
        if lazy.owner is not self.mover.group or lazy.changes:
            return None
        dim = lazy.sharded_dim
        assert dim is not None, "all ranks take part, so features are sliced"
        if need.dim is not None:
            same = need.dim % len(lazy.shape) == dim and lazy.shape[dim] == need.features
            return lazy.local if same else None
        features, member = int(lazy.shape[dim]), self.mover.group.member
        route = group_route(self._counts(), "feature_shard", "replicate", features, member)
        return self.mover.move(lazy.local, route, dim, need.doing)

    def _leave(self, local: Tensor) -> Tensor:
        """A column unit's output as the rest of the model may use it."""
        counts, group = self._counts(), self.mover.group
        features, dim = self.spec.features, self.spec.feature_dim % local.ndim
        route = group_route(counts, "feature_shard", "batch_shard", features, group.member)

        def redistribute() -> Tensor:
            return self.mover.move(local, route, dim, f"the output of unit {self.unit.name!r}")

        if not self.keeps:
            return redistribute()
        shape = list(local.shape)
        shape[0], shape[dim] = counts[group.member], features
        source = TensorPlacement(self.unit.layout, "feature_shard")
        return LazyRedistributed.of(local, torch.Size(shape), dim, group, redistribute, source)

    def reduce(self, partial: Tensor) -> Tensor:
        """A member's partial sums over its group's samples to the sum for its own samples."""
        member = self.mover.group.member
        gather = group_route(self._counts(), "batch_shard", "replicate", 1, member)
        doing = f"the sum inside unit {self.unit.name!r}"
        return self.mover.move(partial, gather.reversed(), None, doing, add=True)


def leaves_to_other_division(unit: UnitPlan, following: Sequence[UnitPlan]) -> bool:
    """Whether what a unit leaves as a feature shard goes straight to a unit that is divided
    otherwise."""
    if unit.style != "column" or not following or keeps_features(unit, following):
        return False
    return following[0].layout.degree > 1


def keeps_features(unit: UnitPlan, following: Sequence[UnitPlan]) -> bool:
    """Whether the next unit can take this one's features as they are: same division."""
    divided = unit.style == "column" and unit.layout.degree > 1
    return divided and bool(following) and following[0].layout == unit.layout
