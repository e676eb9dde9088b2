"""Gives each unit the memory policy that its plan says."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import torch
from torch import nn

from ...planner.schema.errors import InputError
from ...planner.schema.layout import data_parallel
from ...planner.schema.pins import forbidding
from ...planner.schema.plan import Plan, UnitPlan
from . import offload as offloading
from .offload import Offload
from .recompute import Recomputed, ResumeForward
from .regions import Region, Regions


def check_memory(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Raises ``InputError`` where a unit's memory policy cannot be had on this device, or segments
    are not made of units that follow each other and are recomputed."""
    offloaded = next((u for u in plan.units if u.memory == "offload"), None)
    if offloaded is not None and offloading.host_of(device) is None:
        raise InputError(
            f"unit {offloaded.name!r} is planned with memory 'offload', and this run's device "
            f"{str(device)!r} has no memory but the host's: plan with "
            f"{forbidding('offload')}"
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    seen: set[tuple[str, ...]] = set()
    for segment, units in _segments(plan):
        named = " and ".join(repr(name) for name in segment)
        for unit in units:
            _check_in_segment(unit, segment, named)
        missing = next((m for m in segment if m not in known), None)
        if missing is not None:
            raise InputError(f"the plan is for another model: this one has no module {missing!r}")
        if segment in seen:
            raise InputError(
                f"the units of the segment {named} do not follow each other (at "
                f"{units[0].name!r}): list them one after the other"
            )
        seen.add(segment)


def _check_in_segment(unit: UnitPlan, segment: tuple[str, ...], named: str) -> None:
    if unit.memory != "recompute":
        raise InputError(
            f"unit {unit.name!r} is in the segment {named} and has memory {unit.memory!r}: what is "
            "recomputed together needs memory 'recompute'"
        )
    outside = next((m for m in unit.modules if not _inside(m, segment)), None)
    if outside is not None:
        raise InputError(
            f"unit {unit.name!r} is in the segment {named}, which does not contain its module "
            f"{outside!r}: name a module that does, or leave the segment out"
        )


def _inside(module: str, segment: tuple[str, ...]) -> bool:
    return any(not s or module == s or module.startswith(f"{s}.") for s in segment)


def _segments(plan: Plan) -> Iterator[tuple[tuple[str, ...], list[UnitPlan]]]:
    """The segments, each with its units that follow one another."""
    with_modules = (unit for unit in plan.units if unit.modules)  # glue in between runs again too
    for segment, units in groupby(with_modules, lambda unit: unit.segment):
        if segment:
            yield segment, list(units)


def install_memory(
    model: nn.Module,
    plan: Plan,
    device: torch.device,
    current_forward: Callable[[], object],
    resume_later: Callable[[], ResumeForward],
) -> Regions:
    """Hooks the ends of what is recomputed or offloaded. ``current_forward()`` is the forward that
    runs, ``resume_later()`` what makes it the current one again. Call it when units have been
    divided."""
    offloaded = any(unit.memory == "offload" for unit in plan.units)
    # Not made where nothing is offloaded: it has a stream of its own.
    host = offloading.host_of(device) if offloaded else None
    offload = Offload(host, current_forward) if host is not None else None
    regions = Regions() if offload is None else Regions(offload.around, offload.unit_left)

    def recompute(
        region: Region, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Recomputed:
        return Recomputed(region, args, kwargs, resume_later(), offload)

    # Units without modules have nothing to do again.
    unsegmented = [u for u in plan.units if not u.segment and u.memory != "keep" and u.modules]
    found = [(unit, unit.modules, unit.memory) for unit in unsegmented]
    found += [(units[0], segment, "recompute") for segment, units in _segments(plan)]
    everyone = data_parallel(plan.world_size)
    for unit, modules, memory in found:
        region = Region(unit.name, [model.get_submodule(path) for path in modules])
        whole = unit.layout == everyone
        if memory == "recompute":
            regions.add(region, recompute, whole=whole)
        elif offload is not None:
            regions.add(region, partial(offload.start, whole=whole), whole=whole)
    if offload is not None:
        for unit in plan.units:
            if unit.modules:
                regions.tell(model.get_submodule(unit.modules[-1]))
    return regions
