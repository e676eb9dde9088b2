"""The one order in which slices of gradients leave, the same on every rank.

A collective library demands that all ranks issue the same collectives in the same order, so the
order cannot be found out on the way: it is that of a simulation. Gradients get ready as backward
comes down to their unit; a link carries one slice at a time, and takes the most urgent of those
that are ready, that is the one whose unit comes first in forward (P3, arXiv 1905.03960). What
leaves by that order is never held back by a less urgent slice, but for the one under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class ReadyGroup(NamedTuple):
    """Gradients that get ready together, ``ready_s`` after backward began. The lowest ``urgency``
    goes first. ``slices`` are the seconds that each takes on its ``link``."""

    ready_s: float
    urgency: int
    slices: tuple[float, ...]
    link: int = 0


class SendSlot(NamedTuple):
    """Which slice of which load is sent."""

    load: int
    number: int


def send_order(
    loads: Sequence[ReadyGroup], *, sliced: bool = True, urgent: bool = True
) -> list[SendSlot]:
    """The turns in the order of their starts. Without ``urgent`` first come, first served; without
    ``sliced`` what has begun is sent to its end."""
    begun: list[tuple[float, int, SendSlot]] = []
    for link in sorted({load.link for load in loads}):
        mine = [i for i, load in enumerate(loads) if load.link == link and load.slices]
        begun += _on_link(loads, mine, sliced, urgent)
    return [turn for _, _, turn in sorted(begun)]


def _on_link(
    loads: Sequence[ReadyGroup], mine: Sequence[int], sliced: bool, urgent: bool
) -> list[tuple[float, int, SendSlot]]:
    """(start, place among the link's, turn) of each slice."""
    coming = sorted(mine, key=lambda i: (loads[i].ready_s, -loads[i].urgency), reverse=True)
    ready: list[tuple[int, int, int]] = []  # urgency or place in the queue, load, next slice
    found: list[tuple[float, int, SendSlot]] = []
    now, arrived = 0.0, 0
    while coming or ready:
        if not ready:
            now = max(now, loads[coming[-1]].ready_s)
        while coming and loads[coming[-1]].ready_s <= now:
            i = coming.pop()
            heappush(ready, (loads[i].urgency if urgent else arrived, i, 0))
            arrived += 1
        key, i, number = heappop(ready)
        last = number + 1 if sliced else len(loads[i].slices)
        for n in range(number, last):
            found.append((now, len(found), SendSlot(i, n)))
            now += loads[i].slices[n]
        if last < len(loads[i].slices):
            heappush(ready, (key, i, last))
    return found
