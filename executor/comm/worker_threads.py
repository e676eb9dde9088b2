"""What goes on beside the thread that trains, and the end of the process."""

# A thread that comes out of a library's code while the interpreter is ending is ended by Python in
# the midst of it, which C++ may answer with ``terminate``: the process aborts after all its work
# was done. So the end waits for the threads that were started here, whoever still knows of them,
# and for collectives whose model is gone. Not for long: peers may be gone too. What waits for them
# inside a library without a limit is cut off then.

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

LEAVE_S = 3.0
"""So long a process that ends waits for what it has started."""
STOP_S = 0.5
"""So long for a thread that was told to stop: it may be reading from a host that is gone."""
LINGER_S = 0.05
"""So long a thread that is needed many times in a step waits for more to do: starting one takes the
thread that trains until the new one gets a turn."""
_threads: WeakKeyDictionary[threading.Thread, threading.Event | None] = WeakKeyDictionary()
_cuts: WeakKeyDictionary[threading.Thread, Callable[[], None]] = WeakKeyDictionary()
"""What ends the waiting of a thread that nothing else can end."""
_left: list[dist.Work] = []


def spawn(
    name: str,
    work: Callable[[], None],
    stop: threading.Event | None = None,
    cut: Callable[[], None] | None = None,
) -> threading.Thread:
    """Runs ``work()`` in a thread of that name. It ends by itself, or where it would not, soon
    after ``stop`` is set; ``cut()`` ends what it waits for when the process ends without it."""
    # A daemon: a rank that has lost its peers must be able to end.
    thread = threading.Thread(target=work, name=name, daemon=True)
    _when_it_ends()
    _threads[thread] = stop
    if cut is not None:
        _cuts[thread] = cut
    thread.start()
    return thread


def with_current_modes(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` for another thread, under the dispatch modes of this one."""
    modes = _get_current_dispatch_mode_stack()  # what counts memory, say, counts there too

    def run() -> None:
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            work()

    return run


class IssueQueue:
    """Runs pieces of work in the order in which they are submitted: at once, or in a thread of that
    name that ends when there is nothing left to do and nothing has come for ``linger_s``.
    ``computes``: whether they make tensors, and do not only wait. ``cut`` as ``spawn`` has it."""

    # One thread at a time issues on a process group, or their order could differ between ranks: the
    # one that trains, or one that waits in its stead.

    def __init__(
        self,
        name: str,
        *,
        linger_s: float = 0.0,
        computes: bool = True,
        cut: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._linger_s, self._computes, self._cut = name, linger_s, computes, cut
        self._submitted = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def submit(self, work: Callable[[], None], *, in_thread: bool) -> None:
        """Does it now unless ``in_thread``, or others have to be done first."""
        with self._submitted:
            start = not self._running
            if self._running or in_thread:
                self._waiting.append(with_current_modes(work) if self._computes else work)
                self._running = True
                self._submitted.notify()
        if start and in_thread:
            spawn(self._name, self._run, cut=self._cut)
        elif start:
            work()

    def _run(self) -> None:
        while True:
            with self._submitted:
                if not self._waiting and self._linger_s:
                    self._submitted.wait(self._linger_s)
                if not self._waiting:
                    self._running = False
                    return
                work = self._waiting.popleft()
            with torch.no_grad():
                work()
            del work  # it may hold tensors


def in_worker() -> bool:
    """Whether the thread that asks is one of those, and not the one that trains."""
    return threading.current_thread() in _threads


def finish_all(limit_s: float) -> None:
    """Waits until threads that end by themselves have ended, before another run begins. Not for
    those that only wait for messages, which may never come and disturb no other."""
    # Process groups are used again, and a late thread of the run before would issue its collectives
    # among the new ones, on one rank earlier and on another later.
    end_s = time.monotonic() + limit_s
    for thread in _started():
        ends = _threads.get(thread) is None and thread not in _cuts
        if ends and thread is not threading.current_thread():
            thread.join(max(end_s - time.monotonic(), 0.0))


def _started() -> list[threading.Thread]:
    # In one piece, as other threads start more meanwhile; one about to start cannot be waited for.
    threads = [one() for one in _threads.keyrefs()]
    return [one for one in threads if one is not None and one.ident is not None]


def abandon(work: dist.Work) -> None:
    """A collective that nobody will wait for any more, as what it was for is gone."""
    _when_it_ends()
    _left[:] = [one for one in (*_left, work) if not one.is_completed()]


@cache
def _when_it_ends() -> None:
    # At the first call, which comes after the process group was made: what is registered last is
    # done first, so that the threads end before the group does.
    atexit.register(_let_end)


def _let_end() -> None:
    end_s = time.monotonic() + LEAVE_S
    for thread in _started():
        if (stop := _threads.get(thread)) is not None:
            stop.set()
    joined: set[threading.Thread] = set()
    # Those that are waited for may start others for what they have left to send.
    while late := [thread for thread in _started() if thread not in joined]:
        for thread in late:
            most_s = LEAVE_S if _threads.get(thread) is None else STOP_S
            thread.join(max(min(end_s - time.monotonic(), most_s), 0.0))
        joined.update(late)
    while time.monotonic() < end_s and any(not work.is_completed() for work in _left):
        time.sleep(0.01)
    for thread in joined:
        cut = _cuts.get(thread)
        if cut is not None and thread.is_alive():
            cut()
            thread.join(STOP_S)
