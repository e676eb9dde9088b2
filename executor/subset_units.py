"""Units that take a part of the ranks: what a plan may ask of them, and how a model is made ready.

On ranks that such a unit leaves idle its parameters and buffers are empty and its modules are not
run: see [Note: Burst units, idle ranks and the anchor] in redistribution/bursts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..models.spec import ParameterCut, SplitSpec
from ..models.splits import apply_split
from ..models.splits.recipe import forget_accumulator
from ..planner.schema.errors import InputError
from ..planner.schema.layout import Layout
from ..planner.schema.plan import Plan, UnitPlan
from .redistribution.boundary import Boundary
from .redistribution.burst_unit import BurstUnit
from .redistribution.redistribute import Mover
from .redistribution.shards import ModelShards, Shard, SubsetShard
from .run import Run


def subset_units(plan: Plan) -> Iterator[UnitPlan]:
    """The units that leave ranks idle."""
    return (unit for unit in plan.units if unit.layout.size < plan.world_size and unit.modules)


def subset_layouts(model: nn.Module, plan: Plan) -> dict[str, Layout]:
    """The layout of each parameter and buffer in units that leave ranks idle, by name."""
    return {
        name: unit.layout
        for unit in subset_units(plan)
        for name, _ in _tensors(model, unit.modules)
    }


def check_subset_units(model: nn.Module, plan: Plan) -> None:
    """Raises ``InputError`` where a unit cannot be run by a part of the ranks."""
    for unit in subset_units(plan):
        if not unit.batched_inputs:
            raise InputError(
                f"unit {unit.name!r} leaves ranks idle and no input of it carries the batch: give "
                "it all ranks"
            )
        if unit.segment:
            segment = " and ".join(repr(name) for name in unit.segment)
            raise InputError(
                f"unit {unit.name!r} leaves ranks idle and is in the segment {segment}, whose "
                "forward would run again on some ranks only: recompute the unit by itself"
            )
        _check_norms(model, plan, unit)


def _check_norms(model: nn.Module, plan: Plan, unit: UnitPlan) -> None:
    if plan.goal.batch_statistics == "global":
        return
    for path in unit.modules:
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            if isinstance(module, _BatchNorm):
                raise InputError(
                    f"batch normalisation {name!r} is in a unit that leaves ranks idle, so that "
                    "others see more samples: plan with batch_statistics 'global', or give the "
                    "unit all ranks"
                )


def place_subset_unit(
    model: nn.Module,
    run: Run,
    unit: UnitPlan,
    spec: SplitSpec | None,
    shards: ModelShards,
    names: dict[int, list[str]],
) -> None:
    """Makes one unit that leaves ranks idle ready: this rank keeps its part of it, or nothing."""
    assert run.bursts is not None, "the plan leaves ranks idle"
    ends = BurstUnit(unit, spec, run.bursts)
    cuts = {cut.name: cut for cut in spec.cuts} if spec is not None else {}
    for name, tensor in _tensors(model, unit.modules):
        if tensor not in shards:  # else it is tied, and an earlier unit has placed it
            known = tuple(names[id(tensor)])
            cut = next((cuts[alias] for alias in known if alias in cuts), None)
            shards.add(tensor, _subset_shard(run, unit.layout, name, known, tensor, cut))
    if ends.idle:
        for _, tensor in _tensors(model, unit.modules):
            _empty(tensor)
    elif spec is not None:
        group = run.world.redistribution[unit.layout]
        mover = Mover(group, run.watch, run.meter, run.issued)
        # Only for the sums inside the unit: its ends are those of ``BurstUnit``.
        inside = Boundary(unit, spec, mover, partial(run.group_counts, unit.layout))
        apply_split(model, unit.modules, spec, unit.layout.degree, group.member, inside.reduce)
    shards.slice_gradients()
    shards.add_modules(model, unit, unit.layout)
    ends.attach([model.get_submodule(path) for path in unit.modules])


def _tensors(model: nn.Module, paths: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        module = model.get_submodule(path)
        yield from module.named_parameters(prefix=path, remove_duplicate=False)
        yield from module.named_buffers(prefix=path, remove_duplicate=False)


def _subset_shard(
    run: Run,
    layout: Layout,
    name: str,
    names: tuple[str, ...],
    tensor: Tensor,
    cut: ParameterCut | None,
) -> SubsetShard:
    world, shape, stride = run.world, tensor.shape, tensor.stride()
    part = None
    if cut is not None and layout.place(world.position) is not None:
        part = Shard(names, cut, world.redistribution[layout], shape, stride)
    everyone = world.crossings[range(world.size)]
    members = layout.degree if cut is not None else 1
    whole = cut or ParameterCut(name, 0)
    return SubsetShard(names, whole, everyone, shape, stride, layout, world, members, part)


def _empty(tensor: Tensor) -> None:
    """Gives the tensor's memory back; the object stays, so optimizers that hold it do."""
    # Read first: forgetting the accumulator leaves data of another dtype.
    dtype = tensor.dtype
    forget_accumulator(tensor)
    tensor.data = torch.empty(0, dtype=dtype, device=tensor.device)
