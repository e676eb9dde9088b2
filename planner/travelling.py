"""Copies of gradients that live from a unit's backward until its exchange has been waited for.

Gradients that leave in slices are sent from where they lie; what is packed, received or put in
another order needs memory of its own. Per parameter, with P its shard's bytes and G peers:

    dense     P where it is packed with others (small ones)
    sharded   P received from peers and P/G of averages; a copy of P, if it does not lie as it is
              sent (one slice, chunks of equal size), takes the gradient's place when all is sent
    top-k     what all peers send: G · ratio · P with numbers, and one's own message; the ratio
              is largest at the beginning, while top-k warms up
    dropped   nothing besides what dense has

With buckets instead of slices gradients are views of these (``memory``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import Option
from .shares import shard_bytes
from .slices import packed

FIRST_RATIO = 0.25
"""The share that top-k sends in its first backwards (the executor's ``Lossy.first_ratio``)."""

if TYPE_CHECKING:
    from .cost import CostModel


def travelling_bytes(model: CostModel, k: int, option: Option) -> float:
    """What unit ``k`` holds besides its gradients while they travel, under ``option``."""
    layout = option.layout
    if not model.sliced or layout.groups == 1:
        return 0.0
    unit = model.profile.units[k]
    trained = [p for p in model.owned[k] if p.trainable]
    sizes = [shard_bytes(unit, option.style, layout.degree, (p,)) for p in trained]
    if option.exchange == "topk":
        early = option._replace(ratio=max(option.ratio, FIRST_RATIO))
        every = model.payload_bytes(early, sum(sizes))
        return every + every / layout.groups
    if option.exchange != "sharded":
        return float(sum(s for s in sizes if packed(s, model.bucket_bytes)))
    return sum(sizes) * (1 + 1 / layout.groups)


def copied_bytes(model: CostModel, k: int, option: Option) -> float:
    """What of unit ``k``'s gradients is there twice while a sharded exchange sends it."""
    peers = option.layout.groups
    if not model.sliced or peers == 1 or option.exchange != "sharded":
        return 0.0
    unit, limit = model.profile.units[k], model.bucket_bytes
    trained = [p for p in model.owned[k] if p.trainable]
    sizes = [shard_bytes(unit, option.style, option.layout.degree, (p,)) for p in trained]
    return float(sum(size for size in sizes if not _lies_in_rows(size, limit, peers)))


def _lies_in_rows(size_bytes: int, limit_bytes: int, peers: int) -> bool:
    whole = size_bytes <= limit_bytes and not packed(size_bytes, limit_bytes)
    return whole and size_bytes % peers == 0
