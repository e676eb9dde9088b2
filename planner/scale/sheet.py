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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..budget import energy_budget
from ..choices import STYLES, unit_options
from ..cost import CostModel
from ..layout import Layout, Style
from ..memory import MemoryModel, group_samples
from ..options import Decisions, Option, allowed, ties_agree
from ..rows import AT, ENTRY, FIGURES, LOST_FIGURE, RECEIVED, Matrix
from ..search import Space
from ..shares import busiest_samples, saved_bytes
from ..step import LINKS
from .curves import Reader
from .edges import EdgeFigures

State = tuple[Layout, Style]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]
Policy = tuple[tuple[str, Any], ...]
"""Fields of ``Option`` and their values."""


class Block(NamedTuple):
    """One of the choices of a unit: what each policy adds, [state, policy, figure], and where it
    may be had, [state, policy]. ``lost`` is the share of the whole gradient's energy that each
    policy leaves for later: the one thing in which units of the same shape differ here."""

    policies: tuple[Policy, ...]
    figures: Reals
    allowed: Mask
    lost: Reals

    @property
    def free(self) -> bool:
        """Whether every policy may be had in every state."""
        return bool(self.allowed.all())


class UnitTable(NamedTuple):
    """One unit. An option's number is (state · memory policies + memory) · exchange policies +
    exchange."""

    states: tuple[State, ...]
    memory: Block
    exchange: Block

    def split(self, number: int) -> tuple[int, int, int]:
        """(state, memory policy, exchange policy) of an option's number."""
        rest, exchange = divmod(int(number), len(self.exchange.policies))
        state, memory = divmod(rest, len(self.memory.policies))
        return state, memory, exchange

    def number(self, state: int, memory: int, exchange: int) -> int:
        """The option's number."""
        count = len(self.memory.policies)
        return (state * count + memory) * len(self.exchange.policies) + exchange

    def figures(self, number: int) -> Reals:
        """The option's figures."""
        state, memory, exchange = self.split(number)
        found: Reals = self.memory.figures[state, memory] + self.exchange.figures[state, exchange]
        found[LOST_FIGURE] = self.memory.lost[memory] + self.exchange.lost[exchange]
        return found

    def option(self, number: int) -> Option:
        """The option itself."""
        state, memory, exchange = self.split(number)
        fields = (*self.memory.policies[memory], *self.exchange.policies[exchange])
        return Option(*self.states[state])._replace(**dict(fields))

    def find(self, option: Option) -> int:
        """The option's number, -1 where it may not be had."""
        state = option.layout, option.style
        if state not in self.states:
            return -1
        at, fields = self.states.index(state), option._asdict()
        for memory, first in enumerate(self.memory.policies):
            for exchange, second in enumerate(self.exchange.policies):
                fits = all(fields[name] == value for name, value in (*first, *second))
                if fits and self.memory.allowed[at, memory] and self.exchange.allowed[at, exchange]:
                    return self.number(at, memory, exchange)
        return -1

    def may(self, state: int, memory: int, exchange: int) -> bool:
        """Whether the option may be had."""
        return bool(self.memory.allowed[state, memory] and self.exchange.allowed[state, exchange])

    def numbers(self) -> list[int]:
        """The numbers of all options."""
        pairs = self.memory.allowed[:, :, None] & self.exchange.allowed[:, None, :]
        return [int(n) for n in np.flatnonzero(pairs)]


class EdgeTable(NamedTuple):
    """Figures of ``rows.ENTRY`` and ``rows.RECEIVED``, [figure, source's state, target's state]."""

    source: int
    target: int
    figures: Reals


class TieTable(NamedTuple):
    """Which states of two tied units agree."""

    source: int
    target: int
    agree: Mask


class Sheet:
    """The tables of a space, for the position that is judged (by default the first)."""

    def __init__(self, space: Space, memory: MemoryModel, position: int = 0) -> None:
        self.space, self.model, self.memory = space, space.model, memory
        self.position = position
        self._samples: dict[Layout, int | None] = {}
        self._states: dict[object, tuple[State, ...]] = {}
        self._exchanges: dict[object, Block] = {}
        self._shapes: dict[object, Reals] = {}
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
        return UnitTable(states, self._memory_block(k, states, plain), self._exchange_block(k))

    def _plain(self, k: int, states: tuple[State, ...]) -> Reals:
        """[state, figure] without policies. Units of one shape differ in what was measured only."""
        key = states, self._shape(k)
        if key not in self._shapes:
            self._shapes[key] = np.array([self.figures(k, Option(*state)) for state in states])
            return self._shapes[key]
        unit, found = self.model.profile.units[k], self._shapes[key].copy()
        busiest, judged = self._readers(states)
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

    def _shape(self, k: int) -> tuple[object, ...]:
        """All of a unit that its figures depend on, but for its curves."""
        unit, owned = self.model.profile.units[k], self.model.owned[k]
        divided = [{name for name, _ in s.sharded} for s in unit.splits]
        sizes = tuple((p.bytes, p.trainable, *(p.shared in d for d in divided)) for p in owned)
        out = self.model.output_bytes_per_sample(k)
        return sizes, unit.state_bytes, unit.batch_statistics, unit.statistics_bytes, out

    def _readers(self, states: tuple[State, ...]) -> tuple[Reader, Reader]:
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
        listed = Block(policies, figures, open_, self._lost(k, policies))
        return UnitTable(states, listed, _nothing(len(states)))

    def _lost(self, k: int, policies: Sequence[Policy]) -> Reals:
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

    def _memory_block(self, k: int, states: Sequence[State], plain: Reals) -> Block:
        """Keep, recompute and offload, as ``cost`` and ``memory`` have them."""
        unit, names = self.model.profile.units[k], ["keep"]
        saves = not unit.fixed and saved_bytes(unit, "none", 1, 1.0) > 0
        if saves and "recompute" in self.space.capability.memory:
            names.append("recompute")
        host = self.model.cluster.host_bytes_per_s
        if saves and "offload" in self.space.capability.memory and host is not None:
            names.append("offload")
        parts = [plain]
        for name in names[1:]:
            parts.append(self._recomputed(k, states, plain) if name == "recompute"
                         else self._offloaded(k, states, plain, host or 1.0))  # fmt: skip
        open_ = np.ones((len(states), len(names)), dtype=bool)
        policies: tuple[Policy, ...] = tuple((("memory", name),) for name in names)
        return Block(policies, np.stack(parts, axis=1), open_, np.zeros(len(names)))

    def _recomputed(self, k: int, states: Sequence[State], plain: Reals) -> Reals:
        found = plain.copy()
        found[:, AT["backward"]] += plain[:, AT["forward"]]
        for link in LINKS:
            found[:, AT[f"inner_backward.{link}"]] += plain[:, AT[f"inner_forward.{link}"]]
        edges = (self.model.profile.edges[e] for e in self.model.edges_into[k])
        whole = sum(e.bytes_per_sample for e in edges)
        resident = np.array(
            [
                whole * (self.samples(y) or 0) / (1 if s in ("column", "pair") else y.degree)
                for y, s in states
            ]
        )
        resident = np.minimum(resident, plain[:, AT["saved"]])
        return self._released(found, plain, resident, states)

    def _offloaded(
        self, k: int, states: Sequence[State], plain: Reals, host_bytes_per_s: float
    ) -> Reals:
        found, unit = plain.copy(), self.model.profile.units[k]
        busiest, _ = self._readers(tuple(states))
        copy_s = busiest.values(unit, lambda s: s.saved, divides=False) / host_bytes_per_s
        found[:, AT["forward"]] += copy_s
        found[:, AT["backward"]] += copy_s
        return self._released(found, plain, np.zeros(len(states)), states)

    def _released(
        self, found: Reals, plain: Reals, resident: Reals, states: Sequence[State]
    ) -> Reals:
        """Feature maps of which only ``resident`` bytes stay, and the devices' time anew."""
        found[:, AT["workspace"]] += plain[:, AT["saved"]] - resident
        found[:, AT["saved"]] = resident
        both = [AT["forward"], AT["backward"]]
        more = self.model.micro_batches * (found[:, both] - plain[:, both]).sum(axis=1)
        free = [self.model.world_size - y.size for y, _ in states]
        found[:, AT["idle"]] += np.array(free) * more
        return found

    def _exchange_block(self, k: int) -> Block:
        """Every exchange policy, as what it adds to the plain one."""
        unit = self.model.profile.units[k]
        lossy = tuple(
            (c.exchange, r)
            for c in unit.fidelity
            for r in self._affordable(k, c.exchange, c.ratios)
        )
        key = self.states_of(k), self._shape(k), lossy
        if key not in self._exchanges:
            self._exchanges[key] = self._exchange(k, lossy)
        shared = self._exchanges[key]
        return shared._replace(lost=self._lost(k, shared.policies))

    def _affordable(self, k: int, exchange: str, ratios: Sequence[float]) -> tuple[float, ...]:
        """The ratios at which a lossy exchange of unit ``k`` alone would not use up the budget."""
        goal, unit = self.model.goal, self.model.profile.units[k]
        if not goal.allow_lossy or exchange not in self.space.capability.exchange:
            return ()
        budget = energy_budget(self.model)
        lost = {r: (1.0 - (unit.kept(exchange, r) or 0.0)) * self.energy[k] for r in ratios}
        return tuple(r for r in ratios if lost[r] <= budget)

    def _exchange(self, k: int, lossy: Sequence[tuple[str, float]]) -> Block:
        states = self.states_of(k)
        trained = any(p.trainable for p in self.model.owned[k])
        names: list[tuple[str, float]] = [("dense", 1.0)]
        if trained and _shards(self.model, self.space.capability.exchange):
            names.append(("sharded", 1.0))
        names += lossy if trained else ()
        early = (
            trained
            and self.space.capability.early_release
            and self.model.sliced
            and self.model.micro_batches == 1
        )
        fields = [(x, r, e) for x, r in names for e in (False, True)
                  if not e or (early and x != "sharded")]  # fmt: skip
        figures = np.zeros((len(states), len(fields), len(FIGURES)))
        open_ = np.zeros(figures.shape[:2], dtype=bool)
        for i, state in enumerate(states):
            plain = np.array(self.figures(k, Option(*state)))
            for p, (x, r, e) in enumerate(fields):
                if x == "dense" or state[0].groups > 1:
                    option = Option(*state, "keep", x, r, e)  # type: ignore[arg-type]
                    figures[i, p] = np.array(self.figures(k, option)) - plain
                    open_[i, p] = True
        policies: tuple[Policy, ...] = tuple(
            (("exchange", x), ("ratio", r), ("early_release", e)) for x, r, e in fields
        )
        return Block(policies, figures, open_, np.zeros(len(policies)))

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


def _nothing(states: int) -> Block:
    """A choice of one policy that adds nothing."""
    figures = np.zeros((states, 1, len(FIGURES)))
    return Block(((),), figures, np.ones((states, 1), dtype=bool), np.zeros(1))


def _shards(model: CostModel, exchanges: Sequence[str]) -> bool:
    """Whether an exchange may be sharded, and has something to divide."""
    rate = model.profile.update_seconds_per_byte(model.goal.optimizer)
    return "sharded" in exchanges and model.sliced and bool(model.goal.state_copies or rate)
