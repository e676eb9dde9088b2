"""Where less memory is free than a plan needs, another is made before the first step, and runs."""

from __future__ import annotations

import warnings
from pathlib import Path

import meshwright as mw
import pytest
import torch
from meshwright.executor import headroom
from meshwright.executor.parallel import is_parallel
from meshwright.models.zoo import build
from meshwright.planner.schema import cache
from meshwright.planner.schema.errors import NoRoomError
from torch import nn

from tests.strategies import cluster as cluster_of

MIB = 2**20
SCRIPT = """
import sys
import meshwright as mw
from meshwright.executor import headroom
from meshwright.models.zoo import build

headroom.free_bytes = lambda device: int(sys.argv[1])
workload = build("gpt-mini")
optimizer = mw.executor.optimizer.kinds.optimizer_for("adamw", workload.model.parameters())
model, optimizer, plan = mw.auto_parallelize(workload, optimizer)
for _ in range(6):
    batch = workload.make_batch(2)
    workload.loss(model(*batch.args, **batch.kwargs), batch.target).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def planned() -> mw.Plan:
    """For gpt-mini on two devices, from an estimate; ``launch`` finds what it was made from."""
    profile = mw.profile("gpt-mini", device="a100-sxm-40gb", batches=(2, 4))
    cluster = cluster_of(2)
    for document in (profile, cluster):
        cache.put(document)
    return mw.plan(profile, cluster, mw.Goal(batch=4, optimizer="adamw"))


def launched(plan: mw.Plan, folder: Path, free: int) -> tuple[mw.RunReport | None, list[str]]:
    script, said = folder / "train.py", list[str]()
    script.write_text(SCRIPT)
    report = mw.launch(plan, [str(script), str(free)], timeout_s=120, say=said.append)
    return report, [text for text in said if text]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_launch_plans_again_within_what_is_free(tmp_path):
    plan = planned()
    peak = max(plan.prediction.peak_bytes)
    held = sum(t.nbytes for t in build("gpt-mini").model.state_dict().values())
    less = (peak - held) // 8
    report, said = launched(plan, tmp_path, peak - held - less)
    assert report is not None
    (again,) = (text for text in said if "planned again within" in text)
    assert again.startswith("rank 0 has ")
    assert "\n" not in again
    assert report.predicted.peak_bytes <= peak - less


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_launch_says_why_no_other_plan_fits(tmp_path):
    plan = planned()
    with pytest.raises(NoRoomError, match=r"and none was made that needs less \(.*: free some"):
        launched(plan, tmp_path, MIB)


def plans_again(rank: int) -> tuple[tuple[int, ...], list[str]]:
    layers = [m for _ in range(6) for m in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers)
    example = torch.ones(2048, 256)
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(headroom, "free_bytes", lambda device: 22 * MIB)
        _, _, plan = mw.auto_parallelize(model, example_inputs=example)
    assert is_parallel(model)
    model(example).sum().backward()
    return plan.prediction.peak_bytes, [str(w.message) for w in told if w.category is UserWarning]


def test_auto_parallelize_plans_again_within_what_is_free(ranks):
    (peaks, told), (same, untold) = ranks(2)(plans_again, limit_s=100)
    assert same == peaks
    assert max(peaks) < 26 * MIB
    assert any("planned again within" in text for text in told)
    assert not any("planned again within" in text for text in untold)
