"""Ranks that are killed at any moment: the training that goes on ends as one that nobody killed."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import trains
from meshwright.executor.checkpoint.folder import steps_in

from tests.sampling import sampled

LIMIT_S = 90.0


class Runs:
    """Attempts at a training in ``folder``."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        self.name, self.folder, self.steps, self.attempt = name, folder, steps, 0
        folder.mkdir()
        # Forked from a process that has torch already: a start takes a moment and not seconds.
        self.context = multiprocessing.get_context("forkserver")

    def start(self) -> list[Any]:
        self.attempt += 1
        given = (2, self.name, str(self.folder), self.attempt, self.steps)
        ranks = [self.context.Process(target=trains, args=(r, *given)) for r in range(2)]
        for process in ranks:
            process.start()
        return ranks

    def until(self, ranks: list[Any], condition: Any) -> None:
        """Waits for a condition; fails where a rank has ended or it takes too long."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end
            assert all(process.exitcode is None for process in ranks), "a rank has ended by itself"
            time.sleep(0.001)

    def step(self) -> int:
        try:
            return int((self.folder / "progress").read_text() or 0)
        except FileNotFoundError:
            return 0

    def writing(self) -> bool:
        return any((self.folder / "kept").glob(".writing-*"))

    def end(self) -> dict[str, str]:
        """Trains to the end."""
        ranks = self.start()
        for process in ranks:
            process.join(LIMIT_S)
        codes = [process.exitcode for process in ranks]
        stop(ranks)
        assert codes == [0, 0]
        found: dict[str, str] = json.loads((self.folder / "end.json").read_text())
        return found


def stop(ranks: list[Any]) -> None:
    for process in ranks:
        process.kill()
        process.join()


def ends_as_undisturbed(folder: Path, name: str, kills: int, seed: int) -> None:
    steps = 3 * kills + 3
    expected = Runs(name, folder / "undisturbed", steps).end()
    runs, chance = Runs(name, folder / "killed", steps), random.Random(seed)
    for kill in range(kills):
        ranks = runs.start()
        try:
            at = 3 * kill + chance.randrange(1, 4)
            runs.until(ranks, lambda at=at: runs.step() >= at)
            if chance.random() < 0.5:  # in the midst of a checkpoint
                runs.until(ranks, runs.writing)
            else:
                time.sleep(chance.random() * 0.03)
            chance.choice(ranks).kill()
        finally:
            stop(ranks)  # as launchers do when a rank has gone
    assert steps_in(runs.folder / "kept"), "no checkpoint was ever whole"
    assert runs.end() == expected
    left = [path.name for path in (runs.folder / "kept").iterdir()]
    assert len(left) == 2, left  # and nothing half-written


@pytest.fixture(autouse=True)
def preloaded() -> None:
    """What the process that ranks are forked from has imported."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["checkpoints"])


@pytest.mark.parametrize(
    ("name", "seed"), sampled([("divided and fully sharded", 1), ("topk", 2)], 1)
)
def test_three_kills(tmp_path: Path, name: str, seed: int):
    ends_as_undisturbed(tmp_path, name, 3, seed)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), [("sharded", 3), ("data parallel", 4)])
def test_twenty_kills(tmp_path: Path, name: str, seed: int):
    ends_as_undisturbed(tmp_path, name, 20, seed)
