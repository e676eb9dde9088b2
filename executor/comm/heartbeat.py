"""Signs of life of every rank: on which host it is, whether it still runs, whether one gave up."""

# A thread of each process sets a key of the process group's store twice a second. A rank whose key
# stands still has stalled, ended or lost its link, however its collectives fare. Hosts' clocks are
# not compared. On a link that was cut, a ``TCPStore`` (torch 2.13) takes what is set without a word
# and never returns from a read, whatever its timeout says (measured on the test bed: more than two
# minutes after one of 3 s). So reads have a connection and a thread of their own, which are left
# behind where they do not come back.

import contextlib
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from ...planner.schema.errors import RunError
from .worker_threads import spawn

BEAT_S = 0.5
SILENT_S = 2.0
"""A rank that sets nothing for so long, four beats, counts as missing."""
REACH_S = 2.0
"""A store that does not answer for so long cannot be reached."""
LINGER_S = 3.0
"""So long the first rank, whose host keeps the store, waits for others to read it."""

Answer = TypeVar("Answer")


class HeartbeatStatus(NamedTuple):
    """What a rank was heard to say: its place, None where it has none, and whether it is alive."""

    place: str | None
    alive: bool


class Alarm(NamedTuple):
    """A rank that has given up, and the sentence that says why where that was known at once."""

    rank: int
    reason: str


class Heartbeat:
    """This process's beat, and what is heard of the others. Made by all ranks together."""

    def __init__(self, store: Store, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.size = rank, size
        self.alarm: Alarm | None = None
        """That another rank has given up, once this one has heard of it."""
        self._beaten: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._store = store
        self._reader: Any = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self.beats = not in_a_file(store)  # such a store grows with each key that is set
        # A store may still hold the keys of a process group that was destroyed: an alarm counts
        # where it has the mark that its rank has now.
        self._mark = uuid.uuid4().hex
        self._publish(self._key("host", rank), f"{self._mark} {socket.gethostname()}")
        self._publish(self._key("beat", rank), "0")
        self._marks, self.hosts = self._gather_hosts(limit_s)
        self.one_host = len(set(self.hosts)) <= 1

    def _gather_hosts(self, limit_s: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Every rank's mark, and its host's name."""
        keys = [self._key("host", rank) for rank in range(self.size)]
        limit = timedelta(seconds=limit_s)

        def read() -> list[bytes]:
            self._reader.wait([*keys, *(self._key("beat", r) for r in range(self.size))], limit)
            found: list[bytes] = self._reader.multi_get(keys)
            return found

        names = within(read, limit_s + REACH_S)
        if names is None:
            raise RunError(
                f"rank {self.rank} on {socket.gethostname()} has not heard of all of the "
                f"{self.size} ranks in {limit_s:g} s: one of them has not come to apply the plan"
            )
        pairs = [name.decode().split(" ", 1) for name in names]
        return tuple(mark for mark, _ in pairs), tuple(host for _, host in pairs)

    @staticmethod
    def _key(what: str, rank: int) -> str:
        return f"meshwright/{what}/{rank}"

    def _publish(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended: a wait will say so
            self._store.set(key, value)

    def name(self, rank: int) -> str:
        """The rank and, where there are several hosts, which it is on."""
        return f"rank {rank}" if self.one_host else f"rank {rank} on {self.hosts[rank]}"

    def beat(self, number: int) -> None:
        """One sign of life; looks whether a rank has given up."""
        self._reader.set(self._key("beat", self.rank), str(number))
        if self.alarm is None and self._reader.check([_ALARM]):
            rank, mark, reason = self._reader.get(_ALARM).decode().split(" ", 2)
            if mark == self._marks[int(rank)]:
                self.alarm = Alarm(int(rank), reason)

    def tell_of_beats(self, look: Callable[[], None]) -> None:
        """From now on ``look``, a method, is called at each beat, as long as its object lives."""
        self._beaten = [one for one in self._beaten if one() is not None]
        self._beaten.append(weakref.WeakMethod(look))

    def beaten(self) -> None:
        """Calls who asked to be told of beats."""
        for one in self._beaten:
            look = one()
            if look is not None:
                # A device that has failed raises whatever it is asked, where its user asks it too.
                with contextlib.suppress(RuntimeError):
                    look()

    def give_up(self, reason: str = "") -> None:
        """Tells the others that this rank waits no longer, so that they say so in time too."""
        if self.alarm is None:
            self._publish(_ALARM, f"{self.rank} {self._mark} {reason}")

    def leave(self, key: str, value: str) -> None:
        """Leaves a word for whoever asks by ``left``."""
        self._publish(key, value)

    def left(self, keys: Sequence[str]) -> list[str | None]:
        """What stands under the keys, None under those that were never set. On a link that was cut
        it does not return. Raises ``RuntimeError`` where the store has ended."""
        found: list[str | None] = []
        for key in keys:
            found.append(self._reader.get(key).decode() if self._reader.check([key]) else None)
        return found

    def ask(self, keys: Sequence[str]) -> list[HeartbeatStatus] | None:
        """What stands under each rank's key, and whether that rank is alive; takes ``SILENT_S``.
        None where the store does not answer."""
        store, beats = self._reader, [self._key("beat", rank) for rank in range(self.size)]

        def read() -> list[HeartbeatStatus]:
            before = store.multi_get(beats)
            time.sleep(SILENT_S if self.beats else 0.0)
            after = store.multi_get(beats)
            return [
                HeartbeatStatus(
                    store.get(key).decode() if store.check([key]) else None,
                    not self.beats or old != new,
                )
                for key, old, new in zip(keys, before, after, strict=True)
            ]

        return within(read, SILENT_S + REACH_S)

    def part(self, alive: Iterable[int]) -> None:
        """This rank has said what it knows. The first waits until the others that live have."""
        self._publish(self._key("parted", self.rank), "1")
        keys = [self._key("parted", rank) for rank in alive if rank != self.rank]

        def look() -> None:
            # Not by the store's own wait, which would hold back the beats.
            end = time.monotonic() + LINGER_S
            while time.monotonic() < end and not self._reader.check(keys):
                time.sleep(0.1)

        # As the store ends with the first rank, or soon after it.
        if self.rank == 0 and keys and self.beats:
            within(look, LINGER_S)


_ALARM = "meshwright/alarm"
_heartbeats: WeakKeyDictionary[dist.ProcessGroup, Heartbeat] = WeakKeyDictionary()


def heartbeat_of(rank: int, size: int, limit_s: float) -> Heartbeat:
    """The heartbeat in the default process group. Collective the first time."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _heartbeats:
        store = distributed_c10d._get_default_store()
        _heartbeats[group] = made = Heartbeat(store, rank, size, limit_s)
        if made.beats:
            stop = threading.Event()
            spawn("heartbeat", partial(_beat, weakref.ref(group), weakref.ref(made), stop), stop)
    return _heartbeats[group]


def _beat(
    group: weakref.ref[dist.ProcessGroup], heartbeat: weakref.ref[Heartbeat], stop: threading.Event
) -> None:
    # Until the process group or the heartbeat is gone, neither of which this thread keeps alive.
    for number in count(1):
        mine = heartbeat()
        if stop.is_set() or mine is None or group() is None or dist.group.WORLD is not group():
            return
        try:
            mine.beat(number)
        except RuntimeError:  # the store has ended
            return
        mine.beaten()
        del mine
        stop.wait(BEAT_S)


def within(work: Callable[[], Answer], limit_s: float) -> Answer | None:
    """``work()``, which asks a store. None where it fails or is not done in time."""
    found: list[Answer] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # DistStoreError among them
            found.append(work())

    # Not by ``spawn``, for whose threads the end of the process waits: this one may never return.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def in_a_file(store: Store) -> bool:
    """Whether the store is kept in a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)
