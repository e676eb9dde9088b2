"""Two hosts exchange ``MIB`` while one of them comes later; prints the median seconds of a few
all-to-alls, of as many in ``PARTS`` that are issued at once, and of all-gathers, from when the
later one comes.

``both_ways.py MIB LATE_S``: the hosts take turns in being late by so many seconds.
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from meshwright.executor.comm.groups import make_world
from meshwright.executor.comm.two_way import all_to_all, gather_rows
from meshwright.executor.launch.start import start_process_group

size_bytes, late_s = int(float(sys.argv[1]) * 2**20), float(sys.argv[2])
start_process_group()
rank = dist.get_rank()
group = make_world(range(2), [], torch.device("cpu"), 60.0, gathered=[1]).gradients[1]
into, out = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))
rows = torch.zeros(2, size_bytes, dtype=torch.uint8)
PARTS = 32


def swap(parts: int) -> None:
    counts = [0 if m == rank else size_bytes // parts for m in range(2)]
    pairs = zip(into.chunk(parts), out.chunk(parts), strict=True)
    works = [all_to_all(*pair, counts, counts, group)[0] for pair in pairs]
    for work in works:
        work.wait()


exchanges = (lambda: swap(1), lambda: swap(PARTS), lambda: gather_rows(rows, out, group)[0].wait())
for exchange in exchanges:
    taken = []
    for turn in range(5):
        dist.barrier()
        start = time.perf_counter()
        if rank == turn % 2:
            time.sleep(late_s)
        exchange()
        taken.append(time.perf_counter() - start - late_s)
    print(median(taken))
