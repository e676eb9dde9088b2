"""What every option of every unit amounts to, one by one: the coefficients of the integer program.

A unit's *state* is what its neighbours see of its decision: layout and style. Several options may
share a state; edges depend on the states at both ends only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...cost.budget import idle_s
from ...cost.cost import CostModel
from ...cost.ownership import input_placement, output_placement
from ...cost.redistribution import edge_redistribution
from ...cost.step_time import LINKS, Vector
from ...memory.rows import AT, ENTRY, FIGURES, OWN_BYTES, RECEIVED, Matrix
from ...schema.layout import Layout, Style
from ...schema.options import Decisions, Option
from ..evaluate import memory_of

State = tuple[Layout, Style]
EDGE_FIGURES: tuple[int, ...] = (*ENTRY, RECEIVED)
"""The figures that an edge adds to its target."""


class UnitLedger(NamedTuple):
    """One unit: its options, the number of each one's state, the states, and for the position that
    holds most the figures [option, figure]; seconds of a slice [link, option]."""

    options: tuple[Option, ...]
    state_of: tuple[int, ...]
    states: tuple[State, ...]
    figures: Matrix
    slice_s: Matrix


class EdgeLedger(NamedTuple):
    """Figures of ``EDGE_FIGURES``, [figure, source's state, target's state]."""

    source: int
    target: int
    figures: Matrix


class Ledger:
    """The coefficients of a cost model whose units choose from ``options``."""

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]]) -> None:
        self.model, self.memory = model, memory_of(model)
        self.options = tuple(tuple(row) for row in options)

    @cached_property
    def units(self) -> tuple[UnitLedger, ...]:
        """The ledgers of all units."""
        return tuple(self._unit(k) for k in range(len(self.options)))

    def _unit(self, k: int) -> UnitLedger:
        options = self.options[k]
        states = tuple(dict.fromkeys((o.layout, o.style) for o in options))
        number = {state: i for i, state in enumerate(states)}
        state_of = tuple(number[o.layout, o.style] for o in options)
        figures = np.array([self._seconds(k, o) for o in options])
        slices = np.zeros((len(LINKS), len(options)))
        for i, option in enumerate(options):
            cost = self.model.unit(k, option)
            slices[cost.exchange.link, i] = cost.slice_s
        return UnitLedger(options, state_of, states, figures, slices)

    def _seconds(self, k: int, option: Option) -> Vector:
        """The figures of a unit's option, bytes left open."""
        cost = self.model.unit(k, option)
        found = np.zeros(len(FIGURES))
        found[AT["forward"]], found[AT["backward"]] = cost.forward_s, cost.backward_s
        found[AT["update"]], found[AT["idle"]] = cost.update_s, idle_s(self.model, k, option)
        for name, on in (
            ("inner_forward", cost.inner_forward),
            ("inner_backward", cost.inner_backward),
            ("inner_backward", cost.released),
            ("exchange", cost.exchange),
        ):
            found[AT[f"{name}.{LINKS[on.link]}"]] += on.seconds
        return found

    def bytes_at(self, k: int, samples: dict[Layout, int | None]) -> Matrix:
        """[option, figure] of what a position holds of unit ``k`` that has so many ``samples``."""
        table = np.zeros((len(self.options[k]), len(FIGURES)))
        for row, option in zip(table, self.options[k], strict=True):
            row[OWN_BYTES] = self.memory.unit(k, option, samples[option.layout]).figures
        return table

    @cached_property
    def edges(self) -> tuple[EdgeLedger, ...]:
        """The ledgers of all edges."""
        return tuple(self._edge(e, a, b) for e, (a, b) in enumerate(self.model.ends))

    def _edge(self, e: int, a: int, b: int) -> EdgeLedger:
        sources, targets = self.units[a].states, self.units[b].states
        figures = np.zeros((len(EDGE_FIGURES), len(sources), len(targets)))
        count = len(LINKS)
        for s, source in enumerate(sources):
            for t, target in enumerate(targets):
                cost = self.model.edge(e, Option(*source), Option(*target))
                figures[cost.forward.link, s, t] = cost.forward.seconds
                figures[count + cost.backward.link, s, t] = cost.backward.seconds
                figures[-1, s, t] = cost.received_bytes
        return EdgeLedger(a, b, figures)

    def brings_alike(self, e: int, other: int, source: int, target: int) -> list[int]:
        """The states of edge ``other``'s target in which it gets what edge ``e`` of the same load
        brings from one state to another."""
        ends, edges = self.model.ends, self.model.profile.edges
        held = output_placement(*self.units[ends[e][0]].states[source])
        mine = edge_redistribution(
            edges[e], held, input_placement(*self.units[ends[e][1]].states[target])
        )
        states = self.units[ends[other][1]].states
        return [
            i
            for i, s in enumerate(states)
            if edge_redistribution(edges[other], held, input_placement(*s)) == mine
        ]

    def choose(self, numbers: Sequence[int]) -> Decisions:
        """The decisions of one option's number for each unit."""
        return tuple(row[n] for row, n in zip(self.options, numbers, strict=True))
