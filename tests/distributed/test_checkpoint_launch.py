"""``launch --checkpoint``: a plan's own workload, and a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from launched import environment
from meshwright.executor.checkpoint.folder import steps_in
from meshwright.models import zoo
from meshwright.models.units.discover import discover
from meshwright.planner.schema.record import save
from plans import plan, plan_for, scheduled, unit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import meshwright as mw, torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
units = mw.load(mw.Plan, {plan!r})
model, optimizer, plan = mw.auto_parallelize(model, optimizer, plan=units)
with mw.checkpoint(None, model, optimizer) as ckpt:
    first = ckpt.resume()
    for _ in range(first, first + 4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
print("made", first, "to", first + 4)
"""


def launch(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", "launch", *map(str, arguments)],
        capture_output=True, text=True, timeout=200, cwd=folder, check=False,
        env=environment(),
    )  # fmt: skip


def test_a_plans_own_workload_goes_on(tmp_path: Path):
    workload = zoo.build("mlp")
    with scheduled("priority"):
        made = plan_for(discover(workload.model, workload.make_batch(4)), 2)
    save(msgspec.structs.replace(made, target="mlp"), tmp_path / "plan.json")
    options = ("--checkpoint", "kept", "--checkpoint-every", 3)
    done = launch(tmp_path, "plan.json", "--steps", 5, *options)
    assert done.returncode == 0, done.stderr
    assert "note: begins anew in kept" in done.stderr
    assert "over 3 steps after" in done.stdout
    assert steps_in(tmp_path / "kept") == [5, 3]
    damaged = tmp_path / "kept" / "step-00000005" / "index.json"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    done = launch(tmp_path, "plan.json", "--steps", 5, *options)
    assert done.returncode == 0, done.stderr
    assert (
        "note: goes on from the checkpoint of step 3 in kept; that of step 5 is dam" in done.stderr
    )
    assert "note: nothing was measured: fewer than 3 of --steps were left" in done.stderr
    assert "Warning" not in done.stderr
    assert "medians" not in done.stdout
    assert steps_in(tmp_path / "kept") == [5, 3]
    done = launch(tmp_path, "plan.json", "--steps", 5, *options)
    assert done.returncode == 2
    assert "meshwright: the training in kept is at step 5 and --steps asks for 5" in done.stderr


def test_a_script_is_told_the_folder(tmp_path: Path):
    save(plan(2, [unit("0", 1, "none", 2), unit("1", 1, "none", 2)]), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT.format(plan=str(tmp_path / "plan.json")))
    options = ("--checkpoint", "kept", "--checkpoint-every", 2, "plan.json", "train.py")
    for first in (0, 4):
        done = launch(tmp_path, *options)
        assert done.returncode == 0, done.stderr
        assert f"made {first} to {first + 4}" in done.stdout
        how = f"goes on from the checkpoint of step {first}" if first else "begins anew"
        assert f"note: {how} in kept" in done.stderr
        assert steps_in(tmp_path / "kept")[:2] == [first + 4, first + 2]
