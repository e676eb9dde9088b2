"""Divides the units that a plan divides: slices, hooks, and who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from .redistribution.lazy import show_to_backward_hooks
from .redistribution.parts import Division
from .redistribution.redistribute import Mover
from .redistribution.shards import Shard, aliases
from .run import Run
from .subset_units import lives_at, narrowed, settle


def divided(plan: Plan) -> Iterator[tuple[UnitPlan, list[UnitPlan]]]:
    """The divided units, each with the units that follow it, whoever takes part in them."""
    for i, unit in enumerate(plan.units):
        if unit.layout.degree > 1:
            yield unit, list(plan.units[i + 1 :])


def divide(model: nn.Module, run: Run) -> Division:
    """Slices the parameters of divided units in place and hooks their ends."""
    division = Division()
    names = aliases(model)
    # A tied parameter is cut by its first unit: the others' specs must be read before.
    units = [(unit, rest, split_of(model, unit)) for unit, rest in divided(run.plan)]
    for unit, rest, spec in units:
        if unit.layout.size < run.world.size:
            continue
        keeps = keeps_features(unit, rest)
        _divide_unit(model, run, unit, spec, division, names, keeps=keeps)
    if run.bursts is not None:
        specs = {unit.name: spec for unit, _, spec in units}
        for unit in narrowed(run.plan):
            settle(model, run, run.bursts, unit, specs.get(unit.name), division, names)
    if run.bursts is not None or any(keeps_features(unit, rest) for unit, rest, _ in units):
        show_to_backward_hooks(model, [path for unit in run.plan.units for path in unit.modules])
    return division


def _divide_unit(
    model: nn.Module,
    run: Run,
    unit: UnitPlan,
    spec: SplitSpec,
    division: Division,
    names: dict[int, list[str]],
    *,
    keeps: bool,
) -> None:
    degree = unit.layout.degree
    group = run.world.neighbours[degree]
    mover = Mover(group, run.watch, run.meter, run.issued)
    counts: Callable[[], tuple[int, ...]] = partial(run.group_counts, unit.layout)
    bursts = run.bursts
    boundary = Boundary(
        unit, spec, mover, counts,
        keeps=keeps or bursts is not None, bursts=bursts, brought=run.brought,
    )  # fmt: skip
    gradients: dict[nn.Parameter, Tensor] = {}
    for cut in spec.cuts:
        tensor = tensor_named(model, cut.name)
        shard = Shard(tuple(names[id(tensor)]), cut, group, tensor.shape, tensor.stride())
        division.add(tensor, shard, gradients)
    apply_split(model, unit.modules, spec, degree, group.member, boundary.reduce)
    division.give_back(gradients)
    for path in unit.modules:
        for inner, _ in model.get_submodule(path).named_modules(prefix=path):
            division.places[inner], division.styles[inner] = degree, unit.style
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
    names = aliases(model)
    cuts: dict[str, tuple[int, int, int]] = {}
    for unit, _ in divided(plan):
        spec = split_of(model, unit)
        cuts.update({c.name: (c.dim, c.blocks, unit.layout.degree) for c in spec.cuts})
    at = lives_at(model, plan)
    for same in names.values():
        used = [name for name in same if not _only_kept(name, same)]
        ways = {name: (cuts.get(name), at.get(name)) for name in used}
        if len(set(ways.values())) > 1:
            told = ", ".join(f"{n!r} {_way(*way)}" for n, way in ways.items())
            raise InputError(
                f"one parameter is divided in different ways by its uses ({told}): give all units "
                "that share it one layout"
            )


def _only_kept(name: str, same: list[str]) -> bool:
    """Whether ``name`` is in a container of a module that has the parameter too: some models keep
    a second name there, of what the module uses.
    """
    path = name.split(".")[:-1]
    others = [other.split(".")[:-1] for other in same if other != name]
    return any(len(other) > len(path) and other[: len(path)] == path for other in others)


def _way(way: tuple[int, int, int] | None, layout: Layout | None) -> str:
    told = "whole" if way is None else f"cut along dim {way[0]} over {way[2]} members"
    return f"{told} in layout {layout}" if layout is not None else told


def tensor_named(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that fully qualified name."""
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor)
    return tensor
