"""A simulation of training steps whose units run on different ranks, some of them at the same time.

Positions that take part in the same units form a *lane*. Each lane does its own units in forward
order, and in backward the other way; a unit that spans several lanes starts when all of them are
free. A redistribution is waited for where it arrives, and takes the links at both of its ends.
Units on parallel branches that share no lane run side by side, and the step takes as long as the
longest way through all of this: the critical path. Where all units run on all ranks there is one
lane, and this is ``simulate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..cost.cost import CostModel
from ..cost.step_time import LINKS
from ..cost.unit_cost import OnLink
from ..schema.cluster import Interference
from ..schema.layout import Layout
from ..schema.options import Option
from .events import ALONE, Simulation, Span
from .schedule import COMPUTE, Message, ScheduleName

Lanes = frozenset[int]


class Task(NamedTuple):
    """A piece of a step on some lanes: computing, a collective that they wait for (on a link, which
    it takes on the lanes ``holds``), or a message with gradients, which they do not wait for. It
    starts after the tasks ``after``; low ``urgency`` goes first."""

    resource: str
    unit: int
    phase: str
    seconds: float
    lanes: Lanes
    holds: Lanes
    after: tuple[int, ...]
    urgency: float = 0.0

    @property
    def message(self) -> bool:
        """Whether it goes on in the background."""
        return self.phase == "exchange"


def lanes_of(world_size: int, layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
    """The positions of each lane."""
    different = list(dict.fromkeys(layouts))
    found: dict[tuple[bool, ...], list[int]] = {}
    for position in range(world_size):
        key = tuple(y.first <= position < y.first + y.size for y in different)
        found.setdefault(key, []).append(position)
    return tuple(tuple(positions) for positions in found.values())


class Program:
    """The tasks of several steps, in an order in which all of them can be done."""

    def __init__(
        self,
        model: CostModel,
        decisions: Sequence[Option],
        messages: Sequence[Message],
        schedule: ScheduleName,
    ) -> None:
        self.model, self.decisions, self.messages = model, tuple(decisions), tuple(messages)
        self.schedule = schedule
        self.lanes = lanes_of(model.world_size, [o.layout for o in decisions])
        self.of_unit = [self._lanes(o.layout) for o in decisions]
        self.tasks: list[Task] = []
        self.ends: list[int] = []
        self._last: dict[int, int] = {}
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._returned: dict[int, int] = {}
        self._sent: dict[int, list[int]] = {}

    def _lanes(self, layout: Layout) -> Lanes:
        inside = range(layout.first, layout.first + layout.size)
        return frozenset(i for i, lane in enumerate(self.lanes) if lane[0] in inside)

    def _add(
        self,
        resource: str,
        unit: int,
        phase: str,
        seconds: float,
        lanes: Lanes,
        after: Sequence[int] = (),
        holds: Lanes | None = None,
    ) -> int:
        """A task in the order of its lanes."""
        before = {self._last[lane] for lane in lanes if lane in self._last} | set(after)
        held = lanes if holds is None else holds
        self.tasks.append(Task(resource, unit, phase, seconds, lanes, held, tuple(sorted(before))))
        for lane in lanes:
            self._last[lane] = len(self.tasks) - 1
        return len(self.tasks) - 1

    def _collective(
        self,
        on: OnLink,
        unit: int,
        phase: str,
        lanes: Lanes,
        after: int,
        holds: Lanes | None = None,
    ) -> int:
        if on.seconds <= 0:
            return after
        return self._add(LINKS[on.link], unit, phase, on.seconds, lanes, (after,), holds)

    def step(self) -> None:
        """Adds one step."""
        times, units = self.model.micro_batches, range(len(self.decisions))
        for m in range(times):
            for k in units:
                self._forward_of(k, gate=self.schedule == "priority" and m == 0)
            for k in reversed(units):
                self._backward_of(k)
        self._send()
        if self.schedule == "barrier":
            sent = [i for found in self._sent.values() for i in found]
            for k in units:
                self._update(k, sent)
        self.ends.append(len(self.tasks))

    def _update(self, k: int, sent: Sequence[int]) -> None:
        seconds = self.model.unit(k, self.decisions[k]).update_s
        self._add(COMPUTE, k, "update", seconds, self.of_unit[k], sent)

    def _forward_of(self, k: int, *, gate: bool) -> None:
        cost, mine = self.model.unit(k, self.decisions[k]), self.of_unit[k]
        arrived = []
        for e in self.model.edges_into[k]:
            source = self.model.ends[e][0]
            # What is there already came to the same lanes, which did an earlier unit with it.
            on = self.model.arrival(e, self.decisions).forward
            both = mine | self.of_unit[source]
            sent = self._forward[source]
            arrived.append(self._collective(on, k, "redistribute", mine, sent, both))
        if gate:
            self._update(k, self._sent.get(k, []))
        done = self._add(COMPUTE, k, "forward", cost.forward_s, mine, arrived)
        self._forward[k] = self._collective(cost.inner_forward, k, "reduce", mine, done)

    def _backward_of(self, k: int) -> None:
        cost, mine = self.model.unit(k, self.decisions[k]), self.of_unit[k]
        for e in self.model.edges_from[k]:
            if self.of_unit[self.model.ends[e][1]] != mine:
                self._return(e)
        back = [self._returned[e] for e in self.model.edges_from[k]]
        start = max([*back, self._forward[k]])
        start = self._collective(cost.inner_backward, k, "gather gradient", mine, start)
        start = self._collective(cost.released, k, "release", mine, start)
        done = self._add(COMPUTE, k, "backward", cost.backward_s, mine, [*back, start])
        self._backward[k] = done
        for e in self.model.edges_into[k]:
            if self.of_unit[self.model.ends[e][0]] == mine:
                self._return(e)

    def _return(self, e: int) -> None:
        """The gradient of an edge's tensor goes back to its source, which waits for it."""
        source, target = self.model.ends[e]
        on = self.model.arrival(e, self.decisions).backward
        there = self.of_unit[source]
        both, done = there | self.of_unit[target], self._backward[target]
        self._returned[e] = self._collective(on, target, "redistribute gradient", there, done, both)

    def _send(self) -> None:
        self._sent = {}
        for message in self.messages:
            first = min(message.units)
            ready = max(self._backward[k] for k in message.units)
            urgency = 0.0 if self.schedule == "barrier" else message.urgency
            lanes = self.of_unit[first]
            self.tasks.append(
                Task(
                    message.link,
                    first,
                    "exchange",
                    message.seconds,
                    lanes,
                    lanes,
                    (ready,),
                    urgency,
                )
            )
            for k in message.units:
                self._sent.setdefault(k, []).append(len(self.tasks) - 1)


class _Run:
    """The state of a simulation."""

    def __init__(self, program: Program, interference: Interference, *, preempt: bool) -> None:
        self.tasks, self.interference, self.preempt = program.tasks, interference, preempt
        self.left = [task.seconds for task in self.tasks]
        self.waits = [len(task.after) for task in self.tasks]
        self.then: list[list[int]] = [[] for _ in self.tasks]
        for i, task in enumerate(self.tasks):
            for before in task.after:
                self.then[before].append(i)
        self.now_s = 0.0
        self.start_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.order: dict[int, int] = {}
        self.ready = [i for i, count in enumerate(self.waits) if not count]

    def run(self) -> None:
        """Everything, from event to event."""
        for i in self.ready:
            self.order[i] = len(self.order)
        while self.ready:
            self._advance()

    def _advance(self) -> None:
        tasks = self.tasks
        working = [i for i in self.ready if not tasks[i].message]
        instant = [i for i in working if not self.left[i]]
        if instant:  # no message starts between two things that happen at one moment
            self.start_s.update(dict.fromkeys(instant, self.now_s))
            self._finish(instant)
            return
        held = {(tasks[i].resource, lane) for i in working for lane in tasks[i].holds}
        sending = []
        for i in sorted((i for i in self.ready if tasks[i].message), key=self._key):
            wires = {(tasks[i].resource, lane) for lane in tasks[i].lanes}
            if not wires & held:
                held |= wires
                sending.append(i)
        computing = {x for i in working if tasks[i].resource == COMPUTE for x in tasks[i].lanes}
        talking = {lane for i in sending for lane in tasks[i].lanes}
        rates = {}
        for i in working:
            slowed = tasks[i].resource == COMPUTE and tasks[i].lanes & talking
            rates[i] = 1 / self.interference.compute_slowdown if slowed else 1.0
        for i in sending:
            slowed = tasks[i].lanes & computing
            rates[i] = 1 / self.interference.communication_slowdown if slowed else 1.0
        span = min(self.left[i] / rate for i, rate in rates.items())
        over = [i for i, rate in rates.items() if self.left[i] / rate <= span * (1 + 1e-15)]
        for i, rate in rates.items():
            self.start_s.setdefault(i, self.now_s)
            self.left[i] -= span * rate
        self.now_s += span
        self._finish(over)

    def _key(self, i: int) -> tuple[bool, float, int]:
        """Messages under way go on, unless a more urgent one may stop them."""
        started = i in self.start_s and not self.preempt
        return not started, self.tasks[i].urgency, self.order[i]

    def _finish(self, over: Sequence[int]) -> None:
        gone = set(over)
        self.ready = [i for i in self.ready if i not in gone]
        for i in over:
            self.end_s[i] = self.now_s
            for following in self.then[i]:
                self.waits[following] -= 1
                if not self.waits[following]:
                    self.order[following] = len(self.order)
                    self.ready.append(following)


def simulate_lanes(
    model: CostModel,
    decisions: Sequence[Option],
    messages: Sequence[Message],
    schedule: ScheduleName,
    interference: Interference = ALONE,
    *,
    preempt: bool = False,
    steps: int | None = None,
) -> Simulation:
    """Runs a few steps and describes the last, as ``simulate`` does; computing, blocking and
    exposed seconds are those of the lane that works longest."""
    program = Program(model, decisions, messages, schedule)
    count = steps or (1 if schedule == "barrier" else 4)
    for _ in range(count):
        program.step()
    run = _Run(program, interference, preempt=preempt)
    run.run()
    return _summary(program, run)


def _summary(program: Program, run: _Run) -> Simulation:
    ends = [0.0]
    for end in program.ends:
        before = [run.end_s[i] for i in range(end) if not program.tasks[i].message]
        ends.append(max(before))
    start_s, end_s = ends[-2], ends[-1]
    spans = tuple(
        Span(t.resource, t.unit, t.phase, run.start_s[i], run.end_s[i], i if t.message else -1)
        for i, t in enumerate(program.tasks)
        if run.end_s[i] > run.start_s[i]
    )
    last = program.ends[-2] if len(program.ends) > 1 else 0
    best = (0.0, 0.0, 0.0)
    for lane in range(len(program.lanes)):
        compute = update = blocking = 0.0
        for i in range(last, len(program.tasks)):
            task = program.tasks[i]
            if lane not in task.lanes or task.message:
                continue
            took = run.end_s[i] - run.start_s[i]
            compute += took if task.resource == COMPUTE else 0.0
            update += took if task.phase == "update" else 0.0
            blocking += 0.0 if task.resource == COMPUTE else took
        best = max(best, (compute, blocking, update), key=lambda b: b[0] + b[1])
    compute, blocking, update = best
    step_s = end_s - start_s
    exposed = max(step_s - compute - blocking, 0.0)
    ordered = tuple(sorted(spans, key=lambda s: s.start_s))
    return Simulation(step_s, compute, blocking, exposed, update, ordered)
