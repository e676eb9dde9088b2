"""Exchange in eight bits: each rank sends its gradient as whole numbers from -127 to 127, with a
scale for each run of elements; what rounding leaves is added to the next gradient.

Every rank gets what each of the others has sent and adds it up in the gradient's own type, in the
order of ranks: sums are alike on all of them, bit for bit, and nothing but what is sent is rounded.
On two ranks that is a quarter of the bytes that an all-reduce sends.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.collectives import ring_bytes
from ...planner.cost.exchange import INT8_BLOCK
from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm
from ..comm.watchdog import Watchdog
from .buckets import GradParam
from .feedback import LossyGradGroup
from .flat_shard import flat
from .slices import Slice, empty_like

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
    numbers, scales = _views(message, count)
    for start in range(0, count, _PIECE):
        piece = slice(start, min(start + _PIECE, count))
        total = values[piece].add_(residual[piece])
        sent = quantize(total)
        numbers[piece] = sent.numbers
        scales[start // INT8_BLOCK : ceil(piece.stop / INT8_BLOCK)] = sent.scales.view(-1, 1).view(
            torch.uint8
        )
        left = total.sub_(dequantize(sent, total.dtype))
        # What is not finite shows on all ranks, and must not stay for later steps.
        torch.where(torch.isfinite(left), left, residual[piece], out=residual[piece])
    return message


def add_up(messages: Sequence[Tensor], total: Tensor) -> None:
    """Writes the sum of messages into the flat ``total``."""
    count = total.numel()
    total.zero_()
    for message in messages:
        numbers, scales = _views(message, count)
        for start in range(0, count, _PIECE):
            piece = slice(start, min(start + _PIECE, count))
            rows = scales[start // INT8_BLOCK : ceil(piece.stop / INT8_BLOCK)]
            own = rows.clone().view(torch.float32).reshape(-1)  # where it lies may be any byte
            total[piece] += dequantize(Quantized(numbers[piece], own), total.dtype)


def _views(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The numbers in a message, and the bytes of its scales, a row for each."""
    return message[:count].view(torch.int8), message[count:].view(-1, torch.float32.itemsize)


class Int8Slice(Slice):
    """One collective: a part of a parameter's gradient, as every rank has it."""

    residual: Tensor
    """What was not sent of its part so far, flat."""

    def __init__(self, param: GradParam, slice_spec: SliceSpec) -> None:
        super().__init__([param], slice_spec)
        numel, part, parts = param.parameter.numel(), slice_spec.part, slice_spec.parts
        self.elements = slice(numel * part // parts, numel * (part + 1) // parts)
        self._messages: list[Tensor] = []

    @property
    def _message_bytes(self) -> int:
        return message_bytes(self.elements.stop - self.elements.start)

    @property
    def sent_bytes(self) -> int:
        ranks = self.params[0].group.size
        return ring_bytes("all_gather", ranks, ranks * self._message_bytes)

    @property
    def bytes(self) -> int:
        # Those of a gradient whose sum would take a ring as long.
        return self.params[0].group.size * self._message_bytes // 2

    @property
    def shared_bytes(self) -> int:
        (param,) = self.params
        elements = param.shared_bytes // param.parameter.element_size() // self.slice_spec.parts
        return param.group.size * message_bytes(elements) // 2

    def send(self, gradients: dict[GradParam, Tensor]) -> None:
        (param,) = self.params
        self._wire = flat(gradients[param])[self.elements]
        self._arrived = False
        if self._wire.numel():
            message = pack(self._wire, self.residual)
            self._messages = [torch.empty_like(message) for _ in range(param.group.size)]
            *into, mine = self._comm_tensors = [
                alias_for_comm(t) for t in (*self._messages, message)
            ]
            self.work = dist.all_gather(into, mine, group=param.group.handle, async_op=True)

    def wait_and_average(
        self, gradients: dict[GradParam, Tensor], watch: Watchdog, doing: str
    ) -> float:
        if self._arrived:
            return 0.0
        assert self._wire is not None
        group = self.params[0].group
        waited = watch.wait(self.work, group, doing)
        add_up(self._messages, self._wire)
        self._wire.div_(group.size)
        self._messages = []
        self._finish()
        return waited


class Int8GradGroup(LossyGradGroup):
    """Gradients that travel in eight bits; what rounding leaves is held."""

    def _slice(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
        if params[0].whole:
            return Slice(params, slice_spec)
        return Int8Slice(params[0], slice_spec)

    def send(self, number: int) -> None:
        one = self.slices[number]
        if isinstance(one, Int8Slice):
            (param,) = one.params
            feedback = self.feedback[param]
            if feedback.residual is None:
                feedback.restore(empty_like(param).zero_())
            assert feedback.residual is not None
            one.residual = flat(feedback.residual)[one.elements]
        super().send(number)

    def forget(self, param: GradParam) -> None:
        if param in self.feedback:
            self.feedback[param].restore(None)
