"""Plans made by hand: layouts that a test chooses, for the units of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from meshwright.executor.redistribution.shards import aliases
from meshwright.models.spec import SplitSpec, UnitSpec
from meshwright.models.units.discover import Discovery
from meshwright.planner.schema.goal import BatchStatistics, Goal
from meshwright.planner.schema.layout import Layout, Style
from meshwright.planner.schema.plan import Plan, Provenance, ScheduleName, UnitPlan
from meshwright.profiler.overhead import UNPREDICTED
from torch import nn

SCHEDULES: tuple[ScheduleName, ...] = ("barrier", "priority")

_schedules: list[ScheduleName] = ["barrier"]


@contextmanager
def scheduled(name: ScheduleName) -> Iterator[None]:
    """Plans made inside exchange gradients by that schedule."""
    _schedules.append(name)
    try:
        yield
    finally:
        _schedules.pop()


def unit(
    modules: str | Sequence[str],
    degree: int,
    style: Style,
    world_size: int,
    batched_inputs: tuple[int, ...] = (0,),
) -> UnitPlan:
    """A unit of ``modules`` at that degree; all other ranks form more groups of the same kind."""
    names = (modules,) if isinstance(modules, str) else tuple(modules)
    return UnitPlan(
        name=names[0],
        kind="other",
        modules=names,
        batched_inputs=batched_inputs,
        layout=Layout(groups=world_size // degree, degree=degree),
        style=style,
    )


def plan(
    world_size: int,
    units: Sequence[UnitPlan] = (),
    *,
    placement: Sequence[int] | None = None,
    statistics: BatchStatistics = "global",
    message_bytes: int = 2**20,
    micro_batches: int = 1,
) -> Plan:
    """A plan of those units; without any it is plain data parallelism."""
    return Plan(
        target="test",
        model="test",
        world_size=world_size,
        goal=Goal(batch=8, batch_statistics=statistics),
        placement=tuple(placement or range(world_size)),
        message_bytes=message_bytes,
        micro_batches=micro_batches,
        schedule=_schedules[-1],
        units=tuple(units),
        prediction=UNPREDICTED,
        baseline=UNPREDICTED,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )


Choice = tuple[int, Style]
"""A unit's degree and style."""


def plan_for(
    found: Discovery,
    world_size: int,
    choose: Callable[[UnitSpec], Choice] = lambda unit: (1, "none"),
    **options: Any,
) -> Plan:
    """A plan of a model's discovered units; undivided but where ``choose`` says otherwise, and
    only as far as a unit can be."""
    units = []
    for spec in found.units:
        degree, style = choose(spec)
        split = spec.split(style)
        fits = split is not None and degree <= split.parts
        if degree == 1 or not fits or (not split.uneven and split.parts % degree):
            degree, style = 1, "none"
        units.append(
            UnitPlan(
                name=spec.name,
                kind=spec.kind,
                modules=spec.modules,
                batched_inputs=spec.batched_inputs,
                batch_dims=spec.batch_dims,
                layout=Layout(groups=world_size // degree, degree=degree),
                style=style,
            )
        )
    return plan(world_size, units, **options)


def by_columns_and_rows(
    model: nn.Module, degree: int, kinds: Sequence[str]
) -> Callable[[UnitSpec], Choice]:
    """Divides units of those kinds: blocks as pairs, others by columns and rows in turn; units that
    share a parameter cut it alike."""
    turn = iter(range(10**6))
    identity = {name: ids for ids, names in aliases(model).items() for name in names}
    cut: dict[int, tuple[int, int]] = {}

    def fits(split: SplitSpec) -> bool:
        ways = [(identity[c.name], (c.dim, c.blocks)) for c in split.cuts]
        return all(cut.get(ids, way) == way for ids, way in ways)

    def choose(unit: UnitSpec) -> Choice:
        if unit.kind not in kinds:
            return 1, "none"
        odd = next(turn) % 2
        styles: list[Style] = ["pair", "row", "column"] if odd else ["pair", "column", "row"]
        if unit.kind == "embedding" and odd:
            styles = ["column", "pair"]
        for style in styles:
            split = unit.split(style)
            if split is not None and fits(split):
                cut.update({identity[c.name]: (c.dim, c.blocks) for c in split.cuts})
                return degree, style
        return 1, "none"

    return choose
