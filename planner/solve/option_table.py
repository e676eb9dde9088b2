"""All that the units and edges of a model may cost, as tables: what both solvers that prove read.

The integer program lists a unit's options one by one (``listed``), each with exactly the figures of
the cost model. The Lagrangian has a factored table (``units``): in each *state*, layout and style,
there is a choice about memory and one about exchange. What they change adds up, so that both are
tabled by themselves and an option is one row of each. Only where a limit holds for every unit by
itself (it looks at both) does the Lagrangian's table have all pairs too.

Edges depend on the states at both ends only. Edges that carry as much between units with the same
states share one table, and so do the exchanges of units with the same parameters.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.budget import lost_energy
from ..cost.compute import saved_bytes
from ..cost.cost import CostModel
from ..memory.prefetch_overlap import neighbours_bytes
from ..memory.rows import (
    FIGURES,
    LOST_FIGURE,
    OWN_BYTES,
    RECEIVED,
    RETURNING,
    Matrix,
    write_others,
)
from ..memory.unit_memory import memory_of
from ..schema.capability import Capability
from ..schema.layout import Layout
from ..schema.options import Decisions, Option, allowed, ties_agree
from .figures import SUMMED, EdgeFigures, Numbers, Reals, SharedEdges, State, UnitFigures
from .host_memory import allotted_bytes, may_offload
from .unit_options import STYLES, exchange_options, layouts_of, memory_policies, unit_options

Mask = npt.NDArray[np.bool_]
Policy = tuple[tuple[str, Any], ...]
"""Fields of ``Option`` and their values."""


class ListedUnit(NamedTuple):
    """One unit's options one by one: the number of each one's state, and the figures
    [option, figure]."""

    options: tuple[Option, ...]
    state_of: tuple[int, ...]
    figures: Matrix


class PolicyBlock(NamedTuple):
    """One of the choices of a unit: what each policy adds, [state, policy, figure], and where it
    may be had, [state, policy]. ``lost`` is the share of the whole gradient's energy that each
    policy leaves for later: the one thing in which units of the same shape differ here."""

    policies: tuple[Policy, ...]
    figures: Reals
    allowed: Mask
    lost: Reals

    def priced(self, price: Reals, states: int | slice = slice(None)) -> Reals:
        """[state, policy] what the policies cost at a price of each figure, infinite where one may
        not be had."""
        found = self.figures[states] @ price + self.lost * price[LOST_FIGURE]
        return np.where(self.allowed[states], found, np.inf)


class UnitTable(NamedTuple):
    """One unit. An option's number is (state · memory policies + memory) · exchange policies +
    exchange."""

    states: tuple[State, ...]
    memory: PolicyBlock
    exchange: PolicyBlock

    def split(self, number: int) -> tuple[int, int, int]:
        """(state, memory policy, exchange policy) of an option's number."""
        rest, exchange = divmod(int(number), len(self.exchange.policies))
        state, memory = divmod(rest, len(self.memory.policies))
        return state, memory, exchange

    def number(self, state: int, memory: int, exchange: int) -> int:
        """The opposite of ``split``."""
        count = len(self.memory.policies)
        return (state * count + memory) * len(self.exchange.policies) + exchange

    def state(self, number: int) -> int:
        return self.split(number)[0]

    def figures(self, number: int) -> Reals:
        """An option's figures, energy as a share of all."""
        state, memory, exchange = self.split(number)
        found: Reals = self.memory.figures[state, memory] + self.exchange.figures[state, exchange]
        found[LOST_FIGURE] = self.memory.lost[memory] + self.exchange.lost[exchange]
        return found

    def option(self, number: int) -> Option:
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
                if fits and self.may(at, memory, exchange):
                    return self.number(at, memory, exchange)
        return -1

    def may(self, state: int, memory: int, exchange: int) -> bool:
        return bool(self.memory.allowed[state, memory] and self.exchange.allowed[state, exchange])

    def numbers(self) -> list[int]:
        pairs = self.memory.allowed[:, :, None] & self.exchange.allowed[:, None, :]
        return [int(n) for n in np.flatnonzero(pairs)]


class EdgeTable(NamedTuple):
    """One edge's ``EDGE_FIGURES``, [figure, source's state, target's state]."""

    source: int
    target: int
    figures: Reals


class TieTable(NamedTuple):
    """Which states of two tied units agree, [source's state, target's state]."""

    source: int
    target: int
    agree: Mask


class OptionTable:
    """The options of a cost model's units within a capability; bytes are those at ``position``.
    ``options`` lists fewer of them, at least one in each state."""

    def __init__(
        self,
        model: CostModel,
        capability: Capability,
        position: int = 0,
        options: Sequence[tuple[Option, ...]] | None = None,
    ) -> None:
        self.model, self.capability = model, capability
        if options is not None:
            self.options = tuple(options)
        self.memory = memory_of(model)
        self.figures = UnitFigures(model, self.memory, position)
        self._edge_figures = EdgeFigures(model)
        self._states: dict[object, tuple[State, ...]] = {}
        self._exchanges: dict[object, PolicyBlock] = {}

    # -- options one by one ----------------------------------------------------------------------

    @cached_property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        return tuple(unit_options(self.model, k, self.capability) for k in self._every)

    @property
    def _every(self) -> range:
        return range(len(self.model.profile.units))

    @cached_property
    def listed(self) -> tuple[ListedUnit, ...]:
        """The options of each unit with their figures."""
        found = []
        for k, options in enumerate(self.options):
            number = {state: i for i, state in enumerate(self.states[k])}
            state_of = tuple(number[o.layout, o.style] for o in options)
            figures = np.array([self.figures.of(k, option) for option in options])
            found.append(ListedUnit(options, state_of, figures))
        return tuple(found)

    def bytes_at(self, k: int, samples: dict[Layout, int | None]) -> Matrix:
        """[option, figure] of what a position holds of unit ``k`` that has so many ``samples``."""
        table = np.zeros((len(self.options[k]), len(FIGURES)))
        for row, option in zip(table, self.options[k], strict=True):
            row[OWN_BYTES] = self.memory.unit(k, option, samples[option.layout]).figures
        return table

    # -- options as products of policies ---------------------------------------------------------

    @cached_property
    def states(self) -> tuple[tuple[State, ...], ...]:
        if not self._limits_units:
            return tuple(self._states_of(k) for k in self._every)
        # A unit's own limit may forbid a state under every policy.
        return tuple(tuple(dict.fromkeys((o.layout, o.style) for o in row)) for row in self.options)

    @property
    def _limits_units(self) -> bool:
        return self.model.goal.unit_amplification_limit is not None

    def _states_of(self, k: int) -> tuple[State, ...]:
        goal, world = self.model.goal, self.model.world_size
        unit = self.model.profile.units[k]
        cuts = tuple((s.style, s.parts, s.uneven) for s in unit.splits)
        pins = tuple(pin for pin in goal.pins if pin.unit == unit.name)
        # Of a thousand units most are alike in all that decides which states they may have.
        enters = bool(unit.batched_inputs), bool(unit.batch_dims)
        key = (unit.fixed, unit.batch_statistics, enters, cuts, pins)
        if key not in self._states:
            self._states[key] = tuple(
                (layout, style)
                for layout in layouts_of(self.model, self.capability)
                for style in STYLES
                if (style == "none") == (layout.degree == 1)
                and allowed(unit, Option(layout, style), goal, self.capability, world)
            )
        return self._states[key]

    @cached_property
    def units(self) -> tuple[UnitTable, ...]:
        if self._limits_units:
            return tuple(self._pairs(k) for k in self._every)
        return tuple(
            UnitTable(self.states[k], self._memory_block(k), self._exchange_block(k))
            for k in self._every
        )

    def _pairs(self, k: int) -> UnitTable:
        """The table of a unit of which not every pair of policies may be had: all pairs stand in
        the first block, and the second has nothing to choose."""
        unit, states = self.listed[k], self.states[k]
        fields = [tuple(o._asdict().items())[2:] for o in unit.options]
        policies = tuple(dict.fromkeys(fields))
        figures = np.zeros((len(states), len(policies), len(FIGURES)))
        open_ = np.zeros(figures.shape[:2], dtype=bool)
        for state, field, row in zip(unit.state_of, fields, unit.figures, strict=True):
            at = state, policies.index(field)
            figures[at], open_[at] = row, True
        every = PolicyBlock(policies, figures, open_, self._lost(k, policies))
        nothing = np.zeros((len(states), 1, len(FIGURES)))
        none = PolicyBlock(((),), nothing, np.ones((len(states), 1), dtype=bool), np.zeros(1))
        return UnitTable(states, every, none)

    def _memory_block(self, k: int) -> PolicyBlock:
        states, unit = self.states[k], self.model.profile.units[k]
        plain = self.figures.plain(k, states)
        ways = {"keep": lambda *_: plain, "recompute": self.figures.recomputed,
                "offload": self.figures.offloaded}  # fmt: skip
        # Whether anything is saved does not depend on how many samples there are, or on the state.
        saved = saved_bytes(unit, "none", 1, 1.0)
        names = memory_policies(self.model, unit, saved, self.capability)
        parts = [ways[name](k, states, plain) for name in names]
        open_ = np.ones((len(states), len(names)), dtype=bool)
        if "offload" in names:
            room = [may_offload(self.model, k, Option(*state)) for state in states]
            open_[:, names.index("offload")] = room
        policies: tuple[Policy, ...] = tuple((("memory", name),) for name in names)
        return PolicyBlock(policies, np.stack(parts, axis=1), open_, np.zeros(len(names)))

    def _exchange_block(self, k: int) -> PolicyBlock:
        """Every exchange policy, as what it adds to the plain one."""
        model, unit = self.model, self.model.profile.units[k]
        offered = tuple(exchange_options(model, k, model.baseline[0], self.capability))
        around = neighbours_bytes(model, k), model.passing_bytes[k]
        never_together = tuple(share.never_together for share in unit.shares)  # zero for most units
        # All that these figures depend on: units that are alike in it share one block, but for the
        # energy that they lose.
        room = allotted_bytes(model, k, "mirrored")
        key = self.states[k], self.figures.shape(k), around, offered, never_together, room
        if key not in self._exchanges:
            self._exchanges[key] = self._exchange(k)
        shared = self._exchanges[key]
        return shared._replace(lost=self._lost(k, shared.policies))

    def _exchange(self, k: int) -> PolicyBlock:
        states = self.states[k]
        offered = [
            tuple(exchange_options(self.model, k, Option(*state), self.capability))
            for state in states
        ]
        policies = tuple(dict.fromkeys(_exchange_of(o) for options in offered for o in options))
        figures = np.zeros((len(states), len(policies), len(FIGURES)))
        # Where nothing is exchanged there is no choice, and bursts have fewer than other layouts.
        open_ = np.zeros(figures.shape[:2], dtype=bool)
        for i, (state, options) in enumerate(zip(states, offered, strict=True)):
            plain = self.figures.of(k, Option(*state))
            for option in options:
                p = policies.index(_exchange_of(option))
                figures[i, p] = self.figures.of(k, option) - plain
                open_[i, p] = True
        return PolicyBlock(policies, figures, open_, np.zeros(len(policies)))

    def _lost(self, k: int, policies: Sequence[Policy]) -> Reals:
        """The share of the whole gradient's energy that each policy of unit ``k`` leaves."""
        plain = Option(*self.states[k][0])
        options = (plain._replace(**dict(policy)) for policy in policies)
        return np.array([lost_energy(self.model, k, option) for option in options])

    # -- edges and ties --------------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[EdgeTable, ...]:
        """What each edge costs between the states at its ends."""
        return tuple(
            EdgeTable(a, b, self._edge_figures.of(e, self.states[a], self.states[b]))
            for e, (a, b) in enumerate(self.model.ends)
        )

    @cached_property
    def shared(self) -> SharedEdges:
        """Which of the edges may share a redistribution."""
        return SharedEdges(self.model, self.states)

    @cached_property
    def ties(self) -> tuple[TieTable, ...]:
        """For each unit tied to others, which states agree with the first of them."""
        found = []
        for k, (a, *_) in enumerate(self.model.ties):
            if a != k:
                pair = self.model.profile.units[a], self.model.profile.units[k]
                agree = [
                    [ties_agree(pair, (Option(*x), Option(*y))) for y in self.states[k]]
                    for x in self.states[a]
                ]
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

    def plan_figures(self, numbers: Numbers) -> Matrix:
        """[unit, figure] of a plan."""
        figures = np.array([u.figures(n) for u, n in zip(self.units, numbers, strict=True)])
        self.write_moves(figures, numbers, range(len(figures)))
        return figures

    def write_moves(self, figures: Matrix, numbers: Numbers, units: Iterable[int]) -> None:
        """Writes what redistributions at the entry of ``units`` of a plan take, there and at the
        units that they come from, and what others have at each unit's points: of several
        redistributions at one unit the seconds add up, and the largest of each of the bytes
        counts."""
        entered = set(units)
        left = entered | self.model.sources_of(entered)
        for k in entered:
            costs = [self._moved(numbers, e) for e in self.model.edges_into[k]]
            figures[k, SUMMED] = sum(cost[: len(SUMMED)] for cost in costs)
            figures[k, RECEIVED] = max((cost[-1] for cost in costs), default=0.0)
        for k in left:
            costs = [self._moved(numbers, e) for e in self.model.edges_from[k]]
            figures[k, RETURNING] = max((cost[-2] for cost in costs), default=0.0)
        write_others(figures, self.memory.overlaps)

    def _moved(self, numbers: Numbers, e: int) -> Reals:
        """The figures of edge ``e`` in a plan: none where an earlier unit has got the same."""
        edge = self.edges[e]
        states = self._state(numbers, edge.source), self._state(numbers, edge.target)
        cost: Reals = edge.figures[:, *states]
        earlier = self.model.same_tensors_before[e]
        # Most edges cost nothing: only for the others is it worth asking who came before.
        if earlier and cost.any():
            ends = {unit for other in (e, *earlier) for unit in self.model.ends[other]}
            decided = {
                unit: Option(*self.states[unit][self._state(numbers, unit)]) for unit in ends
            }
            if self.model.redistributed_before(e, decided):
                return np.zeros_like(cost)
        return cost

    def _state(self, numbers: Numbers, unit: int) -> int:
        return self.units[unit].state(numbers[unit])


def _exchange_of(option: Option) -> Policy:
    """The fields of an option that are about its exchange."""
    names = ("exchange", "ratio", "early_release", "feedback", "wire", "peers_per_host")
    return tuple((name, getattr(option, name)) for name in names)
