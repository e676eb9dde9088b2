"""A round of hosts that train apart, step by step: what its messages hide behind, and what not."""

from collections.abc import Sequence
from typing import NamedTuple

from ..cost.fragments import FragmentCost
from ..schema.cluster import Interference
from ..schema.local_steps import LocalSteps


class Round(NamedTuple):
    """The mean of a round's steps: its seconds, and what of them a step of the host alone has not:
    waiting for other hosts (``exposed_s``), packing what leaves and applying what has come
    (``applied_s``), and computing more slowly while messages travel (``slowed_s``)."""

    step_s: float
    exposed_s: float
    applied_s: float
    slowed_s: float


def simulate_round(
    local: LocalSteps,
    inner_step_s: float,
    fragments: Sequence[FragmentCost],
    interference: Interference,
) -> Round:
    """A round in the midst of training, where a host's step by itself takes ``inner_step_s``.
    Messages go over the link one after another."""
    length = local.inner_steps
    now_s = link_free_s = exposed_s = applied_s = slowed_s = start_s = 0.0
    ends: dict[int, float] = {}
    # In the first round nothing is under way at its beginning, as there is in all others.
    for step in range(1, 2 * length + 1):
        if step == length + 1:
            start_s, exposed_s, applied_s, slowed_s = now_s, 0.0, 0.0, 0.0
        more_s = _slowed_s(inner_step_s, link_free_s - now_s, interference.compute_slowdown)
        slowed_s += more_s
        now_s += inner_step_s + more_s
        leaving = local.leaving(step)
        if leaving is not None:
            begins_s = max(now_s, link_free_s)
            # While steps go on, both are slowed.
            slowdown = interference.communication_slowdown if local.delay else 1.0
            link_free_s = begins_s + fragments[leaving].message_s * slowdown
            ends[leaving] = link_free_s
        arriving = local.arriving(step)
        if arriving is not None:
            wait_s = max(ends.pop(arriving) - now_s, 0.0)
            exposed_s += wait_s
            applied_s += fragments[arriving].applied_s
            now_s += wait_s + fragments[arriving].applied_s
    return Round(
        (now_s - start_s) / length, exposed_s / length, applied_s / length, slowed_s / length
    )


def _slowed_s(step_s: float, busy_s: float, slowdown: float) -> float:
    """How much longer a step takes for a link that is busy for ``busy_s`` from its beginning."""
    longest = step_s * (slowdown - 1)
    return min(longest, max(busy_s, 0.0) * (1 - 1 / slowdown)) if slowdown > 1 else 0.0
