"""How many threads a rank computes with: the host's cores over its ranks, whoever starts them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
import torch
from meshwright.executor.launch import start

start.cores = lambda: 8
start.start_process_group()
os.write(1, f"{torch.get_num_threads()}\\n".encode())  # at once: ranks share it
"""


@pytest.mark.parametrize(("told", "threads"), [(None, "4"), ("1", "1")])
@pytest.mark.timeout(120)
def test_torchrun_leaves_it_to_us_or_the_user(tmp_path, told, threads):
    """torchrun itself says 1 where the user has said nothing."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: v for name, v in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "script.py"],
        capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False,
        env=environment if told is None else {**environment, "OMP_NUM_THREADS": told},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [threads, threads]
