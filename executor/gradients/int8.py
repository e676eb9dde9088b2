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
from .slices import GatheredSlice, Slice, exact_slice, padded_bytes

# Elements that are turned at once, in whole runs: few enough to stay in a processor's cache until
# their message is made, many for a GPU's kernels.
_PIECE = {"cpu": 2**16}
_LARGE_PIECE = 2**20
_MOST = 127.0
# The reciprocal of a smaller scale may be too large for its type.
_LEAST = torch.finfo(torch.float32).tiny


class Quantized(NamedTuple):
    """Elements of a gradient: ``numbers`` (whole ones, of any type) times the scale of their
    run."""

    numbers: Tensor
    scales: Tensor


def quantize(values: Tensor) -> Quantized:
    """Flat values, each run of ``INT8_BLOCK`` by its own largest. A run that holds what is not
    finite has a scale that is not, and so is none of its elements, whatever their numbers are."""
    computed = values.to(_computed_in(values.dtype))
    numbers, scales = torch.empty_like(computed), _scales_for(values)
    for scale, runs, rounded in _pieces(scales, computed, numbers):
        _round(runs, rounded, scale)
    return Quantized(numbers, scales.view(-1))


def dequantize(sent: Quantized, dtype: torch.dtype) -> Tensor:
    """What quantized values stand for, flat, in memory of their own."""
    values = sent.numbers.to(_computed_in(dtype), copy=True)
    for scale, runs in _pieces(sent.scales.view(-1, 1), values):
        runs.mul_(scale)
    return values.to(dtype)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    # In 16 bits scales would be rounded so far down that numbers come out larger than they may be.
    return torch.promote_types(dtype, torch.float32)


def _scales_for(values: Tensor) -> Tensor:
    """A row for each run."""
    return values.new_empty(ceil(values.numel() / INT8_BLOCK), 1, dtype=torch.float32)


def _round(runs: Tensor, rounded: Tensor, scale: Tensor) -> None:
    """Puts the numbers of each run into ``rounded`` and its scale into ``scale``."""
    scale.copy_(torch.abs(runs, out=rounded).amax(dim=1, keepdim=True))
    scale.div_(_MOST).clamp_min_(_LEAST)
    torch.mul(runs, scale.reciprocal(), out=rounded).round_()


def _pieces(scales: Tensor, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of one length piece by piece: the rows of ``scales``, and of each tensor the
    runs as rows. What does not fill a run is the last piece."""
    count = flats[0].numel()
    runs = count // INT8_BLOCK
    whole, at_once = runs * INT8_BLOCK, _piece(scales) // INT8_BLOCK
    if runs:
        rows = (torch.split(flat[:whole].view(runs, INT8_BLOCK), at_once) for flat in flats)
        yield from zip(torch.split(scales[:runs], at_once), *rows, strict=True)
    if whole < count:
        yield scales[runs:], *(flat[whole:].view(1, -1) for flat in flats)


def _piece(values: Tensor) -> int:
    return _PIECE.get(values.device.type, _LARGE_PIECE)


def _scratch_for(values: Tensor) -> Tensor:
    """Memory for the numbers of flat values, piece by piece."""
    count = min(values.numel(), _piece(values))
    return values.new_empty(count, dtype=_computed_in(values.dtype))


def message_bytes(numel: int) -> int:
    """The size of a message of so many elements: their numbers, a scale for each run, padding."""
    return padded_bytes(_scales_at(numel).stop)


def _scales_at(numel: int) -> slice:
    """Where the scales lie in a message of so many elements: behind their numbers."""
    return slice(numel, numel + torch.float32.itemsize * ceil(numel / INT8_BLOCK))


def messages_for(values: Tensor, count: int) -> Tensor:
    """Memory for so many messages of flat values, a row for each."""
    return values.new_empty(count, message_bytes(values.numel()), dtype=torch.uint8)


def pack(
    values: Tensor, residual: Tensor, into: Tensor | None = None, *, on_stream: bool = False
) -> Tensor:
    """The message of flat ``values`` and the ``residual`` of those before, in which what this one
    leaves is put; it lies in ``into``, bytes, or in memory of its own. Values are not needed after
    that, and changed. With ``on_stream`` the host does not wait for what it launches."""
    count, scratch = values.numel(), _scratch_for(values)
    message = messages_for(values, 1)[0] if into is None else into
    numbers, scales = message[:count].view(torch.int8), _scales_for(values)
    for scale, total, left, sent in _pieces(scales, values, residual, numbers):
        total.add_(left)
        rounded = scratch[: total.numel()].view_as(total)
        _round(total.to(scratch.dtype), rounded, scale)
        sent.copy_(rounded)
        _keep(total, scale, rounded.mul_(scale).to(total.dtype), left, on_stream=on_stream)
    message[_scales_at(count)].view(-1, torch.float32.itemsize).copy_(scales.view(torch.uint8))
    return message


def _keep(
    total: Tensor, scale: Tensor, stands_for: Tensor, residual: Tensor, *, on_stream: bool
) -> None:
    """Puts what ``stands_for`` leaves of ``total`` into the residual, but for runs that are not
    finite: these show on all ranks, and must not stay for later steps."""
    if not on_stream and isfinite(scale.sum()):  # nearly always, and three times as quick
        torch.sub(total, stands_for, out=residual)
    else:
        finite = torch.isfinite(scale)
        torch.where(finite, total.sub_(stands_for), residual, out=residual)


def average(messages: Sequence[Tensor], into: Tensor) -> None:
    """Writes the mean of messages into the flat ``into``."""
    count, scratch = into.numel(), _scratch_for(into)
    in_place = into.dtype == scratch.dtype
    sent = (
        _pieces(_scales_of(message, count).div_(len(messages)), into, message[:count])
        for message in messages
    )
    for pieces in zip(*sent, strict=True):
        for index, (scale, mean, numbers) in enumerate(pieces):
            own = mean if in_place and index == 0 else scratch[: mean.numel()].view_as(mean)
            own.copy_(numbers.view(torch.int8)).mul_(scale)
            if index > 0:
                mean.add_(own.to(mean.dtype))
            elif not in_place:
                mean.copy_(own)


def _scales_of(message: Tensor, count: int) -> Tensor:
    """Copies of a message's scales, a row for each run: where they lie may be any byte."""
    return message[_scales_at(count)].clone().view(torch.float32).view(-1, 1)


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
        group = param.group
        messages = messages_for(values, group.size)
        # Where it stands among what comes from others: a copy would take a tenth of packing it.
        own = messages[group.group_ranks[group.member]]
        one.gather(pack(values, kept, own, on_stream=group.on_stream), messages)
