"""``cluster``: a cluster that is not here, described."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, out
from .output import check_out, deliver
from .render.documents import cluster_table
from .values import amount, number, whole


def cluster(
    device: Annotated[str, typer.Option(help="A catalogued device, such as a100-sxm-40gb.")],
    nodes: Annotated[int, whole("Hosts.")] = 1,
    devices_per_node: Annotated[int, whole("Devices of each host.")] = 1,
    inter_gbit_s: Annotated[
        float | None, number("Gbit/s of a host's network interface, each way.", above=0)
    ] = None,
    intra_gbyte_s: Annotated[
        float | None, number("GB/s between devices of a host, each way.", above=0)
    ] = None,
    inter_latency_us: Annotated[
        float | None, number("Microseconds between hosts.", least=0)
    ] = None,
    intra_latency_us: Annotated[
        float | None, number("Microseconds between devices of a host.", least=0)
    ] = None,
    memory: Annotated[int | None, amount("Memory of a device, where it differs: 40GB.")] = None,
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    out_: Annotated[Path | None, out("cluster")] = None,
    json: Json = False,
) -> None:
    """Describe a cluster that is not here: hosts, devices and bandwidths."""
    from .. import api

    check_out(out_)
    found = api.describe_cluster(
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=device,
        inter_gbit_s=inter_gbit_s,
        intra_gbyte_s=intra_gbyte_s,
        inter_latency_us=inter_latency_us,
        intra_latency_us=intra_latency_us,
        memory_bytes=memory,
        name=name,
    )
    deliver(found, out_, json, cluster_table(found))
