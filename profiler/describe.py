"""A Cluster from a short description instead of from measurements."""

from __future__ import annotations

import math

from ..planner.schema.cluster import Cluster, Level, Node
from ..planner.schema.errors import InputError
from .catalogue import device as catalogued

INTER_LATENCY_US = 30.0
"""Assumed between hosts: one message over Ethernet through a switch with TCP takes tens of
microseconds. Give the measured value where it is known."""

INTRA_LATENCY_US = 5.0
"""Assumed between devices of a host: about a kernel launch and a copy."""


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
    name: str | None = None,
) -> Cluster:
    """A cluster of equal hosts with catalogued devices.

    ``inter_gbit_s`` is a host's network interface in Gbit/s, each way; ``intra_gbyte_s`` a device's
    link inside its host in GB/s, each way. Both are nominal rates: name what a transfer reaches,
    if it is known. Raises ``InputError`` for a device that is not catalogued, for counts and rates
    that are not positive, and where devices have no link.
    """
    _positive("nodes", nodes)
    _positive("devices_per_node", devices_per_node)
    if memory_bytes is not None:
        _positive("memory_bytes", memory_bytes)
    if nodes * devices_per_node > 1 and inter_gbit_s is None and intra_gbyte_s is None:
        raise InputError(
            f"the cluster of {nodes * devices_per_node} devices has no links: give inter_gbit_s "
            f"({_option('inter_gbit_s')}, between hosts), intra_gbyte_s "
            f"({_option('intra_gbyte_s')}, inside a host), or both"
        )
    levels = []
    if devices_per_node > 1:
        rate = _required("intra_gbyte_s", intra_gbyte_s, "between the devices of a host") * 1e9
        levels.append(_level("intra", rate, intra_latency_us, INTRA_LATENCY_US))
    if nodes > 1:
        rate = _required("inter_gbit_s", inter_gbit_s, "between hosts") * 1e9 / 8
        levels.append(_level("inter", rate, inter_latency_us, INTER_LATENCY_US))
    hosts = tuple(
        Node(name=f"node{i}", devices=(catalogued(device, memory_bytes),) * devices_per_node)
        for i in range(nodes)
    )
    title = name or f"{nodes} x {devices_per_node} {device}"
    return Cluster(name=title, nodes=hosts, levels=tuple(levels))


def _level(name: str, rate: float, latency_us: float | None, default_us: float) -> Level:
    latency = default_us if latency_us is None else latency_us
    if not 0 <= latency < math.inf:
        raise InputError(f"{name}_latency_us is {latency}: give microseconds of at least zero")
    return Level(name=name, latency_s=latency * 1e-6, bytes_per_s=rate)  # type: ignore[arg-type]


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}: give a number above zero")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _required(name: str, value: float | None, where: str) -> float:
    if value is None:
        raise InputError(f"the cluster has no links {where}: give {name} ({_option(name)})")
    _positive(name, value)
    return value
