"""Copies of gradients that live from a unit's backward until its exchange has been waited for.

Gradients that leave in slices are sent from where they lie; what is packed, received or put in
another order needs memory of its own. Per parameter, with P its shard's bytes and G peers:

    dense     P where it is packed with others (small ones)
    sharded   P (G - 1)/G received from peers; as much that is sent, and one's own P/G, take the
              gradient's place before anything is received
    top-k     what all peers send: G · ratio · P with numbers, and one's own message; the ratio
              is largest at the beginning, while top-k warms up
    dropped   nothing besides what dense has

Top-k makes its choice parameter by parameter, the largest counts. The gradient (a copy of it, where
it is kept) and the magnitudes of what is held are there beside the choice: values, and numbers in
int64. Those are there beside the message then, with its numbers in int32. When it has come, the
elements of all peers are copied out of it.

With buckets instead of slices gradients are views of these (``held``).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from ..cost.compute import shard_bytes
from ..schema.options import Option
from ..simulate.slicing import packed

FIRST_RATIO = 0.25
"""The share that top-k sends in its first backwards (the executor's ``Lossy.first_ratio``)."""

if TYPE_CHECKING:
    from ..cost.cost import CostModel


def travelling_bytes(model: CostModel, k: int, option: Option) -> float:
    """What unit ``k`` holds besides its gradients while they travel, under ``option``."""
    layout = option.layout
    if not model.sliced or layout.groups == 1 or option.gathers:
        return 0.0  # fully sharded gradients arrive in backward: ``gathering`` counts them
    unit = model.profile.units[k]
    trained = [p for p in model.owned[k] if p.trainable]
    sizes = [shard_bytes(unit, option.style, layout.degree, (p,)) for p in trained]
    if option.exchange == "topk":
        return (layout.groups + 1) * _message_bytes(model, option, sum(sizes))
    if option.exchange != "sharded":
        return float(sum(s for s in sizes if packed(s, model.bucket_bytes)))
    return sum(sizes) * (1 - 1 / layout.groups)


def _message_bytes(model: CostModel, option: Option, shard_bytes: float) -> float:
    """What a rank sends of a shard under top-k, at most."""
    early = option._replace(ratio=max(option.ratio, FIRST_RATIO))
    return model.payload_bytes(early, ceil(shard_bytes)) / max(option.layout.groups, 1)


def chosen_bytes(model: CostModel, option: Option, largest_bytes: float) -> float:
    """What top-k's choice among the largest parameter of a unit takes at most, beside what the
    unit's gradients take as they travel."""
    if option.exchange != "topk":
        return 0.0
    message = _message_bytes(model, option, largest_bytes)
    values = max(option.ratio, FIRST_RATIO) * largest_bytes
    numbers = message - values
    choosing = 2 * largest_bytes + values + 2 * numbers
    away = (option.layout.groups + 1) * message if model.sliced else 0.0
    return max(choosing - away, values + 3 * numbers)


def arrived_bytes(model: CostModel, option: Option, trained_bytes: float) -> float:
    """What elements that have come by top-k take outside their messages."""
    if option.exchange != "topk":
        return 0.0
    return option.layout.groups * _message_bytes(model, option, trained_bytes)
