"""A simulation of training steps whose units run on different ranks, some of them at the same time.

Positions that take part in the same units form a *rank class*. Each class does its own units in
forward order, and in backward the other way; a unit that spans several classes starts when all of
them are free. A redistribution is waited for where it arrives, and takes the links at both of its
ends. Units on parallel branches that share no class run side by side, and the step takes as long as
the longest way through all of this: the critical path. Where all units run on all ranks there is
one class, and this is ``simulate``.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..cost.cost import CostModel
from ..cost.step_time import LINKS, OnLink
from ..schema.cluster import Interference
from ..schema.layout import Layout
from ..schema.options import Option
from .events import NO_INTERFERENCE, STEADY_STEPS, Simulation, Span, simulate
from .schedule import COMPUTE, Message, ScheduleName, Step
from .spread import slowed

RankClasses = frozenset[int]
"""Numbers of rank classes."""


class SimTask(NamedTuple):
    """A piece of a step: computing, a collective that ``classes`` wait for (on a link, which it
    takes on the classes ``occupies``), or a message with gradients, which they do not wait for. It
    starts after the tasks ``after``; low ``urgency`` goes first."""

    resource: str
    unit: int
    phase: str
    seconds: float
    classes: RankClasses
    occupies: RankClasses
    after: tuple[int, ...]
    urgency: float = 0.0

    @property
    def message(self) -> bool:
        """Whether it goes on in the background."""
        return self.phase == "exchange"


def rank_classes(world_size: int, layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
    """The positions of each rank class."""
    different = list(dict.fromkeys(layouts))
    found: dict[tuple[bool, ...], list[int]] = {}
    for position in range(world_size):
        key = tuple(position in layout.positions for layout in different)
        found.setdefault(key, []).append(position)
    return tuple(tuple(positions) for positions in found.values())


class _TaskGraph:
    """The tasks of several steps, in an order in which all of them can be done."""

    def __init__(
        self,
        model: CostModel,
        decisions: Sequence[Option],
        messages: Sequence[Message],
        schedule: ScheduleName,
        slowest: float,
    ) -> None:
        self.model, self.decisions, self.messages = model, tuple(decisions), tuple(messages)
        self.schedule, self.slowest = schedule, slowest
        self.classes = rank_classes(model.world_size, [o.layout for o in decisions])
        self.of_unit = [
            # Positions of one class take part in the same units: the first speaks for all.
            frozenset(i for i, at in enumerate(self.classes) if at[0] in option.layout.positions)
            for option in decisions
        ]
        self.tasks: list[SimTask] = []
        self.ends: list[int] = []
        # The number of the latest task, by rank class, by unit and by edge.
        self._last: dict[int, int] = {}
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._returned: dict[int, int] = {}
        self._sent: dict[int, list[int]] = {}

    def _compute(self, k: int, phase: str, seconds: float, after: Sequence[int]) -> int:
        mine = self.of_unit[k]
        seconds *= self.slowest
        return self._add(SimTask(COMPUTE, k, phase, seconds, mine, mine, tuple(after)))

    def _collective(
        self,
        on: OnLink,
        unit: int,
        phase: str,
        classes: RankClasses,
        after: int,
        occupies: RankClasses | None = None,
    ) -> int:
        if on.seconds <= 0:
            return after
        occupies = classes if occupies is None else occupies
        return self._add(
            SimTask(LINKS[on.link], unit, phase, on.seconds, classes, occupies, (after,))
        )

    def _add(self, task: SimTask) -> int:
        """A task after the latest one of each of its classes."""
        before = {self._last[c] for c in task.classes if c in self._last} | set(task.after)
        self.tasks.append(task._replace(after=tuple(sorted(before))))
        number = len(self.tasks) - 1
        self._last.update(dict.fromkeys(task.classes, number))
        return number

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
        self._compute(k, "update", self.model.unit(k, self.decisions[k]).update_s, sent)

    def _forward_of(self, k: int, *, gate: bool) -> None:
        cost, mine = self.model.unit(k, self.decisions[k]), self.of_unit[k]
        arrived = []
        for e in self.model.edges_into[k]:
            source = self.model.ends[e][0]
            # What is there already came to the same classes, which did an earlier unit with it.
            on = self.model.arrival(e, self.decisions).forward
            both = mine | self.of_unit[source]
            sent = self._forward[source]
            arrived.append(self._collective(on, k, "redistribute", mine, sent, both))
        if gate:
            self._update(k, self._sent.get(k, []))
        done = self._compute(k, "forward", cost.forward_s, arrived)
        self._forward[k] = self._collective(cost.inner_forward, k, "reduce", mine, done)

    def _backward_of(self, k: int) -> None:
        cost, mine = self.model.unit(k, self.decisions[k]), self.of_unit[k]
        # Where producer and consumer are on the same classes, a gradient returns right after the
        # consumer's backward; else the producer takes it when its own turn has come.
        for e in self.model.edges_from[k]:
            if self.of_unit[self.model.ends[e][1]] != mine:
                self._return(e)
        back = [self._returned[e] for e in self.model.edges_from[k]]
        start = max([*back, self._forward[k]])
        start = self._collective(cost.inner_backward, k, "gather gradient", mine, start)
        start = self._collective(cost.released, k, "release", mine, start)
        self._backward[k] = self._compute(k, "backward", cost.backward_s, [*back, start])
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
            behind = self._backward if message.after_backward else message.units
            ready = max(self._backward[k] for k in behind)
            urgency = 0.0 if self.schedule == "barrier" else message.urgency
            first = message.first
            classes = self.of_unit[first]
            # Not by ``_add``: no class waits for it, and it waits for no other work of theirs.
            task = SimTask(
                message.link, first, "exchange", message.seconds, classes, classes, (ready,)
            )
            self.tasks.append(task._replace(urgency=urgency))
            awaiting = message.units
            if message.holds_forward:
                awaiting = tuple(k for k, there in enumerate(self.of_unit) if there & classes)
            for k in awaiting:
                self._sent.setdefault(k, []).append(len(self.tasks) - 1)


class _GraphRun:
    """The state of a simulation of a graph's tasks."""

    def __init__(self, tasks: list[SimTask], interference: Interference) -> None:
        self.tasks, self.interference = tasks, interference
        self.left_s = [task.seconds for task in tasks]
        self.waits = [len(task.after) for task in tasks]
        self.then: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            for before in task.after:
                self.then[before].append(i)
        self.now_s = 0.0
        self.start_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.ready = [i for i, count in enumerate(self.waits) if not count]
        self.order = {i: place for place, i in enumerate(self.ready)}

    def advance(self) -> None:
        """Everything up to the next event."""
        tasks = self.tasks
        working = [i for i in self.ready if not tasks[i].message]
        instant = [i for i in working if not self.left_s[i]]
        if instant:  # no message starts between two things that happen at one moment
            self.start_s.update(dict.fromkeys(instant, self.now_s))
            self._finish(instant)
            return
        sending = self._sending(working)
        rates = self._rates(working, sending)
        span_s = min(self.left_s[i] / rate for i, rate in rates.items())
        # Tasks that differ by rounding only end together: what rounding leaves of one would be an
        # event of its own, at which a less urgent message could start.
        over = [i for i, rate in rates.items() if self.left_s[i] / rate <= span_s * (1 + 1e-15)]
        for i, rate in rates.items():
            self.start_s.setdefault(i, self.now_s)
            self.left_s[i] -= span_s * rate
        self.now_s += span_s
        self._finish(over)

    def _sending(self, working: Sequence[int]) -> list[int]:
        """The messages under way: each takes its link on all of its classes, unless what these wait
        for or a more urgent message does."""

        def key(i: int) -> tuple[bool, float, int]:
            # What has started goes on: the executor's slices are not stopped either.
            return i not in self.start_s, self.tasks[i].urgency, self.order[i]

        taken = {(self.tasks[i].resource, c) for i in working for c in self.tasks[i].occupies}
        found = []
        for i in sorted((i for i in self.ready if self.tasks[i].message), key=key):
            wires = {(self.tasks[i].resource, c) for c in self.tasks[i].classes}
            if not wires & taken:
                taken |= wires
                found.append(i)
        return found

    def _rates(self, working: Sequence[int], sending: Sequence[int]) -> dict[int, float]:
        """How quickly each goes on: computing and messages slow each other down."""
        tasks = self.tasks
        computes = {i for i in working if tasks[i].resource == COMPUTE}
        computing = {c for i in computes for c in tasks[i].classes}
        talking = {c for i in sending for c in tasks[i].classes}
        rates = {}
        for i in working:
            slowed = i in computes and tasks[i].classes & talking
            rates[i] = 1 / self.interference.compute_slowdown if slowed else 1.0
        for i in sending:
            slowed = tasks[i].classes & computing
            rates[i] = 1 / self.interference.communication_slowdown if slowed else 1.0
        return rates

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


def simulate_rank_classes(
    model: CostModel,
    decisions: Sequence[Option],
    messages: Sequence[Message],
    schedule: ScheduleName,
    interference: Interference = NO_INTERFERENCE,
    steps: int | None = None,
    *,
    slowest: float = 1.0,
) -> Simulation:
    """Runs a few steps and describes the last, as ``simulate`` does; computing, blocking and
    exposed seconds are those of the class that works longest. Computing takes ``slowest`` times as
    long."""
    graph = _TaskGraph(model, decisions, messages, schedule, slowest)
    for _ in range(steps or STEADY_STEPS[schedule]):
        graph.step()
    tasks = graph.tasks
    run = _GraphRun(tasks, interference)
    while run.ready:
        run.advance()
    ends = [0.0]
    for end in graph.ends:
        ends.append(max(run.end_s[i] for i in range(end) if not tasks[i].message))
    every = [
        Span(t.resource, t.unit, t.phase, run.start_s[i], run.end_s[i], i if t.message else -1)
        for i, t in enumerate(tasks)
    ]
    spans = [span for span in every if span.end_s > span.start_s]
    last = [0, *graph.ends][-2]
    work = [(t, s) for t, s in zip(tasks[last:], every[last:], strict=True) if not t.message]
    found = (
        Simulation.of(ends[-2], ends[-1], [span for task, span in work if c in task.classes], spans)
        for c in range(len(graph.classes))
    )
    return max(found, key=lambda one: one.compute_s + one.blocking_s)


def simulate_decisions(
    model: CostModel,
    decisions: Sequence[Option],
    step: Step,
    steps: int | None = None,
    *,
    slowest: float = 1.0,
) -> Simulation:
    """Runs the step of those decisions as the cluster does, with its interference, on ranks that
    compute ``slowest`` times as long."""
    noise = model.cluster.interference
    if any(option.layout.first for option in decisions):  # branches on ranks of their own
        return simulate_rank_classes(
            model, decisions, step.messages, step.schedule, noise, steps, slowest=slowest
        )
    return simulate(slowed(step, slowest), noise, steps)
