"""A background job's processes: started at the lowest priority, stopped and continued as a whole,
and ended without a remainder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LOOK_S = 2.0
"""So often it is looked which process groups the job has made."""
_LOWEST_NICE = 19
_SACRIFICED = b"1000"
"""The highest oom_score_adj: what the kernel ends first where memory runs out."""


def become_reaper() -> None:
    """Makes orphans among this process's descendants its own children, so that it can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Child:
    """A running background job: ``command`` and whatever it starts.

    It has a session of its own, so that a terminal's signals do not reach it, and dies with the
    process that has made it.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        log: IO[bytes],
        environment: Mapping[str, str],
        memory_bytes: int | None,
    ) -> None:
        parent = os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            # Nothing else runs in the pacer, whose only thread this is: what forks may run Python.
            preexec_fn=lambda: _prepare(parent, memory_bytes),
        )
        self.pid = self._process.pid
        self.descriptor = os.pidfd_open(self.pid)
        self.running = True
        self.priority = _priority(self.pid)
        self._groups = {self.pid}
        self._looked_s = time.monotonic()

    def let_run(self, runs: bool) -> None:
        """Stops or continues all of it."""
        if runs != self.running:
            if runs:
                self._look()
            self.running = runs
            self._send(signal.SIGCONT if runs else signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _look(self) -> None:
        """Finds process groups that the job has made meanwhile (torchrun's ranks have their own).
        Not every time, and not when the foreground wants its turn: it reads all of /proc."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self._groups = {self.pid, *(os.getpgid(pid) for pid in _alive(_descendants()))}

    def ask_to_end(self) -> None:
        """Tells the job's first process to end; it may write a checkpoint and end its others."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.running = False
        self.let_run(True)  # a stopped process does not hear

    def end(self) -> tuple[str, float]:
        """Kills whatever is left; how the first process ended, and the processor seconds of all
        that were waited for. The job is gone when this returns."""
        while found := list(_alive(_descendants())):
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)
        code = self._process.wait()
        os.close(self.descriptor)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return how, used.ru_utime + used.ru_stime

    def _reap(self) -> None:
        """Waits for orphans that were given to this process; Popen waits for its own child."""
        self._process.poll()
        for pid in _children(os.getpid()):
            if pid != self.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def cpu_s(self) -> float:
        """Processor seconds of all its processes that live and of children that they have waited
        for, from /proc/PID/stat: utime, stime, cutime, cstime. It reads all of /proc."""
        fields = [f for pid in _descendants() for f in _stat(pid)[11:15]]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def _prepare(parent: int, memory_bytes: int | None) -> None:
    """What the child does to itself before it becomes the command."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that line
        os._exit(1)
    _yield_processor()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_SACRIFICED)
    if memory_bytes is not None:
        # Not the address space, of which libraries map gigabytes that they never touch.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _yield_processor() -> None:
    """The idle class, or the lowest priority where that is refused. Where the kernel groups tasks
    by session, classes count inside a session only, and a session's own priority among them."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST_NICE))
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(_LOWEST_NICE)


def _priority(pid: int) -> str:
    """How low the process stands, in words."""
    try:
        idle = os.sched_getscheduler(pid) == os.SCHED_IDLE
    except ProcessLookupError:
        return ""
    return "idle class" if idle else f"nice {_LOWEST_NICE}"


# -- the tree of processes, from /proc ---------------------------------------------------------


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, …; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parents() -> Iterator[tuple[int, int]]:
    """(process, parent) of all processes that are not dead."""
    for pid in _processes():
        if (fields := _stat(pid)) and fields[0] not in "ZX":
            yield pid, int(fields[1])


def _descendants() -> list[int]:
    """Living descendants of this process."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, ())]
        found += new
    return found


def _children(parent: int) -> list[int]:
    """This process's children, dead ones that nobody has waited for among them."""
    return [p for p in _processes() if (fields := _stat(p)) and int(fields[1]) == parent]


def _processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _alive(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.getpgid(pid)
            yield pid
