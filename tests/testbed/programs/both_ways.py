"""Two hosts exchange ``MIB`` while one of them comes later, and prints the longest of a few times.

``both_ways.py MIB LATE_S``: the hosts take turns in being late by so many seconds.
"""

import sys
import time

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
counts = [0 if m == rank else size_bytes for m in range(2)]
longest = 0.0
for turn in range(4):
    for exchange in (
        lambda: all_to_all(into, out, counts, counts, group),
        lambda: gather_rows(rows, out, group),
    ):
        dist.barrier()
        start = time.perf_counter()
        if rank == turn % 2:
            time.sleep(late_s)
        exchange()[0].wait()
        longest = max(longest, time.perf_counter() - start)
print(longest)
