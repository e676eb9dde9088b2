"""The training loop over a workload, what it measures, and the comparison of collectives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from meshwright.cli.render.comparisons import measured_rows
from meshwright.executor.apply import apply
from meshwright.executor.checkpoint.checkpoint import checkpoint
from meshwright.executor.checkpoint.folder import steps_in
from meshwright.executor.launch.report import report_of_training
from meshwright.executor.launch.train import Measured, run_range, run_steps, train_step
from meshwright.executor.parallel import full_state_dict
from meshwright.models import zoo as models
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.planner.schema.errors import RunError
from meshwright.planner.schema.text import seconds
from plans import SCHEDULES, by_columns_and_rows, plan, plan_for, scheduled
from reference import twin


def measures_steps(rank: int, micro: int) -> None:
    torch.manual_seed(0)
    workload = models.build("mlp")
    batch = workload.make_batch(7)
    choose = by_columns_and_rows(workload.model, 2, ("linear",))
    chosen = plan_for(discover(workload.model, batch), 2, choose, micro_batches=micro)
    found = run_steps(workload, chosen, 3)
    assert found.steps == 3
    assert len(found.losses) == 5
    assert found.step_s >= found.blocking_s + found.exposed_s + found.update_s > 0
    assert found.blocking_s > 0
    assert found.wire_bytes > 0
    parameters = sum(p.numel() * 4 for p in workload.model.parameters())
    for peak in found.peak_bytes:
        assert 2 * parameters < peak < 10 * parameters
    assert found.samples_per_s == pytest.approx(8 / found.step_s)


def draws_slowly(rank: int) -> Measured:
    workload = models.build("mlp")
    chosen = plan_for(discover(workload.model, workload.make_batch(4)), 2)

    def draw(number: int) -> Batch:
        time.sleep(0.5 * rank)
        return workload.make_batch(4)

    return run_steps(workload, chosen, 2, draw=draw)


def test_what_drawing_a_batch_takes_is_told_beside_the_step(ranks):
    first, second = ranks(2)(draws_slowly)
    assert first == second
    assert first.drawing_s >= 0.5
    # The other rank waits for it in its step, and is the slowest one.
    reported = report_of_training(plan(2), first, None)
    assert reported.measured.drawing_s == first.drawing_s
    assert reported.predicted.drawing_s is None
    (row,) = (row for row in measured_rows(reported) if "drawing" in row[0])
    assert row[1:] == ("-", seconds(first.drawing_s), "")


@pytest.mark.parametrize("micro", [1, 3])
def test_steps_are_measured(ranks, micro):
    ranks(2)(measures_steps, micro)


def fails_in_step_62(rank: int, folder: str, *, scaled: bool) -> tuple[str, list[int]]:
    """A training that goes on behind step 50 and saves every five: what it says in the end, and
    what it has saved. With a scaler the loss of step 55, at which it saves, is none either."""
    torch.manual_seed(0)
    workload = models.build("mlp")
    chosen = plan_for(discover(workload.model, workload.make_batch(4)), 2)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    apply(workload.model, optimizer, chosen)

    def draw(number: int) -> Batch:
        batch = workload.make_batch(4)
        if number + 1 >= 62 or (scaled and number + 1 == 55):
            batch.args[0][-1] = torch.inf  # the last rank's
        return batch

    kept = checkpoint(folder, workload.model, optimizer, every=5)
    kept.save(50)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled) if scaled else None
    try:
        run_range(
            workload, chosen, range(50, 90), optimizer=optimizer, draw=draw, kept=kept,
            scaler=scaler,
        )  # fmt: skip
    except RunError as error:
        kept.close()
        torch.distributed.barrier()  # what is older is removed by rank 0
        return str(error), steps_in(Path(folder))
    return "nothing was raised", []


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_a_training_that_fails_leaves_its_good_checkpoints(ranks, tmp_path, scaled):
    for said, steps in ranks(2)(fails_in_step_62, str(tmp_path / "kept"), scaled=scaled):
        assert said.startswith("the loss of step 62 is nan: nothing is measured or saved")
        assert steps == [60, 55, 50]


def steps_as_one_process(rank: int, micro: int, schedule: str) -> None:
    torch.manual_seed(0)
    workload = models.build("mlp")
    workload.model.double()
    batches = [workload.make_batch(7).to(dtype=torch.float64) for _ in range(2)]
    choose = by_columns_and_rows(workload.model, 2, ("linear",))
    with scheduled(schedule):
        chosen = plan_for(discover(workload.model, batches[0]), 2, choose, micro_batches=micro)
    alone = twin(workload.model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (workload.model, alone)]
    apply(workload.model, optimizers[0], chosen)
    for batch in batches:
        found = train_step(workload, chosen, batch, optimizers[0])
        loss = workload.loss(alone(*batch.args), batch.target)
        assert found == pytest.approx(loss.item(), rel=1e-12)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for name, value in full_state_dict(workload.model).items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro", [1, 3, 5])
def test_steps_equal_one_process(ranks, micro, schedule):
    ranks(2)(steps_as_one_process, micro, schedule)
