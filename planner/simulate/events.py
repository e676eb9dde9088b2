"""An event simulation of training steps on one rank and its links.

The rank does its work in order. Blocking communication takes its link at once and stops what the
link carries meanwhile; otherwise a link carries one gradient message at a time. While the rank
computes and a message is under way, each runs slower by what ``Interference`` says.

Between events all rates are constant, so the simulation is exact for its schedule: it is what the
step formulas are held against, and what a plan predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ..cost.step_time import LINKS
from ..schema.cluster import Interference
from .schedule import COMPUTE, Message, ScheduleName, Step, Work

NO_INTERFERENCE = Interference()
Interval = tuple[float, float]
"""From when to when, in seconds."""


class Span(NamedTuple):
    """Something that ran on a resource (compute or a link) from ``start_s`` to ``end_s``; several
    spans of one message are the pieces into which more urgent traffic cut it. ``unit`` is the
    first of a message's units, ``message`` its index in the step (-1: not a message)."""

    resource: str
    unit: int
    phase: str
    start_s: float
    end_s: float
    message: int = -1


class Simulation(NamedTuple):
    """A step in the steady state: ``step_s`` = ``compute_s`` + ``blocking_s`` + ``exposed_s``
    (the rank waits for gradients). ``update_s`` is the part of compute that updates, ``host_s``
    that in which a device waits until its host has issued the next (see ``issued_in``). Where steps
    differ it is the mean of the last ``steps``, which begin at ``start_s``. Spans are of all that
    were simulated."""

    step_s: float
    compute_s: float
    blocking_s: float
    exposed_s: float
    update_s: float
    spans: tuple[Span, ...]
    start_s: float = 0.0
    steps: int = 1
    host_s: float = 0.0

    def issued_in(self, host_s: float) -> Simulation:
        """The same steps where the host takes ``host_s`` to issue one."""
        # A host runs ahead of its device, so that what it takes longer counts once in a step.
        more_s = max(host_s - self.step_s, 0.0)
        return self._replace(
            step_s=self.step_s + more_s, compute_s=self.compute_s + more_s, host_s=more_s
        )

    @staticmethod
    def of(
        start_s: float, end_s: float, work: Iterable[Span], spans: Iterable[Span], steps: int = 1
    ) -> Simulation:
        """The simulation of steps in which the rank itself did ``work``, messages aside."""
        compute_s = update_s = blocking_s = 0.0
        for span in work:
            took = span.end_s - span.start_s
            if span.resource == COMPUTE:
                compute_s += took
                update_s += took if span.phase == "update" else 0.0
            else:
                blocking_s += took
        exposed_s = max(end_s - start_s - compute_s - blocking_s, 0.0)  # what remains
        return Simulation(
            step_s=(end_s - start_s) / steps,
            compute_s=compute_s / steps,
            blocking_s=blocking_s / steps,
            exposed_s=exposed_s / steps,
            update_s=update_s / steps,
            spans=tuple(sorted(spans, key=lambda s: s.start_s)),
            start_s=start_s,
            steps=steps,
        )


class _Sending:
    """A message that is ready or under way."""

    __slots__ = ("index", "key", "left_s", "message", "since_s", "step")

    def __init__(self, index: int, message: Message, step: int, key: tuple[float, int]) -> None:
        self.index, self.message, self.step, self.key = index, message, step, key
        self.left_s = message.whole_s
        self.since_s: float | None = None


class _StepRun:
    """The state of a simulation: the clock, the rank's place in its work, what links carry."""

    def __init__(self, step: Step, steps: int, interference: Interference) -> None:
        self.step = step
        # How fast computing goes while a message is under way, and messages while it computes.
        self.compute_rate = 1 / interference.compute_slowdown
        self.communication_rate = 1 / interference.communication_slowdown
        self.now_s = 0.0
        used = {message.link for message in step.messages}
        self.links = [link for link in LINKS if link in used]
        self.waiting: dict[str, list[tuple[tuple[float, int], _Sending]]]
        self.waiting = {link: [] for link in LINKS}
        self.sending: dict[str, _Sending | None] = dict.fromkeys(LINKS)
        # How many messages of each unit have not arrived, by step.
        always = Counter(k for m in step.messages if not m.turns for k in m.awaited_by)
        self.missing = [always.copy() for _ in range(steps)]
        for message in (m for m in step.messages if m.turns):
            for number in filter(message.goes, range(steps)):
                self.missing[number].update(message.awaited_by)
        self.ready_at: dict[int, list[tuple[int, Message]]] = {}
        for index, message in enumerate(step.messages):
            self.ready_at.setdefault(message.ready, []).append((index, message))
        self.released = 0
        # Messages that have got ready and have not arrived.
        self.under_way = 0
        self.spans: list[Span] = []

    def run(self, work: Work, step: int) -> None:
        """Does one piece of the rank's work and whatever links carry meanwhile."""
        # Under priority a unit is updated in the next step's forward, with this step's gradients.
        gate = step if self.step.schedule == "barrier" else step - 1
        if work.awaits and gate >= 0:
            missing = self.missing[gate]
            while any(map(missing.get, work.awaits)):
                self._advance(None, float("inf"))
        left, start = work.seconds, self.now_s
        if not self.under_way:
            self.now_s, left = self.now_s + left, 0.0
        while left > 0:
            left = self._advance(work, left)
        if self.now_s > start:
            self.spans.append(Span(work.resource, work.unit, work.phase, start, self.now_s))
        if not work.frees:
            return
        for index, message in self.ready_at.get(work.unit, ()):
            if not message.goes(step):
                continue
            self.released += 1
            self.under_way += 1
            # Equal urgency leaves the order in which messages get ready: first in, first out.
            urgency = 0.0 if self.step.schedule == "barrier" else message.urgency
            key = urgency, self.released
            heappush(self.waiting[message.link], (key, _Sending(index, message, step, key)))

    def _advance(self, work: Work | None, left: float) -> float:
        """Runs to the next event; returns what is left of the work."""
        resource = work.resource if work else None
        tasks = self._served(resource)
        computing = resource == COMPUTE
        work_rate = self.compute_rate if computing and tasks else 1.0
        rate = self.communication_rate if computing else 1.0
        until_done = span = left / work_rate
        for task in tasks:
            span = min(span, task.left_s / rate)
        assert span < float("inf"), "the rank waits for what nobody sends"
        self.now_s += span
        for task in tasks:
            # Not by subtraction where it ends: what rounding leaves would be an event of its own.
            task.left_s = 0.0 if task.left_s / rate <= span else task.left_s - span * rate
            if not task.left_s:
                self._pause(task)
                self.sending[task.message.link] = None
                self.under_way -= 1
                missing = self.missing[task.step]
                for k in task.message.awaited_by:
                    missing[k] -= 1
        return 0.0 if until_done <= span else left - span * work_rate

    def _served(self, resource: str | None) -> list[_Sending]:
        """The messages that links carry while the rank uses ``resource``."""
        tasks = []
        for link in self.links:
            task = self.sending[link]
            if link == resource or task is None or task.since_s is None or self.step.preempt:
                task = self._serve(link, blocked=link == resource)
            if task is not None:
                tasks.append(task)
        return tasks

    def _serve(self, link: str, *, blocked: bool) -> _Sending | None:
        """The message that a link carries now, or None if it is idle, or ``blocked`` by what the
        rank itself waits for."""
        current, queue = self.sending[link], self.waiting[link]
        if blocked:
            # It keeps its place: when the link is free again it goes on where it was.
            self._pause(current)
            return None
        if queue and (current is None or self.step.preempt):
            key, best = queue[0]
            if current is None or key < current.key:
                heappop(queue)
                if current is not None:
                    self._pause(current)
                    heappush(queue, (current.key, current))
                self.sending[link] = current = best
        if current is not None and current.since_s is None:
            current.since_s = self.now_s
        return current

    def _pause(self, task: _Sending | None) -> None:
        """Ends the span of a message that is under way."""
        if task is None or task.since_s is None:
            return
        if self.now_s > task.since_s:
            link, unit = task.message.link, task.message.first
            span = Span(link, unit, "exchange", task.since_s, self.now_s, task.index)
            self.spans.append(span)
        task.since_s = None


# Under the barrier a step leaves nothing behind, so one is enough. By priority its gradients travel
# in the next forward: the first steps are shorter, as there is nothing to wait for yet.
STEADY_STEPS: dict[ScheduleName, int] = {"barrier": 1, "priority": 4}


def simulate(
    step: Step, interference: Interference = NO_INTERFERENCE, steps: int | None = None
) -> Simulation:
    """Runs ``steps`` steps (as many as the steady state takes if not told) and describes the last,
    or the mean of those after them where messages have ``turns``.

    Under priority a step is counted from the end of one backward to the end of the next.
    """
    period = max((len(message.turns) for message in step.messages), default=0)
    count = (steps or STEADY_STEPS[step.schedule]) + period
    run = _StepRun(step, count, interference)
    ends = [0.0]
    for s in range(count):
        for each in step.work:
            run.run(each, s)
        ends.append(run.now_s)
    last = period or 1
    start_s = ends[-1 - last]
    work = [span for span in run.spans if span.start_s >= start_s and span.message < 0]
    return Simulation.of(start_s, ends[-1], work, run.spans, last)


def gaps(busy: Sequence[Interval], start_s: float, end_s: float) -> Iterator[Interval]:
    """What intervals in the order of their starts leave between ``start_s`` and ``end_s``."""
    at = start_s
    for low, high in busy:
        if high <= start_s or low >= end_s:
            continue
        if low > at:
            yield at, low
        at = max(at, min(high, end_s))
    if end_s > at:
        yield at, end_s
