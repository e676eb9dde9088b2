"""Waiting with a limit, and word of where every rank is when the limit is reached.

Each rank posts its place to the key-value store of the process group: a rank that never arrives
cannot answer, but its last post can.

[Note: Waits on a device's streams]
There a wait holds the device and not the host, which is held later, where it asks the device for
something: in the user's code as a rule (``loss.item()``), which knows no limit, and torch's own
watchdog then ends the process without a word on where the others are. So each wait leaves a moment
behind it on the stream that computes, and the heartbeat's thread looks whether the device comes
past it. Where it has not within the limit, the sentence is said on stderr, and the other ranks are
let know. The moments hold no tensors, as the collectives themselves would.
"""

from __future__ import annotations

import atexit
import copy
import os
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...planner.schema.errors import InputError, RunError
from .collective_log import CollectiveLog, debugging
from .groups import Group
from .heartbeat import Heartbeat, HeartbeatStatus, heartbeat_of, in_a_file
from .moments import Moment, has_come, now
from .recorder import StepRecorder
from .stream_waits import StreamWaits
from .worker_threads import spawn

DEFAULT_TIMEOUT_S = 600.0
POLL_S = 0.25
"""So often a rank that waits looks whether another has given up."""


def time_limit(timeout_s: float | None) -> float:
    """Seconds that a rank waits for others: the argument, the environment, or ten minutes."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if timeout_s is None and text is None:
        return DEFAULT_TIMEOUT_S
    try:
        limit = float(text) if timeout_s is None and text is not None else float(timeout_s or 0)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise InputError(
            f"a time limit of {text if timeout_s is None else timeout_s!r} seconds is not a "
            f"positive number: set timeout_s or {TIMEOUT_VARIABLE} to seconds such as 600"
        )
    return limit


class Watchdog:
    """Posts this rank's place, waits for collectives, and words what went wrong."""

    def __init__(self, rank: int, size: int, timeout_s: float, *, run: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.number = run
        self.timeout_s = timeout_s
        self.on_wait: Callable[[], Callable[[], None] | None] | None = None
        """Called when this rank begins to wait for a collective on the host; what it returns, when
        it goes on."""
        self.stream_waits = StreamWaits()
        self.recorder: StepRecorder | None = None
        """Is told what this rank issues and waits for, while it is there."""
        self.heartbeat = heartbeat_of(rank, size, timeout_s) if size > 1 else None
        self._store = distributed_c10d._get_default_store() if size > 1 else None
        self._prefix = f"meshwright/place/{run}"
        # A post takes 2.5 µs on a loopback TCPStore (torch 2.13, two cores). A store kept in a file
        # grows with each: only exceptional ones go there.
        self._cheap = self._store is not None and not in_a_file(self._store)
        self._doing = "start"
        self._followed: deque[_Followed] = deque()
        self._on_stream: deque[_StreamWait] = deque()
        """Waits of the device that it had not come past when it was looked last."""
        self._progress_s = 0.0
        self._log: CollectiveLog | None = None
        if self.heartbeat is not None and debugging():
            self._log = CollectiveLog(distributed_c10d._get_default_store(), self.heartbeat, run)
        if self.heartbeat is not None:
            self.heartbeat.tell_of_beats(self.look)
        # Weak: what atexit holds would live, with all that it knows, until the process ends.
        atexit.register(_say_goodbye, weakref.ref(self))

    def post(self, doing: str) -> None:
        """Notes where this rank is now. Raises ``RunError`` where a collective that is followed has
        not ended within the limit."""
        while self._followed:
            work, what, since = self._followed[0]
            age_s = time.monotonic() - since
            if not work.is_completed():
                if age_s >= self.timeout_s:
                    self._give_up(what, age_s)
                break
            self._followed.popleft()
            if failure := _ended_within(work, POLL_S):
                self._give_up(what, age_s, failure)
        self._doing = doing
        if self._cheap:
            self._publish(doing)

    def issued(self, what: str, group: Group) -> None:
        """Notes a collective that is about to be issued; in debug mode it is compared with what
        others issue. Raises ``RunError`` where they differ."""
        if self._log is not None:
            self._log.note(group, what)
        if self.recorder is not None:
            self.recorder.issued(what)

    def compare(self, group: Group) -> None:
        """In debug mode, compares what was noted for a group and has been waited for elsewhere."""
        if self._log is not None:
            self._log.compared(group)

    def follow(self, work: dist.Work, doing: str) -> None:
        """Notes a collective that this rank may never wait for, so that it does not go unseen if
        the others never join it."""
        self._followed.append(_Followed(work, doing, time.monotonic()))

    @property
    def busy(self) -> bool:
        """Whether a collective that is followed is still on its way."""
        return any(not followed.work.is_completed() for followed in self._followed)

    def wait(self, work: dist.Work | None, group: Group, doing: str) -> float:
        """Waits for a collective and returns the seconds that it held the host: none on a device's
        streams, where ``stream_waits`` has what it held. Raises ``RunError`` when the limit is
        reached or a peer is lost."""
        if work is None:
            return 0.0
        start = time.perf_counter()
        with self._recorded(group.label):
            if group.on_stream:
                with self.stream_waits.around(group):
                    work.wait()  # the stream waits and not the host: it returns at once
                if self.heartbeat is not None and self.heartbeat.beats:
                    self._on_stream.append(_StreamWait(now(group.device), doing))
            else:
                with self._held():
                    self._wait_on_host(work, group, doing)
        # What other ranks have issued in its place is known now, and its result is not used yet.
        self.compare(group)
        return 0.0 if group.on_stream else time.perf_counter() - start

    def look(self) -> None:
        """Looks whether this rank's device is held by a collective for longer than the limit; says
        so, once. See [Note: Waits on a device's streams]."""
        passed = False
        while self._on_stream and has_come(self._on_stream[0].moment):
            self._on_stream.popleft()
            passed = True
        now_s = time.monotonic()
        if passed or not self._on_stream or not self._progress_s:
            self._progress_s = now_s
        elif now_s - self._progress_s >= self.timeout_s:
            doing, held_s = self._on_stream[0].doing, now_s - self._progress_s
            self._on_stream.clear()
            # In another thread: it takes seconds, in which this one must beat.
            spawn("meshwright stream wait", lambda: self._say_held(doing, held_s))

    def _say_held(self, doing: str, held_s: float) -> None:
        try:
            self._give_up(doing, held_s)
        except RunError as error:
            print(error, file=sys.stderr, flush=True)

    def wait_for(self, done: Future[None]) -> float:
        """Waits for what another thread does, whose waits have their limits, and returns the
        seconds that it took. Raises what that thread has raised."""
        start = time.perf_counter()
        with self._recorded("exchange"), self._held():
            done.result()
        return time.perf_counter() - start

    def for_thread(self) -> Watchdog:
        """One for another thread, whose waits do not hold the thread that trains."""
        other = copy.copy(self)
        other.on_wait = other._log = None
        return other

    def _recorded(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.waiting(what)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """While this rank waits on the host."""
        goes_on = self.on_wait() if self.on_wait is not None else None
        try:
            yield
        finally:
            if goes_on is not None:
                goes_on()

    def _wait_on_host(self, work: dist.Work, group: Group, doing: str) -> None:
        start = time.monotonic()
        while True:
            # In pieces, as another rank may give up meanwhile.
            left = start + self.timeout_s - time.monotonic()
            failure = _ended_within(work, max(min(left, POLL_S), 0.001))
            if failure == "":
                return
            waited_s = time.monotonic() - start
            lagging = ""
            if self._log is not None and not self._log.compared(group):
                lagging = self._log.lagging(group)
            if failure is not None:
                self._give_up(f"{doing}{lagging}", waited_s, failure)
            if waited_s >= self.timeout_s:
                self._give_up(f"{doing}{lagging}", waited_s)
            self._heed_alarm(f"{doing}{lagging}", waited_s)

    def _heed_alarm(self, doing: str, waited_s: float) -> None:
        if self.heartbeat is None or self.heartbeat.alarm is None:
            return
        by, reason = self.heartbeat.alarm
        if reason:
            raise RunError(f"{self.heartbeat.name(by)} has given up: {reason}")
        self._give_up(doing, waited_s, also=f", and {self.heartbeat.name(by)} has given up waiting")

    def _give_up(
        self, doing: str, waited_s: float, failure: str = "", *, also: str = ""
    ) -> NoReturn:
        """Raises the sentence that says where every rank is, and lets the others say theirs.
        ``failure`` is what the collective ended with."""
        assert self.heartbeat is not None
        # Its own place and the alarm first: others ask for both while this rank asks for theirs.
        self._publish(f"waits in {doing}")
        self.heartbeat.give_up()
        heard = self.heartbeat.ask([f"{self._prefix}/{rank}" for rank in range(self.size)])
        since = f"{doing} since {waited_s:.{1 if waited_s < 10 else 0}f} s"
        sentence = where_all_are(self.heartbeat, f"{since}{also}", heard, failure)
        self.heartbeat.part(r for r, h in enumerate(heard or []) if is_present(h))
        given_up = RunError(sentence)
        given_up.of_peer = bool(failure)
        raise given_up from None

    def _publish(self, doing: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set(f"{self._prefix}/{self.rank}", doing)
        except RuntimeError:
            self._cheap = False  # the store is gone: a wait will say so, a post must not fail


class _StreamWait(NamedTuple):
    """A wait of the device for a collective, and the moment behind it."""

    moment: Moment
    doing: str


class _Followed(NamedTuple):
    work: dist.Work
    doing: str
    since_s: float


def _ended_within(work: dist.Work, seconds: float) -> str | None:
    """Waits so long for a collective: "" where it has completed, else what it failed with; None
    where it is still on its way."""
    limit = timedelta(seconds=seconds)
    try:
        work.wait(limit)
    except RuntimeError:
        # A wait that has run out of time and a collective that has failed raise alike. One may
        # complete between the wait and the next line, as it does on a busy machine: so it is asked
        # again, which returns at once, before a peer is called lost.
        if not work.is_completed():
            return None
        try:
            work.wait(limit)
        except RuntimeError as error:
            return _what_failed(str(error)) or type(error).__name__
    return ""


def _what_failed(text: str) -> str:
    """The first line of what a library says, without the place in its source and its advice."""
    line = text.strip().split("\n")[0]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", line).split(". This is typically caused", 1)[0]


def _say_goodbye(reference: weakref.ref[Watchdog]) -> None:
    """Posts that this rank's process ends, in case others still wait for it."""
    watch = reference()
    if watch is not None and dist.is_initialized():
        watch._publish(f"{ENDED} (it last {watch._doing})")


ENDED = "has ended"
"""How the place of a rank begins whose process has ended."""
TIMEOUT_VARIABLE = "MESHWRIGHT_TIMEOUT_S"
LISTED = 8
"""So many other ranks are named in a sentence; the rest are counted."""


def where_all_are(
    heartbeat: Heartbeat, doing: str, heard: list[HeartbeatStatus] | None, failure: str = ""
) -> str:
    """This rank waits in ``doing``; where the others are, by what was ``heard`` of them (None: the
    store does not answer). ``failure`` is what the collective ended with, if it did."""
    lost = f" and lost the connection to another rank ({failure})" if failure else ""
    start = f"{heartbeat.name(heartbeat.rank)} waits in {doing}{lost}; "
    others = [r for r in range(heartbeat.size) if r != heartbeat.rank]
    if heard is None:
        gone = "the launcher or rank 0, whichever keeps it, has ended or stalled"
        if not heartbeat.one_host:
            gone = "the link or the host between them is gone"
        return start + (
            "the process group's store does not answer, so nothing is heard of "
            f"{_listed([heartbeat.name(r) for r in others])}: {gone}"
        )
    silent = [r for r in others if not is_present(heard[r]) and not _ended(heard[r])]
    shown = (silent + [r for r in others if r not in silent])[:LISTED]
    places = [f"{heartbeat.name(r)} {_place(heard[r])}" for r in shown]
    if len(others) > len(shown):
        places.append(f"{len(others) - len(shown)} more ranks are not listed")
    failed = bool(failure) and not any(_ended(heard[r]) for r in others)
    remedy = _remedy(silent=bool(silent), failed=failed, one_host=heartbeat.one_host)
    return f"{start}{'; '.join(places)}: {remedy}"


def is_present(heard: HeartbeatStatus) -> bool:
    """Whether a rank lives and has not said goodbye."""
    return heard.alive and not _ended(heard)


def _remedy(*, silent: bool, failed: bool, one_host: bool) -> str:
    # On one host there is no link to be cut.
    if silent and one_host:
        return (
            "a rank that is not heard of has stalled or ended; what it printed last says more, or "
            "the kernel's log where memory ran out"
        )
    if silent:
        return (
            "a rank that is not heard of has stalled or ended, or its link is cut; look at its host"
        )
    if failed:
        where = "what the ranks printed last" if one_host else "the link between their hosts"
        return (
            f"all ranks still run, so their connections have failed by themselves; look at {where}"
        )
    return (
        "every rank must call the model, backward and what gathers (full_state_dict, norms) "
        "equally often, with an empty batch where it has no samples; where ranks are only slow, "
        f"set {TIMEOUT_VARIABLE} to more seconds"
    )


def _ended(heard: HeartbeatStatus) -> bool:
    return heard.place is not None and heard.place.startswith(ENDED)


def _place(heard: HeartbeatStatus) -> str:
    place = heard.place or "has not called the model yet"
    if heard.alive or _ended(heard):
        return place
    return f"is not heard of any more (its last word: it {place})"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
