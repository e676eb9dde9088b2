"""What can be decided of a unit, and which decisions go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .capability import Capability, degrees
from .goal import Goal
from .layout import Layout, Style, data_parallel
from .plan import LOSSY, SHARDING, ExchangePolicy, FeedbackPolicy, MemoryPolicy
from .profile import ModelProfile, UnitProfile


class Option(NamedTuple):
    """One choice for a unit."""

    layout: Layout
    style: Style = "none"
    memory: MemoryPolicy = "keep"
    exchange: ExchangePolicy = "dense"
    ratio: float = 1.0
    early_release: bool = False
    feedback: FeedbackPolicy = "residual"
    segment: tuple[str, ...] = ()
    """As in ``UnitPlan``: its neighbours with the same modules here are recomputed with it."""

    @property
    def lossy(self) -> bool:
        """Whether part of the gradient waits for a later step."""
        return self.exchange in LOSSY

    @property
    def shards(self) -> bool:
        """Whether each rank updates its chunk of the parameters."""
        return self.exchange in SHARDING

    @property
    def gathers(self) -> bool:
        """Whether parameters are whole only while they are used."""
        return self.exchange == "fully_sharded"


Decisions = tuple[Option, ...]
"""One option for each unit of a profile, in its order."""


def tied_units(profile: ModelProfile) -> tuple[tuple[int, ...], ...]:
    """For each unit the units tied to it by shared parameters, directly or through others."""
    home = list(range(len(profile.units)))
    first: dict[str, int] = {}
    for k, unit in enumerate(profile.units):
        for name in {p.shared for p in unit.parameters}:
            a, b = home[first.setdefault(name, k)], home[k]
            home = [min(a, b) if h in (a, b) else h for h in home]
    return tuple(tuple(i for i, h in enumerate(home) if h == home[k]) for k in range(len(home)))


def allowed(
    unit: UnitProfile, option: Option, goal: Goal, capability: Capability, world_size: int
) -> bool:
    """Whether a unit may have ``option`` by itself (ties are checked by ``ties_agree``)."""
    layout = option.layout
    if not goal.permits(unit.name, layout, option.style):
        return False
    if unit.fixed or (unit.batch_statistics and goal.batch_statistics == "local"):
        return layout == data_parallel(world_size) and option.style == "none"
    return (
        layout.first + layout.size <= world_size
        and capability.allows(layout, world_size)
        and option.style in capability.styles
        and degrees(unit, option.style, layout.degree)
    )


def ties_agree(units: Sequence[UnitProfile], options: Sequence[Option]) -> bool:
    """Whether tied units share one layout and cut each shared parameter along one dimension."""
    if len({o.layout for o in options}) > 1:
        return False
    cuts: dict[str, set[int | None]] = {}
    for unit, option in zip(units, options, strict=True):
        split = unit.split(option.style) if option.layout.degree > 1 else None
        sharded: dict[str, int] = dict(split.sharded) if split else {}
        for parameter in unit.parameters:
            cuts.setdefault(parameter.shared, set()).add(sharded.get(parameter.shared))
    return all(len(dims) == 1 for dims in cuts.values())
