"""A rank of the foreground tells the pacer of its host when it waits, and what its steps take."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm.moments import Moment, has_come, now, seconds_between
from ..comm.steps import after_each_step
from ..comm.watchdog import Watchdog
from .protocol import VARIABLE, Kind, PacerMessage

GAP_S = 0.002
"""Waits that are expected to be shorter are not worth a word: starting and stopping the background
and the word itself would take a good part of them."""


class Signals:
    """What one rank says, to the pipe that ``descriptor`` writes to.

    Waits are known by their place in the step: the k-th of a step is expected to take what the k-th
    of the steps before took, the shorter of the last two.

    Where steps are a GPU's, ``device``, they are told when it has made them, with its own time: its
    host is ahead, and knows only what it has launched.
    """

    def __init__(
        self, descriptor: int, foreground: int, rank: int, device: torch.device | None = None
    ) -> None:
        self._descriptor: int | None = descriptor
        self._foreground, self._rank, self._device = foreground, rank, device
        self._steps = 0
        self._ends: deque[Moment] = deque()
        """Of the last step that was told, and of those after it."""
        self._thread: int | None = None
        self._place = 0
        self._taken: list[float] = []
        self._taken_before: list[float] = []
        self._expected: list[float] = []
        self._tell(Kind.BEGAN)

    def waiting(self) -> Callable[[], None] | None:
        """The rank begins to wait; what to call when it goes on (None: nothing)."""
        # Only the thread that makes the steps has gaps: another that waits leaves it the processor.
        if self._descriptor is None or threading.get_ident() != self._thread:
            return None
        place, self._place = self._place, self._place + 1
        expected_s = self._expected[place] if place < len(self._expected) else 0.0
        if expected_s >= GAP_S:
            self._tell(Kind.WAITS, seconds=expected_s)
        start_s = time.monotonic()

        def goes_on() -> None:
            self._taken.append(time.monotonic() - start_s)
            if expected_s >= GAP_S:
                self._tell(Kind.WORKS)

        return goes_on

    def stepped(self) -> None:
        self._thread = threading.get_ident()
        self._ends.append(time.monotonic() if self._device is None else now(self._device))
        while len(self._ends) > 1 and has_come(self._ends[1]):
            start = self._ends.popleft()
            self._steps += 1
            self._tell(Kind.STEPPED, self._steps, seconds_between(start, self._ends[0]))
        # What was waited in the step that ends is what the next one expects; the shorter wait of
        # two steps, so that the background rather stops too early than runs into the rank's work.
        before = self._taken_before if len(self._taken_before) == len(self._taken) else self._taken
        self._expected = [min(pair) for pair in zip(self._taken, before, strict=True)]
        self._place, self._taken_before, self._taken = 0, self._taken, []

    def _tell(self, kind: Kind, number: int = 0, seconds: float = 0.0) -> None:
        if self._descriptor is None:
            return
        record = PacerMessage(kind, self._foreground, self._rank, number, seconds)
        try:
            os.write(self._descriptor, record.packed())
        except BlockingIOError:
            pass  # the pacer is behind: later records say the same
        except OSError:  # it is gone
            os.close(self._descriptor)
            self._descriptor = None


def tell_pacer(
    watch: Watchdog, parameters: Iterable[nn.Parameter], optimizer: Optimizer | None
) -> None:
    """Lets the pacer of this host know of the run's waits and steps, where the launcher has started
    one; does nothing else. Without ``optimizer`` steps are those of any that has ``parameters``."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads: the background and its pacer have ended
        return
    trained = list(parameters)
    device = next((p.device for p in trained if p.device.type != "cpu"), None)
    number = int(os.environ.get("LOCAL_RANK", "0"))
    signals = Signals(descriptor, watch.number, number, device)
    if device is None:  # elsewhere the host waits, not the device
        watch.on_wait = signals.waiting
    after_each_step(trained, optimizer, lambda _: signals.stepped())
