"""Exchange in eight bits: each rank sends its gradient as whole numbers from -127 to 127, with a
scale for each run of elements; what rounding leaves is added to the next gradient.

Every rank gets what each of the others has sent and adds it up in the gradient's own type, in the
order of ranks: sums are alike on all of them, bit for bit, and nothing but what is sent is rounded.
On two ranks that is a quarter of the bytes that an all-reduce sends.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.cost.exchange import INT8_BLOCK
from ...planner.simulate.slicing import SliceSpec
from .buckets import GradParam
from .feedback import LossyGradGroup
from .flat_shard import flat
from .slices import GatheredSlice, Slice, empty_like

# Elements that are turned at once: their copies stay small. A multiple of ``INT8_BLOCK``.
_PIECE = 2**18
_MOST = 127.0


class Quantized(NamedTuple):
    """Elements of a gradient: ``numbers`` (int8) times the scale of their run (float32)."""

    numbers: Tensor
    scales: Tensor


def quantize(values: Tensor) -> Quantized:
    """Flat values, each run of ``INT8_BLOCK`` by its own largest. A run that holds what is not
    finite becomes infinite or not a number in all of its elements."""
    runs = _runs(values)
    scales = runs.abs().amax(dim=1).div_(_MOST)
    # Not finite: numbers that keep the scale what it is when they are multiplied with it.
    finite = torch.isfinite(scales)
    divisors = torch.where(finite & (scales > 0), scales, torch.ones_like(scales))
    numbers = runs.div(divisors[:, None]).round_().clamp_(-_MOST, _MOST)
    numbers[~finite] = _MOST
    return Quantized(numbers.to(torch.int8).reshape(-1)[: values.numel()], scales.to(torch.float32))


def dequantize(sent: Quantized, dtype: torch.dtype) -> Tensor:
    """What quantized values stand for, flat."""
    runs = _runs(sent.numbers.to(dtype))
    return (runs * sent.scales.to(dtype)[:, None]).reshape(-1)[: sent.numbers.numel()]


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


def pack(values: Tensor, residual: Tensor) -> Tensor:
    """The message of flat ``values`` and the ``residual`` of those before, in which what this one
    leaves is put. Values are not needed after that, and changed."""
    count = values.numel()
    message = torch.empty(message_bytes(count), dtype=torch.uint8, device=values.device)
    for piece, numbers, scales in _pieces(message, count):
        total = values[piece].add_(residual[piece])
        sent = quantize(total)
        numbers.copy_(sent.numbers)
        scales.copy_(sent.scales.view(-1, 1).view(torch.uint8))
        left = total.sub_(dequantize(sent, total.dtype))
        # What is not finite shows on all ranks, and must not stay for later steps.
        torch.where(torch.isfinite(left), left, residual[piece], out=residual[piece])
    return message


def add_up(messages: Sequence[Tensor], total: Tensor) -> None:
    """Writes the sum of messages into the flat ``total``."""
    total.zero_()
    for message in messages:
        for piece, numbers, scales in _pieces(message, total.numel()):
            own = scales.clone().view(torch.float32).view(-1)  # where it lies may be any byte
            total[piece] += dequantize(Quantized(numbers, own), total.dtype)


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
        own = flat(gradient)[self.elements]
        add_up(messages, own)
        own.div_(self.params[0].group.size)


class Int8GradGroup(LossyGradGroup):
    """Gradients that travel in eight bits; what rounding leaves is held."""

    def _slice(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
        if params[0].whole:
            return Slice(params, slice_spec)
        return Int8Slice(params[0], slice_spec)

    def start(self, one: Slice) -> None:
        if not isinstance(one, Int8Slice):
            super().start(one)
            return
        (param,) = one.params
        feedback = self.feedback[param]
        if feedback.residual is None:
            feedback.restore(empty_like(param).zero_())
        assert feedback.residual is not None
        values = flat(self.gradients[param])[one.elements]
        one.gather(pack(values, flat(feedback.residual)[one.elements]))
