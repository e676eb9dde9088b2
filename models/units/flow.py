"""The edges between units: which tensors go from where to where in a forward.

What torch does between two consecutive units is one ``glue`` node, so a residual addition joins two
edges and no cycle can arise: edges follow the order of execution. What leads nowhere is left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .select import TracedUnit
from .trace import Event, Trace, TracedTensor

Ends = tuple[str, str]

# Names of nodes that are no modules. Without the @ they could be a module's.
INPUT, OUTPUT, GLUE = "@input", "@output", "@glue."


class Called(NamedTuple):
    """An operation of glue: its name, empty where a module that glue calls makes it, and the
    tensors that it was given and has made, by identity."""

    name: str
    given: tuple[int, ...]
    made: tuple[int, ...]


@dataclass
class Flow:
    """Nodes in forward order and, for each pair of them, the tensors that flow (by identity).

    ``inside`` names units that read tensors other than their inputs. ``called`` are the operations
    of glue that are made from tensors of other nodes, in order.
    """

    nodes: list[str] = field(default_factory=list)
    edges: dict[Ends, dict[int, TracedTensor]] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    called: dict[str, list[Called]] = field(default_factory=dict)

    def bytes(self, ends: Ends, *, gradient: bool = False) -> int:
        """All bytes of an edge, or those of tensors that have a ``gradient``."""
        tensors = self.edges[ends].values()
        return sum(seen.bytes for seen in tensors if seen.gradient or not gradient)


@dataclass(frozen=True, eq=False)
class _Origin:
    """The node that made a tensor and, for glue, what it was made from: tensors of other nodes."""

    node: str
    sources: dict[tuple[str, int], tuple[_Origin, TracedTensor]] = field(default_factory=dict)


class _Walk:
    """Goes through a trace's events and remembers where each tensor comes from."""

    def __init__(self, trace: Trace, traced: list[TracedUnit]) -> None:
        self.trace, self.traced = trace, traced
        self.flow = Flow()
        self.origins: dict[int, _Origin] = {}
        self.views: dict[int, set[int]] = {}
        self._make(_Origin(INPUT), trace.given)

    def run(self) -> Flow:
        position, order = 0, [INPUT]
        for i, unit in enumerate(self.traced):
            self._between(position, unit.start, f"{GLUE}{i}")
            self._unit(unit)
            position = unit.end
            order += [f"{GLUE}{i}", unit.name]
        last = f"{GLUE}{len(self.traced)}"
        self._between(position, len(self.trace.events), last)
        self._arrive(OUTPUT, self.trace.made)
        linked = {node for ends in self.flow.edges for node in ends}
        order += [last, OUTPUT]
        self.flow.nodes = [n for n in order if not n.startswith(GLUE) or n in linked]
        return self.flow

    def _between(self, start: int, end: int, node: str) -> None:
        events = self.trace.events[start:end]
        modules = {event.module for event in events if event.module is not None}
        for event in events:
            if event.module is None:
                self._operation(event, node, own=modules.isdisjoint(event.stack))

    def _operation(self, event: Event, node: str, *, own: bool) -> None:
        """An operation outside of units makes edges only when something uses its result. ``own``
        says that no module which glue calls makes it."""
        made = _Origin(node)
        for seen in event.given:
            origin = self.origins.get(seen.key)
            if origin is None:
                continue  # a constant, a parameter
            if origin.node == node:
                made.sources.update(origin.sources)
            else:
                made.sources[origin.node, seen.key] = origin, seen
        self._note(event.given)
        if made.sources:
            given, results = (tuple(s.key for s in seen) for seen in (event.given, event.made))
            called = Called(event.name if own else "", given, results)
            self.flow.called.setdefault(node, []).append(called)
            self._make(made, event.made, {seen.key for seen in event.given})
        else:
            self._note(event.made)

    def _unit(self, unit: TracedUnit) -> None:
        given = unit.calls[0].given
        for seen in given:
            # Made from nothing but the batch's size, if it has a batch dim: it comes with it.
            self.origins.setdefault(seen.key, _Origin(INPUT))
        self._note(given)
        self._arrive(unit.name, given)
        entered = {seen.key for seen in given}
        known = set(entered)
        for event in self.trace.events[unit.start : unit.end]:
            if event.module is not None:
                continue
            # What it reads and neither got nor made: an edge, though no hook can move it there.
            foreign = [s for s in event.given if s.key in self.origins and s.key not in known]
            if foreign:
                self.flow.inside.add(unit.name)
                self._arrive(unit.name, foreign)
            known.update(seen.key for seen in event.made)
        self._make(_Origin(unit.name), unit.calls[-1].made, entered)

    def _arrive(self, node: str, tensors: Iterable[TracedTensor]) -> None:
        for seen in tensors:
            origin = self.origins.get(seen.key)
            if origin is not None and origin.node != node:
                self._connect(origin, node, seen)

    def _connect(self, origin: _Origin, node: str, seen: TracedTensor) -> None:
        tensors = self.flow.edges.setdefault((origin.node, node), {})
        if seen.key in tensors and tensors[seen.key] is seen:
            return
        tensors[seen.key] = seen
        # Glue has edges only now that something uses what it made, back to where that came from.
        for before, through in origin.sources.values():
            self._connect(before, origin.node, through)

    def _note(self, tensors: Iterable[TracedTensor]) -> None:
        for seen in tensors:
            self.views.setdefault(seen.storage, set()).add(seen.key)

    def _make(
        self, origin: _Origin, tensors: Iterable[TracedTensor], changed: Container[int] = ()
    ) -> None:
        """Gives tensors their origin; of those ``changed`` in place, all views of their memory."""
        for seen in tensors:
            self._note([seen])
            # Whoever reads an older view of that memory gets what was written through this one.
            keys = self.views[seen.storage] if seen.key in changed else {seen.key}
            self.origins.update(dict.fromkeys(keys, origin))


def flow_of(trace: Trace, traced: list[TracedUnit]) -> Flow:
    return _Walk(trace, traced).run()


def pruned(flow: Flow, ends: set[Ends]) -> tuple[list[str], list[Ends]]:
    """Nodes and edges without edges not in ``ends`` and glue from which then nothing leads on."""
    kept = {e for e in flow.edges if e in ends}
    # Glue that lost its last outgoing edge makes the glue before it lead nowhere, too.
    while True:
        feeding = {source for source, _ in kept}
        dead = {e for e in kept if e[1].startswith(GLUE) and e[1] not in feeding}
        if not dead:
            break
        kept -= dead
    linked = {node for edge in kept for node in edge}
    nodes = [n for n in flow.nodes if not n.startswith(GLUE) or n in linked]
    place = {node: i for i, node in enumerate(nodes)}
    return nodes, sorted(kept, key=lambda e: (place[e[0]], place[e[1]]))


def tensor_numbers(flow: Flow, ends: Iterable[Ends]) -> dict[Ends, int]:
    """For each edge a number that it has in common with those of its source that carry the same
    tensors."""
    numbers: dict[str, dict[frozenset[int], int]] = {}
    found = {}
    for edge in ends:
        known = numbers.setdefault(edge[0], {})
        found[edge] = known.setdefault(frozenset(flow.edges[edge]), len(known))
    return found
