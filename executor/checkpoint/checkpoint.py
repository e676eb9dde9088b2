"""``mw.checkpoint``: saving a training while it goes on, and going on from what was saved."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from ...models.compiled import unwrapped
from ...planner.schema.errors import InputError, RunError
from ...planner.schema.plan import Plan
from ...planner.schema.record import encode, fingerprint
from ..comm.agreement import every_rank_tells, rank_zero_decides, together
from ..comm.groups import checkpoint_group
from ..comm.worker_threads import spawn
from ..notes import note
from ..parallel import run_of
from ..run import Run
from .capture import Parts, capture, parameter_names
from .folder import (
    check_folder,
    discard,
    prepare,
    refused_apart,
    remove_older,
    step_name,
    steps_in,
)
from .holdings import StateTensor, holdings_of
from .index import CheckpointIndex, find_damage
from .latest import Latest, first_whole, index_or_damage
from .restore import Restoration
from .staging import Staging
from .storage import Description, save
from .values import dtype_name, encode_value

FOLDER_VARIABLE = "MESHWRIGHT_CHECKPOINT"
"""Where the launcher tells scripts the folder."""
EVERY_VARIABLE = "MESHWRIGHT_CHECKPOINT_EVERY"
KEEP = 3
"""So many checkpoints stay by default: one that was damaged, the one before, and one to spare."""
LEAVE_S = 60.0
"""So long a process that ends waits for a checkpoint that is being written."""


class Stateful(Protocol):
    """What has state that goes on: a scheduler, a loader that knows its position."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


def checkpoint(
    folder: str | Path | None,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    data: Stateful | None = None,
    every: int | None = None,
    keep: int = KEEP,
) -> Checkpoint:
    """Keeps checkpoints of a training in ``folder``. Collective: call it on every rank, after
    ``auto_parallelize``.

    What is saved: the parameters and buffers of ``model``, the state of ``optimizer``, a learning
    rate ``scheduler`` and a loss ``scaler`` (``GradScaler``), what a lossy exchange holds back, the
    random numbers of each rank, and where each rank is in its ``data`` (anything with
    ``state_dict()`` and ``load_state_dict()``, such as torchdata's ``StatefulDataLoader``).

    ``folder`` must be one that all hosts share; None means the one that ``meshwright launch
    --checkpoint`` names. ``every`` is after how many steps ``step()`` saves (default: what the
    launcher says, else only ``save()`` does), ``keep`` how many checkpoints stay. Raises
    ``InputError`` for a folder that holds something else, and where no plan was applied to the
    model.

    ::

        ckpt = mw.checkpoint("checkpoints", model, optimizer, scheduler=scheduler, every=500)
        for step in range(ckpt.resume(), steps):
            ...
            optimizer.step()
            scheduler.step()
            ckpt.step()
        ckpt.close()
    """
    run = run_of(model)
    parts = Parts(optimizer, scheduler, scaler, data)

    def checked() -> tuple[Path, int | None]:
        if keep < 1:
            raise InputError(f"keep={keep} checkpoints would keep none: give at least 1")
        if run.apart is not None:
            raise refused_apart(
                "save model.state_dict(), optimizer.state_dict() and "
                "mw.exchange_state_dict(model) on every rank with torch.save"
            )
        path = _folder_of(folder)
        if optimizer is not None:
            parameter_names(optimizer, holdings_of(unwrapped(model), run))
        check_folder(path)
        return path, _every_of(every)

    path, each = together(checked)
    _join_writers(path)
    rank_zero_decides(lambda: prepare(path))
    return Checkpoint(path, unwrapped(model), run, parts, each, keep, launched=folder is None)


def _folder_of(folder: str | Path | None) -> Path:
    named = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    if not named:
        raise InputError(
            "no folder for checkpoints was named: give mw.checkpoint one, or start the script with "
            "meshwright launch PLAN --checkpoint FOLDER SCRIPT"
        )
    return Path(named)


def _every_of(every: int | None) -> int | None:
    told = os.environ.get(EVERY_VARIABLE)
    if every is None and told is not None:
        every = int(told) if told.isdigit() else 0
    if every is not None and every < 1:
        raise InputError(f"a checkpoint every {told or every} steps cannot be: give at least 1")
    return every


class Checkpoint:
    """The checkpoints of one training; ``mw.checkpoint`` makes it. All of its methods are
    collective: call them on every rank, between two steps."""

    # Saving copies what this rank writes and returns. A thread writes it: it and those of the other
    # ranks talk through a process group of their own ([Note: Who issues collectives on which group]
    # in gradients/priority.py). What became of it is raised by the next save or ``wait``, as these
    # are the points to which all ranks come with the same checkpoint behind them.

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        run: Run,
        parts: Parts,
        every: int | None,
        keep: int,
        *,
        launched: bool,
    ) -> None:
        self.folder = folder
        # Whether the command line named the folder: then it is to be told what becomes of it.
        self._launched = launched
        self._model, self._run, self._parts = model, run, parts
        self._every, self._keep = every, keep
        self._group = checkpoint_group(run.world, run.watch.timeout_s).handle
        self._steps = 0
        self._found = rank_zero_decides(lambda: steps_in(folder))
        self._resumed = False
        self._thread: threading.Thread | None = None
        _of_group(self._group).add(self)
        self._writing = 0
        self._failure: Exception | None = None
        self._description = Description(
            step=0,
            world_size=run.world.size,
            model=model_fingerprint(model, run),
            plan=fingerprint(run.plan),
            decisions=decisions(run.plan),
            plan_document=encode(run.plan),
        )
        self._staging = Staging()
        atexit.register(_let_write, weakref.ref(self))

    # -- going on ----------------------------------------------------------------------------------

    def resume(self) -> int:
        """Goes on from the latest whole checkpoint, and returns how many steps had been made: the
        number of the step to make next. 0, with everything as it is, where there is none.

        Every file is compared with its hash before anything is loaded. A checkpoint that is damaged
        is passed over, and the one before it is used: a warning of rank 0 names both. (A folder
        that the launcher named gets a note on stderr in its place, which says in any case from
        where the run goes on.) Under the plan that saved, on as many
        ranks, training goes on bit for bit as if it had not been interrupted. Under another plan or
        on another number of ranks, parameters and the optimizer's state are the same; of what a
        lossy exchange held back each rank gets the mean; a rank that was not there draws its own
        random numbers. Raises ``InputError`` where the checkpoint is of another model or optimizer,
        or none of several is whole; nothing has changed then.
        """
        found = self.go_on()
        if self._run.world.rank == 0:
            if self._launched:
                note(found.sentence)
            elif found.damaged:
                warnings.warn(found.sentence, stacklevel=2)
        return found.step

    def go_on(self) -> Latest:
        """``resume()`` for a caller that tells of it himself: from where it goes on."""
        self.wait()
        self._join_all()  # what is read goes through the same process group
        found = self._latest().checked("copy one back, or name a new folder to begin anew")
        if found.index is not None:
            self._restore(found.index)
            self._run.steps_done = found.step
        self._resumed = True
        return found

    def _latest(self) -> Latest:
        world = self._run.world

        def read(where: Path) -> CheckpointIndex | str:
            return rank_zero_decides(lambda: index_or_damage(where))

        def wrong(where: Path, index: CheckpointIndex) -> str | None:
            # Each rank looks at some of the files, and at as much of them as the others.
            files = sorted(index.files, key=lambda file: -file.bytes)[world.rank :: world.size]
            mine = (find_damage(where, file) for file in files)
            found = next((damage for damage in mine if damage is not None), None)
            return next((told for told in every_rank_tells(found) if told is not None), None)

        self._found = rank_zero_decides(lambda: steps_in(self.folder))
        if not self._found:
            self._check_that_others_see_none()
        return first_whole(self.folder, self._found, read, wrong)

    def _check_that_others_see_none(self) -> None:
        """Raises ``InputError`` on all ranks where another one has a checkpoint in the folder:
        where rank 0 is, a disk is missing, and training would begin anew."""
        latest: int | None = None
        with suppress(InputError):
            latest = next(iter(steps_in(self.folder)), None)
        seen = {
            rank: step for rank, step in enumerate(every_rank_tells(latest)) if step is not None
        }
        if seen:
            rank, step = next(iter(seen.items()))
            raise InputError(
                f"rank 0 sees no checkpoint in {self.folder}, and rank {rank} has one of step "
                f"{step} there: see that the same folder is mounted on all hosts, or name a new one"
            )

    def _restore(self, index: CheckpointIndex) -> None:
        def checked() -> Restoration:
            found = Restoration(
                self.folder / step_name(index.step), index, self._model, self._run, self._parts,
                same_plan=index.decisions == self._description.decisions,
            )  # fmt: skip
            found.check()
            return found

        restoration = together(checked)
        try:
            restoration.apply(self._group)
        except RunError as error:
            raise RunError(
                f"the checkpoint of step {index.step} could not be read ({error}): start the ranks "
                "anew"
            ) from error
        self._steps = index.step

    # -- saving ------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the next ``step()`` saves: the same on all ranks, which nobody is asked for."""
        return self._every is not None and (self._steps + 1) % self._every == 0

    def step(self) -> bool:
        """Counts a step, and saves where it is time for that. Call it after every step of the
        optimizer and the scheduler. Returns whether it saved."""
        due = self.due
        self._steps += 1
        if due:
            self.save()
        return due

    def save(self, step: int | None = None) -> None:
        """Saves the training as it is after ``step`` steps (default: those that were counted).

        Returns when what is saved has been copied; the files are written meanwhile. A checkpoint
        before that is still being written is waited for. Raises ``RunError`` where that one could
        not be written; ``InputError`` in a folder with checkpoints that were not gone on from.
        """
        if self._found and not self._resumed:
            raise InputError(
                f"{self.folder} has checkpoints up to step {self._found[0]} of a run before: call "
                "resume() first, or name a new folder"
            )
        self.wait()
        if step is not None:
            if step < 0:
                raise InputError(f"step {step} cannot be saved: give the number of steps made")
            self._steps = step
        tensors, state = self._captured()
        description = replace(self._description, step=self._steps)

        def write() -> None:
            self._write(description, tensors, state)

        # Ranks that write two trainings, or one into two folders, do so in one order.
        self._join_all()
        self._writing = self._steps
        self._thread = spawn(f"checkpoint of step {self._steps}", write)

    def _join(self) -> None:
        """Waits for the thread that writes, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _join_all(self) -> None:
        """Waits for all threads that write within the same process group."""
        for one in _of_group(self._group):
            one._join()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk. Raises ``RunError`` where it could not be
        written, on every rank."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is None:
            return
        left = steps_in(self.folder)
        last = f"the last whole one is of step {left[0]}" if left else "there is none before it"
        raise RunError(
            f"the checkpoint of step {self._writing} could not be written ({failure}); "
            f"{last}: make room or name another folder, and go on from there"
        ) from failure

    def close(self) -> None:
        """Waits for what is being written. A process that ends does so too, for a minute."""
        self.wait()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else peers may be gone, and that error is the one to be seen
            self.close()

    def _captured(self) -> tuple[dict[str, StateTensor], bytes | Exception]:
        """Copies of what this rank writes, on the host: tensors and small state. An error in place
        of the latter is told to all ranks when they write."""
        try:
            captured = capture(self._model, self._run, self._parts)
            encoded = encode_value(captured.state, "the state of this training")
            return self._staging.copies(captured.tensors), encoded
        except Exception as error:
            return {}, error

    def _write(
        self,
        description: Description,
        tensors: Mapping[str, StateTensor],
        state: bytes | Exception,
    ) -> None:
        rank = self._run.world.rank
        try:
            save(self.folder, description, rank, tensors, state, self._group)
        except Exception as error:
            if rank == 0:
                discard(self.folder, description.step)
            self._failure = error
            return
        if rank == 0:
            try:
                remove_older(self.folder, description.step, self._keep)
            except OSError as error:  # the new one is whole, and other ranks go on
                note(f"older checkpoints stay in {self.folder}: {error.strerror}")


# Those that were made within a process group, in whose order of collectives they must write.
_within: Any = WeakKeyDictionary()


def _of_group(group: Any) -> WeakSet[Checkpoint]:
    found: WeakSet[Checkpoint] = _within.setdefault(group, WeakSet())
    return found


def _join_writers(folder: Path) -> None:
    """Waits for what this process still writes into a folder, of which unfinished checkpoints are
    to be removed."""
    for group in _within.values():
        for one in group:
            if one.folder.absolute() == folder.absolute():
                one._join()


def _let_write(reference: weakref.ref[Checkpoint]) -> None:
    kept = reference()
    if kept is None:
        return
    thread = kept._thread
    if thread is not None:
        thread.join(LEAVE_S)
    # Who has called ``close`` has waited for it, and was told.
    where = f"the checkpoint of step {kept._writing} in {kept.folder}"
    if thread is not None and thread.is_alive():
        note(
            f"{where} was still being written {LEAVE_S:g} s after the training had ended, and is "
            "not whole: let the script end with close() of mw.checkpoint, which waits for it"
        )
    elif kept._failure is not None:
        note(f"{where} could not be written: {kept._failure}")


def model_fingerprint(model: nn.Module, run: Run) -> str:
    """What stands for the names, shapes and types of a model's undivided tensors."""
    told = [(h.name, h.full_shape, dtype_name(h.tensor.dtype)) for h in holdings_of(model, run)]
    return _digest(told)


def decisions(plan: Plan) -> str:
    """What stands for all in a plan that decides what its ranks compute, and not for what was
    predicted of it."""
    units = [
        (
            unit.name, unit.modules, str(unit.layout), unit.style, unit.memory, unit.segment,
            unit.early_release, unit.exchange, unit.exchange_ratio, unit.wire,
            unit.peers_per_host, unit.feedback,
        )
        for unit in plan.units
    ]  # fmt: skip
    return _digest(
        (
            plan.world_size, plan.placement, plan.message_bytes, plan.schedule, plan.precision,
            plan.goal.batch_statistics, units, *plan.local_batch_sizes,
        )
    )  # fmt: skip


def _digest(told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
