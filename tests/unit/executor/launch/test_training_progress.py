"""Which part of a step is named where it is not as predicted; the line that is shown."""

from __future__ import annotations

import io

import msgspec
import pytest
import torch
from meshwright.executor.launch.training_progress import (
    RankSteps,
    _LatestLoss,
    _Line,
    is_far,
    why_not_as_predicted,
)
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan, Prediction, Provenance

PREDICTED = Prediction(
    step_s=0.1, compute_s=0.06, blocking_s=0.01, exposed_s=0.03, update_s=0.0, exchange_s=0.05,
    wire_bytes=1, peak_bytes=(1, 1), gpu_seconds=0.2, samples_per_s=80.0, low_s=0.09, high_s=0.11,
)  # fmt: skip
PLAN = Plan(
    target="test", model="0" * 16, world_size=2, goal=Goal(batch=8), placement=(0, 1), units=(),
    prediction=PREDICTED, baseline=PREDICTED,
    provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
)  # fmt: skip
LEVELS = {"blocking": "intra", "exposed": "inter"}


def steps(compute_s: float, blocking_s: float, exposed_s: float) -> RankSteps:
    whole_s = compute_s + blocking_s + exposed_s
    return RankSteps(steps=9, step_s=whole_s, blocking_s=blocking_s, exposed_s=exposed_s)


def why(*ranks: RankSteps, levels=LEVELS, plan: Plan = PLAN):
    return why_not_as_predicted(plan, dict(enumerate(ranks)), lambda r: f"rank {r}", levels)


def test_a_rank_that_computes_too_long_is_named_and_not_the_links():
    """The other one waits for it, and seems to have slow links."""
    found = why(steps(0.06, 0.01, 0.13), steps(0.16, 0.01, 0.03))
    assert found.about == "compute"
    assert found.sentence == (
        "steps take 200.00 ms, and 90.00 ms to 110.00 ms were predicted: computing is slower, "
        "rank 1 computes for 160.00 ms in each, and 60.00 ms were predicted"
    )


def test_links_are_named_where_all_ranks_wait_too_long():
    found = why(steps(0.06, 0.01, 0.15), steps(0.07, 0.01, 0.14))
    assert found.about == "links between nodes"
    assert found.sentence == (
        "steps take 220.00 ms, and 90.00 ms to 110.00 ms were predicted: links between nodes are "
        "slower, each rank waits for gradients for 140.00 ms or longer, and 30.00 ms were predicted"
    )
    found = why(steps(0.06, 0.08, 0.03), steps(0.06, 0.07, 0.04))
    assert found.about == "links inside nodes"
    assert "waits for tensors inside forward and backward for 70.00 ms" in found.sentence
    assert why(steps(0.06, 0.01, 0.15), levels={}).about == "links"


def test_what_the_slowest_rank_was_predicted_to_compute_longer_counts():
    waiting = msgspec.structs.replace(PREDICTED, waiting_s=0.05)
    plan = msgspec.structs.replace(PLAN, prediction=waiting)
    assert why(steps(0.11, 0.01, 0.1), plan=plan).about == "links between nodes"
    assert why(steps(0.16, 0.01, 0.03), plan=plan).about == "compute"


def test_steps_that_are_quicker_are_a_cause_of_their_own():
    found = why(steps(0.02, 0.01, 0.02))
    assert found.about == "quicker"
    assert "calibrate" in found.sentence


def test_steps_that_are_hardly_outside_are_not_told_of():
    """A tenth of a millisecond beyond the interval has no cause that could be named."""
    told = [ms for ms in (85, 86, 90, 100, 110, 115, 116) if is_far(ms / 1e3, PREDICTED)]
    assert told == [85, 116]
    assert not is_far(1.0, msgspec.structs.replace(PREDICTED, low_s=None, high_s=None))


def test_a_file_gets_lines_and_a_terminal_one_line(monkeypatch):
    screen = io.StringIO()
    line = _Line(screen)
    line.show("one")
    line.show("two")
    line.clear()
    assert screen.getvalue() == "one\ntwo\n"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    line = _Line(terminal)
    line.show("a" * 200)
    line.clear()
    line.clear()
    line.show("last", stays=True)
    line.clear()
    assert terminal.getvalue() == f"\r{'a' * 79}\x1b[K\r\r\x1b[K\rlast\x1b[K\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_that_is_shown_is_the_latest_that_has_come(dtype):
    loss = _LatestLoss(torch.device("cpu"))
    assert loss.shown() is None
    loss.given = torch.tensor(1.5, dtype=dtype, requires_grad=True), 2.0
    assert loss.shown() == 3.0
    assert loss.shown() == 3.0
    loss.given = 0.25, 1.0
    assert loss.shown() == 0.25
