"""Waiting with a limit, and the sentence that says where every rank is when the limit is reached.

Each rank posts its place to the key-value store of the process group (2.5 µs on a loopback
TCPStore, torch 2.13, two cores): a rank that never arrives cannot answer, but its last post can.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from ..planner.errors import InputError, RunError
from .groups import Group

DEFAULT_TIMEOUT_S = 600.0
TIMEOUT_VARIABLE = "MESHWRIGHT_TIMEOUT_S"
_LISTED = 8
"""So many other ranks are named in a sentence; the rest are counted."""


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


class Watch:
    """Posts this rank's place, waits for collectives, and words what went wrong."""

    def __init__(self, rank: int, size: int, timeout_s: float, *, run: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.waited_s = 0.0
        self._store = distributed_c10d._get_default_store() if size > 1 else None
        self._prefix = f"meshwright/place/{run}"
        # A store kept in a file grows with each post: only exceptional ones go there.
        self._cheap = self._store is not None and not _in_a_file(self._store)
        self._doing = "start"
        self._since = time.monotonic()
        atexit.register(_say_goodbye, weakref.ref(self))

    def post(self, doing: str) -> None:
        """Notes where this rank is now."""
        self._doing = doing
        self._since = time.monotonic()
        if self._cheap:
            self._publish(doing)

    def wait(self, work: dist.Work | None, group: Group, doing: str) -> float:
        """Waits for a collective and returns the seconds that it took.

        On a device's own streams (NCCL) the wait is the stream's, as torch does it, and returns at
        once. Raises ``RunError`` when the limit is reached or a peer is lost.
        """
        if work is None:
            return 0.0
        start = time.perf_counter()
        if group.on_stream:
            work.wait()
        else:
            self._wait_on_host(work, doing)
        taken = time.perf_counter() - start
        self.waited_s += taken
        return taken

    def _wait_on_host(self, work: dist.Work, doing: str) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            late = not work.is_completed()
            self._publish(f"waits in {doing}")
            reason = f"since {self.timeout_s:.0f} s" if late else f"and lost a peer ({error})"
            raise RunError(self._sentence(doing, reason, late)) from None

    def _sentence(self, doing: str, reason: str, late: bool) -> str:
        remedy = (
            ": every rank must call the model and backward equally often, with an empty batch "
            "where it has no samples"
        )
        others = [r for r in range(self.size) if r != self.rank]
        places = [f"rank {r} {self._place(r)}" for r in others[:_LISTED]]
        if len(others) > _LISTED:
            places.append(f"{len(others) - _LISTED} more ranks are not listed")
        return f"rank {self.rank} waits in {doing} {reason}; {'; '.join(places)}{remedy}"

    def _place(self, rank: int) -> str:
        store = self._store
        assert store is not None
        try:
            key = f"{self._prefix}/{rank}"
            return store.get(key).decode() if store.check([key]) else "has not called the model yet"
        except RuntimeError:  # DistStoreError among them: the store ended with its rank
            return "cannot be asked, as the process that keeps the store has ended"

    def _publish(self, doing: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set(f"{self._prefix}/{self.rank}", doing)
        except RuntimeError:
            self._cheap = False  # the store is gone: a wait will say so, a post must not fail

    def goodbye(self) -> None:
        """Posts that this rank's process ends, in case others still wait for it."""
        self._publish(f"has ended (it last {self._doing})")


def _say_goodbye(reference: weakref.ref[Watch]) -> None:
    watch = reference()
    if watch is not None and dist.is_initialized():
        watch.goodbye()


def _in_a_file(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)
