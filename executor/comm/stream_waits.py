"""How long collectives hold the stream that computes, where a wait does not hold the host.

On a device's streams ``work.wait()`` returns at once and makes the computing stream wait for the
one that communicates. An event before it and one behind it on the computing stream are as far apart
as that was held: nothing if the collective was over by then. Reading them waits for the device, so
that is left to whoever reports.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .groups import Group
from .moments import Moment, now, seconds_between

BLOCKING = ("redistribution", "statistics")
"""How the labels of groups begin whose collectives a rank waits for in forward and backward."""
UNCOUNTED = ("full gradients",)
"""Those for what a user asks of gradients, which is no part of a step."""

Pairs = tuple[tuple[Moment, Moment], ...]


class StreamWaitTimes(NamedTuple):
    """The waits of one step, by moments before and behind each."""

    blocking: Pairs = ()
    exposed: Pairs = ()

    @property
    def blocking_s(self) -> float:
        """Seconds held by redistribution and batch statistics. Waits for the device."""
        return sum(seconds_between(*pair) for pair in self.blocking)

    @property
    def exposed_s(self) -> float:
        """Seconds held by the exchange of gradients. Waits for the device."""
        return sum(seconds_between(*pair) for pair in self.exposed)


class StreamWaits:
    """The waits since the last ``take``, noted once ``begin`` was called: nobody else needs them,
    and they would grow for ever."""

    def __init__(self) -> None:
        self._measuring = False
        self._blocking: list[tuple[Moment, Moment]] = []
        self._exposed: list[tuple[Moment, Moment]] = []

    def begin(self) -> None:
        """Notes waits from now on, and forgets earlier ones."""
        self._measuring = True
        self.take()

    def take(self) -> StreamWaitTimes:
        """What was noted since the last time."""
        found = StreamWaitTimes(tuple(self._blocking), tuple(self._exposed))
        self._blocking.clear()
        self._exposed.clear()
        return found

    @contextmanager
    def around(self, group: Group) -> Iterator[None]:
        """Notes the wait inside, for a collective of ``group``."""
        if not self._measuring or group.label.startswith(UNCOUNTED):
            yield
            return
        before = now(group.device)
        yield
        noted = self._blocking if group.label.startswith(BLOCKING) else self._exposed
        noted.append((before, now(group.device)))
