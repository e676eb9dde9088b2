"""All that the units of a space may cost, as arrays: what the searches over many units work on.

A unit's *state* is what its neighbours see of its decision: layout and style. Several options may
share a state. Edges depend on the states at both ends only; edges that carry as much between units
with the same states share one table, whether or not anybody marked the units as repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .cost import Decisions, Option
from .flows import Flows, Reals, flow_seconds, flows
from .layout import Layout, Style
from .memory import MemoryModel, group_samples
from .ownership import Held, entry, exit_
from .rows import AT, ENTRY, FIGURES, RECEIVED, Matrix
from .search import Space
from .step import LINKS

State = tuple[Layout, Style]
Numbers = npt.NDArray[np.int64]

EDGE_FIGURES: tuple[int, ...] = (*ENTRY, RECEIVED)
"""The figures that an edge adds to its target."""


class UnitTable(NamedTuple):
    """One unit: its options in order of state, figures [option, figure], the number of the first
    option of each state, the state of each option."""

    options: tuple[Option, ...]
    figures: Matrix
    states: tuple[State, ...]
    begin: Numbers
    state_of: Numbers


class EdgeTable(NamedTuple):
    """Figures of ``EDGE_FIGURES`` by [figure, source's state, target's state]."""

    source: int
    target: int
    figures: Reals


class Sheet:
    """The tables of a space, for the position that is judged (by default the first)."""

    def __init__(self, space: Space, memory: MemoryModel, position: int = 0) -> None:
        self.space, self.model, self.memory = space, space.model, memory
        self.position = position
        self._samples: dict[Layout, int | None] = {}
        self._flows: dict[tuple[tuple[Held, ...], tuple[Held, ...], int], Flows] = {}
        self._edges: dict[tuple[object, ...], Reals] = {}

    def samples(self, layout: Layout) -> int | None:
        """Samples of the judged position's group, None where it takes no part."""
        if layout not in self._samples:
            counts = self.model.counts
            self._samples[layout] = group_samples(counts, layout)[self.position]
        return self._samples[layout]

    # -- units ---------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitTable, ...]:
        """The tables of all units."""
        return tuple(self._unit(k) for k in range(len(self.model.profile.units)))

    def _unit(self, k: int) -> UnitTable:
        options = sorted(self.space.options[k], key=lambda o: (o.layout, o.style))
        states = tuple(dict.fromkeys((o.layout, o.style) for o in options))
        number = {state: i for i, state in enumerate(states)}
        state_of = np.array([number[o.layout, o.style] for o in options])
        begin = np.searchsorted(state_of, np.arange(len(states)))
        figures = np.array([self.figures(k, o) for o in options])
        return UnitTable(tuple(options), figures, states, begin, state_of)

    def figures(self, k: int, option: Option) -> list[float]:
        """What unit ``k`` costs by itself, in the order of ``FIGURES``."""
        cost, layout = self.model.unit(k, option), option.layout
        found = [0.0] * len(FIGURES)
        found[:3] = cost.forward_s, cost.backward_s, cost.update_s
        for name, on in (
            ("inner_forward", cost.inner_forward),
            ("inner_backward", cost.inner_backward),
            ("inner_backward", cost.released),
            ("exchange", cost.exchange),
        ):
            found[AT[f"{name}.{LINKS[on.link]}"]] += on.seconds
        weights, optimizer, *rest = self.memory.unit(k, option, self.samples(layout))
        gradients, saved, maps, workspace, exchanged = rest
        found[AT["standing"] : AT["standing"] + 6] = [
            weights + optimizer, gradients, saved, maps, workspace, exchanged,
        ]  # fmt: skip
        took = self.model.micro_batches * (cost.forward_s + cost.backward_s) + cost.update_s
        found[AT["idle"]] = (self.model.world_size - layout.size) * took
        return found

    # -- edges ---------------------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[EdgeTable, ...]:
        """The tables of all edges."""
        return tuple(
            EdgeTable(a, b, self._edge(e, self.units[a].states, self.units[b].states))
            for e, (a, b) in enumerate(self.model.ends)
        )

    def _edge(self, e: int, sources: tuple[State, ...], targets: tuple[State, ...]) -> Reals:
        edge = self.model.profile.edges[e]
        sizes = edge.bytes_per_sample, edge.gradient_bytes_per_sample, edge.features
        key = (*sizes, sources, targets)
        if key not in self._edges:
            self._edges[key] = self._edge_figures(sizes, sources, targets)
        return self._edges[key]

    def _edge_figures(
        self, sizes: tuple[float, float, int], sources: Sequence[State], targets: Sequence[State]
    ) -> Reals:
        made = [exit_(*state) for state in sources]
        taken = [entry(*state) for state in targets]
        out, into = list(dict.fromkeys(made)), list(dict.fromkeys(taken))
        figures = np.zeros((len(EDGE_FIGURES), len(out), len(into)))
        for sliced in (False, True):
            for form in ("samples", "features"):
                rows = [i for i, h in enumerate(out) if h.form == form]
                cols = [i for i, h in enumerate(into) if ("features" in (form, h.form)) == sliced]
                if rows and cols:
                    features = sizes[2] if sliced else 1
                    part = self._pairs(
                        tuple(out[i] for i in rows), tuple(into[i] for i in cols), features
                    )
                    figures[np.ix_(range(len(EDGE_FIGURES)), rows, cols)] = self._seconds(
                        part, sizes[0] / features, sizes[1] / features
                    )
        where = [out.index(h) for h in made], [into.index(h) for h in taken]
        return figures[np.ix_(range(len(EDGE_FIGURES)), *where)]

    def _pairs(self, sources: tuple[Held, ...], targets: tuple[Held, ...], features: int) -> Flows:
        key = (sources, targets, features)
        if key not in self._flows:
            self._flows[key] = flows(
                self.model.fabric, self.model.counts, sources, targets, features
            )
        return self._flows[key]

    def _seconds(self, flow: Flows, element: float, back: float) -> Reals:
        """The figures of ``EDGE_FIGURES`` for a tensor whose elements have so many bytes."""
        ahead = flow_seconds(self.model.fabric, flow, element)
        behind = flow_seconds(self.model.fabric, flow, back)
        on = [flow.level == i for i in range(len(LINKS))]
        return np.stack(
            [*(ahead * link for link in on), *(behind * link for link in on),
             flow.received * element]
        )  # fmt: skip

    # -- plans ---------------------------------------------------------------------------------

    def choose(self, numbers: Sequence[int]) -> Decisions:
        """The decisions of one option's number for each unit."""
        return tuple(u.options[n] for u, n in zip(self.units, numbers, strict=True))

    def numbers(self, decisions: Sequence[Option]) -> Numbers:
        """The number of each unit's option."""
        return np.array([u.options.index(o) for u, o in zip(self.units, decisions, strict=True)])

    def plan_figures(self, numbers: Sequence[int] | Numbers) -> Matrix:
        """[unit, figure] of a plan; of several redistributions at one unit's entry the seconds add
        up and the largest is received."""
        figures = np.array([u.figures[n] for u, n in zip(self.units, numbers, strict=True)])
        states = [u.state_of[n] for u, n in zip(self.units, numbers, strict=True)]
        for edge in self.edges:
            cost = edge.figures[:, states[edge.source], states[edge.target]]
            figures[edge.target, list(ENTRY)] += cost[:-1]
            figures[edge.target, RECEIVED] = max(figures[edge.target, RECEIVED], cost[-1])
        return figures
