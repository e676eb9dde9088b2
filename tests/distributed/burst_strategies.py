"""Random plans whose units take a part of the ranks, for hypothesis to draw and to make small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from burst_models import MODELS, build
from burst_trials import Counts, Trial
from hypothesis import strategies as st
from meshwright.models.spec import UnitSpec
from meshwright.planner.schema.layout import Layout, Style
from meshwright.planner.schema.plan import ExchangePolicy, Plan, UnitPlan
from plans import SCHEDULES, plan, scheduled

STEPS = 2
EXCHANGES: tuple[tuple[ExchangePolicy, ...], ...] = (
    ("dense",),
    ("dense", "sharded"),
    ("fully_sharded", "sharded", "dense"),
)
"""What units of one plan choose from, where gradients leave in slices. Nothing is lost by any."""


@st.composite
def trials(draw: Any, world: int) -> Trial:
    """Any plan of ``world`` ranks that keeps what it sends, and any training under it."""
    name = draw(st.sampled_from(sorted(MODELS)))
    dtype = draw(st.sampled_from(["float64", "float64", "float32"]))
    made = draw(_plans(name, world))
    optimizer = draw(st.sampled_from(["sgd", "adamw"]))
    no_sync, clip = draw(st.booleans()), draw(st.sampled_from(["norm", "none", "largest", "value"]))
    if any(unit.early_release for unit in made.units):
        # Whose gradients are gone after the backward that exchanges: nobody may clip them, add to
        # them, or (as is done with AdamW in float32) look at them.
        no_sync, clip, dtype = True, "none", "float64"
    return Trial(
        model=name,
        plan=made,
        steps=tuple(draw(_backwards(world)) for _ in range(STEPS)),
        dtype=dtype,
        optimizer=optimizer,
        no_sync=no_sync,
        clip=clip,
        decays=draw(st.booleans()),
        evaluates=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def _backwards(world: int) -> st.SearchStrategy[tuple[Counts, ...]]:
    """The counts of a step's backwards: of one, or of two that add up."""
    one = _counts(world)
    return st.one_of(st.tuples(one), st.tuples(one), st.tuples(one, one))


@st.composite
def _counts(draw: Any, world: int) -> Counts:
    """Samples of each position: even, or any, none included."""
    if draw(st.booleans()):
        return (2,) * world
    counts = [draw(st.integers(0, 4)) for _ in range(world)]
    counts[draw(st.integers(0, world - 1))] += 2  # a batch of nothing trains nothing
    return tuple(counts)


@st.composite
def _plans(draw: Any, name: str, world: int) -> Plan:
    _, found = build(name, "float64")
    schedule = draw(st.sampled_from(SCHEDULES))
    exchanges = draw(st.sampled_from(EXCHANGES)) if schedule == "priority" else EXCHANGES[0]
    releases = schedule == "priority" and draw(st.sampled_from([False, False, False, True]))
    # Of what waits in backward there is more where units have all ranks.
    wide = releases or "fully_sharded" in exchanges
    units = {u.name: draw(_units(u, world, exchanges, releases, wide)) for u in found.units}
    if name == "tokens":  # the tied ones live together, whole
        layout = draw(_layouts(world, (1,)))
        for tied in [u for u in found.units if {"embed", "scores"} & set(u.modules)]:
            units[tied.name] = _suited(units[tied.name], layout, "none", world)
    with scheduled(schedule):
        return plan(
            world,
            list(units.values()),
            placement=draw(st.permutations(range(world))),
            message_bytes=draw(st.sampled_from([4096, 256, 64])),
            micro_batches=draw(st.sampled_from([1, 1, 2, 3])),
        )


@st.composite
def _layouts(draw: Any, world: int, degrees: tuple[int, ...] = (1, 1, 2)) -> Layout:
    degree = draw(st.sampled_from(degrees))
    groups = draw(st.integers(1, world // degree))
    first = draw(st.integers(0, world - groups * degree))
    return Layout(groups=groups, degree=degree, first=first)


@st.composite
def _units(
    draw: Any,
    unit: UnitSpec,
    world: int,
    exchanges: Sequence[ExchangePolicy],
    releases: bool,
    wide: bool,
) -> UnitPlan:
    decided = UnitPlan(
        name=unit.name,
        kind=unit.kind,
        modules=unit.modules,
        batched_inputs=unit.batched_inputs,
        batch_dims=unit.batch_dims,
        layout=Layout(groups=world),
    )
    if not unit.modules or unit.batch_dims:  # ranks are left idle only where samples are in front
        return decided
    layout, style = Layout(groups=world), "none"
    if not (wide and draw(st.booleans())):
        layout = draw(_layouts(world))
    if layout.degree > 1:
        styles = _fitting(unit, layout.degree)
        style = draw(st.sampled_from(styles)) if styles else "none"
        if not styles:
            layout = Layout(groups=layout.size, first=layout.first)
    exchange = draw(st.sampled_from(exchanges))
    decided = msgspec.structs.replace(
        decided,
        memory=draw(st.sampled_from(["keep", "keep", "recompute"])),
        exchange=exchange,
        early_release=releases and exchange == "dense" and draw(st.booleans()),
    )
    return _suited(decided, layout, style, world)


def _fitting(unit: UnitSpec, degree: int) -> list[Style]:
    splits = [s for s in unit.splits if s.parts >= degree]
    return [s.style for s in splits if s.uneven or s.parts % degree == 0]


def _suited(unit: UnitPlan, layout: Layout, style: Style, world: int) -> UnitPlan:
    """The unit in that layout; where it leaves ranks idle, without what the executor refuses."""
    narrow = layout.size < world
    exchange = "sharded" if narrow and unit.exchange == "fully_sharded" else unit.exchange
    return msgspec.structs.replace(
        unit,
        layout=layout,
        style=style,
        exchange=exchange,
        early_release=unit.early_release and not narrow,
    )
