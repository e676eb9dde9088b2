"""What ranks record of their steps for a trace."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.launch.timeline import (
    STEPS,
    TRACE_VARIABLE,
    record_timeline,
    recorded_in,
)
from meshwright.executor.launch.train import WARM_UP
from meshwright.executor.parallel import run_of
from meshwright.planner.explain.step_trace import step_trace
from meshwright.planner.schema.recorded import RecordedSteps
from plans import plan, scheduled, unit

from tests.traces import check_trace, tracks

NAMES = ("0", "2", "4")


def made(kind: str):
    with scheduled("barrier" if kind == "barrier" else "priority"):
        units = [unit(name, 1, "none", 2) for name in NAMES]
        if kind == "divided":
            units[0], units[1] = unit("0", 2, "column", 2), unit("2", 2, "row", 2)
        if kind == "sharded":
            units = [msgspec.structs.replace(u, exchange="sharded") for u in units]
        return plan(2, units, message_bytes=2**14)


def train(rank: int, kind: str, folder: str, steps: int) -> None:
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(linear(64, 256), relu(), linear(256, 128), relu(), linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    apply(model, optimizer, made(kind), timeout_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRACE_VARIABLE, folder)
        record_timeline(model, optimizer)
    before = dist.all_reduce, hooks(model)
    for _ in range(steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run_of(model).finish_steps()
    # Nothing of the recording is left behind it.
    assert (dist.all_reduce, hooks(model)) == before
    assert run_of(model).watch.recorder is None


def hooks(model: torch.nn.Module) -> int:
    modules, parameters = list(model.modules()), list(model.parameters())
    found = [(m._forward_pre_hooks, m._forward_hooks) for m in modules]
    found += [(p._post_accumulate_grad_hooks or {}, {}) for p in parameters]
    return sum(len(one) for pair in found for one in pair)


@pytest.mark.parametrize("kind", ["barrier", "priority", "divided", "sharded"])
def test_ranks_record_what_goes_on_in_a_few_steps(ranks, tmp_path: Path, kind: str):
    ranks(2)(train, kind, str(tmp_path), WARM_UP + STEPS + 2)
    found = recorded_in(tmp_path)
    assert [one.rank for one in found] == [0, 1]
    for one in found:
        check_recorded(one, kind)
    events = json.loads(step_trace(made(kind), None, found))["traceEvents"]
    check_trace(events)
    names = {track for process, track in tracks(events) if process == "rank 0"}
    assert {"step, measured", "computing, measured", "optimizer, measured"} <= names


def check_recorded(one: RecordedSteps, kind: str) -> None:
    assert len(one.steps) == STEPS
    inside = [
        span.name
        for span in one.computing
        if one.steps[0].start_s <= span.start_s < one.steps[0].end_s
    ]
    for name in NAMES:
        assert f"forward {name}" in inside
        assert f"backward {name}" in inside
    assert inside.index("forward 0") < inside.index("forward 2") < inside.index("backward 2")
    assert inside.index("backward 4") < inside.index("backward 0")
    labels = {group.label.split()[0] for group in one.groups}
    assert "exchange" in labels
    assert ("redistribution" in labels) == (kind == "divided")
    assert ("updated" in labels) == (kind == "sharded")
    assert "control" not in labels
    sent = next(group for group in one.groups if group.label.startswith("exchange"))
    assert sent.ranks == (0, 1)
    assert all(m.end_s > m.start_s and m.message_bytes for m in sent.messages)
    assert one.updating
    # One thing at a time in the thread that trains.
    mine = sorted((s.start_s, s.end_s) for s in (*one.computing, *one.waiting))
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))


def test_a_run_that_is_too_short_leaves_nothing(ranks, tmp_path: Path):
    ranks(2)(train_briefly, str(tmp_path))
    assert recorded_in(tmp_path) == []


def train_briefly(rank: int, folder: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scheduled("priority"):
        apply(model, optimizer, plan(2), timeout_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRACE_VARIABLE, folder)
        record_timeline(model, optimizer)
    for _ in range(WARM_UP - 1):
        model(torch.randn(4, 4)).mean().backward()
        optimizer.step()
