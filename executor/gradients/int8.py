"""Exchange in eight bits: each rank sends its gradient as whole numbers from -127 to 127, with a
scale for each run of elements; what rounding leaves is added to the next gradient.

Every rank gets what each of the others has sent and adds it up in the gradient's own type, in the
order of ranks: sums are alike on all of them, bit for bit, and nothing but what is sent is rounded.
On two ranks that is a quarter of the bytes that an all-reduce sends.
"""

from collections.abc import Iterator, Sequence
from math import ceil, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.cost.exchange import INT8_BLOCK
from ...planner.simulate.slicing import SliceSpec
from .buckets import GradParam
from .feedback import LossyGradGroup
from .flat_shard import flat
from .slices import GatheredSlice, Slice, exact_slice

# Elements that are turned at once: their copies stay in a cache. A multiple of ``INT8_BLOCK``.
_PIECE = 2**18
_MOST = 127.0
# The reciprocal of a smaller scale may be too large for its type.
_LEAST = torch.finfo(torch.float32).tiny


class Quantized(NamedTuple):
    """Elements of a gradient: ``numbers`` (whole ones, of any type) times the scale of their
    run."""

    numbers: Tensor
    scales: Tensor


def quantize(values: Tensor, scratch: Tensor | None = None) -> Quantized:
    """Flat values, each run of ``INT8_BLOCK`` by its own largest; the numbers lie in ``scratch``,
    flat memory as ``scratch_for`` makes it, or in some of their own. A run that holds what is not
    finite has a scale that is not, and so is none of its elements, whatever their numbers are."""
    runs = _runs(values.to(_computed_in(values.dtype)))
    numbers = torch.empty_like(runs) if scratch is None else scratch[: runs.numel()].view_as(runs)
    scales = torch.abs(runs, out=numbers).amax(dim=1).to(torch.float32).div_(_MOST)
    scales.clamp_min_(_LEAST)
    torch.mul(runs, scales.reciprocal()[:, None], out=numbers).round_()
    return Quantized(numbers.view(-1)[: values.numel()], scales)


def dequantize(sent: Quantized, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
    """What quantized values stand for, flat: in ``scratch`` but for a type of 16 bits, or in memory
    of their own."""
    count = sent.numbers.numel()
    if scratch is None:
        scratch = sent.numbers.new_empty(count, dtype=_computed_in(dtype))
    numbers = scratch[:count].copy_(sent.numbers)
    return _scaled(Quantized(numbers, sent.scales)).to(dtype)


def _scaled(sent: Quantized) -> Tensor:
    """What quantized values stand for, in the place of their numbers."""
    runs = sent.numbers.numel() // INT8_BLOCK
    whole, rest = sent.numbers[: runs * INT8_BLOCK], sent.numbers[runs * INT8_BLOCK :]
    whole.view(runs, INT8_BLOCK).mul_(sent.scales[:runs, None])
    rest.mul_(sent.scales[runs:])
    return sent.numbers


def scratch_for(values: Tensor) -> Tensor:
    """Memory for the numbers of flat values, piece by piece."""
    runs = ceil(min(values.numel(), _PIECE) / INT8_BLOCK)
    return values.new_empty(runs * INT8_BLOCK, dtype=_computed_in(values.dtype))


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    # In 16 bits scales would be rounded so far down that numbers come out larger than they may be.
    return torch.promote_types(dtype, torch.float32)


def _runs(values: Tensor) -> Tensor:
    rows = -(-values.numel() // INT8_BLOCK)
    if rows * INT8_BLOCK == values.numel():
        return values.view(rows, INT8_BLOCK)
    padded = values.new_zeros(rows * INT8_BLOCK)
    padded[: values.numel()] = values
    return padded.view(rows, INT8_BLOCK)


def message_bytes(numel: int) -> int:
    """The size of a message of so many elements: their numbers, and a scale for each run."""
    return numel + torch.float32.itemsize * ceil(numel / INT8_BLOCK)


def pack(values: Tensor, residual: Tensor, *, on_stream: bool = False) -> Tensor:
    """The message of flat ``values`` and the ``residual`` of those before, in which what this one
    leaves is put. Values are not needed after that, and changed. With ``on_stream`` the host does
    not wait for what it launches."""
    count, scratch = values.numel(), scratch_for(values)
    message = torch.empty(message_bytes(count), dtype=torch.uint8, device=values.device)
    for piece, numbers, scales in _pieces(message, count):
        total = values[piece].add_(residual[piece])
        sent = quantize(total, scratch)
        numbers.copy_(sent.numbers)
        scales.copy_(sent.scales.view(-1, 1).view(torch.uint8))
        stands_for = _scaled(sent).to(total.dtype)
        _keep(total, sent.scales, stands_for, residual[piece], on_stream=on_stream)
    return message


def _keep(
    total: Tensor, scales: Tensor, stands_for: Tensor, residual: Tensor, *, on_stream: bool
) -> None:
    """Puts what ``stands_for`` leaves of ``total`` into the residual, but for runs that are not
    finite: these show on all ranks, and must not stay for later steps."""
    if not on_stream and isfinite(scales.sum()):  # nearly always, and three times as quick
        torch.sub(total, stands_for, out=residual)
        return
    finite = torch.isfinite(scales)
    whole = finite.repeat_interleave(INT8_BLOCK, output_size=len(finite) * INT8_BLOCK)
    torch.where(whole[: total.numel()], total.sub_(stands_for), residual, out=residual)


def average(messages: Sequence[Tensor], into: Tensor) -> None:
    """Writes the mean of messages into the flat ``into``."""
    scratch = scratch_for(into)
    for parts in zip(*(_pieces(message, into.numel()) for message in messages), strict=True):
        mean = into[parts[0][0]]
        fits = mean.dtype == scratch.dtype
        for index, (_, numbers, scales) in enumerate(parts):
            own = scales.clone().view(torch.float32).view(-1)  # where it lies may be any byte
            own.div_(len(messages))
            room = mean if fits and index == 0 else scratch
            values = dequantize(Quantized(numbers, own), mean.dtype, room)
            if index > 0:
                mean.add_(values)
            elif not fits:
                mean.copy_(values)


def _pieces(message: Tensor, count: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """A message of ``count`` elements piece by piece: which elements, their numbers, and the bytes
    of their scales, a row for each."""
    numbers = message[:count].view(torch.int8)
    scales = message[count:].view(-1, torch.float32.itemsize)
    for start in range(0, count, _PIECE):
        piece = slice(start, min(start + _PIECE, count))
        yield piece, numbers[piece], scales[start // INT8_BLOCK : ceil(piece.stop / INT8_BLOCK)]


class Int8Slice(GatheredSlice):
    """A part of a parameter's gradient in eight bits."""

    @property
    def message_bytes(self) -> int:
        return message_bytes(self.elements.stop - self.elements.start)

    @property
    def shared_bytes(self) -> int:
        (param,) = self.params
        elements = param.shared_bytes // param.parameter.element_size() // self.slice_spec.parts
        return param.group.size * message_bytes(elements) // 2

    def take(self, messages: Sequence[Tensor], gradient: Tensor) -> None:
        average(messages, flat(gradient)[self.elements])


class Int8GradGroup(LossyGradGroup):
    """Gradients that travel in eight bits; what rounding leaves is held."""

    def _slice(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
        if params[0].whole:
            return exact_slice(params, slice_spec)
        return Int8Slice(params[0], slice_spec)

    def start(self, one: Slice) -> None:
        if not isinstance(one, Int8Slice):
            super().start(one)
            return
        (param,) = one.params
        values = flat(self.gradients[param])[one.elements]
        kept = flat(self.held(param))[one.elements]
        one.gather(pack(values, kept, on_stream=param.group.on_stream))
