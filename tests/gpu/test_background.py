"""A background job beside training, on one GPU that two ranks share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import environment, small_hybrid_plan
from meshwright.planner.schema.record import save

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device to share"),
]
STEPS = 60


def launched(folder: Path, *options: str) -> dict[str, Any]:
    """What a launch of the plan tells at its end."""
    # From NCCL 2.30 on several ranks may work on one GPU.
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-m", "meshwright", "launch", "plan.json", "--steps", str(STEPS)]
    done = subprocess.run(
        [*command, "--json", *options], cwd=folder, env=environment(**shared),
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_job_runs_beside_training_and_changes_none_of_its_numbers(tmp_path):
    save(small_hybrid_plan(), tmp_path / "plan.json")
    save(small_hybrid_plan(1), tmp_path / "small.json")
    options = ("--background", "small.json", "--background-gpu-memory", "2GiB")
    alone, beside = launched(tmp_path), launched(tmp_path, *options)
    assert beside["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    job = beside["background"]
    assert job["steps"] == STEPS
    # It was let run, and until it was told to stop it did.
    assert job["open_share"] > 0
    assert job["cpu_s"] > 0
    assert not job["ended"]
