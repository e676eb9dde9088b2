"""Gradients that are rounded to travel: as what they are sent, in their own memory.

A gradient of 32 bits leaves as bfloat16 (its sign, its exponent, seven of its mantissa's bits),
half of its bytes. All ranks get the same sums of rounded numbers, so parameters stay alike bit for
bit. What is rounded away is at most 2⁻⁹ of each number and is not kept for later.
"""

# [Note: Rounding in place]
# Slices may wait long for their turn, and all of a step's may be on their way at once: copies of
# them would take half of what the gradients take. So a message lies in the first half of its
# gradient's own memory. It is written piece by piece from the front, where each piece lands on
# numbers that have been read, and read back piece by piece from the end.

import torch
from torch import Tensor

from ...planner.cost.exchange import wire_share
from ...planner.schema.plan import WireFormat

WIRE_DTYPES: dict[WireFormat, torch.dtype] = {"bf16": torch.bfloat16}
# Elements that are turned at once: few enough for a processor's cache, many for a GPU's kernels.
_PIECE = {"cpu": 2**17}
_LARGE_PIECE = 2**22


def wire_dtype(wire: WireFormat, own: torch.dtype) -> torch.dtype:
    """As what gradients of the type ``own`` travel: as they are, where that saves nothing."""
    if not own.is_floating_point or wire_share(wire, own.itemsize) == 1:
        return own
    return WIRE_DTYPES[wire]


def encode(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The flat gradient as ``dtype``, in the first part of its memory. It is no gradient any more
    until it is decoded."""
    if gradient.dtype == dtype:
        return gradient
    message = _first_part(gradient, dtype)
    for piece in _pieces(gradient):
        message[piece] = gradient[piece].to(dtype)
    return message


def decode(gradient: Tensor, dtype: torch.dtype, divisor: int) -> None:
    """Turns the message in a flat gradient's memory into numbers again, over ``divisor``."""
    if gradient.dtype == dtype:
        gradient.div_(divisor)
        return
    message = _first_part(gradient, dtype)
    for piece in reversed(_pieces(gradient)):
        # A copy of what is read: at the front it lies where the numbers are written.
        gradient[piece].copy_(message[piece].clone()).div_(divisor)


def _first_part(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.view(dtype)[: gradient.numel()]


def _pieces(gradient: Tensor) -> list[slice]:
    size = _PIECE.get(gradient.device.type, _LARGE_PIECE)
    return [slice(start, start + size) for start in range(0, gradient.numel(), size)]
