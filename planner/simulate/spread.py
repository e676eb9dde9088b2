"""What the spread of measurements does to a step: waiting for the slowest of several ranks, and the
interval in which the step is expected.

A profile and a cluster hold medians, and how far single measurements lie from them. Every step ends
when the slowest of its ranks is done. The median of the largest of W equal draws lies at the
(1/2)^(1/W) quantile of one, 0.54 standard deviations above the median for two ranks and 1.38 for
eight. So the slowest rank is what is simulated, computing so much longer, and what it takes longer
is what the others wait: in the redistribution that follows, or at the end for their gradients.
"""

from math import hypot
from statistics import NormalDist
from typing import NamedTuple

from ..schema.profile import Origin
from .schedule import COMPUTE, Step, Work

CONFIDENCE = 0.9
"""How often the measured step lies in the interval, if all is as it was when it was measured."""

MISSED = 0.10
"""What a prediction misses besides, relative to the step, ``CONFIDENCE`` of the time:
docs/results/prediction.md says by which rows it was chosen."""
MISSED_UNMEASURED = 0.28
"""What computing takes more or less than estimated, or published elsewhere, where it was not
measured: the worst of the published steps in docs/profiling.md that nothing was fitted on."""


def slowest_of(ranks: int, spread: float) -> float:
    """How many times as long as the median rank the slowest of ``ranks`` computes, in the median,
    where a rank's times have that standard deviation relative to their median."""
    return 1.0 + spread * NormalDist().inv_cdf(0.5 ** (1 / ranks))


def slowed(step: Step, factor: float) -> Step:
    """The step of a rank that computes ``factor`` times as long."""
    if factor == 1.0:
        return step
    work = (
        one._replace(seconds=one.seconds * factor) if one.resource == COMPUTE else one
        for one in step.work
    )
    return step._replace(work=tuple(work))


def blocking_share(work: tuple[Work, ...]) -> float:
    """The share of a step's computing that is followed by blocking communication before the step's
    gradients are waited for: there the others wait for a rank that is slow."""
    total = before = since = 0.0
    for one in work:
        if one.resource == COMPUTE:
            since += one.seconds
            total += one.seconds
        elif one.seconds:
            before, since = before + since, 0.0
    return before / total if total else 0.0


class Interval(NamedTuple):
    """Between what seconds a step is expected."""

    low_s: float
    high_s: float


def interval(
    step_s: float, compute_s: float, compute_spread: float, link_spread: float, origin: Origin
) -> Interval:
    """Where a step of ``step_s`` is expected ``CONFIDENCE`` of the time. ``compute_s`` of it are
    computing, the rest is waiting for links; both by the spreads that were measured."""
    if not step_s:
        return Interval(0.0, 0.0)
    deviations = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    computing = min(compute_s / step_s, 1.0)
    # Independent of each other: squares add up.
    relative = hypot(
        MISSED,
        0.0 if origin == "measured" else MISSED_UNMEASURED * computing,
        deviations * compute_spread * computing,
        deviations * link_spread * (1 - computing),
    )
    # A ratio: what takes long can be wrong by more than all of it.
    return Interval(step_s / (1 + relative), step_s * (1 + relative))
