"""A launched run that lacks memory: what its user reads, and that the plan named there fits."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright import api
from meshwright.planner.schema.goal import make_goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

FACTORY = """
import os, resource
import torch
from torch import nn
from torch.nn import functional as F
from meshwright import Batch, Workload

if "RANK" in os.environ:  # a rank may take so much more than it has when it gets here
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = used + int(os.environ["MORE_MIB"]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

def deep():
    layers = [layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.Tanh())]
    def make_batch(size):
        return Batch((torch.randn(size, 256),), torch.randn(size, 256))
    return Workload("deep", nn.Sequential(*layers), make_batch, F.mse_loss)
"""


def meshwright(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *map(str, arguments)],
        capture_output=True, text=True, timeout=150, check=False, cwd=folder,
        env={**os.environ, "MESHWRIGHT_CACHE": str(folder / "cache"), "MORE_MIB": "700"},
    )  # fmt: skip


def test_a_launched_run_that_lacks_memory_names_a_plan_that_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FACTORY)
    profile = api.profile("own.py:deep", device="a100-sxm-40gb")
    cluster = api.describe_cluster(device="a100-sxm-40gb", nodes=2, inter_gbit_s=10.0)
    save(cluster, tmp_path / "CLUSTER")
    made = api.plan(profile, cluster, make_goal(2 * 32768))
    save(made, tmp_path / "plan.json")

    done = meshwright(tmp_path, "launch", "plan.json", "--steps", 1)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr[done.stderr.index("meshwright: ") :].splitlines()
    assert re.match(r"meshwright: rank \d ran out of memory: .*DefaultCPUAllocator", lines[0])
    needed = max(made.prediction.peak_bytes)
    assert f"predicted at most {needed / 2**20:,.1f} MiB, in the " in lines[1]
    assert "feature maps " in lines[1]
    assert any(line.startswith("  held now: weights ") for line in lines)
    assert any("largest parameters: " in line for line in lines)

    (named,) = [line for line in lines if line.startswith("  a plan that fits, predicted to take")]
    words = shlex.split(named[named.index("meshwright plan") :])
    target = words.index("own.py:deep")
    save(profile, tmp_path / "profile.json")  # the estimate; the model would be measured here else
    words[target] = "profile.json"
    again = meshwright(tmp_path, *words[1:], "-o", "less.json")
    assert again.returncode == 0, again.stderr
    less = load(Plan, tmp_path / "less.json")
    assert max(less.prediction.peak_bytes) <= 0.9 * needed
