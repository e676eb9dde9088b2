"""What a unit and an edge cost, as figures kept apart, and how policies change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..schema.options import Option, segments_of
from .step_time import Chain


class OnLink(NamedTuple):
    """Seconds of communication, the link it occupies (index in ``LINKS``), and what the busiest
    rank sends."""

    seconds: float = 0.0
    link: int = 0
    sent_bytes: float = 0.0


class UnitCost(NamedTuple):
    """What one unit costs by itself. ``shard_bytes`` are the parameters that a member holds,
    ``trained_bytes`` those of them with a gradient, ``gradient_bytes`` what is exchanged.
    ``released`` is an exchange that the rank waits for in backward (early release), ``slice_s`` the
    time of one slice on the link of ``exchange`` (zero where gradients travel in buckets)."""

    forward_s: float
    backward_s: float
    update_s: float
    inner_forward: OnLink
    inner_backward: OnLink
    exchange: OnLink
    gradient_bytes: int
    trained_bytes: int
    shard_bytes: int
    released: OnLink = OnLink()
    slice_s: float = 0.0


class EdgeCost(NamedTuple):
    """The redistribution of one edge's tensor, forward and backward, and the bytes that the
    busiest rank receives forward."""

    forward: OnLink
    backward: OnLink
    received_bytes: float


NO_MOVE = EdgeCost(OnLink(), OnLink(), 0.0)


def after(one: OnLink, other: OnLink) -> OnLink:
    """Two collectives one after the other, as on the link of the longer."""
    link = max(one, other).link
    return OnLink(one.seconds + other.seconds, link, one.sent_bytes + other.sent_bytes)


def recomputed(cost: UnitCost) -> UnitCost:
    """With recompute the forward runs again in backward, its collectives too."""
    again, inner = cost.inner_forward, cost.inner_backward
    both = OnLink(
        inner.seconds + again.seconds,
        again.link if again.seconds else inner.link,
        inner.sent_bytes + again.sent_bytes,
    )
    return cost._replace(backward_s=cost.backward_s + cost.forward_s, inner_backward=both)


def offloaded(cost: UnitCost, copy_s: float) -> UnitCost:
    """With offload the feature maps are copied to the host and back in ``copy_s`` each, while the
    rank waits (so do torch's own hooks)."""
    return cost._replace(forward_s=cost.forward_s + copy_s, backward_s=cost.backward_s + copy_s)


def released(cost: UnitCost, option: Option) -> UnitCost:
    """With early release the rank waits for the unit's exchange in backward and updates there."""
    if not option.early_release:
        return cost
    return cost._replace(
        backward_s=cost.backward_s + cost.update_s,
        update_s=0.0,
        exchange=OnLink(),
        released=cost.exchange,
        slice_s=0.0,
    )


def rerun_segments(chain: Chain, decisions: Sequence[Option]) -> None:
    """Moves the second forwards of a segment's units in ``chain`` to where they are: before the
    backward of its last unit."""
    for first, last in segments_of(decisions):
        before = slice(first, last)
        chain.backward_s[last] += chain.forward_s[before].sum()
        left = chain.backward_s[before] - chain.forward_s[before]
        chain.backward_s[before] = np.maximum(left, 0.0)  # below zero by rounding only
