"""What a rank holds at each point of a step.

The points are each unit's forward in order, each unit's backward in reverse, and the update. Alive
are, in bytes:

    weights        shards and buffers, always; divided over the groups where the parameters are
                   sharded too (``gathering`` says what is whole while units work)
    optimizer      its state, always, divided over the groups where the exchange is sharded; and
                   what a lossy exchange has not sent (see ``feedback``)
    gradients      from a unit's backward to the end of the step (the barrier); with micro-batches
                   always, since the last micro-batch adds to those of the others
    feature_maps   what units behind have saved for backward, until their own backward is over: all
                   of it (keep), their input (recompute), nothing (offload)
    map_gradients  gradients of feature maps inside the unit at work; with early release, and with
                   feedback in place or in mirrors, its weight gradients too, which are gone when it
                   has finished
    workspace      temporaries of the unit at work, and those of its feature maps that are only
                   there meanwhile (recompute, offload)
    buffers        what a redistribution receives, the part of open buckets that is not filled
                   yet (slices need none), and a new gradient until it is copied into its bucket
                   or slices, or added

How long a gradient lives depends on the wire, so it counts to the end of the step, and under
priority to its unit's next forward, whatever its exchange. The figures are additive: a unit's
choice adds bytes to each point, and a plan holds their sum (open buckets aside).
What the framework itself takes (allocator slack, a CUDA context) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .feedback import held_bytes
from .gathering import gathered
from .layout import Layout
from .options import Option
from .ownership import group_bounds
from .shares import Quantity, share_of
from .step import Vector


class MemoryPoint(NamedTuple):
    """Bytes alive at one point, by class; ``unit`` is the index of the unit at work."""

    unit: int
    phase: str
    weights: float
    optimizer: float
    gradients: float
    feature_maps: float
    map_gradients: float
    workspace: float
    buffers: float

    @property
    def total(self) -> float:
        """All bytes alive."""
        return sum(self[2:])


class Holding(NamedTuple):
    """What the units of one position hold, one value for each unit, in bytes.

    ``exchanged`` is the part of gradients that travels, in buckets: gradients are views of these.
    ``buckets_bytes`` is the most that buckets being filled may take together.
    """

    weights: Vector
    optimizer: Vector
    gradients: Vector
    saved: Vector
    map_gradients: Vector
    workspace: Vector
    received: Vector
    exchanged: Vector
    buckets_bytes: float


class PositionClass(NamedTuple):
    """Positions that hold the same; ``samples`` of their group under each layout in use."""

    positions: tuple[int, ...]
    samples: dict[Layout, int | None]


def group_samples(counts: tuple[int, ...], layout: Layout) -> list[int | None]:
    """For each position the samples of its group, None where it takes no part."""
    bounds = group_bounds(counts, layout)
    found: list[int | None] = [None] * len(counts)
    for g in range(layout.groups):
        for position in layout.group(g):
            found[position] = bounds[g + 1] - bounds[g]
    return found


def position_classes(counts: tuple[int, ...], layouts: Sequence[Layout]) -> list[PositionClass]:
    """The positions, those together that take equal parts in all of the layouts."""
    different = list(dict.fromkeys(layouts))
    columns = [group_samples(counts, layout) for layout in different]
    classes: dict[tuple[int | None, ...], list[int]] = {}
    for position, key in enumerate(zip(*columns, strict=True)):
        classes.setdefault(key, []).append(position)
    return [
        PositionClass(tuple(positions), dict(zip(different, key, strict=True)))
        for key, positions in classes.items()
    ]


_QUANTITIES: tuple[Quantity, ...] = (
    lambda s: s.saved,
    lambda s: s.gradient,
    lambda s: s.workspace,
)


class MemoryModel:
    """What the units of a cost model hold, remembered by unit, option and samples."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._units: dict[tuple[int, Option, int | None], tuple[float, ...]] = {}

    def unit(self, k: int, option: Option, samples: int | None) -> tuple[float, ...]:
        """(weights, optimizer, gradients, saved, map gradients, workspace, exchanged gradients) of
        unit ``k`` on a position whose group has ``samples``, or which takes no part (None)."""
        if samples is None:
            return (0.0,) * 7
        key = (k, option, samples)
        if key not in self._units:
            self._units[key] = self._unit(k, option, samples)
        return self._units[key]

    def _unit(self, k: int, option: Option, samples: int) -> tuple[float, ...]:
        unit, cost = self.model.profile.units[k], self.model.unit(k, option)
        degree, style = option.layout.degree, option.style
        saved, maps, workspace = (
            share_of(unit, style, degree, q, samples, divides=False) for q in _QUANTITIES
        )
        resident = self._resident(k, option, samples, saved)
        held = held_bytes(option.exchange, option.feedback, cost.trained_bytes)
        gradient, exchanged, maps = held.gradients, cost.gradient_bytes, maps + held.moment
        if option.early_release:
            maps, gradient, exchanged = maps + gradient + exchanged, 0, 0
        state = self._state_bytes(option, cost.trained_bytes) + held.always
        part = gathered(self.model, k, option)
        weights = cost.shard_bytes + unit.state_bytes - part.saved
        maps, workspace = maps + part.behind, workspace + part.at_work
        gradient -= part.saved if self.model.micro_batches == 1 else 0
        return weights, state, gradient, resident, maps, workspace + saved - resident, exchanged

    def _state_bytes(self, option: Option, trained_bytes: int) -> float:
        """Optimizer state of a member's shard."""
        state = trained_bytes * self.model.goal.state_copies
        if option.shards:
            state = ceil(state / option.layout.groups)
        return state

    def _resident(self, k: int, option: Option, samples: int, saved: float) -> float:
        """Bytes of feature maps that stay from forward to backward."""
        if option.memory == "keep":
            return saved
        if option.memory == "offload":
            return 0.0
        edges = (self.model.profile.edges[e] for e in self.model.edges_into[k])
        whole = sum(e.bytes_per_sample for e in edges) * samples
        split = 1 if option.style in ("column", "pair") else option.layout.degree
        return min(whole / split, saved)

    def held(self, decisions: Sequence[Option], samples: dict[Layout, int | None]) -> Holding:
        """What a position of a class holds."""
        rows = [self.unit(k, o, samples[o.layout]) for k, o in enumerate(decisions)]
        table = np.array(rows, dtype=np.float64).T
        received = np.array(
            [self.received(k, decisions, samples[o.layout]) for k, o in enumerate(decisions)]
        )
        weights, optimizer, gradients, saved, maps, workspace, exchanged = table
        return Holding(
            weights,
            optimizer,
            gradients,
            saved,
            maps,
            workspace,
            received,
            exchanged,
            self.buckets_bytes(decisions),
        )

    def received(self, k: int, decisions: Sequence[Option], samples: int | None) -> float:
        """Bytes of the largest tensor that unit ``k`` receives from a redistribution."""
        if samples is None:
            return 0.0
        model = self.model
        costs = (model.edge(e, decisions[model.ends[e][0]], decisions[k])
                 for e in model.edges_into[k])  # fmt: skip
        return max((c.received_bytes for c in costs), default=0.0)

    def buckets_bytes(self, decisions: Sequence[Option]) -> float:
        """The most that open buckets take: one for each layout that exchanges gradients; none where
        gradients travel in slices."""
        if self.model.sliced:
            return 0.0
        kinds = len({o.layout for o in decisions if o.layout.groups > 1})
        return float(kinds * self.model.bucket_bytes)


def _alive(held: Holding, micro_batches: int) -> tuple[Vector, Vector, Vector]:
    """(feature maps, gradients, buffers) as backward reaches each unit; forward has those maps."""
    saved = held.saved.cumsum()
    to_come = held.exchanged.cumsum() - held.exchanged
    unfilled = np.minimum(to_come, held.buckets_bytes)
    if micro_batches > 1:
        gradients, fresh = np.full_like(saved, held.gradients.sum()), held.gradients
    else:
        gradients, fresh = held.gradients[::-1].cumsum()[::-1], held.exchanged
    return saved, gradients, unfilled + fresh + held.received


def timeline(held: Holding, micro_batches: int) -> list[MemoryPoint]:
    """What a position holds at each point of a step's last micro-batch, and at the update."""
    weights, optimizer = float(held.weights.sum()), float(held.optimizer.sum())
    maps, gradients, buffers = _alive(held, micro_batches)
    every = float(held.gradients.sum())
    before = every if micro_batches > 1 else 0.0
    units = range(len(held.saved))
    points = [
        MemoryPoint(k, "forward", weights, optimizer, before, float(maps[k]), 0.0,
                    float(held.workspace[k]), float(held.received[k]))
        for k in units
    ]  # fmt: skip
    points += [
        MemoryPoint(k, "backward", weights, optimizer, float(gradients[k]), float(maps[k]),
                    float(held.map_gradients[k]), float(held.workspace[k]), float(buffers[k]))
        for k in reversed(units)
    ]  # fmt: skip
    end = MemoryPoint(units[-1], "update", weights, optimizer, every, 0.0, 0.0, 0.0, 0.0)
    return [*points, end]


def peak_bytes(held: Holding, micro_batches: int) -> tuple[float, int]:
    """(the largest total of the timeline, the unit at work there), without making the table."""
    maps, gradients, buffers = _alive(held, micro_batches)
    always = held.weights.sum() + held.optimizer.sum()
    every = held.gradients.sum()
    before = every if micro_batches > 1 else 0.0
    forward = before + maps + held.workspace + held.received
    backward = gradients + maps + held.map_gradients + held.workspace + buffers
    both = np.maximum(forward, backward)
    k = int(both.argmax())
    return float(always + max(both[k], every)), k
