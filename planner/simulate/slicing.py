"""How gradients are packed into messages, and in which order those leave.

Packing is stated here alone: the simulation asks it, and the executor asks it. It knows no units
and no tensors, only sizes, and what may travel together. The order here is the executor's; the
simulation follows the same rule as its clock goes on (``events``).
"""

# [Note: The order of slices]
# A collective library demands that all ranks issue the same collectives in the same order. Ranks
# get their gradients ready at different moments, so none may decide by what it sees: there is one
# order over all gradients, fixed before backward begins, and the same on every rank.
#
# It is that of a simulation (``send_order``). Gradients get ready as backward comes down to their
# unit. The link carries one slice at a time and takes the most urgent of those that are ready: the
# one whose unit comes first in forward (P3, Jayarajan et al., arXiv 1905.03960). What leaves by
# that order is never held back by a less urgent slice, but for the one under way. As soon as one
# unit is fully sharded all leave first come, first served (``by_urgency``). Gradients that are
# released early are put between these by the executor (``place_released`` in gradients/release.py).
#
# Slices that stay inside hosts take their turn among those that cross, as if one link carried all:
# what ranks measure is one rate. The plan's prediction has them on a link of their own, where they
# may leave sooner.
#
# The first order uses the plan's times, of computing alone. Where those are wrong, a slice whose
# turn it is holds back others that are ready. So every rank measures, and now and then all agree on
# the latest times of any rank (``SendOrder`` in executor/gradients/order.py). That agreement
# travels in the background and is read at the beginning of the next backward, which all ranks begin
# after the same number of exchanges: so they all swap the order at the same step. All that goes in
# must be equal on all ranks, hence sizes are members' shares of the undivided size
# (``shared_bytes``), also where this rank has less of a parameter, or nothing.

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from ..cost.exchange import PACKED_BYTES, packed
from ..schema.plan import ExchangePolicy


class SliceSpec(NamedTuple):
    """One slice: part ``part`` of ``parts`` equal ones of a parameter, or several small parameters
    whole. ``parameters`` are indices."""

    parameters: tuple[int, ...]
    part: int = 0
    parts: int = 1


class GradientSize(NamedTuple):
    """What packing has to know of a gradient. Those of one ``kind`` may share a message; ``unit``
    is the first that uses it."""

    kind: Hashable
    unit: int
    bytes: int


def pack_buckets(gradients: Iterable[GradientSize], message_bytes: int) -> list[list[int]]:
    """The numbers of the gradients in each bucket, which is one message under the barrier.

    ``gradients`` come in the order of backward, with their undivided sizes. A bucket that one more
    would fill beyond ``message_bytes`` is closed; only a single gradient may be larger. Buckets are
    in the order in which their last gradients get ready, so that none holds back another that is.
    """
    return sorted(_group(gradients, message_bytes), key=lambda numbers: numbers[-1])


def pack_units(gradients: Iterable[GradientSize]) -> list[list[int]]:
    """The numbers of the gradients that get ready and are waited for together, under priority.

    ``gradients`` come in the order of backward, with the shares of a member. Those of one unit are
    together; so are units that follow each other and are small, as each message has its latency.
    """
    return _group(gradients, PACKED_BYTES, whole_units=True)


def _group(
    gradients: Iterable[GradientSize], message_bytes: int, *, whole_units: bool = False
) -> list[list[int]]:
    found: list[list[int]] = []
    last: dict[Hashable, tuple[list[int], int, int]] = {}  # its numbers, bytes and latest unit
    for number, (kind, unit, size) in enumerate(gradients):
        numbers, filled, latest = last.get(kind, ([], 0, unit))
        fits = filled + size <= message_bytes or (whole_units and unit == latest)
        if not numbers or not fits:
            numbers, filled = [], 0
            found.append(numbers)
        numbers.append(number)
        last[kind] = numbers, filled + size, unit
    return found


def cut(sizes_bytes: Sequence[int], message_bytes: int) -> tuple[SliceSpec, ...]:
    """The slices of gradients of those sizes, none above ``message_bytes``; packs of small ones
    first. Sizes of zero are left out.

    Large gradients are cut into equal parts, which are sent from where they lie.
    """
    packs: list[list[int]] = []
    room = 0
    whole: list[SliceSpec] = []
    for i, size in enumerate(sizes_bytes):
        if size <= 0:
            continue
        if not packed(size, message_bytes):
            parts = ceil(size / message_bytes)
            whole += [SliceSpec((i,), part, parts) for part in range(parts)]
            continue
        if not packs or size > room:
            packs.append([])
            room = message_bytes
        packs[-1].append(i)
        room -= size
    return (*(SliceSpec(tuple(pack)) for pack in packs), *whole)


def cut_lossy(
    exchange: ExchangePolicy, sizes_bytes: Sequence[int], whole: Sequence[bool], message_bytes: int
) -> tuple[SliceSpec, ...]:
    """The slices under an exchange that sends a part of each gradient, but for those that are sent
    ``whole`` (which come first). A part shares no message with others; top-k sends one of each,
    and low rank one of all, which are small."""
    groups = [[i for i, w in enumerate(whole) if w], *([i] for i, w in enumerate(whole) if not w)]
    if exchange == "low_rank":
        groups = [groups[0], [i for (i,) in groups[1:]]]
    found: list[SliceSpec] = []
    for group in groups:
        if exchange in ("topk", "low_rank") and not all(whole[i] for i in group):
            found.append(SliceSpec(tuple(group)))
            continue
        for one in cut([sizes_bytes[i] for i in group], message_bytes):
            found.append(one._replace(parameters=tuple(group[i] for i in one.parameters)))
    return tuple(found)


# -- the order in which slices leave ---------------------------------------------------------------


class ReadyGroup(NamedTuple):
    """Gradients that get ready together, ``ready_s`` after backward began. The lowest ``urgency``
    goes first. ``slices`` are the seconds that each takes."""

    ready_s: float
    urgency: int
    slices: tuple[float, ...]


class SendSlot(NamedTuple):
    """Which slice of which group is sent."""

    group: int
    number: int


def by_urgency(exchanges: Iterable[ExchangePolicy]) -> bool:
    """Whether slices under the schedule by priority leave by urgency, given the exchange of every
    unit. As soon as one is fully sharded all leave first come, first served: backward waits for
    its averages to free what they take, and urgent ones before them would hold it back."""
    return "fully_sharded" not in exchanges


def send_order(groups: Sequence[ReadyGroup], *, urgent: bool = True) -> list[SendSlot]:
    """The slots in the order of their starts (see [Note: The order of slices]). Without ``urgent``
    first come, first served."""
    filled = [i for i, group in enumerate(groups) if group.slices]
    coming = sorted(filled, key=lambda i: (groups[i].ready_s, -groups[i].urgency), reverse=True)
    ready: list[tuple[int, int, int]] = []  # urgency or place in the queue, group, next slice
    found: list[SendSlot] = []
    now, arrived = 0.0, 0
    while coming or ready:
        if not ready:
            now = max(now, groups[coming[-1]].ready_s)
        while coming and groups[coming[-1]].ready_s <= now:
            i = coming.pop()
            heappush(ready, (groups[i].urgency if urgent else arrived, i, 0))
            arrived += 1
        key, i, number = heappop(ready)
        found.append(SendSlot(i, number))
        now += groups[i].slices[number]
        if number + 1 < len(groups[i].slices):
            heappush(ready, (key, i, number + 1))
    return found
