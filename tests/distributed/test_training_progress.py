"""What is shown while ranks train, and what is said where steps are not as predicted."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import meshwright
import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.launch import training_progress
from meshwright.executor.launch.training_progress import TrainingProgress, progress
from meshwright.executor.parallel import run_of
from meshwright.executor.step_clock import clock_of
from meshwright.planner.schema.plan import Plan
from meshwright.profiler.overhead import UNPREDICTED
from plans import plan, scheduled

pytestmark = pytest.mark.alone
SLOW_S = 0.03


def predicted(**figures: float) -> Plan:
    made = msgspec.structs.replace(UNPREDICTED, **figures)
    return msgspec.structs.replace(plan(2, statistics="local"), prediction=made)


def trains(
    rank: int, made: Plan, slow_rank: int | None, steps: int = 80, every_s: float = 0.1
) -> tuple[list[str], list[str]]:
    """The lines that this rank shows, and what it says; ``slow_rank`` sleeps in its forward."""

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == slow_rank:
                time.sleep(SLOW_S)
            return super().forward(x)

    model = Net(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    apply(model, optimizer, made, timeout_s=30)
    screen, said, run = io.StringIO(), list[str](), run_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_progress, "TOLD_S", 0.1)
        patch.setattr(training_progress, "FIRST_S", 0.2)
        shown = TrainingProgress(
            run, torch.device("cpu"), total=steps, every_s=every_s, screen=screen, say=said.append
        )
        clock_of(run, model, optimizer).listeners.append(shown.noticed)
        for _ in range(steps):
            if slow_rank is None:
                time.sleep(0.01)
            loss = model(torch.ones(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shown.step(loss)
    shown.end()
    return screen.getvalue().splitlines(), said


FAST = {"step_s": 1e-4, "compute_s": 1e-4, "low_s": 0.9e-4, "high_s": 1.1e-4}


def test_rank_0_shows_steps_loss_and_speed(ranks):
    lines, said = zip(*ranks(2)(trains, predicted(**FAST | {"high_s": 1e3}), None), strict=True)
    assert lines[1] == []
    assert len(lines[0]) >= 2
    words = lines[0][-1]
    assert words.startswith("step ")
    assert " of 80, loss " in words
    assert "samples/s, " in words
    assert "a step, predicted 100 µs (" in words
    assert list(said) == [[], []]


def test_the_rank_that_computes_too_long_is_named_once(ranks):
    for slow in (0, 1):
        (_, said), (_, others) = ranks(2)(trains, predicted(**FAST), slow)
        assert len(said) == 1, said
        assert f"computing is slower, rank {slow} computes for " in said[0]
        assert others == []


def test_why_steps_are_slow_is_said_before_the_next_line(ranks):
    (lines, said), _ = ranks(2)(trains, predicted(**FAST), 1, every_s=60.0)
    assert len(lines) == 2  # the first, and the last step's
    assert lines[1].startswith("step 80 of 80")
    assert len(said) == 1, said


def test_links_are_named_where_ranks_wait_longer_than_predicted(ranks):
    """As much computing was predicted as there could be, and no waiting."""
    made = predicted(**FAST | {"compute_s": 1e3})
    (_, said), _ = ranks(2)(trains, made, None)
    assert len(said) == 1, said
    assert "links inside nodes are slower, each rank waits for gradients for " in said[0]


def test_beside_a_background_job_longer_steps_are_no_surprise(ranks, monkeypatch):
    made = predicted(**FAST)
    (_, said), _ = ranks(2)(trains_beside_a_job, made)
    assert said == []


def trains_beside_a_job(rank: int, made: Plan) -> tuple[list[str], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_progress, "BACKGROUND_VARIABLE", "PATH")
        return trains(rank, made, None)


def test_a_loop_of_ones_own_shows_its_loss(ranks):
    assert ranks(2)(own_loop) == [True, True]


def own_loop(rank: int) -> bool:
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        same = own_loop_on(rank)
    # The last step's line, whenever that is; those before the checkpoint count.
    lines = screen.getvalue().splitlines()
    assert [line.startswith("step 9 of 9, loss ") for line in lines] == [True] * (rank == 0)
    return same


def own_loop_on(rank: int) -> bool:
    model = torch.nn.Linear(4, 4)
    with scheduled("priority"):
        made: Any = plan(2, statistics="local")
        apply(model, None, made, timeout_s=30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(meshwright.InputError, match="give more than 0"):
        progress(model, every_s=0)
    shown = meshwright.progress(model, total=9, every_s=60)
    run_of(model).steps_done = 6
    for _ in range(3):
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        optimizer.step()
        shown.step(loss)
    # The one that is there goes on, with what is told of it now.
    return meshwright.progress(model, every_s=30) is shown
