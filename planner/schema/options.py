"""What can be decided of a unit, and which decisions go together."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .capability import Capability, degrees
from .goal import OPTIMIZERS, Goal, OptimizerName
from .layout import Layout, Style, data_parallel
from .plan import (
    LOSSY,
    MIRRORS,
    SHARDING,
    ExchangePolicy,
    FeedbackPolicy,
    MemoryPolicy,
    WireFormat,
)
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
    wire: WireFormat = "exact"
    peers_per_host: int = 1
    segment: tuple[str, ...] = ()
    """As in ``UnitPlan``: its neighbours with the same modules here are recomputed with it."""

    @property
    def lossy(self) -> bool:
        """Whether part of the gradient waits for a later step."""
        return self.exchange in LOSSY

    @property
    def rounded(self) -> bool:
        """Whether gradients are rounded to travel."""
        return self.wire != "exact"

    @property
    def shards(self) -> bool:
        """Whether each rank updates its part of the parameters."""
        return self.exchange in SHARDING

    @property
    def gathers(self) -> bool:
        """Whether parameters are whole only while they are used."""
        return self.exchange == "fully_sharded"


Decisions = tuple[Option, ...]
"""One option for each unit of a profile, in its order."""


def segments_of(decisions: Sequence[Option]) -> list[tuple[int, int]]:
    """The first and the last unit of each segment that is recomputed together."""
    found, at = [], 0
    for segment, members in groupby(decisions, lambda option: option.segment):
        count = len(list(members))
        if segment:
            found.append((at, at + count - 1))
        at += count
    return found


def tied_units(profile: ModelProfile) -> tuple[tuple[int, ...], ...]:
    """For each unit the units tied to it by shared parameters, directly or through others."""
    # Each unit's group goes by its first unit; a shared parameter joins two groups into one.
    group = list(range(len(profile.units)))
    first: dict[str, int] = {}
    for k, unit in enumerate(profile.units):
        for name in {p.shared for p in unit.parameters}:
            a, b = group[first.setdefault(name, k)], group[k]
            if a != b:
                group = [min(a, b) if g in (a, b) else g for g in group]
    members: dict[int, list[int]] = {}
    for k, own in enumerate(group):
        members.setdefault(own, []).append(k)
    return tuple(tuple(members[own]) for own in group)


def allowed(
    unit: UnitProfile, option: Option, goal: Goal, capability: Capability, world_size: int
) -> bool:
    """Whether a unit may have ``option`` by itself (ties are checked by ``ties_agree``)."""
    # The model's own code between units and its ends see each rank's own samples, and local batch
    # statistics are those of a rank's samples: both keep the layout (W, 1). So does what no samples
    # enter, as what enters is nothing that could be sent elsewhere.
    layout = option.layout
    if not goal.permits(unit.name, layout, option.style):
        return False
    local = unit.batch_statistics and goal.batch_statistics == "local"
    if unit.fixed or local or not unit.batched_inputs:
        return layout == data_parallel(world_size) and option.style == "none"
    # Idle ranks make up outputs that have no samples in dimension 0.
    if unit.batch_dims and layout.size < world_size:
        return False
    return (
        layout.first + layout.size <= world_size
        and capability.allows(layout, world_size)
        and option.style in capability.styles
        and degrees(unit, option.style, layout.degree)
    )


def ties_agree(units: Sequence[UnitProfile], options: Sequence[Option]) -> bool:
    """Whether tied units share one layout and cut each shared parameter along one dimension."""
    # One parameter has one shard on a rank: uses that cut it differently would need several.
    if len({o.layout for o in options}) > 1:
        return False
    found: dict[str, set[int | None]] = {}
    for unit, option in zip(units, options, strict=True):
        for name, dim in cuts(unit, option).items():
            found.setdefault(name, set()).add(dim)
    return all(len(dims) == 1 for dims in found.values())


def cuts(unit: UnitProfile, option: Option) -> dict[str, int | None]:
    """The dimension along which ``option`` cuts each parameter of a unit, by shared name; None for
    those that it leaves whole."""
    split = unit.split(option.style) if option.layout.degree > 1 else None
    sharded: dict[str, int] = dict(split.sharded) if split else {}
    return {p.shared: sharded.get(p.shared) for p in unit.parameters}


def feedbacks(
    exchange: str,
    optimizer: OptimizerName,
    known: tuple[FeedbackPolicy, ...],
    host_bytes_per_s: float | None,
) -> tuple[FeedbackPolicy, ...]:
    """The feedback policies worth planning of those known, the one without copies first."""
    if exchange != "topk":
        return ("residual",)
    # In place never holds more than a residual, and a mirror never more than in place, in the same
    # time: of those that the executor has and the optimizer allows, one is planned. A mirror on the
    # host is a choice besides, as its copies take time.
    able = [f for f in known if f not in MIRRORS or OPTIMIZERS[optimizer].linear]
    order: tuple[FeedbackPolicy, ...] = ("mirror", "in_place", "residual")
    best: FeedbackPolicy = next((f for f in order if f in able), "residual")
    if "host_mirror" in able and host_bytes_per_s is not None:
        return best, "host_mirror"
    return (best,)
