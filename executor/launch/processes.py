"""Starting ranks with torchrun's own engine, and ending every one of them whatever happens.

torch.distributed.run is a thin script over ``torch.distributed.launcher``; calling that directly
saves a process and lets a failure reach the user as one sentence instead of torchrun's report.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...planner.schema.errors import (
    InfeasibleError,
    InputError,
    MemoryRunError,
    MeshwrightError,
    NoRoomError,
    RunError,
)
from ...planner.schema.plan import Plan
from ..capability import CAPABILITY
from .start import cores, tell_gloo
from .worker import LAUNCHER

RENDEZVOUS_TIMEOUT_S = 300
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Ranks that are told to end and do not are killed after so many seconds.
_SHUTDOWN_S = "5"
# One that was killed before is noticed within a fraction of this.
_SOON_S = 2.0


@dataclass(frozen=True)
class Ranks:
    """How many ranks to start, and where.

    ``nproc`` on this host, which is number ``node_rank`` of ``nodes``; with several,
    ``rendezvous`` is the HOST:PORT of host 0. ``per_host`` are the numbers of all hosts, where
    these differ. ``timeout_s`` ends the run, whatever it does; where that is what is left after a
    restart, ``limit_s`` is what the user has given.
    """

    nproc: int
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    per_host: tuple[int, ...] = ()
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nodes < 1:
            raise InputError(f"{self.nproc} ranks on {self.nodes} hosts: at least one of each")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(
                f"node rank {self.node_rank} is not one of {self.nodes} hosts: number them from 0 "
                f"to {self.nodes - 1}"
            )
        host, _, port = (self.rendezvous or "").rpartition(":")
        # Not what ssh takes, such as USER@HOST: it is no address to torch.
        named = bool(host) and not set(host) & set("@%")
        valid = named and port.isdecimal() and 0 < int(port) < 65536
        if self.nodes > 1 and not valid:
            raise InputError(
                f"rendezvous {self.rendezvous!r} is no address for {self.nodes} hosts: give "
                "HOST:PORT of host 0, the same on all, such as 10.0.0.1:29500"
            )

    def telling(self, environment: Mapping[str, str]) -> Ranks:
        """The same ranks, which are told more by their environment."""
        return replace(self, environment={**self.environment, **environment})

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return sum(self.per_host) or self.nproc * self.nodes

    @property
    def here(self) -> range:
        """The numbers of this host's ranks."""
        before = self.per_host or (self.nproc,) * self.nodes
        first = sum(before[: self.node_rank])
        return range(first, first + self.nproc)


def check_plan(plan: Plan, world_size: int) -> None:
    """Raises ``InputError`` for a plan that these ranks or this executor cannot run."""
    if plan.world_size != world_size:
        raise InputError(
            f"the plan is for {plan.world_size} ranks and {world_size} would be started: start "
            f"{plan.world_size}, or plan for {world_size}"
        )
    refusals = CAPABILITY.refusals(plan)
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        raise InputError(
            f"this executor cannot run the plan: {refusals[0]}{more}; plan without --hypothetical "
            "(hypothetical)"
        )


def run_ranks(program: Sequence[str], ranks: Ranks, folder: Path) -> None:
    """Runs ``SCRIPT ARGS…`` or ``-m MODULE ARGS…`` on every rank, and returns when all are done.

    ``folder`` (one for each run) receives what ranks leave behind. Raises the first failing rank's
    error; ``RunError`` for a rank that was killed or a run past its time. No rank outlives the
    call, be it ended by a failure, the limit or a signal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entry = ["-m", f"{__package__}.worker", str(folder), *program]
    with _environment(ranks), _signals_restored(), _time_limit(ranks, folder) as late:
        try:
            elastic_launch(_configuration(ranks, folder), sys.executable)(*entry)
        except ChildFailedError as error:
            if late.is_set():
                given_s = ranks.timeout_s if ranks.limit_s is None else ranks.limit_s
                raise RunError(
                    f"the run was ended after its limit of {given_s:g} s: allow more time"
                ) from None
            raise _failure(folder, error) from None
        except DistError as error:
            raise _did_not_meet(ranks, error) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


def _did_not_meet(ranks: Ranks, error: DistError) -> RunError:
    """Why hosts did not find each other, before any rank was started."""
    said = str(error)
    if "EADDRINUSE" in said:
        port = (ranks.rendezvous or "").rpartition(":")[2]
        return RunError(
            f"port {port} is in use on this host, by another run perhaps: give all hosts another "
            "(--rendezvous)"
        )
    return RunError(
        f"the {ranks.nodes} hosts did not meet at {ranks.rendezvous} ({said.splitlines()[0]}): "
        "start all of them, with the address of the first, which the others must reach"
    )


def _configuration(ranks: Ranks, folder: Path) -> LaunchConfig:
    # What the engine logs about failures, the error that is raised says better. Each of its loggers
    # has a level of its own, so their common parent's does not count.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    configs: dict[str, Any] = {"timeout": RENDEZVOUS_TIMEOUT_S}
    if ranks.nodes > 1:
        # Unlike c10d's, this rendezvous keeps the order of hosts that the plan was made for.
        configs["rank"] = ranks.node_rank
        where: dict[str, Any] = {"rdzv_backend": "static", "rdzv_endpoint": ranks.rendezvous}
    else:
        # Any free port of the loopback interface: the host's name may resolve to another's address.
        where = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    return LaunchConfig(
        min_nodes=ranks.nodes,
        max_nodes=ranks.nodes,
        nproc_per_node=ranks.nproc,
        # Hosts must give one name, while runs beside each other on one host must not.
        run_id=uuid.uuid4().hex if ranks.nodes == 1 else "meshwright",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=",".join(number.name for number in heard(_SIGNALS)),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torchrun")),
        rdzv_configs=configs,
        **where,
    )


def heard(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of ``signals`` that are to end a run: not a hang-up that is ignored, as under nohup,
    which is there for a run to outlive it."""
    ignores = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in signals if number != signal.SIGHUP or not ignores]


@contextlib.contextmanager
def _environment(ranks: Ranks) -> Iterator[None]:
    """What the ranks inherit; this process's own environment is put back afterwards."""
    before = dict(os.environ)
    os.environ.update(ranks.environment)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks.nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    # For scripts that start their process group themselves.
    if ranks.nodes > 1 and ranks.rendezvous is not None:
        tell_gloo(ranks.rendezvous.rpartition(":")[0].strip("[]"), several=True)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """torchrun's engine replaces the handlers of signals and leaves its own."""
    # Only a main thread has handlers, and may set them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _time_limit(ranks: Ranks, folder: Path) -> Iterator[threading.Event]:
    """Kills the ranks when their time is over, and then sets the event."""
    late, done = threading.Event(), threading.Event()

    def watch() -> None:
        if done.wait(ranks.timeout_s):
            return
        late.set()
        while not done.wait(0.5):  # again and again, as ranks may still be starting
            for note in folder.glob("pid-*"):
                with contextlib.suppress(ProcessLookupError, ValueError, OSError):
                    os.killpg(int(note.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    if ranks.timeout_s is not None:
        thread.start()
    try:
        yield late
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def _failure(folder: Path, error: ChildFailedError) -> MeshwrightError:
    """What a rank has written of its own failure, the earliest; else how its process ended."""
    written = [json.loads(p.read_bytes()) for p in folder.glob("failure-*.json")]
    # Not one that the engine has killed, as it did not end when a peer had failed (it was stopped).
    by_engine = min((failed["time"] for failed in written), default=math.inf) + _SOON_S
    killed = [
        r
        for r, f in error.failures.items()
        if f.exitcode == -signal.SIGKILL and f.timestamp < by_engine
    ]
    # A rank that was killed writes nothing, and its peers write of the consequences only. The
    # kernel kills so where memory has run out.
    if killed and not any(failed["memory"] for failed in written):
        lacking = MemoryRunError(
            f"rank {min(killed)} ended with SIGKILL (out of memory?); its own output says more"
        )
        lacking.lost = True
        lacking.failed_at = 0.0  # before all that came of it, on other hosts too
        return lacking
    if not written:
        rank, failure = error.get_first_failure()
        how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        ended = RunError(f"rank {rank} ended with {how}; its own output says more")
        ended.lost = failure.exitcode < 0
        return ended
    # What a rank saw of another's end comes of that, whatever the clocks say.
    first = min(written, key=lambda failed: (failed["of_peer"], float(failed["time"])))
    raised = _error_of(first)
    raised.failed_at, raised.of_peer = float(first["time"]), first["of_peer"]
    return raised


def _error_of(first: dict[str, Any]) -> MeshwrightError:
    """What a rank has written, as an error."""
    message = first["message"]
    if first["room"] is not None:
        return NoRoomError(*first["room"])
    if first["exit_code"] == InputError.exit_code:
        return InputError(message)
    if first["exit_code"] == InfeasibleError.exit_code:
        return InfeasibleError(message)
    if first["memory"] is not None:
        return MemoryRunError(message, **first["memory"])
    if first["expected"]:
        return RunError(message)
    return RunError(f"rank {first['rank']} failed with {first['kind']}: {message}")


def new_folder(kind: str, root: Path = Path("runs")) -> Path:
    """A new folder for what a run leaves, named by kind and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = root / f"{kind}-{stamp}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot make the folder {folder}: {error.strerror}") from None
        return folder
    raise InputError(f"{root} has a thousand runs of this second: name another folder")
