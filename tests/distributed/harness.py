"""Runs functions on several ranks: processes that stay for the next test, as importing torch takes
longer than most of what they do. They are forked from one process that has imported it and does
nothing else.

Calls share a process group (gloo, over a store that this process keeps), as its threads and
connections are costly; after one that failed they get a new one, as a collective may be stuck in
the old. After a module's tests all groups are left: each has a thread that looks a hundred times a
second whether something came, and those of hundreds of groups took half a core. Each call begins
with random numbers from seed 0 and has a time limit; when a rank dies or outlasts it, all are
killed and started anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STARTUP_S = 60.0
LEAVE = b"leave"
# What every rank needs: torch's optimizers import the compiler when the first of them is made. Not
# transformers, which looks for accelerate when it is imported, and few tests have that.
IMPORTED = [
    *("torch.distributed", "torch.distributed.tensor", "torch._dynamo"),
    *("meshwright.api", "meshwright.executor.apply", "meshwright.profiler.model"),
]


@dataclass(frozen=True)
class Outcome:
    """What a rank returned, or the error that it raised."""

    value: Any = None
    error: str = ""
    kind: str = ""
    trace: str = ""


class RankError(AssertionError):
    """A rank failed."""


class Ranks:
    """``size`` processes that run the same function at the same time."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._calls = 0
        self._failed = False
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None

    def __call__(
        self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """``function(rank, *args)`` of every rank; ``RankError`` where one failed."""
        outcomes = self.outcomes(function, *args, limit_s=limit_s, **kwargs)
        failed = [(r, o) for r, o in enumerate(outcomes) if o.kind]
        if failed:
            raise RankError("\n".join(f"rank {r}: {o.error}\n{o.trace}" for r, o in failed))
        return [o.value for o in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0, **kwargs: Any
    ) -> list[Outcome]:
        """The same, errors included."""
        self._ensure()
        self._calls += 1
        place = inspect.getsourcefile(function)
        task = pickle.dumps((self._calls, place, function.__qualname__, args, kwargs, self._failed))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        outcomes = self._collect(limit_s)
        self._failed = any(o.kind for o in outcomes)
        if any(o.kind == "Died" for o in outcomes):
            self.stop()
        return outcomes

    def leave_groups(self) -> None:
        """Ends all process groups, on ranks that wait for their next call."""
        if self._processes and all(p.is_alive() for p in self._processes):
            for pipe in self._pipes:
                pipe.send_bytes(LEAVE)

    def _collect(self, limit_s: float) -> list[Outcome]:
        answers: dict[int, Outcome] = {}
        end = time.monotonic() + limit_s
        while len(answers) < self.size:
            left = [p for r, p in enumerate(self._pipes) if r not in answers]
            ready = wait(left, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = [r for r in range(self.size) if r not in answers]
                self.stop()
                raise RankError(f"ranks {late} did not finish in {limit_s:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = Outcome(*pickle.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = Outcome(None, "the process died", "Died", "")
        return [answers[r] for r in range(self.size)]

    def _ensure(self) -> None:
        if self._processes and all(p.is_alive() for p in self._processes):
            return
        from torch.distributed import TCPStore

        self.stop()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self._store.port, theirs, self.backend, environment),
                daemon=True,
            )
            with _one_thread():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def stop(self) -> None:
        """Ends every process."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None


@contextlib.contextmanager
def _one_thread() -> Any:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _serve(
    rank: int, size: int, port: int, pipe: Connection, backend: str, environment: dict[str, str]
) -> None:
    import torch
    from meshwright.profiler import model
    from torch.distributed import TCPStore

    os.environ.update(environment)  # as it is now, not as it was when the first rank was started
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    # The same for every model on a device, and most of the time of profiling a small one.
    model.compression_rates = functools.cache(model.compression_rates)
    sys.path.insert(0, str(HERE))
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STARTUP_S))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        if message == LEAVE:
            _leave_groups()
            _give_memory_back()
            continue
        number, place, name, args, kwargs, fresh = pickle.loads(message)
        if fresh:
            _leave_groups()
        answer = _answer(rank, size, store, number, _find(place, name), args, kwargs, backend)
        pipe.send_bytes(pickle.dumps(answer))


def _put_back(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _leave_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _give_memory_back() -> None:
    """What training has freed, and Meshwright has malloc keep for the next step: of the ranks of
    three tests at once that was more than a machine of 24 GiB has."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def _find(place: str, name: str) -> Callable[..., Any]:
    """The function of that name in that file; pytest's own module names mean nothing here."""
    key = f"ranks:{place}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, place)
        assert spec is not None
        assert spec.loader is not None
        if str(Path(place).parent) not in sys.path:
            sys.path.insert(0, str(Path(place).parent))
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
        gc.collect()
        gc.freeze()  # what has been imported need not be looked through after each call
    return getattr(sys.modules[key], name)  # type: ignore[no-any-return]


def _answer(
    rank: int,
    size: int,
    store: Any,
    number: int,
    function: Any,
    args: Any,
    kwargs: Any,
    backend: str,
) -> tuple[Any, str, str, str]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    if not dist.is_initialized():
        prefixed = dist.PrefixStore(f"call/{number}", store)
        dist.init_process_group(
            backend, store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=50)
        )
    environment = dict(os.environ)
    try:
        known = len(sys.modules)
        value = function(rank, *args, **kwargs)
        gc.collect()  # models and their hooks refer to each other
        if len(sys.modules) > known:
            gc.freeze()
        return value, "", "", ""
    except Exception as error:
        return None, str(error), type(error).__name__, traceback.format_exc()
    finally:
        _put_back(environment)  # what a test sets is not the next one's
