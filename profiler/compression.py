"""What choosing, rounding and packing gradients takes, and making gradients of what has come.

It is measured with the executor's own functions on a slice of a gradient, after a pause and with
other data in the caches: slices are waited for, and a processor that has waited takes up to twice
as long for the first millisecond of work, and what was kept of a gradient, or has come of it, was
not touched for a step. On a GPU it is what the device takes by itself; see [Note: Rates on a GPU]
below. What a dense exchange does too (the division by the number of ranks) is left
out: it is part of the executor's measured work.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ..executor.gradients.feedback import ErrorFeedback, l1
from ..executor.gradients.int8 import average, pack
from ..executor.gradients.low_rank import Directions
from ..executor.gradients.topk import add_parts, largest, packed, topk_elements
from ..executor.gradients.wire import WIRE_DTYPES, decode, encode, wire_dtype
from ..planner.cost.exchange import thin_share
from ..planner.schema.profile import CODING_FIXED, CodedExchange, CompressionRate
from .catalogue import Datasheet
from .fidelity import RANKS, RATIOS
from .roofline import estimated_s
from .timing import Taken, timed

# [Note: Rates on a GPU]
# A cost is a rate times the bytes of a unit's gradient, so whatever a slice takes however small it
# is becomes a cost of each byte. On a GPU that was most of it. Low rank's decomposition and the
# fourteen launches of int8 took the host longer than the device, and the wait for the device came
# on top. So the device is kept busy while the host issues what is timed, as where updates are.
# What is left of a fixed part is the device's own: the least that each kernel takes, and the wait
# of top-k, whose host has to know how many elements it has found. A step has that once for each
# parameter, or slice, however small it is: without it low rank would be nearly free. So two sizes
# are measured, the larger as large as slices become and as the pieces that the executor turns at
# once, and a line through both tells what is fixed.

# Elements of the slice by the type of device, 2 MiB of float32: plans have slices of 1, 4 and 16
# MiB. Elsewhere 16.
ELEMENTS = {"cpu": 2**19}
LARGE_ELEMENTS = 2**22
SMALL_ELEMENTS = 2**16
"""Of the slice that what is fixed is told by, elsewhere than on CPUs."""
ROWS = 2**9
"""Of the slice as a matrix."""
PAUSE_S = 0.005
CACHED_BYTES = 2**26  # more than caches hold
PEERS = 4
ROUNDS = 7


class Coding(NamedTuple):
    """What is done to a gradient before it is sent, and when it has come; ``plain`` is what a dense
    exchange does then. Where all get what each of their ``peers`` has sent, ``after`` is of that of
    all, and ``plain`` of one's. ``ratio`` is the share of the elements that is sent, if it is the
    time's matter."""

    exchange: CodedExchange
    before: Callable[[], object]
    after: Callable[[], object]
    plain: Callable[[], object]
    ratio: float | None = None
    peers: int = 1

    @property
    def parts(self) -> tuple[Callable[[], object], ...]:
        return self.before, self.after, self.plain


def wire_codings(gradient: Tensor) -> Iterator[Coding]:
    """Those of the wire formats that make a flat gradient smaller."""
    dtype = WIRE_DTYPES["bf16"]
    if wire_dtype("bf16", gradient.dtype) == dtype:
        yield Coding(
            "bf16",
            lambda: encode(gradient, dtype),
            lambda: decode(gradient, dtype, 1),
            lambda: decode(gradient, gradient.dtype, 1),
        )


def part_codings(gradient: Tensor) -> Iterator[Coding]:
    """Those of the exchanges that send a part of a flat gradient."""
    for ratio in RATIOS["topk"]:
        yield _topk(gradient, ratio)
    for rank in (RANKS[0], RANKS[-1]):
        yield _low_rank(gradient, rank)
    held = ErrorFeedback()
    held.restore(torch.zeros_like(gradient))
    # What waits is added up, and its size is agreed on.
    yield Coding("dropped", lambda: l1(held.add(gradient)) + l1(gradient), _nothing, _nothing)
    mean = torch.empty_like(gradient)
    rounded, residual = gradient.clone(), torch.zeros_like(gradient)
    message = pack(gradient.clone(), torch.zeros_like(gradient))
    yield Coding(
        "int8",
        lambda: pack(rounded, residual, on_stream=gradient.is_cuda),
        lambda: average([message] * PEERS, mean),
        lambda: average([message], mean),
        peers=PEERS,
    )


def _topk(gradient: Tensor, ratio: float) -> Coding:
    held = ErrorFeedback()
    held.restore(torch.zeros_like(gradient))
    average, count = torch.empty_like(gradient), topk_elements(gradient.numel(), ratio)
    step = gradient.numel() // count
    index = torch.arange(0, gradient.numel(), step, device=gradient.device)
    values = gradient[index]

    def choose() -> None:
        chosen = largest(held.add(gradient), count)
        packed(held.take(chosen), chosen)

    def put_together(peers: int) -> None:
        add_parts([(values, index)] * peers, average.zero_())

    return Coding(
        "topk", choose, lambda: put_together(PEERS), lambda: put_together(1), ratio, PEERS
    )


def _low_rank(gradient: Tensor, rank: int) -> Coding:
    rows, columns = ROWS, gradient.numel() // ROWS
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    directions = Directions(rows, columns, rank, dtype, gradient.device, "")
    values, mean = gradient.clone().view(rows, columns), torch.empty_like(gradient)
    residual, on_stream = torch.zeros_like(values), gradient.is_cuda
    return Coding(
        "low_rank",
        lambda: directions.thin(values, residual, on_stream=on_stream),
        # A step takes the one thin matrix that was sent, of one side or the other.
        lambda: directions.take(
            (directions.left if directions.by_rows else directions.right), mean.view_as(values)
        ),
        lambda: decode(gradient, gradient.dtype, 1),
        thin_share([(rows, columns)], rank),
    )


def _nothing() -> None:
    pass


def compression_rates(device: torch.device, dtype: torch.dtype) -> tuple[CompressionRate, ...]:
    """The measured rates on a device, of gradients of a type."""
    if not dtype.is_floating_point:
        return ()
    # Of its own: a profile leaves the random state as it was.
    generator = torch.Generator(device).manual_seed(0)
    if device.type in ELEMENTS:
        sizes: tuple[int, ...] = (ELEMENTS[device.type],)
    else:
        sizes = (LARGE_ELEMENTS, SMALL_ELEMENTS)
    by_size = []
    for count in sizes:
        gradient = torch.randn(count, device=device, generator=generator).to(dtype)
        by_size.append([
            _rate(coding, gradient.nbytes, *_medians(coding, device))
            for coding in (*wire_codings(gradient), *part_codings(gradient))
        ])  # fmt: skip
    if len(sizes) == 1:
        return tuple(by_size[0])
    large_bytes, small_bytes = (count * dtype.itemsize for count in sizes)
    return tuple(
        _line(large, large_bytes, small, small_bytes) for large, small in zip(*by_size, strict=True)
    )


def _line(
    large: CompressionRate, large_bytes: int, small: CompressionRate, small_bytes: int
) -> CompressionRate:
    """The rate, and what is fixed, of a coding that was measured at two sizes as if nothing were
    fixed."""
    fields: dict[str, float] = {}
    for rate, fixed in CODING_FIXED.items():
        took, less = getattr(large, rate) * large_bytes, getattr(small, rate) * small_bytes
        fields[rate] = max((took - less) / (large_bytes - small_bytes), 0.0)
        fields[fixed] = max(less - fields[rate] * small_bytes, 0.0)
    # Where the slice was cut otherwise (thin matrices), the larger one tells the share.
    return msgspec.structs.replace(large, **fields)


def _rate(
    coding: Coding, size_bytes: int, before: float, after: float, plain: float
) -> CompressionRate:
    """The rate of a coding whose parts take so many seconds."""
    more = max(after - plain, 0.0)
    each = more / (coding.peers - 1) if coding.peers > 1 else 0.0
    once = max(plain - each, 0.0) if coding.peers > 1 else more
    return CompressionRate(
        exchange=coding.exchange,
        ratio=coding.ratio,
        seconds_per_byte=before / size_bytes,
        received_seconds_per_byte=once / size_bytes,
        gathered_seconds_per_byte=each / size_bytes,
    )


def _medians(coding: Coding, device: torch.device) -> tuple[float, float, float]:
    """Seconds of each part; they take turns, so that what disturbs one disturbs all."""

    other = torch.zeros(CACHED_BYTES, dtype=torch.uint8, device=device).view(torch.float32)

    def waited(part: Callable[[], object], ahead_s: float = 0.0) -> Taken:
        time.sleep(PAUSE_S)
        other.add_(1.0)
        return timed(part, device, ahead_s)

    for part in coding.parts:
        waited(part)  # makes what is used again, and does not count
    ahead_s = [0.0 for _ in coding.parts]
    if device.type != "cpu":
        # On an idle device: behind others the host may wait within a part, and longer each time.
        ahead_s = [waited(part).issued_s for part in coding.parts]
    rows = [
        [waited(part, ahead).done_s for part, ahead in zip(coding.parts, ahead_s, strict=True)]
        for _ in range(ROUNDS - 1)
    ]
    before, after, plain = (median(column) for column in zip(*rows, strict=True))
    return before, after, plain


def estimated_rates(dtype: torch.dtype, sheet: Datasheet) -> tuple[CompressionRate, ...]:
    """The rates of a device that is not here, by what is done to a gradient: those of wire formats,
    as what exchanges keep that send a part has to be measured."""
    if not dtype.is_floating_point:
        return ()
    gradient = torch.empty(LARGE_ELEMENTS, dtype=dtype, device="meta")
    return tuple(
        _rate(coding, gradient.nbytes, *(estimated_s(part, sheet) for part in coding.parts))
        for coding in wire_codings(gradient)
    )
