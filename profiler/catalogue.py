"""Devices and clusters that can be planned for without being here.

Devices have their datasheets' figures. Peak rates are without sparsity. ``flops_per_s`` is plain
float32, which is what torch's matrix products use unless told otherwise; estimates use the rate of
what is computed.
"""

import math
import warnings
from difflib import get_close_matches
from typing import NamedTuple

import msgspec

from ..planner.memory.reserved import fragments_bytes
from ..planner.schema.cluster import Cluster, Device, Level, Node, check_ranks
from ..planner.schema.errors import InputError
from ..planner.schema.text import option, size

GIB = 2**30
TERA, GIGA = 1e12, 1e9


class Datasheet(NamedTuple):
    """A device's memory in GiB, peak TFLOP/s in float32, TF32 and bfloat16 (float16 where the
    device has no bfloat16), memory bandwidth in GB/s, how many multiprocessors it has, and where
    these figures are from; the shares of the half precision peak that matrix products and
    attention reach in training; the PCIe link to its host in GB/s, one direction of 16 lanes (16 of
    the third generation, 32 of the fourth, 64 of the fifth)."""

    memory_gib: int
    float32: float
    tf32: float
    half: float
    gbyte_s: float
    multiprocessors: int
    source: str
    products: float = 0.6
    attention: float = 0.6
    host_gbyte_s: float = 32.0

    def peak(self, rate: str) -> float:
        """Operations per second at a rate: ``float64``, ``float32``, ``tf32`` or ``half``."""
        # Data centre devices have float64 at half of float32's rate or better, others far less.
        return (self.float32 / 2 if rate == "float64" else float(getattr(self, rate))) * TERA


_A100 = "NVIDIA A100 Tensor Core GPU datasheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, 2023"
_V100 = "NVIDIA V100 datasheet, 2020"

# ``products`` of A100 and H100 (SXM) are fitted on what training MPT of 1, 3 and 7 billion
# parameters took on a host or two of eight (MosaicML, llm-foundry, scripts/train/benchmarking, at
# 8c8dd48): less than the best products alone, as clocks fall and other kernels run beside. Others
# are in proportion to the best products measured on them: 0.869 of the peak on A100 SXM, 0.811 on
# PCIe, 0.803 on H100 and H200, 0.776 on B200, 0.511 on MI300X (S. Bekman, Machine Learning
# Engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS comparison table", at 744d01e);
# 0.6 where nothing was measured. For ``attention`` see roofline.
DEVICES: dict[str, Datasheet] = {
    "a100-sxm-40gb": Datasheet(40, 19.5, 156, 312, 1555, 108, _A100, 0.64),
    "a100-sxm-80gb": Datasheet(80, 19.5, 156, 312, 2039, 108, _A100, 0.64),
    "a100-pcie-40gb": Datasheet(40, 19.5, 156, 312, 1555, 108, _A100, 0.6),
    "a100-pcie-80gb": Datasheet(80, 19.5, 156, 312, 1935, 108, _A100, 0.6),
    "h100-sxm": Datasheet(80, 67, 494.5, 989.5, 3350, 132, _H100, 0.48, 0.35, 64),
    "h100-pcie": Datasheet(80, 51, 378, 756, 2000, 114, _H100, 0.48, 0.35, 64),
    "h200-sxm": Datasheet(
        141, 67, 494.5, 989.5, 4800, 132, "NVIDIA H200 Tensor Core GPU datasheet", 0.48, 0.35, 64
    ),
    "b200-sxm": Datasheet(
        180, 80, 1100, 2250, 7700, 148, "NVIDIA HGX B200 datasheet, 2024", 0.46, 0.35, 64
    ),
    "mi300x": Datasheet(
        192, 163.4, 653.7, 1307.4, 5300, 304, "AMD Instinct MI300X data sheet, 2023", 0.31, 0.35, 64
    ),
    "v100-sxm2-16gb": Datasheet(16, 15.7, 15.7, 125, 900, 80, _V100, host_gbyte_s=16),
    "v100-sxm2-32gb": Datasheet(32, 15.7, 15.7, 125, 900, 80, _V100, host_gbyte_s=16),
    "t4": Datasheet(16, 8.1, 8.1, 65, 320, 40, "NVIDIA T4 datasheet, 2019", host_gbyte_s=16),
    "l4": Datasheet(24, 30.3, 60, 121, 300, 58, "NVIDIA L4 datasheet, 2023"),
    "a10": Datasheet(24, 31.2, 62.5, 125, 600, 72, "NVIDIA A10 datasheet, 2021"),
    "l40s": Datasheet(48, 91.6, 183, 362, 864, 142, "NVIDIA L40S datasheet, 2023"),
    "rtx-3090": Datasheet(24, 35.6, 35.6, 71, 936, 82, "NVIDIA Ampere GA102 whitepaper, 2021"),
    "rtx-4090": Datasheet(
        24, 82.6, 82.6, 165.2, 1008, 128, "NVIDIA Ada architecture whitepaper, 2022"
    ),
    "rtx-5090": Datasheet(
        32,
        104.8,
        104.8,
        209.5,
        1792,
        170,
        "NVIDIA RTX Blackwell architecture whitepaper, 2025",
        host_gbyte_s=64,
    ),
}


def names() -> tuple[str, ...]:
    """The devices that are catalogued."""
    return tuple(DEVICES)


def datasheet(name: str) -> Datasheet:
    """A device's figures; ``InputError`` with the nearest names where it is not catalogued."""
    if name not in DEVICES:
        # Names that begin so come first: "a100" is nearer to "a100-sxm-40gb" than to "a10".
        longer = [device for device in DEVICES if device.startswith(name.lower())]
        near = longer or get_close_matches(name.lower(), DEVICES, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(DEVICES)}"
        raise InputError(f"device {name!r} is not catalogued: {hint}")
    return DEVICES[name]


# Assumed: what copies between a device and pinned memory reach of its link's nominal rate.
HOST_LINK_SHARE = 0.8

# Assumed where a device is not here to be measured: of a GPU's memory the context with its kernels,
# NCCL's buffers and libraries' workspaces take a twentieth or CONTEXT_BYTES, whichever is less.
CONTEXT_BYTES = GIB
CONTEXT_PART = 20


def assumed_reserve(memory_bytes: int) -> int:
    """What of a GPU's memory tensors are taken not to have, where nothing was measured."""
    return min(CONTEXT_BYTES, memory_bytes // CONTEXT_PART) + fragments_bytes(memory_bytes)


def catalogued_device(name: str, memory_bytes: int | None = None) -> Device:
    """A catalogued device as a cluster's, with another memory size where one is given."""
    sheet = datasheet(name)
    memory = sheet.memory_gib * GIB if memory_bytes is None else memory_bytes
    return Device(
        name=name,
        memory_bytes=memory,
        flops_per_s=sheet.float32 * TERA,
        memory_bytes_per_s=sheet.gbyte_s * GIGA,
        host_bytes_per_s=HOST_LINK_SHARE * sheet.host_gbyte_s * GIGA,
        reserve_bytes=assumed_reserve(memory),
        source=sheet.source,
    )


# Assumed between hosts: one message over Ethernet through a switch with TCP takes tens of
# microseconds. Give the measured value where it is known.
INTER_LATENCY_US = 30.0

# Assumed between devices of a host: about a kernel launch and a copy.
INTRA_LATENCY_US = 5.0


def describe_cluster(
    *,
    device: str,
    nodes: int = 1,
    devices_per_node: int = 1,
    inter_gbit_s: float | None = None,
    intra_gbyte_s: float | None = None,
    inter_latency_us: float | None = None,
    intra_latency_us: float | None = None,
    memory_bytes: int | None = None,
    reserve_bytes: int | None = None,
    host_gbyte_s: float | None = None,
    host_memory_bytes: int | None = None,
    name: str | None = None,
) -> Cluster:
    """A cluster of equal hosts with catalogued devices.

    ``inter_gbit_s`` is a host's network interface in Gbit/s, each way; ``intra_gbyte_s`` a device's
    link inside its host in GB/s, each way. Both are nominal rates: name what a transfer reaches,
    if it is known. ``host_gbyte_s`` is a device's link to its host's memory in GB/s, one direction
    (none given: what copies reach of its PCIe link), ``host_memory_bytes`` a host's memory, which
    limits what is offloaded, and ``reserve_bytes`` what of ``memory_bytes`` tensors cannot have
    (none given: ``assumed_reserve``). Raises ``InputError`` for a device that is not catalogued,
    for counts and rates that are not positive, and where devices have no link; warns of links
    inside hosts of one device.
    """
    _positive("nodes", nodes)
    _positive("devices_per_node", devices_per_node)
    check_ranks(nodes * devices_per_node)
    for what, value in (
        ("memory_bytes", memory_bytes),
        ("host_gbyte_s", host_gbyte_s),
        ("host_memory_bytes", host_memory_bytes),
    ):
        if value is not None:
            _positive(what, value)
    known = catalogued_device(device, memory_bytes)
    if nodes * devices_per_node > 1 and inter_gbit_s is None and intra_gbyte_s is None:
        raise InputError(
            f"the cluster of {nodes * devices_per_node} devices has no links: give inter_gbit_s "
            f"({_EXAMPLES['inter_gbit_s']}) between hosts, intra_gbyte_s "
            f"({_EXAMPLES['intra_gbyte_s']}) inside a host, or both"
        )
    levels = []
    if devices_per_node > 1:
        rate = _required("intra_gbyte_s", intra_gbyte_s, "between the devices of a host") * 1e9
        levels.append(_level("intra", rate, intra_latency_us, INTRA_LATENCY_US))
    else:
        _tell_of_links_to_none(intra_gbyte_s=intra_gbyte_s, intra_latency_us=intra_latency_us)
    # Of one host as well where it is given: a plan may be asked for on more of them.
    if nodes > 1 or inter_gbit_s is not None:
        rate = _required("inter_gbit_s", inter_gbit_s, "between hosts") * 1e9 / 8
        levels.append(_level("inter", rate, inter_latency_us, INTER_LATENCY_US))
    described = _stated(known, reserve_bytes, host_gbyte_s)
    hosts = tuple(
        Node(
            name=f"node{i}", devices=(described,) * devices_per_node,
            host_memory_bytes=host_memory_bytes,
        )
        for i in range(nodes)
    )  # fmt: skip
    title = name or f"{nodes} x {devices_per_node} {device}"
    return Cluster(name=title, nodes=hosts, levels=tuple(levels))


def _tell_of_links_to_none(**given: float | None) -> None:
    """Says what is given of links inside hosts that have one device each."""
    for name, value in given.items():
        if value is not None:
            warnings.warn(
                f"{option(name)} {value:g} ({name}) says nothing of hosts with one device each: "
                f"say how many they have ({option('devices_per_node')}, devices_per_node), or "
                "leave it out",
                stacklevel=3,
            )


def _stated(device: Device, reserve_bytes: int | None, host_gbyte_s: float | None) -> Device:
    """The device with what is stated of it in place of what is assumed."""
    if reserve_bytes is not None:
        if not 0 <= reserve_bytes < device.memory_bytes:
            raise InputError(
                f"a reserve of {size(reserve_bytes)} leaves nothing of the device's "
                f"{size(device.memory_bytes)}: reserve less ({option('reserve')})"
            )
        device = msgspec.structs.replace(device, reserve_bytes=reserve_bytes)
    if host_gbyte_s is not None:
        device = msgspec.structs.replace(device, host_bytes_per_s=host_gbyte_s * GIGA)
    return device


def _level(name: str, rate: float, latency_us: float | None, default_us: float) -> Level:
    latency = default_us if latency_us is None else latency_us
    if not 0 <= latency < math.inf:
        raise InputError(f"{name}_latency_us is {latency}: give microseconds of at least zero")
    return Level(name=name, latency_s=latency * 1e-6, bytes_per_s=rate)  # type: ignore[arg-type]


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}: give a number above zero")


_EXAMPLES = {
    "inter_gbit_s": f"such as {option('inter_gbit_s')} 10",
    "intra_gbyte_s": f"such as {option('intra_gbyte_s')} 300, NVLink of an A100",
}
"""How a bandwidth is stated; an A100's is 600 GB/s both ways together (NVIDIA A100 datasheet)."""


def _required(name: str, value: float | None, where: str) -> float:
    if value is None:
        raise InputError(f"the cluster has no links {where}: give {name} ({_EXAMPLES[name]})")
    _positive(name, value)
    return value
