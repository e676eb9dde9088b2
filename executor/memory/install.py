"""Gives each unit the memory policy that its plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
from torch import nn

from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan, UnitPlan
from . import offload as offloading
from .offload import Offload
from .recompute import Recomputed, ResumeForward
from .regions import Body, Regions


def check_memory(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Raises ``InputError`` where a unit's memory policy cannot be had on this device, or segments
    are not made of units that follow each other and are recomputed."""
    offloaded = next((u for u in plan.units if u.memory == "offload"), None)
    if offloaded is not None and offloading.host_of(device) is None:
        raise InputError(
            f"unit {offloaded.name!r} is planned with memory 'offload', and this run's device "
            f"{str(device)!r} has no memory but the host's: plan with --forbid offload"
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    seen: set[tuple[str, ...]] = set()
    for segment, units in _segments(plan):
        _check_segment(segment, units, known, seen)
        seen.add(segment)


def _check_segment(
    segment: tuple[str, ...], units: list[UnitPlan], known: set[str], seen: set[tuple[str, ...]]
) -> None:
    named = " and ".join(repr(name) for name in segment)
    for unit in units:
        if unit.memory != "recompute":
            raise InputError(
                f"unit {unit.name!r} is in the segment {named} and has memory {unit.memory!r}: "
                "what is recomputed together needs memory 'recompute'"
            )
        outside = next((m for m in unit.modules if not _inside(m, segment)), None)
        if outside is not None:
            raise InputError(
                f"unit {unit.name!r} is in the segment {named}, which does not contain its module "
                f"{outside!r}: name a module that does, or leave the segment out"
            )
    missing = next((m for m in segment if m not in known), None)
    if missing is not None:
        raise InputError(f"the plan is for another model: this one has no module {missing!r}")
    if segment in seen:
        raise InputError(
            f"the units of the segment {named} do not follow each other (at {units[0].name!r}): "
            "list them one after the other"
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
    regions = Regions()

    def recompute(body: Body, args: tuple[object, ...], kwargs: dict[str, object]) -> Recomputed:
        return Recomputed(body, args, kwargs, resume_later())

    host = None
    if any(unit.memory == "offload" for unit in plan.units):
        host = offloading.host_of(device)
    offload = Offload(host, current_forward) if host is not None else None
    for name, modules, memory in _bodies(plan):
        body = Body(name, [model.get_submodule(path) for path in modules])
        if memory == "recompute":
            regions.add(body, recompute)
        elif offload is not None:
            regions.add(body, offload.start)
    return regions


def _bodies(plan: Plan) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(name, modules, policy) of each region: the segments, and the other units that are not kept.
    Units without modules have nothing to do again."""
    for unit in plan.units:
        if not unit.segment and unit.memory != "keep" and unit.modules:
            yield unit.name, unit.modules, unit.memory
    for segment, units in _segments(plan):
        yield units[0].name, segment, "recompute"
