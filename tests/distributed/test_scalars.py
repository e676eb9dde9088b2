"""What TensorBoard is told of a training: read back from its files."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.checkpoint.checkpoint import checkpoint
from meshwright.executor.launch.report import REPORT_VARIABLE, record_run
from meshwright.executor.launch.scalars import (
    TENSORBOARD_VARIABLE,
    ScalarWriter,
    given_scalars,
)
from meshwright.executor.launch.train import run_range, take_step
from meshwright.executor.parallel import run_of
from meshwright.models import zoo as models
from meshwright.models.units.discover import discover
from meshwright.models.workload import Workload
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import Plan
from plans import plan_for

from tests import frameworks

STEPS = 5


def scalars_in(folder: str) -> dict[str, dict[int, float]]:
    """Values by name and step."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = defaultdict(dict)
    (file,) = Path(folder).iterdir()  # rank 0's and no other
    for raw in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(raw)
        for value in event.summary.value:
            found[value.tag.removeprefix("training/")][event.step] = value.simple_value
    return found


def prepared(folder: str) -> tuple[Any, Any]:
    frameworks.use()
    os.environ[TENSORBOARD_VARIABLE] = folder
    torch.manual_seed(0)
    workload = models.build("mlp")
    made = plan_for(discover(workload.model, workload.make_batch(4)), 2)
    prediction = msgspec.structs.replace(made.prediction, step_s=0.25)
    return workload, msgspec.structs.replace(made, prediction=prediction)


def tells_of_a_training(rank: int, folder: str) -> None:
    workload, plan = prepared(folder)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    apply(workload.model, optimizer, plan)
    scalars = given_scalars(run_of(workload.model))
    found = run_range(workload, plan, range(STEPS), optimizer=optimizer, launched=scalars.stepped)
    scalars.close()
    del os.environ[TENSORBOARD_VARIABLE]
    assert found is not None
    if rank:
        return
    told = scalars_in(folder)
    assert sorted(told) == ["loss", "predicted_step_s", "samples_per_s", "step_s"]
    assert list(told["loss"]) == list(range(STEPS))
    assert list(told["loss"].values()) == pytest.approx(found.losses, rel=1e-6)
    assert set(told["predicted_step_s"].values()) == {0.25}
    for step, seconds in told["step_s"].items():
        assert seconds > 0
        rate = plan.goal.batch / seconds
        assert told["samples_per_s"][step] == pytest.approx(rate, rel=1e-5)


def record(workload: Workload, optimizer: torch.optim.Optimizer, report: str) -> None:
    """As the launcher asks for it."""
    os.environ[REPORT_VARIABLE] = report
    record_run(workload.model, optimizer)
    del os.environ[REPORT_VARIABLE], os.environ[TENSORBOARD_VARIABLE]


def make_steps(workload: Workload, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        take_step(workload, plan, workload.make_batch(4), optimizer).spent()


def tells_of_a_script(rank: int, folder: str) -> None:
    workload, plan = prepared(folder)
    Path(folder + "-report").mkdir(exist_ok=True)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    apply(workload.model, optimizer, plan)
    record(workload, optimizer, folder + "-report")
    make_steps(workload, plan, optimizer)
    if rank:
        return
    close_writers()
    told = scalars_in(folder)
    assert list(told["step_s"]) == list(range(1, STEPS - 1))
    assert "loss" not in told


def goes_on_behind_a_checkpoint(rank: int, folder: str) -> None:
    """A script that wrote up to step 9 and goes on from the checkpoint of step 7."""
    workload, plan = prepared(folder)
    if rank == 0:
        before = ScalarWriter(folder, plan)
        for number in range(10):
            before.write(number, 0.5)
        before.close()
    kept = str(Path(folder).parent / "kept")
    for resumes in (False, True):
        torch.manual_seed(0)
        workload = models.build("mlp")
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
        apply(workload.model, optimizer, plan)
        ckpt = checkpoint(kept, workload.model, optimizer)
        if not resumes:
            ckpt.save(7)
            ckpt.close()
    record(workload, optimizer, folder)
    assert ckpt.resume() == 7
    make_steps(workload, plan, optimizer)
    if rank:
        return
    close_writers()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder)
    found.Reload()
    shown = [(event.step, event.value) for event in found.Scalars("training/step_s")]
    # The first step behind it has no beginning that is known.
    assert [step for step, _ in shown] == [*range(8), *range(8, 7 + STEPS - 1)]
    assert [value == 0.5 for _, value in shown] == 8 * [True] + (STEPS - 2) * [False]


def close_writers() -> None:
    """They are on disk a few seconds later, or when the process ends."""
    for writer in (o for o in gc.get_objects() if type(o) is ScalarWriter):
        writer.close()


def says_what_cannot_be(rank: int, folder: str) -> None:
    file = Path(folder).parent / f"file-{rank}"
    file.write_text("")
    workload, plan = prepared(str(file / "inside"))
    apply(workload.model, None, plan)
    try:
        if rank == 0:
            with pytest.raises(InputError, match="cannot write scalars"):
                given_scalars(run_of(workload.model))
    finally:
        del os.environ[TENSORBOARD_VARIABLE]


@frameworks.needs("tensorboard")
@pytest.mark.parametrize(
    "check",
    [tells_of_a_training, tells_of_a_script, goes_on_behind_a_checkpoint, says_what_cannot_be],
)
def test_scalars(ranks, tmp_path, check):
    ranks(2)(check, str(tmp_path / "scalars"))
