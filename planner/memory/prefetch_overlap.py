"""What one unit holds while other units work: parameters on their way, and feature maps.

Parameters that are fully sharded (exchange ``fully_sharded``) are whole only while they are used.
Each rank keeps its part of them. While a unit works, forward or backward, its own are whole, and
those of the unit that comes next are on their way. In backward the gradients of the two units after
it are on their way too, what belongs to others as sent and as received; the executor waits before
there are those of a third. An embedding's backward does not use its parameters, so the parameters
that come next there are those of the unit before it.

``gathered`` counts this for units that have parameters themselves. It counts their neighbours
whatever exchange these have, so that a unit's bytes depend on its own decision alone: an upper
bound. Tied parameters count as whole throughout: in backward they are, from their first use to
their last. With micro-batches gradients are added up whole.

``prefetch_overlaps`` counts the rest: what stands at units without such parameters (a ReLU, an
addition in the model's own code) between the ones that have some. It does so for offloaded feature
maps as well, both ways: a unit's leave for the host while the next ``COPIES_AHEAD`` units that may
be offloaded are updated and run forward, and are called back when backward is at the last of these;
they are there while those and whatever stands between them work. The executor waits where it would
be at more units. A unit's output is there until the last unit that it enters has run forward, and
again from that one's backward on. A unit takes these bytes by its own decision, so the points of
the timeline stay sums over units: a point gets a multiple of a field of each unit that overlaps
it.
"""

from collections import deque
from collections.abc import Iterator
from math import ceil
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.compute import shard_bytes
from ..cost.exchange import Exchanges, packed
from ..cost.step_time import Vector
from ..cost.structure import Structure
from ..schema.options import Option

# So many times what others own of a gradient it takes, besides this rank's own part, until it has
# arrived: what is sent, what is received.
GRADIENT_COPIES = 2
COPIES_AHEAD = 1
"""Offloaded units whose feature maps are on their way, to the host or back, beside those of the
unit at work. One is enough: copies run under a unit's computing, and what is not over by then would
hold back every later one as well."""


class UnshardedBytes(NamedTuple):
    """Bytes of one unit whose parameters are fully sharded.

    saved              of parameters, and as many of their gradients, that this rank need not keep
                       between uses
    forward            of parameters that are whole in its forward
    before             of others' parameters that are whole in its backward
    backward_more      of what its backward has more than its forward
    unsharded          its own parameters, while they are whole
    gradients_sent     its gradients on their way
    next_gradients     the next unit's gradients on their way as its own leave
    """

    saved: int = 0
    forward: int = 0
    before: int = 0
    backward_more: int = 0
    unsharded: int = 0
    gradients_sent: int = 0
    next_gradients: int = 0


def gathered(structure: Exchanges, k: int, option: Option) -> UnshardedBytes:
    """What unit ``k`` keeps and holds where its parameters are fully sharded; nothing elsewhere."""
    groups, degree = option.layout.groups, option.layout.degree
    if not option.gathers or groups == 1:
        return UnshardedBytes()
    own = own_bytes(structure, k, option)
    plain = Option(option.layout) if degree == 1 else option
    neighbours = _neighbours(structure, k)
    before, after, beyond = (0 if n is None else own_bytes(structure, n, plain) for n in neighbours)
    before_coming, after_coming = (
        0 if n is None else packed_copies_bytes(structure, n, plain) for n in neighbours[:2]
    )
    saved, *later = (bytes_ - ceil(bytes_ / groups) for bytes_ in (own, after, beyond))
    copies = GRADIENT_COPIES * structure.wire_share(option.wire)
    return UnshardedBytes(
        saved=saved,
        forward=own + after + after_coming,
        before=before + before_coming,
        backward_more=before + before_coming + ceil(copies * sum(later)) - after - after_coming,
        unsharded=own,
        gradients_sent=ceil(copies * saved),
        next_gradients=ceil(copies * later[0]),
    )


def packed_copies_bytes(structure: Exchanges, k: int, option: Option) -> int:
    """What small parameters of a unit take besides while they are put together: they travel in one
    message, as it is received, and this rank's part of it as it is sent."""
    unit, degree = structure.profile.units[k], option.layout.degree
    sizes = [shard_bytes(unit, option.style, degree, (p,)) for p in structure.untied[k]]
    small = [size for size in sizes if packed(size, structure.message_bytes)]
    # One alone is received where it belongs.
    return sum(small) + ceil(sum(small) / option.layout.groups) if len(small) > 1 else 0


def neighbours_bytes(structure: Structure, k: int) -> tuple[tuple[int, ...], ...]:
    """All of a unit and its neighbours that ``gathered`` depends on."""
    neighbours = (k, *_neighbours(structure, k))
    return tuple(
        () if i is None else tuple(p.bytes for p in structure.untied[i]) for i in neighbours
    )


def _neighbours(structure: Structure, k: int) -> tuple[int | None, int | None, int | None]:
    """The unit that gathers parameters before ``k`` in backward, and the two after it."""
    units = structure.profile.units
    # An embedding's backward does not use its parameters.
    earlier = (i for i in reversed(range(k)) if units[i].kind != "embedding")
    before = next((i for i in earlier if own_bytes(structure, i)), None)
    later = (i for i in range(k + 1, len(units)) if own_bytes(structure, i))
    return before, next(later, None), next(later, None)


def own_bytes(structure: Structure, k: int, option: Option | None = None) -> int:
    """A member's ``untied`` parameters of a unit; without an ``option`` those of the whole unit."""
    if option is None:
        return sum(p.bytes for p in structure.untied[k])
    unit, degree = structure.profile.units[k], option.layout.degree
    return shard_bytes(unit, option.style, degree, structure.untied[k])


NeighbourField = Literal["unsharded", "gradients_sent", "offloaded", "offloaded_output"]
OverlapPoint = Literal["neighbours_forward", "neighbours_backward", "neighbours_update"]


class PrefetchOverlap(NamedTuple):
    """At the ``point`` of unit ``at[i]`` stands the ``field`` of unit ``of[i]``."""

    point: OverlapPoint
    field: NeighbourField
    at: npt.NDArray[np.int64]
    of: npt.NDArray[np.int64]

    def added(self, values: Vector) -> Vector:
        """For each unit the sum of ``values`` over the other units whose bytes are there at its
        point."""
        return _sums(self.at, values[self.of], len(values))

    def priced(self, prices: Vector) -> Vector:
        """For each unit what one byte of its field costs, at the ``prices`` of the points."""
        return _sums(self.of, prices[self.at], len(prices))


def _sums(where: npt.NDArray[np.int64], values: Vector, count: int) -> Vector:
    return np.asarray(np.bincount(where, weights=values, minlength=count), dtype=np.float64)


def prefetch_overlaps(structure: Structure) -> tuple[PrefetchOverlap, ...]:
    """All pairs of a unit at work and another whose bytes may be there then, for any decisions."""
    found: dict[tuple[OverlapPoint, NeighbourField], list[tuple[int, int]]] = {}
    for point, field, at, of in (*_fully_sharded(structure), *_offloaded(structure)):
        found.setdefault((point, field), []).append((at, of))
    return tuple(
        PrefetchOverlap(point, field, *(np.array(v) for v in zip(*places, strict=True)))
        for (point, field), places in found.items()
    )


_Overlapping = tuple[OverlapPoint, NeighbourField, int, int]


def _fully_sharded(structure: Structure) -> Iterator[_Overlapping]:
    """At units without parameters of their own, between the nearest ones that have some."""
    last: int | None = None
    for at in range(len(structure.profile.units)):
        if own_bytes(structure, at):
            last = at
            continue
        before, after, beyond = _neighbours(structure, at)
        # Forward calls for nothing before the first unit with parameters is reached.
        if last is not None:
            yield "neighbours_forward", "unsharded", at, last
            if after is not None:
                yield "neighbours_forward", "unsharded", at, after
        if before is not None:
            yield "neighbours_backward", "unsharded", at, before
        if after is not None:
            yield "neighbours_backward", "gradients_sent", at, after
        if beyond is not None:
            yield "neighbours_backward", "gradients_sent", at, beyond


def _offloaded(structure: Structure) -> Iterator[_Overlapping]:
    """What is on its way at the next units that may be offloaded, and at all between; of outputs
    also what enters units after these."""
    waiting: deque[int] = deque(maxlen=COPIES_AHEAD)
    far: list[int] = []
    for at, unit in enumerate(structure.profile.units):
        far = [of for of in far if structure.last_use[of] >= at]
        here: tuple[tuple[NeighbourField, int], ...] = (
            *(("offloaded", of) for of in waiting),
            *(("offloaded_output", of) for of in far if of not in waiting),
        )
        for field, of in here:
            yield "neighbours_update", field, at, of
            yield "neighbours_forward", field, at, of
            yield "neighbours_backward", field, at, of
        if not unit.fixed and unit.whole.saved(1.0) > 0:
            waiting.append(at)
            far.append(at)
