"""A quick bound from below on the memory that any plan needs: often a proof that nothing fits.

Each point of the memory timeline is a sum over units (``memory.rows``). The sum of the units' own
least at a point is therefore no more than any plan holds there, and the fullest of these points is
no more than any plan's peak.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...cost.cost import CostModel
from ...cost.ownership import group_samples
from ...memory.rows import AT, OWN_BYTES, UPDATE, Matrix, rows
from ...memory.unit_memory import memory_of
from ...schema.capability import Capability
from ...schema.layout import Layout
from ...schema.options import Decisions, Option
from ..choice import over_bytes
from ..evaluate import limits_bytes
from ..problem import Problem
from ..unit_options import all_options, unit_options
from .checkpointing import has_segments

ROUNDING = 1e-9
"""A bound is lowered by this share: sums of floats differ by their order."""


MOST_OPTIONS = 10_000
"""Options of all units together up to which the bound is worked out: less than a second."""


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
    """The cost models of a problem of which one has a plan that keeps all limits if any has."""
    # Larger slices only hold more, as smaller parameters are packed into them; which of them is
    # quicker does not matter where nothing but memory is limited.
    goal = problem.goal
    seconds = (goal.amplification_limit, goal.unit_amplification_limit, goal.time_limit_s)
    alike = not goal.allow_lossy and not any(seconds)
    smallest = min(problem.slice_bytes)
    for model in problem.cost_models():
        if not alike or model.message_bytes == smallest:
            yield model


def never_fits(problem: Problem, model: CostModel) -> bool:
    """Whether memory rules out every plan of a cost model. False where a unit has no option at all:
    then it is not memory that is missing; and where the options are too many to ask."""
    # By far the most frequent case, and quick to see for a thousand units.
    if over_bytes(model, model.baseline) <= 0:
        return False
    # The bound asks for every option of every unit, which a search of many avoids.
    options = few_options(problem, model)
    if options is None or not all(options):
        return False
    # Where memory is very short, one unit tells, and of each of the others the first option that is
    # small enough is the last that is looked at.
    if _one_unit_is_too_large(problem, model, options):
        return True
    least = least_memory(problem, model)
    if least is None:
        return False
    over = least.over_bytes_in_segments if has_segments(problem) else least.over_bytes
    return over > 0


def few_options(problem: Problem, model: CostModel) -> Sequence[Sequence[Option]] | None:
    """Each unit's options; None where they are so many that a bound over them takes long beside a
    search."""
    found: list[tuple[Option, ...]] = []
    left = MOST_OPTIONS
    for k in range(len(model.profile.units)):
        found.append(unit_options(model, k, problem.capability))
        left -= len(found[-1])
        if left < 0:
            return None
    return found


def _one_unit_is_too_large(
    problem: Problem, model: CostModel, options: Sequence[Sequence[Option]]
) -> bool:
    """Whether some unit at work, with nothing else there, is over the limit of the first position
    whatever it does."""
    memory, (_, at, _, _) = memory_of(model), _own_bytes(problem, model)
    samples = _samples(model, options, 0)
    limit = limits_bytes(model)[0]

    def too_large(k: int, option: Option) -> bool:
        own = memory.unit(k, option, samples[option.layout]).figures @ at
        return bool(own.max() * (1 - ROUNDING) > limit)

    return any(all(too_large(k, o) for o in row) for k, row in enumerate(options))


_known: WeakKeyDictionary[CostModel, tuple[Capability, LeastMemory | None]] = WeakKeyDictionary()
"""The bounds worked out, while their cost models live."""


def least_memory(problem: Problem, model: CostModel) -> LeastMemory | None:
    """The bound for all plans of a cost model; None where a unit has no option at all."""
    # The search asks for it, then the report of why nothing fits, for the same cost models.
    capability, least = _known.get(model, (None, None))
    if capability != problem.capability:
        least = _least_memory(problem, model)
        _known[model] = problem.capability, least
    return least


def _least_memory(problem: Problem, model: CostModel) -> LeastMemory | None:
    options = all_options(model, problem.capability)
    if not all(options):
        return None
    limits = limits_bytes(model)
    found = []
    # Every layout that is searched takes position 0 in; another may have less memory.
    for position in sorted({0, limits.index(min(limits))}):
        *peaks, easiest = _at_position(problem, model, options, position)
        unsegmented, segmented = (ceil(p * (1 - ROUNDING)) - limits[position] for p in peaks)
        found.append(LeastMemory(unsegmented, segmented, easiest))
    best = max(found, key=lambda each: each.over_bytes)
    segmented = max(each.over_bytes_in_segments for each in found)
    return best._replace(over_bytes_in_segments=segmented)


def _samples(
    model: CostModel, options: Sequence[Sequence[Option]], position: int
) -> dict[Layout, int | None]:
    layouts = {option.layout for row in options for option in row}
    return {layout: group_samples(model.counts, layout)[position] for layout in layouts}


def _own_bytes(problem: Problem, model: CostModel) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Coefficients [figure of a unit's own bytes, point] of what is there of a unit before another
    one that works, of one at work, and of one after it; and at the update [figure, 1]."""
    # What units do to each other only adds to their own bytes, so the bound may leave it out: tied
    # options, redistributions, open buckets, parameters that are gathered ahead.
    together = memory_of(model).updates_together
    family = rows(model.micro_batches, problem.schedule, together=together)
    tracks = slice(family.timed, None)  # those of bytes
    before, at, after = (
        part[tracks, OWN_BYTES].T for part in (family.before, family.at, family.after)
    )
    return before, at, after, family.totals[UPDATE, OWN_BYTES][:, None]


def _at_position(
    problem: Problem, model: CostModel, options: Sequence[Sequence[Option]], position: int
) -> tuple[float, float, Decisions]:
    """The bounds on the peak of one position without segments and with them, and the options that
    are least at the point of the first."""
    memory, samples = memory_of(model), _samples(model, options, position)
    before, at, after, update = _own_bytes(problem, model)
    # Inside a segment feature maps are gone until it runs again. What a unit does not save there is
    # its workspace while it works, so that only the points of units after it have less.
    gone = before.copy()
    gone[AT["saved"] - OWN_BYTES.start] = 0.0
    weights = (before, at, after, gone, update)
    units: list[list[Matrix]] = []
    for k, row in enumerate(options):
        own = np.array([memory.unit(k, o, samples[o.layout]).figures for o in row])
        units.append([own @ weight for weight in weights])
    earlier, working, later, in_segment, updating = (
        np.array([unit[part].min(axis=0) for unit in units]) for part in range(len(weights))
    )
    behind = later[::-1].cumsum(axis=0)[::-1] - later
    points = earlier.cumsum(axis=0) - earlier + working + behind
    segmented = in_segment.cumsum(axis=0) - in_segment + working + behind
    j, track = np.unravel_index(int(points.argmax()), points.shape)
    together = float(updating.sum())
    if together > points[j, track]:
        columns = [unit[-1][:, 0] for unit in units]
    else:
        # A unit before j counts by ``before``, j itself by ``at``, one behind it by ``after``.
        columns = [unit[(k > j) * 2 + (k == j)][:, track] for k, unit in enumerate(units)]
    easiest = tuple(row[int(c.argmin())] for row, c in zip(options, columns, strict=True))
    most = max(float(points.max()), together), max(float(segmented.max()), together)
    return *most, easiest
