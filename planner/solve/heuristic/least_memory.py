"""A quick bound from below on the memory that any plan needs: often a proof that nothing fits.

Each point of the memory timeline is a sum over units (``memory.rows``). The sum of the units' own
least at a point is therefore no more than any plan holds there, and the fullest of these points is
no more than any plan's peak. What units do to each other only adds to that and is left out: tied
options, redistributions, open buckets, parameters that are gathered ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...cost.cost import CostModel
from ...cost.ownership import group_samples
from ...memory.rows import AT, OWN_BYTES, UPDATE, Matrix, rows
from ...schema.capability import Capability
from ...schema.options import Decisions, Option
from ...simulate.schedule import ScheduleName
from ..choices import unit_options
from ..evaluate import limits_bytes, memory_of
from ..objective import over_bytes
from ..problem import Problem
from .fitting import has_segments

ROUNDING = 1e-9


class LeastMemory(NamedTuple):
    """What any plan of a cost model goes over its memory limits at least (negative: what it may
    leave free), without segments and with them, and the options that are least at the point where
    the first of these is needed."""

    over_bytes: int
    over_bytes_in_segments: int
    decisions: Decisions


def nothing_fits(problem: Problem) -> bool:
    """Whether memory rules out every plan of a problem."""
    return all(never_fits(problem, model) for model in memory_models(problem))


def memory_models(problem: Problem) -> Iterator[CostModel]:
    """The cost models of a problem of which one has a plan that keeps all limits if any has. Larger
    slices only hold more, as smaller parameters are packed into them; which of them is quicker does
    not matter where nothing but memory is limited."""
    goal = problem.goal
    seconds = (goal.amplification_limit, goal.unit_amplification_limit, goal.time_limit_s)
    alike = not goal.allow_lossy and not any(seconds)
    smallest = min(problem.slice_bytes)
    for model in problem.cost_models():
        if not alike or model.message_bytes == smallest:
            yield model


def never_fits(problem: Problem, model: CostModel) -> bool:
    """Whether memory rules out every plan of a cost model. False where a unit has no option at all:
    then it is not memory that is missing."""
    if over_bytes(model, model.baseline) <= 0:
        return False  # by far the most frequent, and quick to see for a thousand units
    least = least_memory(problem, model)
    if least is None:
        return False
    over = least.over_bytes_in_segments if has_segments(problem) else least.over_bytes
    return over > 0


_known: WeakKeyDictionary[CostModel, tuple[Capability, LeastMemory | None]] = WeakKeyDictionary()
"""The bounds worked out, while their cost models live."""


def least_memory(problem: Problem, model: CostModel) -> LeastMemory | None:
    """The bound for all plans of a cost model; None where a unit has no option at all."""
    capability, least = _known.get(model, (None, None))
    if capability != problem.capability:
        least = _least_memory(problem, model)
        _known[model] = problem.capability, least
    return least


def _least_memory(problem: Problem, model: CostModel) -> LeastMemory | None:
    units = range(len(model.profile.units))
    options = [unit_options(model, k, problem.capability) for k in units]
    if not all(options):
        return None
    limits = limits_bytes(model.cluster, model.goal, model.placement)
    # Every layout that is searched takes position 0 in; another may have less memory.
    found = []
    for position in sorted({0, limits.index(min(limits))}):
        peaks = _at_position(model, options, position, problem.schedule)
        # Sums of floats differ by their order.
        alone, inside = (ceil(p * (1 - ROUNDING)) - limits[position] for p in peaks[:2])
        found.append(LeastMemory(alone, inside, peaks[2]))
    best = max(found, key=lambda each: each.over_bytes)
    inside = max(each.over_bytes_in_segments for each in found)
    return best._replace(over_bytes_in_segments=inside)


def _at_position(
    model: CostModel,
    options: Sequence[Sequence[Option]],
    position: int,
    schedule: ScheduleName,
) -> tuple[float, float, Decisions]:
    """The bounds on the peak of one position without segments and with them, and the options that
    are least at the point of the first."""
    memory = memory_of(model)
    layouts = {option.layout for row in options for option in row}
    samples = {y: group_samples(model.counts, y)[position] for y in layouts}
    family = rows(model.micro_batches, schedule, 0.0, together=memory.updates_together)
    tracks = slice(family.timed, None)  # those of bytes
    weights = [part[tracks, OWN_BYTES].T for part in (family.before, family.at, family.after)]
    # Inside a segment feature maps are gone until it runs again. What a unit does not save there is
    # its workspace while it works, so that only the points of units after it have less.
    gone = weights[0].copy()
    gone[AT["saved"] - OWN_BYTES.start] = 0.0
    weights += [gone, family.totals[UPDATE, OWN_BYTES][:, None]]
    units: list[list[Matrix]] = []
    for k, row in enumerate(options):
        own = np.array([memory.unit(k, o, samples[o.layout]).figures for o in row])
        units.append([own @ weight for weight in weights])
    earlier, at, later, inside, update = (
        np.array([unit[part].min(axis=0) for unit in units]) for part in range(len(weights))
    )
    behind = later[::-1].cumsum(axis=0)[::-1] - later
    points = earlier.cumsum(axis=0) - earlier + at + behind
    segmented = inside.cumsum(axis=0) - inside + at + behind
    j, track = np.unravel_index(int(points.argmax()), points.shape)
    together = float(update.sum())
    if together > points[j, track]:
        columns = [unit[-1][:, 0] for unit in units]
    else:
        columns = [unit[(k > j) * 2 + (k == j)][:, track] for k, unit in enumerate(units)]
    easiest = tuple(row[int(c.argmin())] for row, c in zip(options, columns, strict=True))
    most = max(float(points.max()), together), max(float(segmented.max()), together)
    return *most, easiest
