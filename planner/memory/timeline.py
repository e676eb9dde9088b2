"""What a rank holds at each point of a step (LaySA's memory timeline).

``points`` is the one statement of it: ``timeline`` and ``fullest_bytes`` evaluate it for a plan,
and ``rows`` turns it into rows that are linear in the units' decisions, for the solvers.
"""

# [Note: The memory timeline]
#
# A step has five families of points, each with one point for every unit j of the model:
#
#     forward     unit j runs its forward
#     backward    unit j runs its backward
#     update      the optimizer updates unit j
#     exchange    the weight gradients of unit j leave, at the end of its backward: its own feature
#                 maps have gone, copies of the gradients may have come
#     rerun       the segment that ends with unit j runs its forward again, before j's backward
#
# Units hold bytes by their decision (``UnitBytes``), and a point counts some fields of the units
# before j, some of unit j itself and some of the units after it. That is all that ``points`` says.
# A field counts in the same way at every point where it counts, so each point is a sum over units:
# evaluated it is a number, and handed to a solver it is a linear row.
#
# What lives when, by the classes that people see (``FIELDS_OF`` lists the fields of each):
#
#     weights        always: shards and buffers. Where parameters are sharded too (fully_sharded)
#                    each rank's chunk; what is whole while units work is workspace
#     optimizer      always: its state, divided over the groups where the exchange is sharded
#     residuals      always: what a lossy exchange has not sent (see ``gradient_buffers``)
#     gradients      of weights, from a unit's backward to the end of the step; by priority to its
#                    own update, which comes in the next forward; with micro-batches always, as the
#                    last micro-batch adds to those of the others
#     feature_maps   from a unit's forward to the end of its backward: all of them (keep), only its
#                    output (recompute), none (offload)
#     map_gradients  while a unit's backward runs. With early release, and with feedback in place or
#                    in mirrors, its weight gradients are among these, as they go when it ends
#     buffers        what a redistribution receives, or has as a gradient comes back; the part of
#                    open buckets that is not filled yet; a new gradient until it is copied into its
#                    bucket or added to another; and copies of gradients until their exchange has
#                    been waited for
#     workspace      temporaries of the unit at work, of its update, its feature maps that are there
#                    only meanwhile (recompute, offload), and what other units hold there while it
#                    works (``prefetch_overlap``, ``checkpoint_segments``)
#
# How long a gradient lives depends on the network, which cannot be planned to the byte. So it
# counts to the latest moment: the end of the step, or under priority its unit's next forward.
# What the framework itself takes is not counted: of a GPU a reserve is taken off for it, and what
# its allocator rounds up to is predicted besides (``reserved``).
#
# Two quantities are not linear, and rows do not know them. The unfilled part of open buckets is the
# smaller of two sums (the integer program adds a binary). The bytes of segments follow from several
# units at once; segments are chosen after the search.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.step_time import Vector
from ..schema.plan import CLASS_NAMES, Moment, Phase

Table = npt.NDArray[np.float64]
Fields = tuple[str, ...]


class Persistent(NamedTuple):
    """Bytes of one unit that are there at every point of a step. ``residual`` is what a lossy
    exchange has not sent."""

    weights: float = 0.0
    optimizer: float = 0.0
    residual: float = 0.0


class PerPhase(NamedTuple):
    """Bytes of one unit that are there at some points of a step.

    gradients          of its weights, as far as they stay after its backward
    comm_buffers       copies of gradients that live until their exchange has been waited for
    saved              feature maps that stay from forward to backward
    map_gradients      gradients of feature maps while its backward is at work
    new_grad           new weight gradients that are not kept as they are
    never_together     what of its gradients and feature maps is never there at the same time
    workspace          temporaries, and feature maps that are there only while it works
    bucketed           the part of its gradients that travels in buckets
    exchange_temp      what there is besides as its gradients leave: copies, what top-k's choice
                       takes, gradients of feature maps
    update_temp        temporaries of its parameters' update
    recomputed         feature maps that are made again in backward
    segment_input      of a unit in a segment: what enters it and no other unit saves
    output_gradients   of a unit in a segment: gradients of feature maps that are there as its
                       backward begins
    """

    gradients: float = 0.0
    comm_buffers: float = 0.0
    saved: float = 0.0
    map_gradients: float = 0.0
    new_grad: float = 0.0
    never_together: float = 0.0
    workspace: float = 0.0
    bucketed: float = 0.0
    exchange_temp: float = 0.0
    update_temp: float = 0.0
    recomputed: float = 0.0
    segment_input: float = 0.0
    output_gradients: float = 0.0


class Neighbours(NamedTuple):
    """Bytes of one unit that are there while other units work (see ``prefetch_overlap``):
    parameters that are whole only while they are used, their gradients on their way, feature maps
    on their way to the host or back, and the unit's output among these."""

    unsharded: float = 0.0
    gradients_sent: float = 0.0
    offloaded: float = 0.0
    offloaded_output: float = 0.0


class UnitBytes(NamedTuple):
    """What one unit holds on a position, in bytes."""

    persistent: Persistent = Persistent()
    phases: PerPhase = PerPhase()
    neighbours: Neighbours = Neighbours()

    @property
    def column(self) -> tuple[float, ...]:
        """All fields, in the order of ``UNIT_FIELDS``."""
        return (*self.persistent, *self.phases, *self.neighbours)

    @property
    def figures(self) -> tuple[float, ...]:
        """The fields in the order of ``FIGURES``: ``Persistent`` as one sum, then the others."""
        return (sum(self.persistent), *self.phases, *self.neighbours)

    def released_early(self) -> UnitBytes:
        """With gradients that are applied and gone when the unit's backward has finished."""
        old = self.phases
        own = old.gradients + old.comm_buffers
        phases = old._replace(
            map_gradients=old.map_gradients + old.gradients,
            exchange_temp=old.exchange_temp + own + old.update_temp,
            gradients=0.0,
            comm_buffers=0.0,
            bucketed=0.0,
            update_temp=0.0,
        )
        return self._replace(phases=phases)


FIGURES: Fields = ("persistent", *PerPhase._fields, *Neighbours._fields)
"""The names of ``UnitBytes.figures``."""
UNIT_FIELDS: Fields = (*Persistent._fields, *PerPhase._fields, *Neighbours._fields)
OTHERS_FIELDS: Fields = (
    "kept_input", "received", "returned", "neighbours_forward", "neighbours_backward",
    "neighbours_update", "unfilled_buckets", "open_buckets", "segment_outputs", "segment_remade",
    "segment_rerun",
)  # fmt: skip
"""Bytes at a unit's points that follow from several units' decisions: inputs that came for it in
the form that it and others need; the largest tensor that a redistribution brings; what the
redistribution of its output's gradient takes, as that comes back, beyond what the backward itself
does; what others hold in its forward, in its backward and in its update; the part of open buckets
that is not filled, as its backward works and before it begins; and of its segment the outputs that
are there in its forward, the feature maps made again before its own, and what running all of it
again takes at most."""
FIELDS: Fields = (*UNIT_FIELDS, *OTHERS_FIELDS)
FIELD = {name: i for i, name in enumerate(FIELDS)}
"""The row of each field in a table [field, unit]."""

FIELDS_OF: dict[str, Fields] = {
    "weights": ("weights",),
    "optimizer": ("optimizer",),
    "residuals": ("residual",),
    "gradients": ("gradients",),
    "feature_maps": ("saved", "kept_input", "never_together"),
    "map_gradients": ("map_gradients", "exchange_temp", "output_gradients"),
    "buffers": (
        "comm_buffers", "new_grad", "received", "returned", "unfilled_buckets", "open_buckets",
    ),
    "workspace": (
        "workspace", "update_temp", "neighbours_forward", "neighbours_backward",
        "neighbours_update", "segment_outputs", "segment_remade", "segment_rerun",
    ),
}  # fmt: skip
"""The fields that count to each class of ``CLASS_NAMES``; the others count at no point."""
SUBTRACTED = ("never_together",)
"""Fields that are taken off; all others add up."""
OWN_BACKWARD: Fields = ("workspace", "map_gradients", "new_grad", "never_together")
"""What a unit's own backward has besides what is saved."""


class Point(NamedTuple):
    """One family of points: the fields that units before unit j hold there, unit j itself, and
    units after it."""

    phase: Phase
    before: Fields
    at: Fields
    after: Fields


class Points(NamedTuple):
    """The families of points of a step."""

    forward: Point
    backward: Point
    update: Point
    exchange: Point
    rerun: Point


FORWARD, BACKWARD, UPDATE, EXCHANGE, RERUN = range(5)
"""The families, as ``Points`` lists them."""


@lru_cache
def points(*, many: bool, sliced: bool, together: bool) -> Points:
    """What lives at each point. ``many`` says that there are several micro-batches, ``sliced`` that
    gradients travel by priority and are applied in the next forward, and ``together`` that the
    temporaries of all units' updates are there at once."""
    always = Persistent._fields
    kept = (*always, "gradients") if many else always
    past = (*kept, "saved", "kept_input")
    complete = (*always, "gradients", "comm_buffers")
    work = ("saved", "kept_input", "workspace")
    # The barrier applies all gradients at the end of the step. By priority those of a unit are
    # applied just before its next forward, when the units before it have saved feature maps again.
    updated = (*always, "saved", "kept_input") if sliced else complete
    others = ("update_temp",) if together else ()
    # Just before a forward there is what has not reached the host yet.
    before_forward = ("segment_outputs", "neighbours_update") if sliced else ()
    return Points(
        forward=Point(
            "forward",
            before=past,
            at=(*kept, *work, "received", "neighbours_forward", "segment_outputs"),
            after=complete if sliced and not many else kept,
        ),
        backward=Point(
            "backward",
            before=past,
            at=(
                *always, "gradients", *work, "map_gradients", "new_grad", "never_together",
                "returned", "neighbours_backward", "unfilled_buckets", "segment_remade",
            ),
            after=complete,
        ),
        update=Point(
            "update",
            before=(*updated, *others),
            at=(*complete, "update_temp", *before_forward),
            after=(*complete, *others),
        ),
        exchange=Point(
            "backward",
            before=past,
            at=(*complete, "exchange_temp", "neighbours_backward", "segment_remade"),
            after=complete,
        ),
        rerun=Point(
            "backward",
            before=past,
            at=(
                *kept, "saved", "output_gradients", "neighbours_backward", "open_buckets",
                "segment_rerun",
            ),
            after=complete,
        ),
    )  # fmt: skip


def indicator(fields: Fields, columns: Sequence[str]) -> Vector:
    """By column 1 for a field that counts, -1 for one that is taken off, else 0. Fields that
    ``columns`` lacks are left out."""
    found = np.zeros(len(columns))
    for name in fields:
        if name in columns:
            found[columns.index(name)] = -1.0 if name in SUBTRACTED else 1.0
    return found


def returned_bytes(returning: Vector, own_backward: Vector) -> Vector:
    """What the redistribution of a unit's output's gradient, which takes ``returning``, has beyond
    ``OWN_BACKWARD``: the one comes before the other."""
    found: Vector = np.maximum(returning - own_backward, 0.0)
    return found


class Family(NamedTuple):
    """Coefficients of families of points or rows: ``before``, ``at``, ``after`` [family, field]."""

    before: Table
    at: Table
    after: Table

    def values(self, table: Table) -> Table:
        """[family, unit] for a ``table`` [field, unit]: two running sums."""
        before, found, after = (part @ table for part in self)
        # Sums of the others, not of all less a unit's own: bytes are compared with limits, and a
        # difference of large sums would round them up.
        found[:, 1:] += before[:, :-1].cumsum(axis=1)
        found[:, :-1] += after[:, :0:-1].cumsum(axis=1)[:, ::-1]
        return found


@lru_cache
def _coefficients(stated: Points) -> Family:
    """The statement over ``FIELDS``."""
    return Family(*(
        np.stack([indicator(getattr(point, side), FIELDS) for point in stated])
        for side in ("before", "at", "after")
    ))  # fmt: skip


@lru_cache
def _by_class(stated: Points) -> Family:
    """The statement over ``FIELDS``, family by family and in each class by class."""
    classes = np.array([[float(f in FIELDS_OF[name]) for f in FIELDS] for name in CLASS_NAMES])
    return Family(*(
        (part[:, None] * classes).reshape(-1, len(FIELDS)) for part in _coefficients(stated)
    ))  # fmt: skip


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
    rounded = {name: round(max(float(getattr(point, name)), 0.0)) for name in CLASS_NAMES}
    return Moment(unit=names[point.unit], phase=point.phase, **rounded)


class PositionMemory(NamedTuple):
    """What the units of one position hold: ``table`` [field of ``FIELDS``, unit], and the points at
    which it counts. ``sliced`` as in ``points``."""

    table: Table
    points: Points
    sliced: bool

    def field(self, name: str) -> Vector:
        """One field by unit."""
        found: Vector = self.table[FIELD[name]]
        return found

    def totals(self) -> Table:
        """[family of ``Points``, unit] of all bytes alive; none where no segment runs again."""
        # Shares such as a sixth are rounded in floating point. A plan that needs its limit to the
        # byte must not seem to need 1e-11 more.
        found = _coefficients(self.points).values(self.table).round(3)
        found[RERUN, self.field("segment_rerun") + self.field("output_gradients") <= 0] = 0.0
        return found


def timeline(position: PositionMemory) -> list[MemoryPoint]:
    """What a position holds at each point of a step's last micro-batch, class by class: of each
    unit's forward, in reverse of its backward, and of the update that takes most."""
    totals, table = position.totals(), position.table
    parts = _by_class(position.points).values(table).reshape(len(totals), len(CLASS_NAMES), -1)
    # ``never_together`` is taken from the feature maps first, as these have gone; what is more than
    # they have is taken from the gradients, which are not there yet.
    names = list(CLASS_NAMES)
    beyond = np.maximum(position.field("never_together") - position.field("saved"), 0.0)
    parts[BACKWARD, names.index("feature_maps")] += beyond
    parts[BACKWARD, names.index("gradients")] -= beyond

    def point(family: int, k: int) -> MemoryPoint:
        return MemoryPoint(k, position.points[family].phase, *parts[family, :, k].tolist())

    units = range(table.shape[1])
    ways = np.array((BACKWARD, EXCHANGE, RERUN))
    fullest = ways[totals[ways].argmax(axis=0)]
    return [
        *(point(FORWARD, k) for k in units),
        *(point(int(fullest[k]), k) for k in reversed(units)),
        point(UPDATE, int(totals[UPDATE].argmax())),
    ]


def fullest_bytes(position: PositionMemory) -> tuple[Vector, Vector]:
    """For each unit the largest total of its forward and backward, and that of its update."""
    totals = position.totals()
    work: Vector = totals[[FORWARD, BACKWARD, EXCHANGE, RERUN]].max(axis=0)
    return work, totals[UPDATE]


def peak_bytes(position: PositionMemory) -> tuple[float, int]:
    """(the largest total of the timeline, the unit at work there), without making the table."""
    most = position.totals().max(axis=0)
    k = int(most.argmax())
    return float(most[k]), k
