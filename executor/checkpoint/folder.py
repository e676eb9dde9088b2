"""The folder of a run's checkpoints: one folder for each, which is there whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ...planner.schema.errors import InputError
from .index import INDEX
from .safetensors import write_all

_STEP = re.compile(r"step-(\d{8,})")
# What is being written, what is being removed, and what another takes the place of: never taken for
# a checkpoint.
_WRITING, _GONE, _REPLACED = ".writing-", ".gone-", ".replaced-"


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints that a folder has, the latest first."""
    try:
        names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise InputError(
            f"cannot look into {folder}: {error.strerror}; name a folder for checkpoints"
        ) from None
    found = (_STEP.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def refused_apart(remedy: str, of: str = "") -> InputError:
    """For a plan whose hosts train apart, of which no checkpoint (``of`` a framework) is whole."""
    return InputError(
        f"hosts train apart under this plan (local steps), and a checkpoint{of} holds what all "
        f"have alike: {remedy}, or plan without --allow-local-steps (allow_local_steps)"
    )


def check_folder(folder: Path) -> None:
    """Raises ``InputError`` unless a folder is new, empty or has checkpoints."""
    if (folder / INDEX).exists():
        raise InputError(f"{folder} is one checkpoint: name the folder that it lies in")
    if steps_in(folder) or not folder.exists():
        return
    others = [
        e.name for e in folder.iterdir() if not e.name.startswith((_WRITING, _GONE, _REPLACED))
    ]
    if others:
        raise InputError(
            f"{folder} is not a folder of checkpoints (it has {sorted(others)[0]!r}): name a new "
            "or an empty one"
        )


def prepare(folder: Path) -> None:
    """Makes the folder, and removes what runs that were killed have left half-written."""
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {folder}: {error.strerror}; name another for checkpoints"
        ) from None
    for entry in list(folder.iterdir()):
        if entry.name.startswith(_REPLACED):
            _put_back(entry)
        if entry.name.startswith((_WRITING, _GONE, _REPLACED)):
            shutil.rmtree(entry, ignore_errors=True)


def writing_folder(folder: Path, step: int) -> Path:
    """Where the files of a checkpoint are written."""
    return folder / f"{_WRITING}{step_name(step)}"


def publish(folder: Path, step: int) -> None:
    """Makes what was written the checkpoint of that step: from now on it is found."""
    written, final = writing_folder(folder, step), folder / step_name(step)
    sync(written)
    # One that was damaged, or the same step saved again. It is out of sight until the new one is
    # there, and comes back if that does not come.
    old = _put_away(final, _REPLACED) if final.exists() else None
    try:
        written.rename(final)
    except BaseException:
        if old is not None:
            _put_back(old)
        raise
    sync(folder)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path) -> None:
    """Gives a checkpoint that was replaced its name, where none has it."""
    final = old.with_name(old.name.removeprefix(_REPLACED))
    if not final.exists():
        old.rename(final)


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Removes all but the ``keep`` latest checkpoints up to that step."""
    for old in [s for s in steps_in(folder) if s <= step][keep:]:
        _remove(folder / step_name(old))


def _remove(checkpoint: Path) -> None:
    # Out of sight first: half of a checkpoint must not look like one.
    shutil.rmtree(_put_away(checkpoint), ignore_errors=True)


def _put_away(checkpoint: Path, prefix: str = _GONE) -> Path:
    gone = checkpoint.with_name(f"{prefix}{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    return checkpoint.rename(gone)


def discard(folder: Path, step: int) -> None:
    """Removes what was written of a checkpoint that failed."""
    shutil.rmtree(writing_folder(folder, step), ignore_errors=True)


def sync(folder: Path) -> None:
    """Has the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file, and returns when it is on disk."""
    try:
        with path.open("wb", buffering=0) as file:
            write_all(file, data)
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
