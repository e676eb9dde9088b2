"""The step time and the memory timeline as rows that are linear in what each unit costs.

A unit's decision is a vector of *figures*: seconds of forward, backward, update, of collectives by
link, and bytes by class. Both formulas of ``step`` are the largest of many sums of these, and the
memory timeline is a limit on as many others. A row belongs to a unit j, and what unit k adds to it
depends only on whether k stands before j, at it or after it:

    row_j = Σ_{k<j} before·x_k + at·x_j + Σ_{k>j} after·x_k

so that a family of rows (a *track*: one for each link, and one for memory in forward and in
backward) is three short vectors, a *total* (one row for all units) is one, and all rows of a plan
are two running sums. Weights on the rows turn into a price for each unit's figures in the same way.

    track            before                at                       after
    time on link l   gradients on the wire, compute and waiting, as ``step`` has them
    memory forward   standing + saved      + workspace + received   standing (by priority
                                           + beside                 + gradients)
    memory backward  standing + saved      + gradients, maps, …     standing + gradients
                                           + beside
    memory leaving   standing + saved      + gradients, leaving     standing + gradients
                                           + beside
    memory update    standing + gradients  + renewed                standing + gradients
                     (by priority standing + saved for units before, as it is in the next forward)

Buckets in flight are the smaller of two sums, which is not linear; a share of the exchanged bytes
that is never more stands for them (the chord under a concave function; none where units close what
is open).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.prefetch_overlap import Beside
from ..cost.step_time import LINKS, Chain, Terms, Vector, priority_terms
from ..cost.unit_bytes import OWN
from ..simulate.schedule import ScheduleName

Matrix = npt.NDArray[np.float64]

_VECTORS = ("forward", "backward", "update")
_PER_LINK = ("inner_forward", "inner_backward", "exchange", "entry_forward", "entry_backward")
_BYTES = (*OWN, "received", "beside_forward", "beside_backward")
"""Bytes, as ``UnitBytes.figures`` has them; what a unit receives, and what others have there while
it works, follow from other units' decisions too (``write_beside``)."""
FIGURES: tuple[str, ...] = (
    *_VECTORS,
    *(f"{name}.{link}" for name in _PER_LINK for link in LINKS),
    *_BYTES,
    "lost",
    "idle",
    *(f"slice.{link}" for link in LINKS),
)
"""What each unit's decision amounts to: seconds, bytes, the share of the gradient's energy that is
``lost`` for a step, ``idle`` device-seconds that it leaves free (devices that take no part times
the seconds of its compute), and seconds of one slice of its exchange (see ``slice_waits``)."""
AT = {name: i for i, name in enumerate(FIGURES)}
ENTRY: tuple[int, ...] = tuple(i for i, n in enumerate(FIGURES) if n.startswith("entry_"))
RECEIVED = AT["received"]
BESIDE: tuple[int, ...] = (AT["beside_forward"], AT["beside_backward"])
OWN_BYTES = slice(AT["standing"], AT["received"])
"""The figures of memory that are a unit's own."""
SLICES: tuple[int, ...] = tuple(AT[f"slice.{link}"] for link in LINKS)
LOST_FIGURE = AT["lost"]
EXCHANGES: tuple[int, ...] = tuple(AT[f"exchange.{link}"] for link in LINKS)
ALWAYS, UPDATE, LOST = range(3)
"""The totals: Σ(F+B+U+A) or what the barrier has instead, memory at the update, energy lost."""


class Rows(NamedTuple):
    """The families of rows: ``before``, ``at``, ``after`` [track, figure] and ``totals`` [total,
    figure]. The first ``timed`` tracks and the total ``ALWAYS`` are seconds of a step, the other
    tracks and the total ``UPDATE`` bytes of memory."""

    before: Matrix
    at: Matrix
    after: Matrix
    totals: Matrix
    timed: int


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
        return float(max((self.tracks[:timed] + waits).max(), self.totals[ALWAYS]))

    def peak_bytes(self, timed: int) -> float:
        """The largest row of bytes."""
        return float(max(self.tracks[timed:].max(), self.totals[UPDATE]))


def barrier_terms(chain: Chain) -> Terms:
    """Each unit's contribution to ``barrier_step`` with one micro-batch, less what is before the
    last backward (see ``forward_part``)."""
    entry, inner = chain.entry_backward_s, chain.inner_backward_s
    own = chain.backward_s
    waiting = entry + inner
    after = own + waiting.sum(axis=0)
    return Terms(
        before=waiting + chain.exchange_s,
        at=own + inner[::-1] + waiting + chain.exchange_s,
        after=np.broadcast_to(after, waiting.shape),
        always=after,
    )


def _once(chain: Chain) -> Vector:
    """Σ(F + B + A) of one micro-batch, by unit."""
    per_link = (
        chain.entry_forward_s + chain.entry_backward_s + chain.inner_forward_s
        + chain.inner_backward_s
    )  # fmt: skip
    total: Vector = chain.forward_s + chain.backward_s + per_link.sum(axis=0)
    return total


def _forward_part(chain: Chain) -> Vector:
    """Forward, its waiting, and the update: what the barrier's step has outside the overlap."""
    per_link = chain.entry_forward_s + chain.inner_forward_s
    total: Vector = chain.forward_s + chain.update_s + per_link.sum(axis=0)
    return total


def step_terms(chain: Chain, micro_batches: int, schedule: ScheduleName) -> Terms:
    """Each unit's contribution to every bound on the whole step."""
    common = (micro_batches - 1) * _once(chain)
    if schedule == "priority":
        terms = priority_terms(chain)
    else:
        terms = barrier_terms(chain)
        common = common + _forward_part(chain)
    return Terms(*(part + common for part in terms))


def _unit_chain() -> Chain:
    """A chain with one unit for each figure, which has that figure 1 and all others 0."""
    count = len(FIGURES)
    eye = np.eye(count)
    fields: dict[str, Matrix] = {f"{name}_s": eye[AT[name]] for name in _VECTORS}
    for name in _PER_LINK:
        fields[f"{name}_s"] = np.stack([eye[AT[f"{name}.{link}"]] for link in LINKS])
    return Chain(**fields)


def _memory(
    micro_batches: int, bucket: float, *, sliced: bool, together: bool
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """(before, at, after) for memory in forward, in backward, at each unit's update and as its
    gradients leave, and the total of the update. With micro-batches all gradients stand always.
    """
    eye = np.eye(len(FIGURES))
    figure = {name: eye[AT[name]] for name in _BYTES}
    standing = figure["standing"] + (figure["gradients"] if micro_batches > 1 else 0.0)
    own = figure["standing"] + figure["gradients"]
    backward = own + figure["travelling"]
    early = standing + bucket * figure["exchanged"]
    work = figure["saved"] + figure["workspace"] + figure["received"]
    pending = backward if sliced and micro_batches == 1 else standing
    others = backward + (figure["renewed"] if together else 0.0)
    past = figure["standing"] + figure["saved"] if sliced else others
    left = standing + figure["saved"]
    before = np.stack([left, early + figure["saved"], past, left])
    at = np.stack([
        standing + work + figure["beside_forward"],
        own + work + figure["map_gradients"] + figure["fresh"] - figure["spared"]
        + figure["beside_backward"],
        backward + figure["renewed"],
        backward + figure["leaving"] + figure["beside_backward"],
    ])  # fmt: skip
    after = np.stack([pending, backward, others, backward])
    return before, at, after, backward[None]


def rows(
    micro_batches: int, schedule: ScheduleName, bucket: float, *, together: bool = False
) -> Rows:
    """The families of rows; ``bucket`` is the share of the bytes still to be exchanged that
    open buckets take at least, ``together`` says that the update's temporaries are those of all
    units at once."""
    terms = step_terms(_unit_chain(), micro_batches, schedule)
    sliced = schedule == "priority"
    before, at, after, update = _memory(micro_batches, bucket, sliced=sliced, together=together)
    return Rows(
        before=np.concatenate([terms.before, before]),
        at=np.concatenate([terms.at, at]),
        after=np.concatenate([terms.after, after]),
        totals=np.concatenate([terms.always[None], update, np.eye(len(FIGURES))[AT["lost"]][None]]),
        timed=len(LINKS),
    )


def write_beside(figures: Matrix, besides: Sequence[Beside]) -> None:
    """Writes into a plan's ``figures`` [unit, figure] what others have at each unit's points."""
    figures[:, list(BESIDE)] = 0.0
    for one in besides:
        figures[:, AT[one.point]] += one.added(figures[:, AT[one.figure]])


def bucket_share(exchanged_bytes: float, bucket_bytes: int) -> float:
    """The share of the gradients still to be exchanged that open buckets take at least, where units
    exchange at most ``exchanged_bytes`` together."""
    return min(1.0, bucket_bytes / max(exchanged_bytes, 1.0))


def values(rows_: Rows, figures: Matrix) -> Values:
    """The rows of a plan whose units have ``figures`` [unit, figure]."""
    before, at, after = (figures @ m.T for m in (rows_.before, rows_.at, rows_.after))
    ahead = before.cumsum(axis=0) - before
    behind = after[::-1].cumsum(axis=0)[::-1] - after
    return Values((ahead + at + behind).T, rows_.totals @ figures.sum(axis=0))


def slice_waits(figures: Matrix) -> Matrix:
    """For each link and unit the longest slice of the units after it, which one of its own may
    find on the wire (none where it has none): what ``step.priority_step`` adds to the rows."""
    waits = np.zeros((len(SLICES), len(figures)))
    later = figures[:0:-1, list(SLICES)].T
    waits[:, :-1] = np.maximum.accumulate(later, axis=1)[:, ::-1]
    return waits * (figures[:, list(EXCHANGES)].T > 0)


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
