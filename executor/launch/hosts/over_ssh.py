"""A run on several hosts over ssh, from the first connection until nothing is left of it."""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import NoReturn

import msgspec

from ....planner.schema.errors import MeshwrightError, RunError
from ....planner.schema.plan import Plan
from ....planner.schema.record import decode
from ....planner.schema.recorded import RecordedSteps
from ....planner.schema.report import RunReport
from ....planner.schema.text import size
from ...comm.setups import check_versions, other_devices, software
from ..processes import check_plan, heard
from .protocol import (
    HEARTBEAT_S,
    HostFailure,
    HostOrder,
    HostReady,
    HostRecording,
    HostWork,
    RendezvousAddress,
    SavedStep,
    error_of,
)
from .remote import GRACE_S
from .settings import Hosts
from .ssh import KEPT_LINES, HostConnection, HostEvent, ssh_command, why_ended, why_not_there

# After one host has failed, the others get the first of these to say what they saw, then they are
# ended. Where all reports so far are of another host's failure, that host gets the second to say
# what its cause was.
_TO_TELL_S, _CAUSE_S = 3.0, 15.0
# From the first connection until all hosts have started Python and read what they need.
READY_S = 600.0
# After a host has failed before the run begins, others get this to say what is wrong with them.
_OTHERS_S = 3.0
# What a host may take to end, until its connection is given up.
_TO_END_S = GRACE_S + 10.0


def order_for(work: HostWork, number: int, hosts: Hosts) -> HostOrder:
    """Host ``number``'s part of the work."""
    return HostOrder(
        **msgspec.structs.asdict(work),
        node_rank=number,
        folder=hosts.where,
        environment=hosts.told,
    )


def launch_over_ssh(
    work: HostWork,
    hosts: Hosts,
    at_end: Callable[[RunReport | None], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None,
    recorded: Callable[[Plan, list[RecordedSteps]], None] | None = None,
    stops: Callable[[int | None], bool] = lambda step: False,
) -> RunReport | None:
    """Runs ``work`` on ``hosts`` and returns the report of rank 0, which ``at_end`` gets as soon as
    it is there; ``say`` gets remarks, ``recorded`` the plan and what all ranks have recorded of
    its steps. ``stops`` is asked every few seconds, and with the step of each checkpoint that is
    found, whether to end the run: by ``StoppedAtCheckpoint``.

    Every line of a host is printed with its name in front. Raises the error of the rank that failed
    first, or of the host that is not to be had. Signals are passed on, and what runs on the hosts
    ends with this call, also where this process is killed.
    """
    check_plan(work.plan, sum(work.per_host))
    run = _SshRun(work, hosts, at_end, say, stops)
    with signals_raised():
        try:
            return run.conduct()
        except KeyboardInterrupt:
            run.stop(signal.SIGINT)
            raise
        except StoppedAtCheckpoint:
            run.stop(signal.SIGTERM)
            raise
        except StoppedBySignal as stopped:
            run.stop(stopped.number)
            raise SystemExit(128 + stopped.number) from None
        finally:
            run.end()
            if recorded is not None:
                recorded(work.plan, run.recorded)


class StoppedAtCheckpoint(BaseException):
    """The run was ended where ``stops`` said so."""


class StoppedBySignal(BaseException):
    """SIGTERM or SIGHUP came, which is ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Inside, the two are raised as ``StoppedBySignal``, as far as they are ``heard``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> NoReturn:
        raise StoppedBySignal(number)

    before = {n: signal.signal(n, stop) for n in heard((signal.SIGTERM, signal.SIGHUP))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SshRun:
    """The hosts of one run, and what they have told so far."""

    def __init__(
        self,
        work: HostWork,
        hosts: Hosts,
        at_end: Callable[[RunReport | None], None],
        say: Callable[[str], None],
        stops: Callable[[int | None], bool],
    ) -> None:
        self._work, self._hosts, self._at_end, self._say = work, hosts, at_end, say
        self._stops = stops
        self._labels = hosts.labels
        self._events: queue.Queue[HostEvent] = queue.Queue()
        self._connections: list[HostConnection] = []
        # Of hosts that have not told of themselves yet, lines are kept rather than printed.
        self._lines: list[list[str]] = [[] for _ in hosts.names]
        self._ready: dict[int, HostReady] = {}
        self._running: set[int] = set()
        # Those that need not say why they end: they have, or were told to.
        self._explained: set[int] = set()
        self._failures: list[MeshwrightError] = []
        self._began = False
        self._report: RunReport | None = None
        self.recorded: list[RecordedSteps] = []
        self._over = threading.Event()

    def conduct(self) -> RunReport | None:
        """From the first connection to the last host's end."""
        threading.Thread(target=self._tell_alive, daemon=True).start()
        place = self._gather()
        self._began = True
        for connection in self._connections:
            connection.tell("go", place)
        self._follow()
        self._raise_failure()
        if self._report is None:
            self._at_end(None)
        return self._report

    def _gather(self) -> RendezvousAddress:
        """Connects all hosts; where they meet."""
        self._connect()
        until_s = time.monotonic() + READY_S
        while len(self._ready) < len(self._connections):
            self._handle(self._next())
            if self._failures:
                self._hear_other_failures()
            self._raise_failure()
            if time.monotonic() > until_s:
                raise self._silent(set(range(len(self._connections))) - set(self._ready))
        self._compare()
        return self._meet(until_s)

    def _hear_other_failures(self) -> None:
        """Says what is wrong with other hosts too, of those that tell so soon: who has misspelled
        two names wants to correct both."""
        until_s = time.monotonic() + _OTHERS_S
        while (left_s := until_s - time.monotonic()) > 0 and self._undecided:
            self._handle(self._next(left_s))
        first = str(self._first_failure())
        for sentence in dict.fromkeys(map(str, self._failures)):
            if sentence != first:
                self._say(sentence)

    @property
    def _undecided(self) -> bool:
        """Whether hosts have neither told of themselves nor ended."""
        return bool(self._running - set(self._ready))

    def _silent(self, numbers: Iterable[int]) -> RunError:
        silent = tuple(sorted(numbers))
        error = RunError(
            f"{', '.join(self._labels[number] for number in silent)} answered over ssh and had not "
            f"begun after {READY_S:g} s: see whether its working folder and its Python can be read "
            "there (a network folder that hangs)"
        )
        error.broken = silent
        return error

    def _failed(self, number: int, error: MeshwrightError) -> None:
        error.host = number
        if not self._began:
            error.broken = (number,)
        self._failures.append(error)

    def stop(self, number: int) -> None:
        """Passes a signal on and waits until all hosts have ended."""
        self._tell_signal(number)
        try:
            self._wait_for_ends()
        except BaseException:  # stopped again: hosts end by themselves where ssh has gone
            for running in self._running:
                self._connections[running].kill()
            raise

    def end(self) -> None:
        """Leaves nothing: hosts that are still there are told that it is over, and waited for."""
        self._explained.update(self._running)
        for connection in self._connections:
            connection.close()
        self._wait_for_ends()
        self._over.set()
        for number in self._running:
            self._connections[number].kill()

    def _tell_alive(self) -> None:
        """Tells hosts that this process is alive, until all is over. In a thread of its own, as the
        one that prints waits for a terminal that has stopped reading (Ctrl-S), however long."""
        while not self._over.wait(HEARTBEAT_S / 2):
            for number in tuple(self._running):
                self._connections[number].send(b"alive")

    def _connect(self) -> None:
        for number, name in enumerate(self._hosts.names):
            token = secrets.token_hex(16)
            connection = HostConnection(number, ssh_command(name, self._hosts), token, self._events)
            self._connections.append(connection)
            self._running.add(number)
            connection.send(token.encode())
            connection.send(dict(software())["meshwright"].encode())
            connection.tell("order", order_for(self._work, number, self._hosts))

    def _compare(self) -> None:
        """Raises ``InputError`` for hosts that cannot work together; says what else differs."""
        ready = [self._ready[number] for number in sorted(self._ready)]
        setups = [answer.setup for answer in ready]
        check_versions(setups)
        # Where a plan shares the batch out by the devices' speed, it knows of them.
        if not self._work.plan.local_batch_sizes:
            self._say(other_devices(setups) or "")
        notes: dict[str, list[str]] = {}
        for label, answer in zip(self._labels, ready, strict=True):
            for note in answer.notes:
                notes.setdefault(note, []).append(label)
        for note, labels in notes.items():
            self._say(f"on {', '.join(labels)}: {note}")
        for number, answer in enumerate(ready):
            self._say(self._short_of_memory(number, answer.free_bytes))

    def _short_of_memory(self, number: int, free: int | None) -> str:
        """Where a host has less memory free than its ranks are predicted to take."""
        counts = self._work.per_host
        first = sum(counts[:number])
        placement, peaks = self._work.plan.placement, self._work.plan.prediction.peak_bytes
        here = range(first, first + counts[number])
        # Peaks are by position in the layouts; ``placement`` says which rank is at each.
        needed = sum(peak for rank, peak in zip(placement, peaks, strict=False) if rank in here)
        if free is None or free >= needed:
            return ""
        return (
            f"host {self._labels[number]} has {size(free)} of memory free and its ranks are "
            f"predicted to take {size(needed)}: free some, or plan with a lower --memory-limit"
        )

    def _meet(self, until_s: float) -> RendezvousAddress:
        """Where the hosts meet: on the first, at its address on the way to the others."""
        host, port = self._hosts.meeting
        peer = meeting_peer([self._ready[n].address for n in sorted(self._ready)])
        self._connections[0].tell("meet", RendezvousAddress(address=peer, port=port))
        while True:
            event = self._next()
            if event is not None and event.kind == "met":
                found = decode(RendezvousAddress, event.data)
                return RendezvousAddress(address=host or found.address, port=found.port)
            self._handle(event)
            self._raise_failure()
            if time.monotonic() > until_s:
                raise self._silent([0])

    def _follow(self) -> None:
        """Returns when all hosts have ended. Where one fails, the others are ended."""
        failed_s = told_s = inf
        while self._running:
            event = self._next(0.5 if self._failures else HEARTBEAT_S)
            self._handle(event)
            self._ask_whether_to_stop(event)
            now_s = time.monotonic()
            if self._failures:
                failed_s = min(failed_s, now_s)
            caused = not all(failure.of_peer for failure in self._failures)
            if told_s == inf and now_s >= failed_s + (_TO_TELL_S if caused else _CAUSE_S):
                self._tell_signal(signal.SIGTERM)
                told_s = now_s
            if now_s >= told_s + _TO_END_S:
                return

    def _ask_whether_to_stop(self, event: HostEvent | None) -> None:
        """Raises ``StoppedAtCheckpoint`` where the run is to end."""
        is_saved = event is not None and event.kind == "saved"
        stops = self._stops(decode(SavedStep, event.data).step if event and is_saved else None)
        # Not where the end has come, or a failure, by itself.
        whole = len(self._running) == len(self._connections)
        if stops and whole and self._report is None and not self._failures:
            raise StoppedAtCheckpoint

    def _tell_signal(self, signal_number: int) -> None:
        self._explained.update(self._running)
        for number in self._running:
            self._connections[number].send(b"signal %d" % signal_number)

    def _wait_for_ends(self) -> None:
        deadline = time.monotonic() + _TO_END_S
        while self._running and time.monotonic() < deadline:
            self._handle(self._next(0.5))

    def _raise_failure(self) -> None:
        """Raises the first failure: once all have begun the others come of it."""
        if self._failures:
            raise self._first_failure()

    def _first_failure(self) -> MeshwrightError:
        # One of a host as a whole has no time, and is told at once.
        return min(self._failures, key=lambda error: (error.of_peer, error.failed_at or 0.0))

    def _next(self, wait_s: float = HEARTBEAT_S) -> HostEvent | None:
        """The next event, or None when none comes."""
        try:
            return self._events.get(timeout=min(wait_s, HEARTBEAT_S / 2))
        except queue.Empty:
            return None

    def _handle(self, event: HostEvent | None) -> None:
        if event is None:
            return
        number, label = event.number, self._labels[event.number]
        if event.kind in ("stdout", "stderr"):
            self._show(number, event)
        elif event.kind == "ready":
            self._ready[number] = decode(HostReady, event.data)
            self._lines[number].clear()
        elif event.kind == "report":
            self._report = decode(RunReport, event.data)
            self._at_end(self._report)
        elif event.kind == "recorded":
            self.recorded += decode(HostRecording, event.data).ranks
        elif event.kind == "failed":
            self._explained.add(number)
            self._failed(number, error_of(decode(HostFailure, event.data), label))
        elif event.kind == "ended":
            self._running.discard(number)
            # One that has not told of itself yet would be waited for without end.
            if number not in self._explained and (event.code or number not in self._ready):
                self._failed(number, self._unexplained(number, event.code))

    def _unexplained(self, number: int, code: int) -> MeshwrightError:
        label, lines = self._labels[number], self._lines[number]
        if number in self._ready:
            return why_ended(label, code, lines)
        return why_not_there(label, code, lines, self._hosts)

    def _show(self, number: int, event: HostEvent) -> None:
        text = event.data.decode(errors="replace").rstrip("\r\n")
        kept = self._lines[number]
        kept.append(text)
        del kept[:-KEPT_LINES]
        if number not in self._ready:
            return
        # With --json stdout is the report's alone.
        own = event.kind == "stdout" and not self._work.quiet
        print(f"{self._labels[number]}: {text}", file=sys.stdout if own else sys.stderr, flush=True)


def meeting_peer(addresses: Sequence[str]) -> str:
    """The address towards which host 0 is to look for its own: of another host, as ssh reached it,
    or where those are on this machine alone its own."""
    others = [address for address in addresses[1:] if _of_a_network(address)]
    if others:
        return others[0]
    return addresses[0] if _of_a_network(addresses[0]) else "127.0.0.1"


def _of_a_network(address: str) -> bool:
    return address != "" and not address.startswith("127.") and address != "::1"
