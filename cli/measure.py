"""``profile``, ``probe`` and ``cluster``: what is measured here, and what is described instead."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import progress
from ..executor.notes import note
from .options import AllUnits, Json, PrecisionName, RelativeSpeeds, out
from .output import check_out, deliver
from .render.documents import cluster_table, speed_sentences, units_table
from .render.whole import whole_sentences
from .values import amount, counts, number, speeds, whole

UNSTEADY = 0.5
"""From so large a spread on the probe says that it was disturbed."""


def profile(
    target: Annotated[
        str,
        typer.Argument(
            help="A workload's name, path/to/file.py:factory or package.module:factory.",
            metavar="TARGET",
        ),
    ],
    out_: Annotated[Path | None, out("profile")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, or a catalogued device to estimate for, such as h100-sxm."),
    ] = None,
    batches: Annotated[
        Sequence[int] | None, counts("Batch sizes to measure, such as 8,16,32.")
    ] = None,
    ranks: Annotated[
        int, whole("Measure while so many processes compute, as in a run on one host.")
    ] = 1,
    precision: PrecisionName = None,
    all_units: AllUnits = False,
    json: Json = False,
) -> None:
    """Measure a model: each unit's times, memory and parameters."""
    from .. import api

    check_out(out_)
    # Under torchrun every rank is this command. All measure at once, and have the same answer.
    measured = device is None or device.split(":")[0] in ("cpu", "cuda")
    together = measured and int(os.environ.get("WORLD_SIZE", "1")) > 1
    with progress(f"profiling {target}", show=api.is_rank_zero()) as step:
        found = api.profile(
            target, batches=batches, device=device, ranks=ranks, precision=precision,
            together=together, progress=step,
        )  # fmt: skip
    if api.is_rank_zero():
        table = units_table(found, fold=not all_units)
        deliver(found, out_, json, table, *speed_sentences(found), *whole_sentences(found.units))


def probe(
    out_: Annotated[Path | None, out("cluster")] = None,
    ranks: Annotated[
        int | None,
        whole("Start so many ranks here (default: one for each GPU, else 2); 1 has no links."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure the links among ranks: those it is started on by torchrun, else local ones."""
    from .. import api

    check_out(out_)
    with progress("probing") as step:
        found = api.probe(ranks=ranks, progress=step)
    # Under torchrun every rank is this command, and all have the same answer.
    if api.is_rank_zero():
        deliver(found, out_, json, cluster_table(found))
        if found.spread > UNSTEADY:
            note(
                f"repeated collectives lay {found.spread:.0%} apart, and predictions are no surer: "
                "if the machines do other work, probe again when they do not"
            )


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
    reserve: Annotated[
        int | None, amount("What of it tensors cannot have (context, NCCL, fragments): 3GiB.")
    ] = None,
    host_gbyte_s: Annotated[
        float | None, number("GB/s between a device and its host's memory, each way.", above=0)
    ] = None,
    host_memory: Annotated[
        int | None, amount("Memory of a host, which limits what is offloaded: 1TB.")
    ] = None,
    relative_speed: RelativeSpeeds = None,
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
        reserve_bytes=reserve,
        host_gbyte_s=host_gbyte_s,
        host_memory_bytes=host_memory,
        relative_speeds=speeds(relative_speed),
        name=name,
    )
    deliver(found, out_, json, cluster_table(found))
