"""Estimates of reference models are found again without torch, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.profiler import catalogue

PROGRAM = """
import sys
import meshwright as mw

target, device, dtype = sys.argv[1:4]
if dtype != "as-built":
    import torch
    torch.set_default_dtype(getattr(torch, dtype))
cluster = mw.describe_cluster(device=device, nodes=2, inter_gbit_s=10)
plan = mw.plan(target, cluster, mw.Goal(batch=8))
print("torch" in sys.modules, plan.prediction.step_s)
"""


def planned(cache: Path, target: str, device: str, dtype: str = "as-built") -> tuple[bool, float]:
    """Whether a process that plans a target has loaded torch, and the step that it predicts."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, device, dtype],
        env={**os.environ, "MESHWRIGHT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded, step_s = done.stdout.split()
    return loaded == "True", float(step_s)


@pytest.mark.timeout(300)
def test_the_second_plan_of_a_reference_model_does_without_torch(tmp_path):
    device, other = sorted(catalogue.names())[:2]
    first = planned(tmp_path, "mlp", device)
    assert first[0]
    assert planned(tmp_path, "mlp", device) == (False, first[1])
    assert planned(tmp_path, "mlp", other)[0], "another device"
    assert planned(tmp_path, "mlp", device, "float64")[1] > first[1], "twice the bytes"
    assert planned(tmp_path, "mlp", device) == (False, first[1])


@pytest.mark.timeout(300)
def test_a_file_of_the_users_is_looked_at_each_time(tmp_path):
    own = tmp_path / "own.py"
    text = """
import torch
from meshwright import Batch, Workload
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, 4))
    loss = nn.functional.cross_entropy
    return Workload(
        model=model,
        loss=loss,
        make_batch=lambda n: Batch((torch.randn(n, 64),), torch.randint(4, (n,))),
        name="own",
    )
"""
    device = min(catalogue.names())
    found = []
    for width in (512, 4096):
        own.write_text(text.replace("WIDTH", str(width)))
        found.append(planned(tmp_path / "cache", f"{own}:make", device))
    assert all(loaded for loaded, _ in found)
    assert found[0][1] < found[1][1]
