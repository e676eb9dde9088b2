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

from ..choices import STYLES, unit_options
from ..layout import Layout
from ..memory import MemoryModel, group_samples
from ..options import Decisions, Option, allowed, ties_agree
from ..rows import AT, ENTRY, FIGURES, RECEIVED, Matrix
from ..search import Space
from ..shares import busiest_samples
from ..step import LINKS
from .curves import Reader
from .edges import EdgeFigures
from .policies import exchange_block, memory_block
from .tables import (
    Block,
    EdgeTable,
    Numbers,
    Policy,
    Reals,
    State,
    TieTable,
    UnitTable,
    nothing,
)


class Sheet:
    """The tables of a space, for the position that is judged (by default the first)."""

    def __init__(self, space: Space, memory: MemoryModel, position: int = 0) -> None:
        self.space, self.model, self.memory = space, space.model, memory
        self.position = position
        self._samples: dict[Layout, int | None] = {}
        self._states: dict[object, tuple[State, ...]] = {}
        self.exchanges: dict[object, Block] = {}
        self.shapes: dict[object, Reals] = {}
        self._reading: dict[tuple[State, ...], tuple[Reader, Reader]] = {}
        self._edge_figures = EdgeFigures(self.model)

    def samples(self, layout: Layout) -> int | None:
        """Samples of the judged position's group, None where it takes no part."""
        if layout not in self._samples:
            counts = self.model.counts
            self._samples[layout] = group_samples(counts, layout)[self.position]
        return self._samples[layout]

    @cached_property
    def energy(self) -> Reals:
        """The share of the whole gradient's energy in each unit (see ``budget.lost_energy``)."""
        units = self.model.profile.units
        energy = np.array([u.gradient_energy for u in units])
        if not energy.any():
            owned = self.model.owned
            energy = np.array([float(sum(p.bytes for p in o if p.trainable)) for o in owned])
        return energy / max(float(energy.sum()), 1e-300)

    # -- units ---------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitTable, ...]:
        """The tables of all units."""
        flat = self.model.goal.unit_amplification_limit is not None
        make = self._listed if flat else self._unit
        return tuple(make(k) for k in range(len(self.model.profile.units)))

    def states_of(self, k: int) -> tuple[State, ...]:
        """The states that unit ``k`` may have."""
        unit = self.model.profile.units[k]
        cuts = tuple((s.style, s.parts, s.uneven) for s in unit.splits)
        pins = tuple(pin for pin in self.model.goal.pins if pin.unit == unit.name)
        key = (unit.fixed, unit.batch_statistics, cuts, pins)
        if key not in self._states:
            capability = self.space.capability
            every = [
                (layout, style)
                for layout in self.space.layouts
                for style in STYLES
                if (style == "none") == (layout.degree == 1)
            ]
            self._states[key] = tuple(
                state
                for state in every
                if allowed(unit, Option(*state), self.model.goal, capability, self.model.world_size)
            )
        return self._states[key]

    def _unit(self, k: int) -> UnitTable:
        states = self.states_of(k)
        plain = self._plain(k, states)
        return UnitTable(states, memory_block(self, k, states, plain), exchange_block(self, k))

    def _plain(self, k: int, states: tuple[State, ...]) -> Reals:
        """[state, figure] without policies. Units of one shape differ in what was measured only."""
        key = states, self.shape(k)
        if key not in self.shapes:
            self.shapes[key] = np.array([self.figures(k, Option(*state)) for state in states])
            return self.shapes[key]
        unit, found = self.model.profile.units[k], self.shapes[key].copy()
        busiest, judged = self.readers(states)
        for name, reader, quantity in (
            ("forward", busiest, lambda s: s.forward),
            ("backward", busiest, lambda s: s.backward),
            ("saved", judged, lambda s: s.saved),
            ("maps", judged, lambda s: s.gradient),
            ("workspace", judged, lambda s: s.workspace),
        ):
            column = reader.values(unit, quantity, divides=reader is busiest)
            found[:, AT[name]] = column
        times = self.model.micro_batches
        took = times * (found[:, AT["forward"]] + found[:, AT["backward"]])
        free = self.model.world_size - np.array([layout.size for layout, _ in states])
        found[:, AT["idle"]] = free * (took + found[:, AT["update"]])
        idle = [self.samples(layout) is None for layout, _ in states]
        found[np.ix_(idle, [AT["saved"], AT["maps"], AT["workspace"]])] = 0.0
        return found

    def shape(self, k: int) -> tuple[object, ...]:
        """All of a unit that its figures depend on, but for its curves."""
        unit, owned = self.model.profile.units[k], self.model.owned[k]
        divided = [{name for name, _ in s.sharded} for s in unit.splits]
        sizes = tuple((p.bytes, p.trainable, *(p.shared in d for d in divided)) for p in owned)
        out = self.model.output_bytes_per_sample(k)
        return sizes, unit.state_bytes, unit.batch_statistics, unit.statistics_bytes, out

    def readers(self, states: tuple[State, ...]) -> tuple[Reader, Reader]:
        """Readers of curves at the busiest group's samples, and at the judged position's."""
        if states not in self._reading:
            counts = self.model.counts
            busiest = [float(busiest_samples(counts, layout)) for layout, _ in states]
            judged = [float(self.samples(layout) or 0) for layout, _ in states]
            self._reading[states] = Reader(states, busiest), Reader(states, judged)
        return self._reading[states]

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

    def lost(self, k: int, policies: Sequence[Policy]) -> Reals:
        """The share of the whole gradient's energy that each policy of unit ``k`` leaves."""
        unit, found = self.model.profile.units[k], []
        for policy in policies:
            fields = dict(policy)
            kept = unit.kept(fields.get("exchange", "dense"), fields.get("ratio", 1.0))
            found.append(0.0 if kept is None else 1.0 - kept)
        lost: Reals = np.array(found) * self.energy[k]
        return lost

    def figures(self, k: int, option: Option) -> list[float]:
        """What unit ``k`` costs by itself, in the order of ``FIGURES`` (energy lost left out)."""
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
        found[AT[f"slice.{LINKS[cost.exchange.link]}"]] = cost.slice_s
        weights, optimizer, *rest = self.memory.unit(k, option, self.samples(layout))
        gradients, saved, maps, workspace, exchanged = rest
        found[AT["standing"] : AT["standing"] + 6] = [
            weights + optimizer, gradients, saved, maps, workspace, exchanged,
        ]  # fmt: skip
        took = self.model.micro_batches * (cost.forward_s + cost.backward_s) + cost.update_s
        found[AT["idle"]] = (self.model.world_size - layout.size) * took
        return found

    # -- edges and ties --------------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[EdgeTable, ...]:
        """The tables of all edges."""
        return tuple(
            EdgeTable(a, b, self._edge_figures.of(e, self.units[a].states, self.units[b].states))
            for e, (a, b) in enumerate(self.model.ends)
        )

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
        for edge in self.edges:
            cost = edge.figures[:, states[edge.source], states[edge.target]]
            figures[edge.target, list(ENTRY)] += cost[:-1]
            figures[edge.target, RECEIVED] = max(figures[edge.target, RECEIVED], cost[-1])
        return figures
