"""Scalars of a training for TensorBoard, where that is installed: loss, step time, samples per
second, and the step that was predicted."""

from __future__ import annotations

import atexit
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan
from ..comm.control import PendingGather
from ..run import Run
from .train import LaunchedStep

# The folder that rank 0 writes scalars into.
TENSORBOARD_VARIABLE = "MESHWRIGHT_TENSORBOARD"
# So old may be what somebody sees who looks while the training goes on.
FLUSH_S = 5


def scalar_folder(folder: str | Path) -> str:
    """The folder that ranks are told of. Raises ``InputError`` where TensorBoard is not installed,
    or where it cannot be a folder."""
    path = Path(folder).absolute()
    if path.exists() and not path.is_dir():
        raise InputError(f"--tensorboard {folder} is a file: name a folder for the scalars")
    _check_installed()
    return str(path)


def _check_installed() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "--tensorboard needs TensorBoard, which is not installed: pip install tensorboard, or "
            "leave --tensorboard out"
        )


class ScalarWriter:
    """Writes what rank 0 tells of each step. What the folder has of steps from the first that is
    told on, of a run that ended behind the checkpoint from which this one goes on, is hidden."""

    def __init__(self, folder: str, plan: Plan) -> None:
        _check_installed()  # on this host too, which need not be the launcher's
        self._folder, self._plan = folder, plan
        self._writer: Any = None
        # Before the training, of which the first step's number is not known yet.
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputError(
                f"cannot write scalars into {folder}: {error.strerror}; name another folder"
            ) from None
        atexit.register(self.close)

    def write(self, number: int, step_s: float, loss: float | None = None) -> None:
        """The scalars of step ``number`` (the first is 0)."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter
            self._writer = writer(self._folder, purge_step=number, flush_secs=FLUSH_S)
        found = {"step_s": step_s, "predicted_step_s": self._plan.prediction.step_s}
        if step_s:
            found["samples_per_s"] = self._plan.goal.batch / step_s
        if loss is not None:
            found["loss"] = loss
        for name, value in found.items():
            self._writer.add_scalar(f"training/{name}", value, number)

    def close(self) -> None:
        """Has all of it on disk."""
        if self._writer is not None:
            self._writer.close()


def given_writer(plan: Plan, rank: int) -> ScalarWriter | None:
    """Rank 0's writer where the launcher was asked for scalars."""
    folder = os.environ.get(TENSORBOARD_VARIABLE)
    return ScalarWriter(folder, plan) if folder and not rank else None


class _StepTold(NamedTuple):
    number: int
    step_s: float
    losses: PendingGather


class TrainingScalars:
    """Tells a writer of the steps of a training of which every rank has a part of the loss.
    ``stepped`` and ``close`` are collective; ``writer`` is None on ranks other than 0."""

    def __init__(self, run: Run, writer: ScalarWriter | None) -> None:
        self._run, self._writer = run, writer
        self._launched: tuple[int, LaunchedStep] | None = None
        self._told: _StepTold | None = None

    def stepped(self, number: int, step: LaunchedStep | None) -> None:
        """Step ``number`` was launched."""
        # Late on purpose: a step is asked for its figures when the next one has been launched, and
        # its losses are waited for when those of the next are on their way. Nothing is held up.
        before, self._launched = self._launched, None if step is None else (number, step)
        told, self._told = self._told, None
        if before is not None:
            spent = before[1].spent()
            losses = self._run.everyone.gather([spent.loss], "the loss of a step", whole=False)
            self._told = _StepTold(before[0], spent.step_s, losses)
        if told is not None:
            loss = sum(row[0] for row in told.losses.rows())
            if self._writer is not None:
                self._writer.write(told.number, told.step_s, loss)

    def close(self) -> None:
        """Tells of the last steps."""
        self.stepped(-1, None)
        self.stepped(-1, None)
        if self._writer is not None:
            self._writer.close()


def given_scalars(run: Run) -> TrainingScalars | None:
    """What tells of a training's steps where the launcher was asked for scalars, on every rank."""
    if not os.environ.get(TENSORBOARD_VARIABLE):
        return None
    return TrainingScalars(run, given_writer(run.whole_plan, run.world.rank))
