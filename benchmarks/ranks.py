"""Ranks of a benchmark: on this machine, or on a test bed whose links get the rates asked for.

A benchmark on a bed is one program. Started by hand it makes the bed and starts itself on every
host with ``--rank``; there ``run`` yields its rows, which rank 0 writes.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from meshwright.executor.launch.processes import Ranks, run_ranks
from meshwright.executor.launch.start import start_process_group
from meshwright.planner.cost.collectives import ring_steps
from testbed import Bed

LIMIT_S = 1800.0
START_MBIT_S = 1000.0
POLL_S = 0.02


def joined(
    count: int,
    limit_s: float = LIMIT_S,
    mbit_s: float | Sequence[float] | None = None,
    slow: Mapping[int, float] | None = None,
) -> bool:
    """True on a rank, which has met the others. Else runs this program, with its arguments, as that
    many ranks: on this machine, or on hosts of a bed with links of ``mbit_s`` (one rate, or each
    host's), of which ``slow`` ones, by number, have a share of a core."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "RANK" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        start_process_group()
        return True
    program = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
    if mbit_s is None:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            run_ranks(program, Ranks(count, timeout_s=limit_s), Path(folder))
    else:
        with Bed(count, mbit_s) as bed:
            for number, share in (slow or {}).items():
                bed.slow(bed.hosts[number], share)
            done = bed.launch(program, timeout_s=limit_s)
        print(done[0].stdout, end="")
        _check(done)
    return False


def on_a_bed(
    script: str,
    asked: Mapping[str, Any],
    hosts: int = 2,
    mbit_s: float = START_MBIT_S,
    each: int = 1,
) -> list[dict[str, Any]]:
    """The rows that ``script --rank`` writes on a bed of its own, with ``each`` ranks on a host,
    and the depth of the bed's token buckets with each row. Exits where the ranks failed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Bed(hosts, mbit_s) as bed:
        folder, over = Path(name), threading.Event()
        watcher = threading.Thread(target=_serve_rates, args=(bed, folder, over), daemon=True)
        watcher.start()
        try:
            program = [script, "--rank", json.dumps({**asked, "folder": name})]
            done = bed.launch(program, timeout_s=LIMIT_S, nproc=each)
        finally:
            over.set()
            watcher.join()
        _check(done)
        # With the bucket's depth, by which short messages can beat a link's rate.
        lines = (folder / "rows").read_text().splitlines()
        return [{**json.loads(line), "burst_bytes": bed.burst_bytes} for line in lines]


def _check(done: Sequence[CompletedProcess[str]]) -> None:
    if any(host.returncode for host in done):
        sys.exit("\n".join(host.stderr[-3000:] for host in done))


def _serve_rates(bed: Bed, folder: Path, over: threading.Event) -> None:
    # Ranks live in network namespaces and cannot shape links, so rank 0 asks by a file.
    while not over.wait(POLL_S):
        if (folder / "asked").exists():
            mbit_s = float((folder / "asked").read_text())
            (folder / "asked").unlink()
            for host in bed.hosts:
                bed.set_rate(host, mbit_s)
            (folder / "done").touch()


def set_rate(folder: str, mbit_s: float) -> None:
    """Gives all links of the bed that rate. Collective."""
    if dist.get_rank() == 0:
        asked, done = Path(folder) / "asked", Path(folder) / "done"
        part = asked.with_suffix(".part")
        part.write_text(repr(mbit_s))
        # Renamed once it is whole, or the watcher could read half of it.
        part.rename(asked)
        while not done.exists():
            time.sleep(POLL_S)
        done.unlink()
    dist.barrier()


def run(
    rows: Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]], main: Callable[[], object]
) -> None:
    """``main``, or one rank of ``on_a_bed``: rank 0 writes each row as it comes."""
    if sys.argv[1:2] != ["--rank"]:
        main()
        return
    asked = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    start_process_group()
    for row in rows(asked):
        if dist.get_rank() == 0:
            with (Path(asked["folder"]) / "rows").open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def slowest(value: float) -> float:
    """The largest over ranks. Collective."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class Link(NamedTuple):
    """What a large all_reduce makes of it: bytes that a rank sends in a second, and seconds of the
    process, user's and system's, for each byte that it sends."""

    bytes_per_s: float
    processor_s_per_byte: float


def goodput(bytes_: float) -> Link:
    """One large all_reduce, of the slowest rank. Collective."""
    # At least 1 MiB, or its latency would count; at most 16 MiB, or slow links would take minutes.
    flat = torch.zeros(min(max(int(bytes_) // 4, 2**18), 2**22))
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    dist.all_reduce(flat)
    busy = time.process_time() - busy
    seconds = slowest(time.perf_counter() - start)
    sent = ring_bytes(flat.numel() * 4)
    return Link(sent / seconds, slowest(busy) / sent)


def ring_bytes(bytes_: float) -> float:
    """What a rank sends in an all-reduce of so many bytes by a ring."""
    world = dist.get_world_size()
    return ring_steps("all_reduce", world) / world * bytes_
