"""What torch's caching allocator takes of a GPU for tensors of so many bytes.

It rounds sizes up to ``BLOCK_BYTES`` and cuts tensors of up to ``SMALL_BYTES`` from segments of
``SMALL_SEGMENT_BYTES``, others below ``LARGE_BYTES`` from segments of ``LARGE_SEGMENT_BYTES``; what
is larger has a segment of its own, rounded up to ``ROUND_BYTES``. The constants are those of
torch's c10/core/AllocatorConfig.h and CUDACachingAllocator.cpp (2.13: kMinBlockSize, kSmallSize,
kSmallBuffer, kMinLargeAlloc, kRoundLarge; kLargeBuffer, since 2.10 a default that
``large_segment_size_mb`` changes).

Parameters and optimizer state are counted tensor by tensor. Of everything else the sizes are not
known: it is taken to fill segments one after another. So it is the least that is reserved: what
lies unused between blocks that live for different times comes on top, for which a device's reserve
has room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from ..schema.options import Option
from .unit_memory import MemoryModel

MIB = 2**20
# Of a GPU's memory one part in so many is left to what torch's caching allocator has reserved and
# cannot give out: blocks between others, of sizes that nobody asks for (assumed, not measured).
FRAGMENTS_PART = 20
BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
ROUND_BYTES = 2 * MIB


def fragments_bytes(memory_bytes: int) -> int:
    """What of a GPU's memory is left to fragments."""
    return memory_bytes // FRAGMENTS_PART


def segments_bytes(sizes: Iterable[int]) -> int:
    """The segments that tensors of these bytes take."""
    small = middle = large = 0
    for size in sizes:
        if size <= SMALL_BYTES:
            small += _rounded(size, BLOCK_BYTES)
        elif size < LARGE_BYTES:
            middle += _rounded(size, BLOCK_BYTES)
        else:
            large += _rounded(size, ROUND_BYTES)
    return _rounded(small, SMALL_SEGMENT_BYTES) + _rounded(middle, LARGE_SEGMENT_BYTES) + large


def reserved_bytes(
    memory: MemoryModel, decisions: Sequence[Option], peaks_bytes: Sequence[int]
) -> tuple[int, ...]:
    """What is reserved at least on positions whose tensors take so many bytes at most."""
    copies = memory.model.goal.state_copies
    lasting: list[int] = []
    for k, option in enumerate(decisions):
        sizes = [size for _, size in memory.sizes_bytes(k, option)]
        groups = option.layout.groups
        parts = [ceil(size / groups) for size in sizes]
        lasting += parts if option.gathers else sizes
        lasting += copies * (parts if option.shards else sizes)
    whole, segments = sum(lasting), segments_bytes(lasting)
    return tuple(
        segments + _rounded(max(peak - whole, 0), LARGE_SEGMENT_BYTES) for peak in peaks_bytes
    )


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
