"""The variables of the integer program, rows over them, and running sums that keep rows sparse.

The variables are options of units, pairs of states along edges, and ties: families (1) to (3) and
(12) of ``integer``.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pulp

from ...cost.step_time import Vector
from ...memory.rows import ENTRY, Matrix, Rows
from ...schema.options import Decisions, cuts
from ..figures import SUMMED
from ..option_table import OptionTable

Terms = dict[pulp.LpVariable, float]
"""A linear form without a constant."""


def summed(parts: Iterable[tuple[pulp.LpVariable, float]]) -> Terms:
    """The sum of products, each variable once."""
    total: Terms = {}
    for variable, value in parts:
        if value:
            total[variable] = total.get(variable, 0.0) + float(value)
    return total


class Pair(NamedTuple):
    """One variable of an edge and its ``EDGE_FIGURES``.
    ``source`` and ``target`` are the numbers of the ends' states."""

    variable: pulp.LpVariable
    figures: Vector
    source: int
    target: int


class Variables:
    """A program with the variables of an option table: x for each option of each unit, the pairs of
    each edge."""

    def __init__(self, table: OptionTable) -> None:
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self.table, self.model = table, table.model
        self._options()
        self._ties()
        self.pairs = [self._pairs(e) for e in range(len(table.edges))]
        self.moves = [self._moves(e) for e in range(len(table.edges))]

    def new(self, name: str) -> pulp.LpVariable:
        return pulp.LpVariable(name, lowBound=0)

    def at_most(self, terms: Terms, most: float) -> None:
        """Σ terms ≤ most."""
        form = pulp.LpAffineExpression(terms)
        self.problem += pulp.LpConstraint(form, pulp.LpConstraintLE, rhs=most)

    def equal(self, terms: Terms, value: float) -> None:
        form = pulp.LpAffineExpression(terms)
        self.problem += pulp.LpConstraint(form, pulp.LpConstraintEQ, rhs=value)

    def _options(self) -> None:
        self.x = [
            [pulp.LpVariable(f"x_{k}_{o}", cat="Binary") for o in range(len(options))]
            for k, options in enumerate(self.table.options)
        ]
        for row in self.x:
            self.equal(dict.fromkeys(row, 1.0), 1.0)

    def in_state(self, k: int, state: int) -> list[pulp.LpVariable]:
        numbers = enumerate(self.table.listed[k].state_of)
        return [self.x[k][n] for n, theirs in numbers if theirs == state]

    def _pairs(self, e: int) -> list[Pair]:
        """An edge's pairs of states: products of sums of x, by their marginals."""
        edge = self.table.edges[e]
        a, b = edge.source, edge.target
        sources, targets = (range(count) for count in edge.figures.shape[1:])
        # Where one end has one state only, the other end's x are the pairs.
        if len(sources) == 1:
            each = [(x, 0, t) for t in targets for x in self.in_state(b, t)]
        elif len(targets) == 1:
            each = [(x, s, 0) for s in sources for x in self.in_state(a, s)]
        else:
            y = {(s, t): self.new(f"y_{e}_{s}_{t}") for s in sources for t in targets}
            each = [(variable, s, t) for (s, t), variable in y.items()]
            for s in sources:
                row = dict.fromkeys((y[s, t] for t in targets), 1.0)
                self.equal(row | dict.fromkeys(self.in_state(a, s), -1.0), 0.0)
            for t in targets:
                row = dict.fromkeys((y[s, t] for s in sources), 1.0)
                self.equal(row | dict.fromkeys(self.in_state(b, t), -1.0), 0.0)
        return [Pair(v, edge.figures[:, s, t], s, t) for v, s, t in each]

    def _moves(self, e: int) -> list[Pair]:
        """The pairs of an edge with what they cost in a plan: a pair of states whose tensors an
        earlier unit may have got alike has a variable of its own, which is 0 where one has."""
        if not self.model.same_tensors_before[e]:
            return self.pairs[e]
        same: dict[tuple[int, int], list[Pair]] = {}
        for pair in self.pairs[e]:
            same.setdefault((pair.source, pair.target), []).append(pair)
        # A pair that moves nothing needs none: its variable multiplies zeros.
        return [
            pairs[0]._replace(variable=self._charged(e, states, pairs))
            if pairs[0].figures.any()
            else pairs[0]
            for states, pairs in same.items()
        ]

    def _charged(self, e: int, states: tuple[int, int], pairs: Sequence[Pair]) -> pulp.LpVariable:
        """At least 1 where an edge has these states and no earlier one moves the same."""
        charged = self.new(f"c_{e}_{states[0]}_{states[1]}")
        row = dict.fromkeys((pair.variable for pair in pairs), 1.0) | {charged: -1.0}
        for other in self.model.same_tensors_before[e]:
            target = self.model.ends[other][1]
            for state in self.table.shared.states_that_share(e, other, *states):
                row |= dict.fromkeys(self.in_state(target, state), -1.0)
        self.at_most(row, 0.0)
        return charged

    def _ties(self) -> None:
        """Units share a layout, and the cut of each parameter that both have."""
        tied = ((k, other) for k, units in enumerate(self.model.ties) for other in units)
        for a, b in tied:
            if a < b:
                one, two = self._cuts(a, b), self._cuts(b, a)
                for key in dict.fromkeys((*one, *two)):
                    left = dict.fromkeys(one.get(key, ()), 1.0)
                    self.equal(left | dict.fromkeys(two.get(key, ()), -1.0), 0.0)

    def _cuts(self, k: int, other: int) -> dict[object, list[pulp.LpVariable]]:
        """The x of a unit by layout and by the dimension in which it cuts what both have."""
        unit, theirs = self.model.profile.units[k], self.model.profile.units[other]
        names = sorted({p.shared for p in unit.parameters} & {p.shared for p in theirs.parameters})
        found: dict[object, list[pulp.LpVariable]] = {}
        for x, option in zip(self.x[k], self.table.options[k], strict=True):
            dims = cuts(unit, option)
            key = option.layout, tuple(dims[name] for name in names)
            found.setdefault(key, []).append(x)
        return found

    def track(
        self,
        name: str,
        rows: Rows,
        track: int,
        figures: Sequence[Matrix],
        kept: Sequence[Vector] | None = None,
    ) -> list[Terms]:
        """The rows of a track, one for each unit; ``figures`` [option, figure] are units' own, and
        ``kept`` as in ``form``."""
        before, at, after = (
            [self.form(k, weights, own, kept) for k, own in enumerate(figures)]
            for weights in (rows.before[track], rows.at[track], rows.after[track])
        )
        # Running sums: a row has its own terms and two more, not those of all units.
        last = len(figures) - 1
        ahead = [self.new(f"{name}_ahead_{j}") for j in range(last + 1)]
        behind = [self.new(f"{name}_behind_{j}") for j in range(last + 1)]
        for j in range(1, last + 1):
            self.running(ahead[j], ahead[j - 1], before[j - 1])
            self.running(behind[j - 1], behind[j], after[j])
        for j, row in enumerate(at):
            row |= {ahead[j]: 1.0} if j else {}
            row |= {behind[j]: 1.0} if j < last else {}
        self.equal({ahead[0]: 1.0}, 0.0)
        self.equal({behind[-1]: 1.0}, 0.0)
        return at

    def running(self, now: pulp.LpVariable, last: pulp.LpVariable, added: Terms) -> None:
        self.equal({now: 1.0, last: -1.0} | {v: -c for v, c in added.items()}, 0.0)

    def form(
        self, k: int, weights: Vector, figures: Matrix, kept: Sequence[Vector] | None = None
    ) -> Terms:
        """weights·f_k; ``figures`` [option, figure] are the unit's own. ``kept`` has for each
        unit's states by what the bytes of inputs are multiplied there (none: no bytes count)."""
        # Without the bytes of which the largest counts (``MemoryRows._received``, ``_returned``).
        own = zip(self.x[k], figures @ weights, strict=True)
        entry = weights[list(SUMMED)]
        scale = np.zeros(len(self.table.states[k])) if kept is None else kept[k]

        def added(pair: Pair) -> float:
            seconds = pair.figures[: len(ENTRY)] @ entry[:-1]
            return float(seconds + entry[-1] * scale[pair.target] * pair.figures[len(ENTRY)])

        edges = [
            (pair.variable, added(pair)) for e in self.model.edges_into[k] for pair in self.moves[e]
        ]
        return summed([*own, *(edges if entry.any() else ())])

    def chosen(self) -> Decisions:
        return tuple(
            options[int(np.argmax([x.value() or 0.0 for x in row]))]
            for options, row in zip(self.table.options, self.x, strict=True)
        )

    def forbid(self, decisions: Decisions) -> None:
        chosen = [
            row[options.index(option)]
            for row, options, option in zip(self.x, self.table.options, decisions, strict=True)
        ]
        self.at_most(dict.fromkeys(chosen, 1.0), len(chosen) - 1.0)
