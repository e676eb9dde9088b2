"""Which checkpoint in a folder is the latest whole one, and the words for it and for those that are
damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...planner.schema.errors import InputError
from .folder import step_name, steps_in
from .index import CheckpointIndex, find_damage, find_wrong_size, read_index


@dataclass(frozen=True)
class Latest:
    """The ``index`` of the latest whole checkpoint in ``folder``, None where there is none, and by
    step, the latest first, what is wrong with those after it."""

    folder: Path
    index: CheckpointIndex | None
    damaged: Mapping[int, str]

    @property
    def step(self) -> int:
        """How many steps had been made."""
        return self.index.step if self.index is not None else 0

    @property
    def sentence(self) -> str:
        """How a run goes on."""
        if self.index is None:
            return f"begins anew in {shown(self.folder)}"
        where = f"the checkpoint of step {self.step} in {shown(self.folder)}"
        return f"goes on from {where}{self.passed_over}"

    @property
    def passed_over(self) -> str:
        """The end of a sentence on a checkpoint: which ones after it were not taken, and why."""
        if not self.damaged:
            return ""
        steps, why = list(self.damaged), "; ".join(self.damaged.values())
        if len(steps) == 1:
            return f"; that of step {steps[0]} is damaged ({why}) and was passed over"
        *most, last = map(str, steps)
        those = f"those of steps {', '.join(most)} and {last}"
        return f"; {those} are damaged ({why}) and were passed over"

    def checked(self, remedy: str) -> Latest:
        """This, or ``InputError`` with the ``remedy`` where there are checkpoints and none of them
        is whole: to begin anew in silence would be to lose a training."""
        if self.index is None and self.damaged:
            step, why = next(iter(self.damaged.items()))
            raise InputError(
                f"no checkpoint in {self.folder} is whole (of that of step {step} {why}): {remedy}"
            )
        return self


TRIES = 3
"""How often checkpoints are looked for that go while they are read."""


def latest_whole(folder: Path, *, by_size: bool = False) -> Latest:
    """Looks for it in this process. With ``by_size`` files are not read, as it takes long to read
    many gigabytes: one that is there in its size counts as whole."""
    look = find_wrong_size if by_size else find_damage

    def wrong(where: Path, index: CheckpointIndex) -> str | None:
        return next((d for d in (look(where, file) for file in index.files) if d), None)

    for _ in range(TRIES):
        found = first_whole(folder, steps_in(folder), index_or_damage, wrong)
        if found.index is not None or all((folder / step_name(s)).exists() for s in found.damaged):
            break  # else a training goes on there, which has removed what was looked at
    return found


def first_whole(
    folder: Path,
    steps: Iterable[int],
    read: Callable[[Path], CheckpointIndex | str],
    wrong: Callable[[Path, CheckpointIndex], str | None],
) -> Latest:
    """The first of the checkpoints of those steps that is whole. ``read`` gives the index of one,
    or what is wrong with it, and ``wrong`` what is wrong with one of its files."""
    damaged: dict[int, str] = {}
    for step in steps:
        where = folder / step_name(step)
        index = read(where)
        if isinstance(index, CheckpointIndex) and index.step != step:
            index = f"it is the checkpoint of step {index.step}, under another name"
        damage = index if isinstance(index, str) else wrong(where, index)
        if isinstance(index, CheckpointIndex) and damage is None:
            return Latest(folder, index, damaged)
        # By the file's name alone: the checkpoint is named beside it.
        damaged[step] = str(damage).removeprefix(f"{where}/")
    return Latest(folder, None, damaged)


def index_or_damage(where: Path) -> CheckpointIndex | str:
    """The index of a checkpoint, or what is wrong with it."""
    try:
        return read_index(where)
    except InputError as error:
        return str(error)


def shown(folder: Path) -> Path:
    """A folder as a user in the working folder would write it."""
    here = Path.cwd()
    return folder.relative_to(here) if here in folder.parents else folder
