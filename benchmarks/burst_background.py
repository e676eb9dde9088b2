"""The background job of ``benchmarks/burst_measured.py``: training on one device, counted.

    python benchmarks/burst_background.py MODEL BATCH COUNTER

Trains until it is told to end; the file COUNTER holds the samples trained on as eight bytes.
"""

from __future__ import annotations

import mmap
import signal
import struct
import sys
from pathlib import Path

import torch
from burst_models import fresh, momentum


def main() -> None:
    """See the module."""
    name, size, counter = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    torch.set_num_threads(1)
    workload = fresh(name)
    optimizer = momentum(workload.model.parameters())
    batch = workload.make_batch(size)
    counter.write_bytes(bytes(8))
    with counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
        done = 0
        while not told:
            loss = workload.loss(workload.model(*batch.args, **batch.kwargs), batch.target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += size
            shared[:] = struct.pack("q", done)


if __name__ == "__main__":
    main()
