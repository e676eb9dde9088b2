"""A training by ``meshwright launch``, and what may be done to its processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from meshwright.executor.checkpoint.folder import step_name, steps_in
from meshwright.models import zoo
from meshwright.models.units.discover import discover
from meshwright.planner.schema.plan import Plan

from tests.distributed.plans import by_columns_and_rows, plan_for, scheduled
from tests.processes import wait_until

LIMIT_S = 120.0


def small_hybrid_plan(ranks: int = 2) -> Plan:
    """A plan of "mlp" with linear layers divided by columns and rows, by priority and with Adam."""
    workload = zoo.build("mlp")
    found = discover(workload.model, workload.make_batch(4))
    with scheduled("priority"):
        made = plan_for(found, ranks, by_columns_and_rows(workload.model, ranks, ("linear",)))
    assert any(unit.layout.degree == ranks for unit in made.units)
    goal = msgspec.structs.replace(made.goal, optimizer="adam")
    return msgspec.structs.replace(made, target="mlp", goal=goal)


def children(pid: int, words: str) -> list[int]:
    """The processes that one has started and whose command line has those words, not dead ones."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if int(parent) == pid and state not in "ZX" and words.encode() in line:
            found.append(int(entry.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def environment(**more: str) -> dict[str, str]:
    """Of a command that is started: one thread, as ranks share the cores, and ``more``."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


class Training:
    """One training in ``folder``, by as many launches as it takes."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.arguments, self.seen = folder, arguments, set[int]()
        self.launcher: subprocess.Popen[Any] | None = None

    def start(self, **more: str) -> None:
        with (self.folder / "log").open("ab") as log:
            self.launcher = self.spawn(log, more)

    def spawn(self, log: IO[bytes], more: Mapping[str, str]) -> subprocess.Popen[Any]:
        """Its launcher, which writes into ``log``."""
        return subprocess.Popen(
            [sys.executable, "-m", "meshwright", "launch", *self.arguments],
            cwd=self.folder, env=environment(**more), stdout=log, stderr=log,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def ranks(self) -> list[int]:
        """The processes of its ranks that are there now."""
        assert self.launcher is not None
        found = children(self.launcher.pid, "meshwright.executor.launch.worker")
        self.seen |= set(found)
        return found

    def step(self) -> int:
        return next(iter(steps_in(self.folder / "kept")), 0)

    def writing(self) -> bool:
        return any((self.folder / "kept").glob(".writing-*"))

    def until(self, condition: Callable[[], object]) -> None:
        """Waits; fails where the launcher has ended or it takes too long."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.log
            assert self.launcher is not None
            assert self.launcher.poll() is None, self.log
            time.sleep(0.002)

    def ended(self) -> int:
        """Its exit code, when it has ended by itself; none of its ranks is left then."""
        assert self.launcher is not None
        try:
            code = self.launcher.wait(LIMIT_S)
        finally:
            self.end()
        return code

    def end(self) -> None:
        """Leaves nothing of it, and fails where a rank outlives its launcher."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.ranks()
            self.launcher.kill()
            self.launcher.wait()
        try:
            assert wait_until(lambda: not any(map(is_running, self.seen)), 10.0)
        finally:
            for pid in filter(is_running, self.seen):
                os.kill(pid, signal.SIGKILL)

    def kept(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint with the parameters and the optimizer's state. Random numbers
        are drawn by no step, and differ from one start of a training to another."""
        found = (self.folder / "kept" / step_name(step)).glob("tensors-*")
        return {path.name: path.read_bytes() for path in found}


def disturb(training: Training, kind: str, chance: random.Random) -> None:
    """Does one thing to a training that is going on."""
    if kind == "launcher":
        assert training.launcher is not None
        training.ranks()
        training.launcher.kill()
        training.launcher.wait()
        training.end()
        training.start()
        return
    if kind == "stopped":
        pid = chance.choice(training.ranks())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(20)
        os.kill(pid, signal.SIGCONT)
        assert is_running(pid), "a rank that stood still for 20 s was given up"
        return
    if kind == "writing":
        training.until(training.writing)
    elif kind == "rank":
        time.sleep(chance.random() * 0.1)
    victim = chance.choice(training.ranks())
    os.kill(victim, signal.SIGKILL)
    training.until(lambda: not is_running(victim))
    if kind == "starting":  # the next ones too, wherever they are by now
        training.until(lambda: len(training.ranks()) == 2)
        time.sleep(chance.random() * 4)
        os.kill(chance.choice(training.ranks()), signal.SIGKILL)
