"""Makes the units that a plan divides, or that it gives to a part of the ranks, ready on this rank:
slices, hooks, and who has what.

On ranks that a unit leaves idle its parameters and buffers are empty and its modules are not run:
see [Note: Burst units, idle ranks and the anchor] in redistribution/bursts.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..models.spec import SplitSpec
from ..models.splits import apply_split, find_splits
from ..models.splits.recipe import forget_accumulator
from ..planner.cost.ownership import feature_bounds
from ..planner.schema.errors import InputError
from ..planner.schema.layout import Layout
from ..planner.schema.plan import Plan, UnitPlan
from .comm.groups import Place
from .redistribution.boundary import Boundary, BurstUnit, keeps_features
from .redistribution.lazy import materialize_for_backward_hooks
from .redistribution.redistribute import Mover
from .redistribution.shards import ModelShards, Shard, SubsetShard, aliases
from .run import Run


def divided(plan: Plan) -> Iterator[tuple[UnitPlan, list[UnitPlan]]]:
    """The divided units, each with the units that follow it, whoever takes part in them."""
    for i, unit in enumerate(plan.units):
        if unit.layout.degree > 1:
            yield unit, list(plan.units[i + 1 :])


def subset_units(plan: Plan) -> Iterator[UnitPlan]:
    """The units that leave ranks idle."""
    return (unit for unit in plan.units if unit.layout.size < plan.world_size and unit.modules)


def subset_layouts(model: nn.Module, plan: Plan) -> dict[str, Layout]:
    """The layout of each parameter and buffer in units that leave ranks idle, by name."""
    units = subset_units(plan)
    return {name: unit.layout for unit in units for name, _ in _tensors(model, unit)}


def divide(model: nn.Module, run: Run) -> ModelShards:
    """Slices the parameters of divided units in place, empties those of units that leave this rank
    idle, and hooks the units' ends."""
    shards = ModelShards(aliases(model))
    # A tied parameter is cut by its first unit: the others' specs must be read before.
    units = [(unit, rest, split_of(model, unit)) for unit, rest in divided(run.plan)]
    keeping = {unit.name for unit, rest, _ in units if keeps_features(unit, rest)}
    for unit, _, spec in units:
        if unit.layout.size == run.world.size:
            keeps = run.bursts is not None or unit.name in keeping
            _divide_unit(model, run, unit, spec, shards, keeps=keeps)
    if run.bursts is not None:
        specs = {unit.name: spec for unit, _, spec in units}
        for unit in subset_units(run.plan):
            ends = BurstUnit(unit, specs.get(unit.name), run.bursts)
            _place_subset_unit(model, run, ends, shards)
    _refuse_late_users(model, run.plan, shards)
    if run.bursts is not None or keeping:  # only then is anything between units lazy
        inside = [path for unit in run.plan.units for path in unit.modules]
        materialize_for_backward_hooks(model, inside)
    return shards


def _divide_unit(
    model: nn.Module, run: Run, unit: UnitPlan, spec: SplitSpec, shards: ModelShards, *, keeps: bool
) -> None:
    degree = unit.layout.degree
    boundary = _boundary(
        run, unit, spec, degree, keeps=keeps, bursts=run.bursts, cache=run.redistribution_cache
    )
    group = boundary.mover.group
    for cut in spec.cuts:
        tensor = tensor_named(model, cut.name)
        names = shards.names_of(tensor)
        shards.add(tensor, Shard(names, cut, degree, group, tensor.shape, tensor.stride()))
    apply_split(model, unit.modules, spec, degree, group.member, boundary.reduce)
    shards.slice_gradients()
    shards.add_modules(model, unit, degree)
    boundary.attach(model.get_submodule(unit.modules[0]), model.get_submodule(unit.modules[-1]))


def _boundary(run: Run, unit: UnitPlan, spec: SplitSpec, place: Place, **options: Any) -> Boundary:
    mover = Mover(run.world.redistribution[place], run.watch, run.meter, run.issued)
    return Boundary(unit, spec, mover, partial(run.group_counts, unit.layout), **options)


def _place_subset_unit(model: nn.Module, run: Run, ends: BurstUnit, shards: ModelShards) -> None:
    """Makes one unit that leaves ranks idle ready: this rank keeps its part of it, or nothing."""
    unit, spec = ends.unit, ends.spec
    cuts = {cut.name: cut for cut in spec.cuts} if spec is not None else {}
    for name, tensor in _tensors(model, unit):
        if tensor not in shards:  # else it is tied, and an earlier unit has placed it
            names = shards.names_of(tensor)
            cut = next((cuts[alias] for alias in names if alias in cuts), None)
            shards.add(tensor, SubsetShard.of(run.world, unit.layout, name, names, tensor, cut))
    if ends.idle:
        for _, tensor in _tensors(model, unit):
            # Its memory goes and the object stays, so optimizers that hold it do. The dtype is read
            # first, as forgetting the accumulator leaves data of another one.
            dtype = tensor.dtype
            forget_accumulator(tensor)
            tensor.data = torch.empty(0, dtype=dtype, device=tensor.device)
    elif spec is not None:
        # Only for the sums inside the unit: its ends are those of ``BurstUnit``.
        inside = _boundary(run, unit, spec, unit.layout)
        member = inside.mover.group.member
        apply_split(model, unit.modules, spec, unit.layout.degree, member, inside.reduce)
    shards.slice_gradients()
    shards.add_modules(model, unit, unit.layout)
    ends.attach([model.get_submodule(path) for path in unit.modules])


def _tensors(model: nn.Module, unit: UnitPlan) -> Iterator[tuple[str, Tensor]]:
    for path in unit.modules:
        module = model.get_submodule(path)
        # Under every name: a tensor that is tied inside the unit has cuts by one of them only.
        yield from module.named_parameters(prefix=path, remove_duplicate=False)
        yield from module.named_buffers(prefix=path, remove_duplicate=False)


def tensor_named(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that fully qualified name."""
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor)
    return tensor


# -- what a plan may ask of a model's units --------------------------------------------------------


def split_of(model: nn.Module, unit: UnitPlan) -> SplitSpec:
    """How the model's own modules divide in the plan's style; ``InputError`` if they do not."""
    found = {spec.style: spec for spec in find_splits(model, unit.modules)}
    spec = found.get(unit.style)
    if spec is None:
        raise InputError(
            f"unit {unit.name!r} cannot be divided in style {unit.style!r} (it can in: "
            f"{', '.join(found) or 'none'}): make a new plan for this model"
        )
    degree = unit.layout.degree
    left, right = feature_bounds(spec.parts, degree, degree - 1)
    # Torch has no convolution of nothing.
    if isinstance(model.get_submodule(unit.modules[0]), _ConvNd) and left == right:
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


def check_subset_units(model: nn.Module, plan: Plan) -> None:
    """Raises ``InputError`` where a unit cannot be run by a part of the ranks."""
    for unit in subset_units(plan):
        if not unit.batched_inputs:
            raise InputError(
                f"unit {unit.name!r} leaves ranks idle and no input of it carries the batch: give "
                "it all ranks"
            )
        if unit.batch_dims:
            raise InputError(
                f"unit {unit.name!r} leaves ranks idle, and not all that it takes and leaves has "
                "the samples in dim 0: give it all ranks"
            )
        if unit.segment:
            segment = " and ".join(repr(name) for name in unit.segment)
            raise InputError(
                f"unit {unit.name!r} leaves ranks idle and is in the segment {segment}, whose "
                "forward would run again on some ranks only: recompute the unit by itself"
            )
        if plan.goal.batch_statistics == "global":
            continue
        for path in unit.modules:
            for name, module in model.get_submodule(path).named_modules(prefix=path):
                if isinstance(module, _BatchNorm):
                    raise InputError(
                        f"batch normalisation {name!r} is in a unit that leaves ranks idle, so "
                        "that others see more samples: plan with batch_statistics 'global', or "
                        "give the unit all ranks"
                    )


def check_ties(model: nn.Module, plan: Plan) -> None:
    """Raises ``InputError`` where a parameter is cut in one use and whole, or cut in another way,
    in another."""
    cuts: dict[str, tuple[int, int, int]] = {}
    for unit, _ in divided(plan):
        spec = split_of(model, unit)
        cuts.update({c.name: (c.dim, c.blocks, unit.layout.degree) for c in spec.cuts})
    layouts, never_runs = subset_layouts(model, plan), _never_run(plan)
    for same in aliases(model).values():
        used = [name for name in same if not _only_listed(name, same)]
        # A module may have several names: what the plan says of one of them holds for it.
        known = {_holder(model, name) for name in used if name in cuts or name in layouts}
        used = [n for n in used if n in cuts or n in layouts or _holder(model, n) not in known]
        uses = {name: (cuts.get(name), layouts.get(name)) for name in used}
        if not any(layouts.get(name) for name in used):
            # Modules that never run do not count: those that run have the tensor cut.
            uses = {name: use for name, use in uses.items() if not never_runs(name)}
        if len(set(uses.values())) > 1:
            sentences = ", ".join(f"{name!r} {_use(*use)}" for name, use in uses.items())
            raise InputError(
                f"one parameter is divided in different ways by its uses ({sentences}): give all "
                "units that share it one layout"
            )


def _holder(model: nn.Module, name: str) -> nn.Module:
    """The module that has the tensor of that name."""
    return model.get_submodule(name.rpartition(".")[0])


def _never_run(plan: Plan) -> Callable[[str], bool]:
    """Tells by a tensor's name whether it is in a module that no forward was seen to run (a head
    that is tied and not used here): one without units, where the plan has all units of the model.
    """
    if not any(unit.kind == "input" for unit in plan.units):
        return lambda name: False
    run = {path for unit in plan.units for path in unit.modules}
    around = {above for path in run for above in _at_or_above(path)}

    def never_runs(name: str) -> bool:
        path = name.rpartition(".")[0]
        return path not in around and run.isdisjoint(_at_or_above(path))

    return never_runs


def _at_or_above(path: str) -> list[str]:
    """A module's path and those of the modules around it, the model's own (``""``) last."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _refuse_late_users(model: nn.Module, plan: Plan, shards: ModelShards) -> None:
    """A module that was not seen to run and has a divided parameter must not take this rank's part
    for the whole, if it is called after all."""

    def refuse(_module: nn.Module, _args: Any, *, path: str, name: str) -> None:
        raise InputError(
            f"module {path!r} is called, which was not when the model was profiled, and its "
            f"parameter {name!r} is tied to one that is divided over ranks: profile the model with "
            "batches for which it is called"
        )

    run = [model.get_submodule(path) for unit in plan.units for path in unit.modules]
    seen = {inner for module in run for inner in module.modules()}
    for name in filter(_never_run(plan), shards.by_name):
        path = name.rpartition(".")[0]
        module = model.get_submodule(path)
        if module not in seen:  # else it is another name of a module that runs
            module.register_forward_pre_hook(partial(refuse, path=path, name=name))


def _only_listed(name: str, same: list[str]) -> bool:
    """Whether ``name`` is in a container of a module that has the parameter too."""
    # Some models keep a second name in the container, of what the module inside it uses.
    path = name.split(".")[:-1]
    others = [other.split(".")[:-1] for other in same if other != name]
    return any(len(other) > len(path) and other[: len(path)] == path for other in others)


def _use(cut: tuple[int, int, int] | None, layout: Layout | None) -> str:
    text = "whole" if cut is None else f"cut along dim {cut[0]} over {cut[2]} members"
    return f"{text} in layout {layout}" if layout is not None else text
