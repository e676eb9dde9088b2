"""What hosts that train apart exchange: how units are grouped into fragments, and what each takes.

A fragment of B bytes that n ranks of a host hold takes, in the way of the executor
(executor/local_steps.py): an all-reduce of B/n bytes among those in one place of all hosts, n of
them at once over the hosts' links, while training goes on; and packing and the outer update of B/n
bytes (when it has come), an all-gather of B bytes inside the host and writing them, for which
training waits. With a round's last fragment every rank averages the buffers that training changes.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from .collectives import Fabric, collective_s, ring_steps, rings

FRAGMENTS = 4
"""Into so many fragments a model is cut where the user does not say. With more of them less of it
is under way at a time, and averages are applied less late; each costs messages of its own."""


OUTER_UPDATES = 21 / 8
"""What is done to each byte of a fragment in a round, as a multiple of an update by SGD with
momentum: both take as long as memory does, which that update reads and writes 8 times; packing the
message 3 times, the outer step 13, mixing 3, writing the parameters 2 (executor/local_steps.py).
"""
WRITING = 2 / 21
"""Of that the writing, which each rank of a host does for all of the fragment."""


class FragmentCost(NamedTuple):
    """One fragment's exchange: seconds of its message on the link between hosts, seconds for which
    training waits as it is packed and when it has come, and bytes that a rank sends."""

    message_s: float
    applied_s: float
    sent_bytes: float


def first_units(unit_bytes: Sequence[int], count: int) -> tuple[int, ...]:
    """The first unit of each of at most ``count`` fragments of about equal bytes, none of them
    empty."""
    reached = list(accumulate(unit_bytes))
    total = reached[-1] if reached else 0
    first = [0]
    for k in range(1, len(unit_bytes)):
        # A fragment ends with the unit that brings it nearest to its part of the whole.
        due = total * len(first) / count
        enough = reached[k - 1] + unit_bytes[k] / 2 > due and len(first) < count
        if enough and any(unit_bytes[first[-1] : k]) and any(unit_bytes[k:]):
            first.append(k)
    return tuple(first)


def fragment_bytes(unit_bytes: Sequence[int], first: Sequence[int]) -> list[int]:
    """The bytes of each fragment."""
    bounds = [*first, len(unit_bytes)]
    return [sum(unit_bytes[a:b]) for a, b in pairwise(bounds)]


def fragment_cost(
    fabric: Fabric,
    hosts: int,
    size_bytes: int,
    seconds_per_byte: float,
    buffers_bytes: int = 0,
) -> FragmentCost:
    """The exchange of a fragment among ``hosts``, equal runs of positions, with an outer update
    that takes so many seconds for each byte, and of buffers that each rank averages with it."""
    inside = np.arange(fabric.cluster.world_size, dtype=np.int64).reshape(hosts, -1)
    across_ring, inside_ring = rings(fabric, np.ascontiguousarray(inside.T)), rings(fabric, inside)
    part_bytes = size_bytes / inside_ring.ranks
    gather_s = collective_s(fabric, inside_ring, "all_gather", size_bytes)
    sent = ring_steps("all_reduce", hosts) / hosts * (part_bytes + buffers_bytes)
    sent += ring_steps("all_gather", inside_ring.ranks) / inside_ring.ranks * size_bytes
    return FragmentCost(
        message_s=sum(
            collective_s(fabric, across_ring, "all_reduce", each)
            for each in (part_bytes, buffers_bytes)
        ),
        applied_s=gather_s + seconds_per_byte * ((1 - WRITING) * part_bytes + WRITING * size_bytes),
        sent_bytes=sent,
    )
