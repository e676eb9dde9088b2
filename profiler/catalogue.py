"""Devices that can be planned for without being here, with their datasheets' figures.

Peak rates are without sparsity. ``flops_per_s`` is plain float32, which is what torch's matrix
products use unless told otherwise; estimates for lower precision use the tensor cores' rates.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from ..planner.schema.cluster import Device
from ..planner.schema.errors import InputError

GIB = 2**30
TERA, GIGA = 1e12, 1e9


class Datasheet(NamedTuple):
    """A device's memory in GiB, peak TFLOP/s in float32, TF32 and bfloat16 (float16 where the
    device has no bfloat16), memory bandwidth in GB/s, and where the figures are from."""

    memory_gib: int
    float32: float
    tf32: float
    half: float
    gbyte_s: float
    source: str


_A100 = "NVIDIA A100 Tensor Core GPU datasheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, 2023"

DEVICES: dict[str, Datasheet] = {
    "a100-sxm-40gb": Datasheet(40, 19.5, 156, 312, 1555, _A100),
    "a100-sxm-80gb": Datasheet(80, 19.5, 156, 312, 2039, _A100),
    "a100-pcie-40gb": Datasheet(40, 19.5, 156, 312, 1555, _A100),
    "a100-pcie-80gb": Datasheet(80, 19.5, 156, 312, 1935, _A100),
    "h100-sxm": Datasheet(80, 67, 494.5, 989.5, 3350, _H100),
    "h100-pcie": Datasheet(80, 51, 378, 756, 2000, _H100),
    "h200-sxm": Datasheet(141, 67, 494.5, 989.5, 4800, "NVIDIA H200 Tensor Core GPU datasheet"),
    "v100-sxm2-16gb": Datasheet(16, 15.7, 15.7, 125, 900, "NVIDIA V100 datasheet, 2020"),
    "v100-sxm2-32gb": Datasheet(32, 15.7, 15.7, 125, 900, "NVIDIA V100 datasheet, 2020"),
    "t4": Datasheet(16, 8.1, 8.1, 65, 320, "NVIDIA T4 datasheet, 2019"),
    "l4": Datasheet(24, 30.3, 60, 121, 300, "NVIDIA L4 datasheet, 2023"),
    "a10": Datasheet(24, 31.2, 62.5, 125, 600, "NVIDIA A10 datasheet, 2021"),
    "l40s": Datasheet(48, 91.6, 183, 362, 864, "NVIDIA L40S datasheet, 2023"),
    "rtx-3090": Datasheet(24, 35.6, 35.6, 71, 936, "NVIDIA Ampere GA102 whitepaper, 2021"),
    "rtx-4090": Datasheet(24, 82.6, 82.6, 165.2, 1008, "NVIDIA Ada architecture whitepaper, 2022"),
}


def names() -> tuple[str, ...]:
    """The devices that are catalogued."""
    return tuple(DEVICES)


def datasheet(name: str) -> Datasheet:
    """A device's figures; ``InputError`` with the nearest names where it is not catalogued."""
    if name not in DEVICES:
        near = get_close_matches(name.lower(), DEVICES, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(DEVICES)}"
        raise InputError(f"device {name!r} is not catalogued: {hint}")
    return DEVICES[name]


def device(name: str, memory_bytes: int | None = None) -> Device:
    """A catalogued device as a cluster's, with another memory size where one is given."""
    sheet = datasheet(name)
    return Device(
        name=name,
        memory_bytes=sheet.memory_gib * GIB if memory_bytes is None else memory_bytes,
        flops_per_s=sheet.float32 * TERA,
        memory_bytes_per_s=sheet.gbyte_s * GIGA,
        source=sheet.source,
    )
