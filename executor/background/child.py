"""A background job's processes: started at the lowest priority, stopped and continued as a whole,
and ended without a remainder."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LOOK_S = 2.0
"""So often it is looked which process groups the job has made."""
_LOWEST_NICE = 19
_SACRIFICED = b"1000"
"""The highest oom_score_adj: what the kernel ends first where memory runs out."""


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
        # The job's orphans become children of this process, so that it can end them.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
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
        if runs != self.running:
            now_s = time.monotonic()
            # The job may have made process groups meanwhile (torchrun's ranks have their own). Not
            # every time, and not when the foreground wants its turn: this reads all of /proc.
            if runs and now_s - self._looked_s > _LOOK_S:
                self._looked_s = now_s
                self._groups = {self.pid, *(int(f[_GROUP]) for f in _descendants().values())}
            self.running = runs
            for group in self._groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGCONT if runs else signal.SIGSTOP)

    def ask_to_end(self) -> None:
        """Tells the job's first process to end; it may write a checkpoint and end its others."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.running = False
        self.let_run(True)  # a stopped process does not hear

    def end(self) -> tuple[str, float]:
        """Kills whatever is left; how the first process ended, and the processor seconds of all
        that were waited for. The job is gone when this returns."""
        while found := _descendants():  # again: one may have started another meanwhile
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            # Popen does not wait for the orphans that were given to this process.
            for pid, fields in _processes().items():
                if int(fields[_PARENT]) == os.getpid() and pid != self.pid:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        code = self._process.wait()
        os.close(self.descriptor)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return how, used.ru_utime + used.ru_stime

    def cpu_s(self) -> float:
        """Processor seconds of all its processes that live and of children that they have waited
        for. It reads all of /proc."""
        ticks = (int(f) for fields in _descendants().values() for f in fields[_TIMES])
        return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _prepare(parent: int, memory_bytes: int | None) -> None:
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that line
        os._exit(1)
    # Where the kernel groups tasks by session, scheduling classes count inside a session only, and
    # a session's own priority among them: so both are set.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST_NICE))
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(_LOWEST_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_SACRIFICED)
    if memory_bytes is not None:
        # Not the address space, of which libraries map gigabytes that they never touch.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _priority(pid: int) -> str:
    try:
        idle = os.sched_getscheduler(pid) == os.SCHED_IDLE
    except ProcessLookupError:
        return ""
    return "idle class" if idle else f"nice {_LOWEST_NICE}"


_STATE, _PARENT, _GROUP, _TIMES = 0, 1, 2, slice(11, 15)
"""Where fields stand in /proc/PID/stat after the name; times are utime, stime, cutime, cstime."""


def _processes() -> dict[int, list[str]]:
    """Those fields of all processes, dead ones that nobody has waited for among them."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has gone meanwhile
                # After the last parenthesis: a process's name may contain some.
                found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    return found


def _descendants() -> dict[int, list[str]]:
    """Living descendants of this process, with their fields."""
    alive = {pid: fields for pid, fields in _processes().items() if fields[_STATE] not in "ZX"}
    children: dict[int, list[int]] = {}
    for pid, fields in alive.items():
        children.setdefault(int(fields[_PARENT]), []).append(pid)
    found: dict[int, list[str]] = {}
    new = [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, ())]
        found |= {pid: alive[pid] for pid in new}
    return found
