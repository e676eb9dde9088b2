"""How long a device takes for an operation: a roofline whose roof depends on operation and size.

    seconds = KERNEL_S + max( products, bytes / bandwidth ) + bytes besides / bandwidth

Products are computed tile by tile (NVIDIA, Matrix Multiplication Background User's Guide: tile and
wave quantisation): the result is cut into tiles, each multiprocessor computes one at a time, and
all wait for the last wave; an edge takes a whole tile, and few tiles leave multiprocessors idle.
Smaller tiles reach less of the peak. The best of the tiles, and for products with a long inner
dimension the best division of that, is taken, as libraries do.

Where the constants are from:

- ``FULL_REACHED``, ``TILES``, ``WEIGHTS_REACHED``, and in ``operations`` what laying out channels
  and pooling take: fitted on DeepPool's layer times of Inception-v3 on an A100 (TF32), and tested
  on those of VGG-16 and WideResNet-101-2.
- ``Datasheet.products`` in half precision: fitted on throughputs of training MPT, and tested on
  those of Llama 2.
- Attention: Dao, FlashAttention-2, 2023 (arXiv 2307.08691): 50 to 73% of an A100's peak forward, up
  to 63% backward; Shah et al., FlashAttention-3, 2024 (arXiv 2407.08608): the same kernels reach
  35% of an H100's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from .catalogue import GIGA, TERA, Datasheet
from .operations import Operation, OperationLog

# Share of the memory bandwidth that streaming kernels reach: the same on A100 and H100. Read off
# the ReLU rows of DeepPool's VGG table; copies measured on an H100 reach 3.02 of 3.35 TB/s, max
# pooling in the Inception table 0.83.
BANDWIDTH_REACHED = 0.87

# A kernel's launch from Python, which small operations cannot beat.
KERNEL_S = 5e-6

# Share of the peak that large products reach in TF32 and float32.
FULL_REACHED = 0.87

# Rows and columns of the tiles, and what they reach compared with the best.
TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.74), (64, 64, 0.5))
# Inner dimensions are padded to this.
TILE_DEPTH = 32
# An inner dimension may be divided into so many, each of at least so much.
DIVISIONS = (2, 4, 8, 16, 32, 64, 128)
DIVISION_DEPTH = 128

# Gradients of convolutions' weights, whose inner dimension is gathered, reach so much less.
WEIGHTS_REACHED = 0.79

# Attention's backward compared with its forward, 63% against 73%.
ATTENTION_BACK = 0.86

# Kernels without tensor cores, for convolutions of many small groups.
DIRECT_REACHED = 0.5


def bandwidth(sheet: Datasheet) -> float:
    """Bytes per second that kernels reach."""
    return sheet.gbyte_s * GIGA * BANDWIDTH_REACHED


@lru_cache(maxsize=1 << 16)
def seconds(operation: Operation, sheet: Datasheet) -> float:
    """The seconds of one operation on a device."""
    op = operation
    streamed = op.traffic / bandwidth(sheet)
    if op.kind == "stream":
        return KERNEL_S + streamed
    computed = KERNEL_S + max(_computed(op, sheet), streamed)
    found = computed + op.besides / bandwidth(sheet)
    if op.kind.startswith("conv") and op.groups > 1:
        flops = 2 * op.m * op.n * op.k * op.groups
        direct = flops / (sheet.float32 * TERA * DIRECT_REACHED)
        found = min(found, KERNEL_S + max(direct, 2 * streamed))
    return found


def _computed(op: Operation, sheet: Datasheet) -> float:
    peak = sheet.peak(op.rate)
    if op.kind == "attention":
        return op.flops / (peak * sheet.attention)
    if op.kind == "attention_back":
        return op.flops / (peak * sheet.attention * ATTENTION_BACK)
    reached = sheet.products if op.rate == "half" else FULL_REACHED
    if op.kind == "other":
        return op.flops / (peak * reached)
    reached *= WEIGHTS_REACHED if op.kind == "conv_weight" else 1.0
    # Forward convolutions are not divided along their inner dimension.
    divisions = (1,) if op.kind == "conv" else (1, *DIVISIONS)
    return min(
        _tiled(op, rows, columns, parts, sheet) / (peak * reached * share)
        for a, b, share in TILES
        for rows, columns in {(a, b), (b, a)}
        for parts in divisions
        if parts == 1 or op.k / parts >= DIVISION_DEPTH
    )


def _tiled(op: Operation, rows: int, columns: int, parts: int, sheet: Datasheet) -> float:
    """Operations that go by until the last wave is done, as if all multiprocessors were busy."""
    tiles = ceil(op.m / rows) * ceil(op.n / columns) * op.groups * parts
    waves = ceil(tiles / sheet.multiprocessors)
    depth = ceil(op.k / parts / TILE_DEPTH) * TILE_DEPTH
    work = waves * sheet.multiprocessors * 2.0 * rows * columns * depth
    if parts > 1:
        # Partial sums are written and read again, in float32, from the cache for the most part.
        sums = 2 * parts * op.m * op.n * op.groups * 4 / (2 * sheet.gbyte_s * GIGA)
        work += sums * sheet.peak(op.rate)
    return work


class CountedWork(NamedTuple):
    """What runs at two batch sizes, from which follows what does at others."""

    sizes: tuple[int, int]
    few: Sequence[Operation]
    many: Sequence[Operation]

    def seconds(self, batch: float, sheet: Datasheet) -> float:
        """Seconds at a batch size: sizes of operations grow linearly with it. Where other
        operations run at the two sizes, their seconds are taken to do so."""
        part = (batch - self.sizes[0]) / (self.sizes[1] - self.sizes[0])
        if [op[:2] for op in self.few] == [op[:2] for op in self.many]:
            pairs = Counter(zip(self.few, self.many, strict=True))
            return sum((n * seconds(a.toward(b, part), sheet) for (a, b), n in pairs.items()), 0.0)
        few, many = (sum(seconds(op, sheet) for op in ops) for ops in (self.few, self.many))
        return max(few + part * max(many - few, 0.0), 0.0)


def estimated_s(work: Callable[[], object], sheet: Datasheet) -> float:
    """Seconds of the operations of ``work``, which is done on the meta device."""
    log = OperationLog()
    with log:
        work()
    return sum(seconds(operation, sheet) for operation in log.forward.get("", ()))
