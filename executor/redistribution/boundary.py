"""A divided unit's entry and exit: brings its inputs to the form it needs, and its output back.

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
from .bursts import Bursts, want
from .cache import RedistributionCache, SharedRedistribution
from .lazy import LazyRedistributed
from .redistribute import Mover, route


class Boundary:
    """One divided unit on one member.

    ``counts()`` are the samples of each member of its group in the forward that runs. ``keeps``
    tells that the next unit may take the output in the form in which this one leaves it. Where the
    plan leaves ranks idle in some units, ``bursts`` moves what enters; else ``brought`` holds what
    other units have got of it.
    """

    def __init__(
        self,
        unit: UnitPlan,
        spec: SplitSpec,
        mover: Mover,
        counts: Callable[[], tuple[int, ...]],
        *,
        keeps: bool,
        bursts: Bursts | None = None,
        brought: RedistributionCache | None = None,
    ) -> None:
        self.bursts = bursts
        self.brought = brought
        self.unit = unit
        self.spec = spec
        self.mover = mover
        self.keeps = keeps and unit.style == "column"
        self._counts = counts

    def attach(self, first: nn.Module, last: nn.Module) -> None:
        """Registers the hooks at the unit's first and last module."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.enter(args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self.leave(output)

        first.register_forward_pre_hook(enter, with_kwargs=True)
        if self.unit.style == "column":
            last.register_forward_hook(leave)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """The call's inputs in the form that the unit needs. Collective over the group.

        One tensor that is several inputs (attention's query, key and value) travels once and stays
        one tensor.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        brought: dict[tuple[int, Form], Tensor] = {}
        for i, index in enumerate(self.unit.batched_inputs):
            given = leaves[index]
            if isinstance(given, Tensor):
                form: Form = "features" if self.unit.style == "row" and i == 0 else "whole"
                if (id(given), form) not in brought:
                    brought[id(given), form] = self._bring(given, form, i)
                leaves[index] = brought[id(given), form]
        return pytree.tree_unflatten(leaves, structure)

    def _bring(self, tensor: Tensor, form: Form, index: int) -> Tensor:
        doing = f"the input of unit {self.unit.name!r}"
        if self.bursts is not None:
            return self.bursts.bring(tensor, want(self.unit, self.spec, form, doing, index))
        if self.brought is None:
            return self._fetch(tensor, form, doing)
        sliced = form == "features"
        features, dim = (self.spec.features, self.spec.feature_dim) if sliced else (1, None)
        taking = SharedRedistribution(
            self.unit.name, index, TensorPlacement(self.unit.layout, form), features, dim
        )
        return self.brought.get(tensor, taking, lambda: self._fetch(tensor, form, doing))

    def _fetch(self, tensor: Tensor, form: Form, doing: str) -> Tensor:
        """The tensor in that form, moved among the members."""
        if isinstance(tensor, LazyRedistributed):
            direct = self._take(tensor, form, doing)
            if direct is not None:
                return direct
            tensor = tensor.home()
        sliced = form == "features"
        features = self.spec.features if sliced else 1
        way = route(self._counts(), "samples", form, features, self.mover.group.member)
        return self.mover.move(tensor, way, self.spec.feature_dim if sliced else None, doing)

    def _take(self, held: LazyRedistributed, form: Form, doing: str) -> Tensor | None:
        """The held tensor without the way home, where the same members hold it."""
        if held.owner is not self.mover.group or held.changes:
            return None
        dim = held.dim_held
        assert dim is not None, "all ranks take part, so only features are held"
        if form == "features":
            wanted = self.spec.feature_dim % len(held.shape)
            fits = wanted == dim and held.shape[dim] == self.spec.features
            return held.local if fits else None
        features = int(held.shape[dim])
        way = route(self._counts(), "features", "whole", features, self.mover.group.member)
        return self.mover.move(held.local, way, dim, doing)

    def leave(self, output: Any) -> Any:
        """A column unit's output as the rest of the model may use it."""
        return pytree.tree_map_only(Tensor, self._leave_tensor, output)

    def _leave_tensor(self, local: Tensor) -> Tensor:
        counts, group = self._counts(), self.mover.group
        features, dim = self.spec.features, self.spec.feature_dim % local.ndim
        way = route(counts, "features", "samples", features, group.member)

        def bring() -> Tensor:
            return self.mover.move(local, way, dim, f"the output of unit {self.unit.name!r}")

        if not self.keeps:
            return bring()
        shape = list(local.shape)
        shape[0], shape[dim] = counts[group.member], features
        source = TensorPlacement(self.unit.layout, "features")
        return LazyRedistributed.of(local, torch.Size(shape), dim, group, bring, source)

    def reduce(self, partial: Tensor) -> Tensor:
        """A member's partial sums over its group's samples to the sum for its own samples."""
        way = route(self._counts(), "samples", "whole", 1, self.mover.group.member)
        doing = f"the sum inside unit {self.unit.name!r}"
        return self.mover.move(partial, way, None, doing, reduce=True)


def crosses(unit: UnitPlan, following: Sequence[UnitPlan]) -> bool:
    """Whether what a unit leaves as features goes straight to a unit that is divided otherwise."""
    if unit.style != "column" or not following or keeps_features(unit, following):
        return False
    return following[0].layout.degree > 1


def keeps_features(unit: UnitPlan, following: Sequence[UnitPlan]) -> bool:
    """Whether the next unit can take this one's features as they are held: same division."""
    divided = unit.style == "column" and unit.layout.degree > 1
    return divided and bool(following) and following[0].layout == unit.layout
