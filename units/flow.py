"""The edges between units: which tensors go from where to where in a forward.

What torch does between two consecutive units is one ``glue`` node, so a residual addition joins two
edges and no cycle can arise: edges follow the order of execution.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .select import Run
from .trace import Event, Seen, Trace

Ends = tuple[str, str]

INPUT, OUTPUT, GLUE = "@input", "@output", "@glue."
"""Names of nodes that are no modules; no module's name can hold an @."""


@dataclass
class Flow:
    """Nodes in forward order and, for each pair of them, the tensors that flow (by identity).

    ``inside`` names units that read tensors other than their inputs.
    """

    nodes: list[str] = field(default_factory=list)
    edges: dict[Ends, dict[int, Seen]] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    sources: dict[str, set[int]] = field(default_factory=dict)

    def bytes(self, ends: Ends) -> int:
        """All bytes of an edge."""
        return sum(seen.bytes for seen in self.edges[ends].values())

    def gradient_bytes(self, ends: Ends) -> int:
        """Bytes of an edge's tensors that have a gradient."""
        return sum(seen.bytes for seen in self.edges[ends].values() if seen.gradient)


class _Walk:
    """Goes through a trace's events and remembers which node made each tensor."""

    def __init__(self, trace: Trace, runs: list[Run]) -> None:
        self.trace, self.runs = trace, runs
        self.flow = Flow(nodes=[INPUT])
        self.maker: dict[int, str] = {s.key: INPUT for s in trace.inputs if s is not None}
        self.glue = 0

    def run(self) -> Flow:
        position = 0
        for run in self.runs:
            self._between(position, run.start)
            self._unit(run)
            position = run.end
            self.glue += 1
        self._between(position, len(self.trace.events))
        self.flow.nodes.append(OUTPUT)
        self._arrive(OUTPUT, self.trace.outputs)
        return self.flow

    def _between(self, start: int, end: int) -> None:
        for event in self.trace.events[start:end]:
            if event.module is not None:
                continue
            node = f"{GLUE}{self.glue}"
            if not any(s is not None and s.key in self.maker for s in event.inputs):
                continue  # makes a constant
            if node not in self.flow.nodes:
                self.flow.nodes.append(node)
            self._arrive(node, event.inputs)
            self._make(node, event.outputs)

    def _unit(self, run: Run) -> None:
        self.flow.nodes.append(run.name)
        self._arrive(run.name, run.calls[0].inputs)
        given = {s.key for s in run.calls[0].inputs if s is not None}
        made: set[int] = set()
        for event in self.trace.events[run.start : run.end]:
            if event.module is None:
                self._check_inside(run, event, given | made)
                made.update(s.key for s in event.outputs if s is not None)
        self._make(run.name, run.calls[-1].outputs)

    def _check_inside(self, run: Run, event: Event, known: set[int]) -> None:
        foreign = [s for s in event.inputs if s and s.key in self.maker and s.key not in known]
        if foreign:
            self.flow.inside.add(run.name)
            self._arrive(run.name, foreign)

    def _arrive(self, node: str, tensors: Iterable[Seen | None]) -> None:
        for seen in tensors:
            source = self.maker.get(seen.key) if seen is not None else None
            if seen is not None and source is not None and source != node:
                self.flow.edges.setdefault((source, node), {})[seen.key] = seen

    def _make(self, node: str, tensors: Iterable[Seen | None]) -> None:
        for seen in tensors:
            if seen is not None:
                self.maker[seen.key] = node


def flow_of(trace: Trace, runs: list[Run]) -> Flow:
    """The nodes and edges of one forward."""
    return _Walk(trace, runs).run()


def pruned(flow: Flow, ends: set[Ends]) -> tuple[list[str], list[Ends]]:
    """Nodes and edges without the glue from which nothing leads on, and without edges not in
    ``ends``.
    """
    kept = {e for e in flow.edges if e in ends}
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
