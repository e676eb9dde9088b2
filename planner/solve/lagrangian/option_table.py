"""All that the units of a space may cost, as arrays: what the searches over many units work on.

A unit's *state* is what its neighbours see of its decision: layout and style. In each state there
is a choice about memory and one about exchange. What they change adds up, so that both are tabled
by themselves and an option is one row of each; only where a limit holds for every unit by itself
(which looks at both) are all their pairs tabled. Edges depend on the states at both ends only;
edges that carry as much between units with the same states share one table, and so do the exchanges
of units with the same parameters, whether or not anybody marked the units as repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ...memory.rows import ENTRY, FIGURES, RECEIVED, Matrix, write_neighbours
from ...memory.unit_memory import MemoryModel
from ...schema.options import Decisions, Option, ties_agree
from ..choices import unit_options
from ..heuristic.space import Space
from .edges import EdgeFigures
from .figures import Figures
from .moves import Moves
from .policies import exchange_block, memory_block
from .tables import Block, EdgeTable, Numbers, Reals, TieTable, UnitTable, nothing


class OptionTable(Figures):
    """The tables of a space, for the position that is judged (by default the first)."""

    def __init__(self, space: Space, memory: MemoryModel, position: int = 0) -> None:
        super().__init__(space, memory, position)
        self._edge_figures = EdgeFigures(self.model)

    # -- units ---------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitTable, ...]:
        """The tables of all units."""
        flat = self.model.goal.unit_amplification_limit is not None
        make = self._listed if flat else self._unit
        return tuple(make(k) for k in range(len(self.model.profile.units)))

    def _unit(self, k: int) -> UnitTable:
        states = self.states_of(k)
        plain = self.plain(k, states)
        return UnitTable(states, memory_block(self, k, states, plain), exchange_block(self, k))

    def _listed(self, k: int) -> UnitTable:
        """The table of a unit whose options are tabled one by one."""
        options = unit_options(self.model, k, self.space.capability)
        fields = [tuple(o._asdict().items())[2:] for o in options]
        policies = tuple(dict.fromkeys(fields))
        states = tuple(dict.fromkeys((o.layout, o.style) for o in options))
        figures = np.zeros((len(states), len(policies), len(FIGURES)))
        open_ = np.zeros(figures.shape[:2], dtype=bool)
        for option, field in zip(options, fields, strict=True):
            at = states.index((option.layout, option.style)), policies.index(field)
            figures[at], open_[at] = self.figures(k, option), True
        listed = Block(policies, figures, open_, self.lost(k, policies))
        return UnitTable(states, listed, nothing(len(states)))

    # -- edges and ties --------------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[EdgeTable, ...]:
        """The tables of all edges."""
        return tuple(
            EdgeTable(a, b, self._edge_figures.of(e, self.units[a].states, self.units[b].states))
            for e, (a, b) in enumerate(self.model.ends)
        )

    @cached_property
    def moves(self) -> Moves:
        """Which of the edges bring the same."""
        return Moves(self.model, [unit.states for unit in self.units])

    @cached_property
    def ties(self) -> tuple[TieTable, ...]:
        """For each unit tied to others, which states agree with the first of them."""
        found = []
        for k, group in enumerate(self.model.ties):
            if group[0] != k:
                a = group[0]
                pair = self.model.profile.units[a], self.model.profile.units[k]
                agree = [
                    [ties_agree(pair, (Option(*x), Option(*y)))
                     for y in self.units[k].states]
                    for x in self.units[a].states
                ]  # fmt: skip
                found.append(TieTable(a, k, np.array(agree)))
        return tuple(found)

    def agreeing(self, first: int, k: int, state: int, other: int) -> list[int]:
        """The states of unit ``other`` that agree with that state of unit ``k``; ``first`` is the
        first of the units tied to both."""
        tables = {t.target: t.agree for t in self.ties if t.source == first}
        ways = [state] if k == first else [int(s) for s in np.flatnonzero(tables[k][:, state])]
        if other == first:
            return ways
        return sorted({int(s) for way in ways for s in np.flatnonzero(tables[other][way])})

    # -- plans ---------------------------------------------------------------------------------

    def choose(self, numbers: Sequence[int] | Numbers) -> Decisions:
        """The decisions of one option's number for each unit."""
        return tuple(u.option(n) for u, n in zip(self.units, numbers, strict=True))

    def numbers(self, decisions: Sequence[Option]) -> Numbers | None:
        """The number of each unit's option, or None where one of them may not be had."""
        found = [u.find(o) for u, o in zip(self.units, decisions, strict=True)]
        return None if -1 in found else np.array(found)

    def unit_figures(self, k: int, number: int) -> Reals:
        """The figures of unit ``k`` under an option's number, energy as a share of all."""
        return self.units[k].figures(number)

    def plan_figures(self, numbers: Sequence[int] | Numbers) -> Matrix:
        """[unit, figure] of a plan; of several redistributions at one unit's entry the seconds add
        up and the largest is received."""
        figures = np.array([self.unit_figures(k, int(n)) for k, n in enumerate(numbers)])
        states = [u.split(n)[0] for u, n in zip(self.units, numbers, strict=True)]
        for e, edge in enumerate(self.edges):
            cost = edge.figures[:, states[edge.source], states[edge.target]]
            if cost.any() and self.moves.brought(e, states.__getitem__):
                continue
            figures[edge.target, list(ENTRY)] += cost[:-1]
            figures[edge.target, RECEIVED] = max(figures[edge.target, RECEIVED], cost[-1])
        write_neighbours(figures, self.memory.overlaps)
        return figures
