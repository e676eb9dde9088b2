"""What a rank holds at each point of a step.

The points are each unit's forward in order, each unit's backward in reverse, and the update. Alive
are, in bytes:

    weights        shards and buffers, always; divided over the groups where the parameters are
                   sharded too (``gathering`` says what is whole while units work)
    optimizer      its state, always, divided over the groups where the exchange is sharded
    residuals      what a lossy exchange has not sent (see ``feedback``), always
    gradients      of weights, from a unit's backward to the end of the step; with micro-batches
                   always, since the last micro-batch adds to those of the others
    feature_maps   what units behind have made and backward needs, until their own backward is over:
                   all of it (keep), their output (recompute), nothing (offload)
    map_gradients  gradients of feature maps and what else the unit at work needs in backward; with
                   early release, and with feedback in place or in mirrors, its weight gradients
                   too, which are gone when it has finished
    buffers        in flight: what a redistribution receives, the part of open buckets that is not
                   filled yet, a new gradient until it is copied into its bucket or added, and
                   copies of gradients that travel
    workspace      temporaries of the unit at work, of its update, and those of its feature maps
                   that are only there meanwhile (recompute, offload)

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
import numpy.typing as npt

from .cost import CostModel
from .feedback import averaged_bytes, held_bytes
from .gathering import gathered
from .layout import Layout
from .options import Option
from .ownership import group_bounds
from .peak import CLASS_NAMES, Moment, Phase
from .shares import Quantity, shard_bytes, share_of
from .step import Vector
from .travelling import copied_bytes, travelling_bytes


class MemoryPoint(NamedTuple):
    """Bytes alive at one point, by class; ``unit`` is the index of the unit at work."""

    unit: int
    phase: Phase
    weights: float = 0.0
    optimizer: float = 0.0
    residuals: float = 0.0
    gradients: float = 0.0
    feature_maps: float = 0.0
    map_gradients: float = 0.0
    buffers: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All bytes alive."""
        return sum(self[2:])


def moment_of(point: MemoryPoint, names: Sequence[str]) -> Moment:
    """The point with its unit's name, in whole bytes."""
    held = {name: round(max(float(getattr(point, name)), 0.0)) for name in CLASS_NAMES}
    return Moment(unit=names[point.unit], phase=point.phase, **held)


class Holding(NamedTuple):
    """What the units of one position hold, one value for each unit, in bytes: the fields of
    ``UnitBytes``, and ``received``, the largest tensor that a redistribution brings.

    ``buckets_bytes`` is the most that buckets being filled may take together; gradients are views
    of these. ``sliced`` gradients have none, and are applied as the next forward needs them;
    ``together`` says that the update's temporaries are those of all units at once.
    """

    weights: Vector
    optimizer: Vector
    residual: Vector
    gradients: Vector
    travelling: Vector
    saved: Vector
    map_gradients: Vector
    fresh: Vector
    spared: Vector
    workspace: Vector
    exchanged: Vector
    renewed: Vector
    received: Vector
    buckets_bytes: float
    sliced: bool
    together: bool


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


Table = npt.NDArray[np.float64]

UPDATE_COPIES = {"sgd": (0, 0), "momentum": (0, 0), "adam": (2, 1), "adamw": (2, 1)}
"""How many copies of what it updates a step of torch's own optimizer makes (2.13): of one parameter
at a time on a CPU, of all parameters together (``foreach``) on CUDA."""

_QUANTITIES: tuple[Quantity, ...] = (
    lambda s: s.saved,
    lambda s: s.gradient,
    lambda s: s.workspace,
    lambda s: s.fresh,
    lambda s: s.spared,
)


class UnitBytes(NamedTuple):
    """What one unit holds on a position, in bytes.

    ``residual`` is what a lossy exchange has not sent, ``travelling`` the copies of gradients that
    live until their exchange has been waited for, ``map_gradients`` those of feature maps while the
    unit's backward is at work, ``fresh`` new gradients that are not kept as they are,
    ``spared`` what of its gradients and feature maps is never there together,
    ``exchanged`` the part of gradients that travels in buckets, and ``renewed`` the temporaries of
    its parameters' update.
    """

    weights: float = 0.0
    optimizer: float = 0.0
    residual: float = 0.0
    gradients: float = 0.0
    travelling: float = 0.0
    saved: float = 0.0
    map_gradients: float = 0.0
    fresh: float = 0.0
    spared: float = 0.0
    workspace: float = 0.0
    exchanged: float = 0.0
    renewed: float = 0.0

    @property
    def figures(self) -> tuple[float, ...]:
        """The same as ``rows`` has them: standing, gradients, saved, maps, workspace, exchanged,
        fresh, spared, renewed."""
        return (
            self.weights + self.optimizer + self.residual,
            self.gradients + self.travelling,
            self.saved,
            self.map_gradients,
            self.workspace,
            self.exchanged,
            self.fresh,
            self.spared,
            self.renewed,
        )

    def released(self) -> UnitBytes:
        """With gradients that are gone when the unit's backward has finished."""
        own = self.gradients + self.travelling
        return self._replace(
            map_gradients=self.map_gradients + own, gradients=0.0, travelling=0.0, exchanged=0.0
        )


class MemoryModel:
    """What the units of a cost model hold, remembered by unit, option and samples."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._units: dict[tuple[int, Option, int | None], UnitBytes] = {}

    def unit(self, k: int, option: Option, samples: int | None) -> UnitBytes:
        """What unit ``k`` holds on a position whose group has ``samples``, or which takes no part
        (None)."""
        if samples is None:
            return UnitBytes()
        key = (k, option, samples)
        if key not in self._units:
            self._units[key] = self._unit(k, option, samples)
        return self._units[key]

    def _unit(self, k: int, option: Option, samples: int) -> UnitBytes:
        unit, cost = self.model.profile.units[k], self.model.unit(k, option)
        degree, style = option.layout.degree, option.style
        saved, maps, workspace, fresh, spared = (
            share_of(unit, style, degree, q, samples, divides=False) for q in _QUANTITIES
        )
        resident = self._resident(k, option, samples, saved)
        entered = self.gathered_bytes(k, option, samples)
        if option.memory == "offload":
            saved += entered
        else:
            saved, resident = saved + entered, resident + entered
        largest, trained = self._largest_bytes(k, option), cost.trained_bytes
        held = held_bytes(option.exchange, option.feedback, trained, largest)
        part = gathered(self.model, k, option)
        found = UnitBytes(
            weights=cost.shard_bytes + unit.state_bytes - part.saved,
            optimizer=self._state_bytes(option, trained),
            residual=held.always,
            gradients=held.gradients - (part.saved if self.model.micro_batches == 1 else 0),
            travelling=travelling_bytes(self.model, k, option),
            saved=resident,
            map_gradients=maps + held.moment + part.behind,
            fresh=self._fresh_bytes(option, fresh or largest) + copied_bytes(self.model, k, option),
            spared=spared,
            workspace=workspace + saved - resident + part.at_work,
            exchanged=cost.gradient_bytes,
            renewed=self._renewed_bytes(option, trained, largest),
        )
        return found.released() if option.early_release else found

    def gathered_bytes(self, k: int, option: Option, samples: int | None) -> float:
        """The input of a divided unit, which its members have put together (or a slice of it) and
        keep for backward. More than there is where it comes in that form already."""
        if option.layout.degree == 1 or samples is None:
            return 0.0
        edges = (self.model.profile.edges[e] for e in self.model.edges_into[k])
        whole = sum(edge.bytes_per_sample for edge in edges) * samples
        return whole / (option.layout.degree if option.style == "row" else 1)

    def _largest_bytes(self, k: int, option: Option) -> int:
        """A member's shard of the unit's largest parameter that has a gradient."""
        unit, trained = self.model.profile.units[k], (p for p in self.model.owned[k] if p.trainable)
        degree = option.layout.degree
        return max((shard_bytes(unit, option.style, degree, (p,)) for p in trained), default=0)

    def _fresh_bytes(self, option: Option, fresh_bytes: float) -> float:
        """New gradients that do not stand: one that is added to others or copied into a bucket
        (slices are cut from gradients where they lie)."""
        sent = option.layout.groups > 1 and not self.model.sliced
        return fresh_bytes if sent or self.model.micro_batches > 1 else 0.0

    def _renewed_bytes(self, option: Option, trained_bytes: int, largest_bytes: int) -> float:
        """Temporaries of the update: for one parameter after the other on a CPU, on CUDA for all of
        them at once."""
        one, together = UPDATE_COPIES[self.model.goal.optimizer]
        on_cuda = self.model.profile.device_type == "cuda"
        if option.exchange == "sharded":
            return 0.0  # its gradient and the copies that travelled have gone by then
        parts = option.layout.groups if option.gathers else 1
        copies = float(together * trained_bytes if on_cuda else one * largest_bytes) / parts
        return copies + averaged_bytes(option.exchange, option.feedback, trained_bytes)

    @property
    def updates_together(self) -> bool:
        """Whether the update's temporaries are those of all units at once."""
        return self.model.profile.device_type == "cuda" and not self.model.sliced

    def _state_bytes(self, option: Option, trained_bytes: int) -> float:
        """Optimizer state of a member's shard."""
        state = trained_bytes * self.model.goal.state_copies
        return ceil(state / option.layout.groups) if option.shards else state

    def _resident(self, k: int, option: Option, samples: int, saved: float) -> float:
        """Bytes of feature maps that stay from forward to backward."""
        if option.memory == "keep":
            return saved
        if option.memory == "offload":
            return 0.0
        # A feature map counts to the unit that made it. What the next unit needs to run again, or
        # has saved itself, is this unit's output.
        whole = self.model.output_bytes_per_sample(k)[0] * samples
        split = option.layout.degree if option.style == "column" else 1
        return min(whole / split, saved)

    def held(self, decisions: Sequence[Option], samples: dict[Layout, int | None]) -> Holding:
        """What a position of a class holds."""
        rows = [self.unit(k, o, samples[o.layout]) for k, o in enumerate(decisions)]
        table = np.array(rows, dtype=np.float64).T
        received = np.array(
            [self.received(k, decisions, samples[o.layout]) for k, o in enumerate(decisions)]
        )
        return self.holding(table, received, decisions)

    def holding(self, table: Table, received: Vector, decisions: Sequence[Option]) -> Holding:
        """The ``table`` [field of ``UnitBytes``, unit] with what concerns all units."""
        together = self.updates_together
        buckets = self.buckets_bytes(decisions)
        return Holding._make([*table, received, buckets, self.model.sliced, together])

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


class _Alive(NamedTuple):
    """By unit what lives as its backward is reached: feature maps (forward has them too), weight
    gradients, copies of them that travel, and open buckets' unfilled parts; ``before`` are the
    gradients that are there in forward, ``renewing`` what lives while the unit is updated."""

    maps: Vector
    gradients: Vector
    travelling: Vector
    unfilled: Vector
    before: float
    renewing: Vector


def _alive(held: Holding, micro_batches: int) -> _Alive:
    maps = held.saved.cumsum()
    to_come = held.exchanged.cumsum() - held.exchanged
    unfilled = np.minimum(to_come, held.buckets_bytes)
    every = float(held.gradients.sum() + held.travelling.sum())
    if micro_batches > 1:
        gradients = np.full_like(maps, held.gradients.sum())
        travelling, before = np.full_like(maps, held.travelling.sum()), every
    else:
        gradients, travelling = _from(held.gradients), _from(held.travelling)
        before = 0.0
    if held.sliced:  # in the next forward, before the unit's own feature maps
        renewing = maps - held.saved + _from(held.gradients + held.travelling) + held.renewed
    else:
        temporaries = np.full_like(maps, held.renewed.sum()) if held.together else held.renewed
        renewing = every + temporaries
    return _Alive(maps, gradients, travelling, unfilled, before, renewing)


def _from(values: Vector) -> Vector:
    """For each unit the sum of its own and later units' values."""
    found: Vector = values[::-1].cumsum()[::-1]
    return found


def timeline(held: Holding, micro_batches: int) -> list[MemoryPoint]:
    """What a position holds at each point of a step's last micro-batch, and at the update."""
    alive = _alive(held, micro_batches)
    units = range(len(held.saved))
    points = [_forward(held, alive, k, micro_batches) for k in units]
    points += [_backward(held, alive, k) for k in reversed(units)]
    return [*points, _update(held, alive)]


def _point(held: Holding, unit: int, phase: Phase, **bytes_: float) -> MemoryPoint:
    standing = (float(v.sum()) for v in (held.weights, held.optimizer, held.residual))
    return MemoryPoint(unit, phase, *standing, **{k: float(v) for k, v in bytes_.items()})


def _forward(held: Holding, alive: _Alive, k: int, micro_batches: int) -> MemoryPoint:
    many = micro_batches > 1
    return _point(
        held, k, "forward",
        gradients=held.gradients.sum() if many else 0.0,
        feature_maps=alive.maps[k],
        buffers=held.received[k] + (held.travelling.sum() if many else 0.0),
        workspace=held.workspace[k],
    )  # fmt: skip


def _backward(held: Holding, alive: _Alive, k: int) -> MemoryPoint:
    buffers = alive.unfilled[k] + alive.travelling[k] + held.fresh[k] + held.received[k]
    spared = min(held.spared[k], held.saved[k])
    return _point(
        held, k, "backward",
        gradients=alive.gradients[k] - (held.spared[k] - spared),
        feature_maps=alive.maps[k] - spared,
        map_gradients=held.map_gradients[k],
        buffers=buffers,
        workspace=held.workspace[k],
    )  # fmt: skip


def _update(held: Holding, alive: _Alive) -> MemoryPoint:
    """The update that takes most."""
    k = int(alive.renewing.argmax())
    later = slice(k, None) if held.sliced else slice(None)
    every = held.together or slice(k, k + 1)
    return _point(
        held, k, "update",
        gradients=held.gradients[later].sum(),
        feature_maps=held.saved[:k].sum() if held.sliced else 0.0,
        buffers=held.travelling[later].sum(),
        workspace=held.renewed[every].sum(),
    )  # fmt: skip


def peak_bytes(held: Holding, micro_batches: int) -> tuple[float, int]:
    """(the largest total of the timeline, the unit at work there), without making the table."""
    alive = _alive(held, micro_batches)
    always = held.weights.sum() + held.optimizer.sum() + held.residual.sum()
    work = alive.maps + held.workspace + held.received
    forward = alive.before + work
    backward = (
        alive.gradients + alive.travelling + work + held.map_gradients + held.fresh
        - held.spared + alive.unfilled
    )  # fmt: skip
    most = np.maximum(np.maximum(forward, backward), alive.renewing)
    k = int(most.argmax())
    return float(always + most[k]), k
