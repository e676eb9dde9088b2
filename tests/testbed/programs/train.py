"""Trains a small model as a plan says, without an end where STEPS is 0: what fault tests disturb.

``train.py SCHEDULE STEPS FOLDER``: each rank leaves its process's number in FOLDER/pid-RANK, the
seconds of each step in FOLDER/steps-RANK, and at the end its parameters in FOLDER/result-RANK.
With ``headers`` for a schedule it only calls the model and never waits for anything; ``sharded``
and ``fully_sharded`` are exchanges by priority.
"""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
from meshwright.executor.apply import apply
from meshwright.executor.launch.start import start_process_group
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import SHARDING
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
from plans import plan, scheduled, unit

schedule, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
start_process_group()
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 256))
units = [unit(str(i), 1, "none", size) for i in range(4)]
with scheduled("priority" if schedule == "priority" else "barrier"):
    chosen = plan(size, units, message_bytes=2**18)
if schedule in SHARDING:
    chosen = with_exchange(chosen, schedule)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
apply(model, optimizer, chosen)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
with (folder / f"steps-{rank}").open("w", buffering=1) as taken:
    for number in range(steps) if steps else itertools.count():
        start = time.monotonic()
        torch.manual_seed(number * size + rank)
        output = model(torch.randn(4, 256))
        if schedule == "headers":
            time.sleep(0.1)
        else:
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        taken.write(f"{time.monotonic() - start}\n")
torch.save(model.state_dict(), folder / f"result-{rank}")
