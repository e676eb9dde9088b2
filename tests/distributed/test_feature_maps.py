"""What becomes of feature maps where units have different memory policies: bytes on the device and
bytes sent to the host, as the plan has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.launch.train import run_steps
from meshwright.executor.memory import offload as hosts
from meshwright.models.precision import in_precision
from meshwright.models.zoo import build
from meshwright.planner.schema.cluster import Cluster, Device, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.plan import MemoryPolicy
from meshwright.planner.schema.precision import Precision
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.model import profile

from tests.copying_host import CopyingHost


def errors_of_mixed_policies(rank: int, name: str, precision: Precision) -> list[float]:
    """By how much peaks are predicted too high, relative, and what is sent by how many bytes."""
    batch, before, found = 4, hosts.host_of, []
    measured = profile(
        in_precision(build(name), precision), batches=(2, batch), repeats=1, degrees=()
    )
    device = Device(name="here", memory_bytes=2**40, host_bytes_per_s=1e10)
    links = Cluster(name="here", nodes=(Node(name="here", devices=(device,)),), levels=())
    random = np.random.default_rng(0)
    policies: list[MemoryPolicy] = ["keep", "recompute", "offload"]
    whole = Option(data_parallel(1))
    for shares in ([0, 1, 0], [0, 0, 1], [1 / 3] * 3, [1 / 3] * 3):
        chosen = random.choice(3, len(measured.units), p=shares)
        may_leave = [bool(u.modules) and u.whole.saved(1.0) > 0 for u in measured.units]
        decisions = [
            whole._replace(memory=policies[which]) if may else whole
            for which, may in zip(chosen, may_leave, strict=True)
        ]
        goal = Goal(batch=batch, optimizer="adamw")
        made = make_plan(measured, links, goal, decisions, schedule="barrier", executor=CAPABILITY)
        host, forwards = CopyingHost(), 0
        torch.manual_seed(0)
        workload = in_precision(build(name), precision)

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        workload.model.register_forward_hook(count)
        hosts.host_of = lambda device, host=host: host
        try:
            report = run_steps(workload, made, 1)
        finally:
            hosts.host_of = before
        found.append(max(made.prediction.peak_bytes) / max(report.peak_bytes) - 1)
        planned = sum(
            unit.whole.saved(float(batch))
            for unit, decision in zip(measured.units, decisions, strict=True)
            if decision.memory == "offload"
        )
        found.append(planned / (host.sent_bytes / forwards) - 1 if planned else host.sent_bytes)
    return found


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt-mini", "bf16-mixed"),
        pytest.param("gpt-mini", "float32", marks=pytest.mark.slow),
        pytest.param("resnet50-32", "float32", marks=pytest.mark.long),
    ],
)
def test_a_feature_map_costs_what_its_makers_policy_says(ranks, name, precision):
    """Whoever saves it: what is predicted of it is what is there, and what is copied."""
    (errors,) = ranks(1)(errors_of_mixed_policies, name, precision, limit_s=100)
    print(name, precision, [f"{error:+.2%}" for error in errors])
    assert max(map(abs, errors)) <= 0.015
