"""Divides the units that a plan divides: slices, hooks, and who holds what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..models.spec import SplitSpec
from ..models.splits import apply_split, find_splits
from ..planner.cost.ownership import feature_bounds
from ..planner.schema.errors import InputError
from ..planner.schema.layout import Layout
from ..planner.schema.plan import Plan, UnitPlan
from .redistribution.boundary import Boundary, keeps_features
from .redistribution.lazy import materialize_for_backward_hooks
from .redistribution.redistribute import Mover
from .redistribution.shards import ModelShards, Shard, aliases
from .run import Run
from .subset_units import place_subset_unit, subset_layouts, subset_units


def divided(plan: Plan) -> Iterator[tuple[UnitPlan, list[UnitPlan]]]:
    """The divided units, each with the units that follow it, whoever takes part in them."""
    for i, unit in enumerate(plan.units):
        if unit.layout.degree > 1:
            yield unit, list(plan.units[i + 1 :])


def divide(model: nn.Module, run: Run) -> ModelShards:
    """Slices the parameters of divided units in place, empties those of units that leave this rank
    idle, and hooks the units' ends."""
    shards = ModelShards()
    names = aliases(model)
    # A tied parameter is cut by its first unit: the others' specs must be read before.
    units = [(unit, rest, split_of(model, unit)) for unit, rest in divided(run.plan)]
    for unit, rest, spec in units:
        if unit.layout.size == run.world.size:
            keeps = run.bursts is not None or keeps_features(unit, rest)
            _divide_unit(model, run, unit, spec, shards, names, keeps=keeps)
    if run.bursts is not None:
        specs = {unit.name: spec for unit, _, spec in units}
        for unit in subset_units(run.plan):
            place_subset_unit(model, run, unit, specs.get(unit.name), shards, names)
    if run.bursts is not None or any(keeps_features(unit, rest) for unit, rest, _ in units):
        inside = [path for unit in run.plan.units for path in unit.modules]
        materialize_for_backward_hooks(model, inside)
    return shards


def _divide_unit(
    model: nn.Module,
    run: Run,
    unit: UnitPlan,
    spec: SplitSpec,
    shards: ModelShards,
    names: dict[int, list[str]],
    *,
    keeps: bool,
) -> None:
    degree = unit.layout.degree
    group = run.world.redistribution[degree]
    mover = Mover(group, run.watch, run.meter, run.issued)
    boundary = Boundary(
        unit, spec, mover, partial(run.group_counts, unit.layout),
        keeps=keeps, bursts=run.bursts, cache=run.redistribution_cache,
    )  # fmt: skip
    for cut in spec.cuts:
        tensor = tensor_named(model, cut.name)
        shard = Shard(tuple(names[id(tensor)]), cut, group, tensor.shape, tensor.stride())
        shards.add(tensor, shard)
    apply_split(model, unit.modules, spec, degree, group.member, boundary.reduce)
    shards.slice_gradients()
    shards.add_modules(model, unit, degree)
    boundary.attach(model.get_submodule(unit.modules[0]), model.get_submodule(unit.modules[-1]))


def split_of(model: nn.Module, unit: UnitPlan) -> SplitSpec:
    """How the model's own modules divide in the plan's style; ``InputError`` if they do not."""
    found = find_splits(model, unit.modules)
    for spec in found:
        if spec.style == unit.style:
            return _checked(spec, unit, model.get_submodule(unit.modules[0]))
    known = ", ".join(spec.style for spec in found) or "none"
    raise InputError(
        f"unit {unit.name!r} cannot be divided in style {unit.style!r} (it can in: {known}): make "
        "a new plan for this model"
    )


def _checked(spec: SplitSpec, unit: UnitPlan, first: nn.Module) -> SplitSpec:
    degree = unit.layout.degree
    left, right = feature_bounds(spec.parts, degree, degree - 1)
    if isinstance(first, _ConvNd) and left == right:  # torch has no convolution of nothing
        raise InputError(
            f"unit {unit.name!r} has {spec.parts} channels, of which the last of {degree} members "
            "would get none: plan a smaller degree"
        )
    if degree > spec.parts or (not spec.uneven and spec.parts % degree):
        raise InputError(
            f"unit {unit.name!r} has {spec.parts} parts, which {degree} members cannot share: "
            "make a new plan for this model"
        )
    if not unit.batched_inputs:
        raise InputError(
            f"unit {unit.name!r} is divided and no input of it carries the batch: give it degree 1"
        )
    return spec


def check_ties(model: nn.Module, plan: Plan) -> None:
    """Raises ``InputError`` where a parameter is cut in one use and whole, or cut in another way,
    in another.
    """
    cuts: dict[str, tuple[int, int, int]] = {}
    for unit, _ in divided(plan):
        spec = split_of(model, unit)
        cuts.update({c.name: (c.dim, c.blocks, unit.layout.degree) for c in spec.cuts})
    layouts = subset_layouts(model, plan)
    for same in aliases(model).values():
        used = [name for name in same if not _only_listed(name, same)]
        uses = {name: (cuts.get(name), layouts.get(name)) for name in used}
        if len(set(uses.values())) > 1:
            sentences = ", ".join(f"{name!r} {_use(*use)}" for name, use in uses.items())
            raise InputError(
                f"one parameter is divided in different ways by its uses ({sentences}): give all "
                "units that share it one layout"
            )


def _only_listed(name: str, same: list[str]) -> bool:
    """Whether ``name`` is in a container of a module that has the parameter too: some models keep
    a second name there, of what the module uses.
    """
    path = name.split(".")[:-1]
    others = [other.split(".")[:-1] for other in same if other != name]
    return any(len(other) > len(path) and other[: len(path)] == path for other in others)


def _use(cut: tuple[int, int, int] | None, layout: Layout | None) -> str:
    text = "whole" if cut is None else f"cut along dim {cut[0]} over {cut[2]} members"
    return f"{text} in layout {layout}" if layout is not None else text


def tensor_named(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that fully qualified name."""
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor)
    return tensor
