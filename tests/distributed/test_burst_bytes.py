"""What the meter says is sent under a burst plan leaves the process (docs/executor.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.parallel import run_of
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import ExchangePolicy, Plan, UnitPlan
from plans import plan, scheduled
from torch import nn

from tests.wire import ExchangedParam, exchanged_bytes

WIDTH, SAMPLES, WARM_UP = 512, 96, 3
SMALL_BYTES = 40_000
"""Headers of messages, votes, and what ranks post to the store, in one step: a few percent."""


def written_bytes() -> int:
    """What this process has written since it began. Linux counts writes to sockets with those to
    files, and gloo sends by ``writev``."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def _plan(schedule: str, exchange: ExchangePolicy) -> Plan:
    layouts = (Layout(groups=2), Layout(groups=2, first=1), Layout(groups=3), Layout(groups=1))
    units = [
        UnitPlan(name=str(i), kind="linear", modules=(str(i),), batched_inputs=(0,), layout=layout)
        for i, layout in enumerate(layouts)
    ]
    units = [msgspec.structs.replace(unit, exchange=exchange) for unit in units]
    with scheduled(schedule):
        return plan(3, units, placement=(2, 0, 1), message_bytes=2**18)


def leaves_the_process(rank: int, schedule: str, exchange: ExchangePolicy) -> None:
    model, made = _model(), _plan(schedule, exchange)
    parameters = [
        ExchangedParam(name.split(".")[0], tuple(p.shape), p.element_size())
        for name, p in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    apply(model, optimizer, made, timeout_s=20)
    run = run_of(model)
    x = torch.randn(SAMPLES // 3, WIDTH)
    for step in range(WARM_UP + 1):
        dist.barrier()
        before = written_bytes(), run.meter.sent_bytes, run.meter.exchanged_bytes
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.state_dict()
        run.finish_steps()
        dist.barrier()  # whoever waits for something of this rank has it now
        written, sent, exchanged = (
            now - then
            for now, then in zip(
                (written_bytes(), run.meter.sent_bytes, run.meter.exchanged_bytes),
                before,
                strict=True,
            )
        )
        if step < WARM_UP:
            continue
        predicted = exchanged_bytes(made, parameters)[run.world.position]
        assert abs(exchanged - predicted) <= len(parameters) * 8, (exchanged, predicted)
        assert sent > 2**20 or run.world.position == 0, sent
        assert sent <= written <= sent + SMALL_BYTES, (written, sent)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts what processes write")
@pytest.mark.parametrize(
    ("schedule", "exchange"),
    [("barrier", "dense"), ("priority", "dense"), ("priority", "sharded")],
)
def test_what_is_counted_leaves_the_process(ranks, schedule, exchange):
    ranks(3)(leaves_the_process, schedule, exchange)
