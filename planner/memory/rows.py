"""The step time and the memory timeline as rows that are linear in what each unit costs.

A unit's decision is a vector of *figures*: seconds of forward, backward, update, of collectives by
link, and bytes by field. Both formulas of ``step_time`` are the largest of many sums of these, and
the memory timeline is a limit on as many others. A row belongs to a unit j, and what unit k adds to
it depends only on whether k stands before j, at it or after it:

    row_j = Σ_{k<j} before·x_k + at·x_j + Σ_{k>j} after·x_k

so that a family of rows (a *track*: one for each link, and one for memory in forward and in
backward) is three short vectors, a *total* (one row for all units) is one, and all rows of a plan
are two running sums. Weights on the rows turn into a price for each unit's figures in the same way.

Seconds: one track for each link, with gradients on the wire, compute and waiting, as ``step_time``
has them. Bytes: one track for each of ``MEMORY_POINTS``, as ``timeline.points`` states them (see
[Note: The memory timeline] in planner/memory/timeline.py); only the rerun of segments has none, as
segments are chosen later.

The unfilled part of open buckets is the smaller of two sums, which is not linear: it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ..cost.step_time import LINKS, Chain, Vector, longest_after, step_terms
from ..simulate.schedule import ScheduleName
from . import timeline
from .prefetch_overlap import OverlapPoint, PrefetchOverlap
from .timeline import Family

Matrix = npt.NDArray[np.float64]

_VECTORS = ("forward", "backward", "update")
_ON_RANK = (*_VECTORS, "host", "entry_host")
_PER_LINK = ("inner_forward", "inner_backward", "exchange", "entry_forward", "entry_backward")
_BYTES = (
    *timeline.FIGURES, "kept_input", "received", "returning", "returned", "neighbours_forward",
    "neighbours_backward", "neighbours_update",
)  # fmt: skip
"""Bytes, as ``UnitBytes.figures`` has them; what a unit receives, what there is as its output's
gradient comes back, and what others have there while it works, follow from other units' decisions
too (``write_others``)."""
FIGURES: tuple[str, ...] = (
    *_VECTORS,
    *(f"{name}.{link}" for name in _PER_LINK for link in LINKS),
    *_BYTES,
    "lost",
    "idle",
    *(f"slice.{link}" for link in LINKS),
    "host",
    "entry_host",
)
"""What each unit's decision amounts to: seconds, bytes, the share of the gradient's energy that is
``lost`` for a step, ``idle`` device-seconds that it leaves free (devices that take no part times
the seconds of its compute), seconds of one slice of its exchange (see ``slice_waits``), and those
that a GPU's host takes to issue it, and the redistributions at its entry."""
AT = {name: i for i, name in enumerate(FIGURES)}
ENTRY: tuple[int, ...] = tuple(i for i, n in enumerate(FIGURES) if n.startswith("entry_"))
KEPT_INPUT, RECEIVED = AT["kept_input"], AT["received"]
RETURNING, RETURNED = AT["returning"], AT["returned"]
NEIGHBOURS: tuple[int, ...] = tuple(AT[name] for name in get_args(OverlapPoint))
OWN_BYTES = slice(AT["persistent"], KEPT_INPUT)
"""The figures of memory that are a unit's own."""
SLICES: tuple[int, ...] = tuple(AT[f"slice.{link}"] for link in LINKS)
LOST_FIGURE = AT["lost"]
EXCHANGES: tuple[int, ...] = tuple(AT[f"exchange.{link}"] for link in LINKS)
MEMORY_POINTS = ("forward", "backward", "update", "exchange")
"""The families of ``timeline.Points`` that have a track, in the order of the tracks."""
ALWAYS, UPDATE, LOST, HOST = range(4)
"""The totals: Σ(F+B+U+A) or what the barrier has instead, memory at the update, energy lost, and
where hosts take time ΣH."""


class Rows(NamedTuple):
    """The families of rows: ``before``, ``at``, ``after`` [track, figure] and ``totals`` [total,
    figure]. The first ``timed`` tracks and the totals ``ALWAYS`` and ``HOST`` are seconds of a
    step, the other tracks and the total ``UPDATE`` bytes of memory."""

    before: Matrix
    at: Matrix
    after: Matrix
    totals: Matrix
    timed: int

    def memory_track(self, point: str) -> int:
        """The number of the track of one of ``MEMORY_POINTS``."""
        return self.timed + MEMORY_POINTS.index(point)


class Values(NamedTuple):
    """The rows of one plan: ``tracks`` [track, unit], ``totals`` [total]."""

    tracks: Matrix
    totals: Vector

    def plus(self, other: Values) -> Values:
        """Both added up."""
        return Values(self.tracks + other.tracks, self.totals + other.totals)

    def step_s(self, waits: Matrix) -> float:
        """The largest row of seconds, with the waits for slices [link, unit]."""
        timed = len(waits)
        serial = self.totals[seconds_of(self.totals)]
        return float(max((self.tracks[:timed] + waits).max(), serial.max()))

    def peak_bytes(self, timed: int) -> float:
        """The largest row of bytes."""
        return float(max(self.tracks[timed:].max(), self.totals[UPDATE]))


def seconds_of(totals: Matrix | Vector) -> list[int]:
    """The totals that are seconds of a step."""
    return [ALWAYS, HOST] if len(totals) > HOST else [ALWAYS]


def _unit_chain() -> Chain:
    """A chain with one unit for each figure, which has that figure 1 and all others 0."""
    # The formulas are linear: their terms for these units are the coefficients of the figures.
    eye = np.eye(len(FIGURES))
    fields: dict[str, Matrix] = {f"{name}_s": eye[AT[name]] for name in _ON_RANK}
    for name in _PER_LINK:
        fields[f"{name}_s"] = np.stack([eye[AT[f"{name}.{link}"]] for link in LINKS])
    return Chain(**fields)


def _figures_of(fields: Sequence[str]) -> Vector:
    """Coefficients of the figures of a sum of fields; what is there at every point is one figure,
    and fields of segments and buckets are none."""
    together = ["persistent" if name in timeline.Persistent._fields else name for name in fields]
    return timeline.indicator(tuple(together), FIGURES)


def rows(
    micro_batches: int, schedule: ScheduleName, *, together: bool = False, hosts: bool = False
) -> Rows:
    """The families of rows; ``together`` says that the update's temporaries are those of all units
    at once, ``hosts`` that hosts take time to issue units' work."""
    sliced = schedule == "priority"
    terms = step_terms(_unit_chain(), micro_batches, priority=sliced)
    stated = timeline.points(many=micro_batches > 1, sliced=sliced, together=together)
    families = [getattr(stated, name) for name in MEMORY_POINTS]
    before, at, after = (
        np.stack([_figures_of(getattr(point, side)) for point in families])
        for side in ("before", "at", "after")
    )
    # The total of the update has all gradients and none of its temporaries. It is looser than the
    # update's track, which few plans need.
    update = _figures_of(stated.backward.after)
    totals = [terms.always, update, np.eye(len(FIGURES))[AT["lost"]]]
    return Rows(
        before=np.concatenate([terms.before, before]),
        at=np.concatenate([terms.at, at]),
        after=np.concatenate([terms.after, after]),
        totals=np.stack([*totals, terms.host] if hosts else totals),
        timed=len(LINKS),
    )


def write_others(figures: Matrix, overlaps: Sequence[PrefetchOverlap]) -> None:
    """Writes into a plan's ``figures`` [unit, figure] what others have at each unit's points, and
    what a gradient that comes back takes beyond the unit's own backward."""
    figures[:, RETURNED] = timeline.returned_bytes(figures[:, RETURNING], figures @ OWN_BACKWARD)
    figures[:, list(NEIGHBOURS)] = 0.0
    for overlap in overlaps:
        figures[:, AT[overlap.point]] += overlap.added(figures[:, AT[overlap.field]])


OWN_BACKWARD = _figures_of(timeline.OWN_BACKWARD)
"""Coefficients of the figures of what a unit's own backward has besides what is saved."""


def values(rows_: Rows, figures: Matrix) -> Values:
    """The rows of a plan whose units have ``figures`` [unit, figure]."""
    tracks = Family(rows_.before, rows_.at, rows_.after).values(figures.T)
    return Values(tracks, rows_.totals @ figures.sum(axis=0))


def slice_waits(figures: Matrix) -> Matrix:
    """``step_time.longest_after`` of units with ``figures``: [link, unit], what
    ``step_time.priority_step`` adds to the rows."""
    return longest_after(figures[:, list(SLICES)].T, figures[:, list(EXCHANGES)].T)


def changes(rows_: Rows, units: Sequence[int], figures: Matrix, count: int) -> Values:
    """What the rows of a plan of ``count`` units gain where ``units``, in rising order, gain
    ``figures`` [changed unit, figure]."""
    before, at, after = (figures @ m.T for m in (rows_.before, rows_.at, rows_.after))
    place = np.array(units)
    ahead = np.concatenate([np.zeros((1, before.shape[1])), before.cumsum(axis=0)])
    behind = np.concatenate([after[::-1].cumsum(axis=0)[::-1], np.zeros((1, after.shape[1]))])
    every = np.arange(count)
    tracks = ahead[np.searchsorted(place, every)] + behind[np.searchsorted(place, every, "right")]
    tracks[place] += at
    return Values(tracks.T, rows_.totals @ figures.sum(axis=0))


def prices(rows_: Rows, tracks: Matrix, totals: Vector) -> Matrix:
    """What one of each figure of each unit costs, [unit, figure], for weights on the rows."""
    later = tracks[:, ::-1].cumsum(axis=1)[:, ::-1] - tracks
    earlier = tracks.cumsum(axis=1) - tracks
    priced: Matrix = (
        later.T @ rows_.before + tracks.T @ rows_.at + earlier.T @ rows_.after
        + totals @ rows_.totals
    )  # fmt: skip
    return priced
