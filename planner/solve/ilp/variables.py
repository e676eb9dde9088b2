"""The variables of the integer program: options of units, pairs of states along edges, ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pulp

from ...cost.step_time import Vector
from ...memory.rows import RECEIVED, Matrix
from .ledger import EDGE_FIGURES, Ledger
from .linear import Linear, Terms, summed


class Pair(NamedTuple):
    """One variable of an edge and what it adds to the target: seconds of ``EDGE_FIGURES``, bytes
    received last; ``source`` and ``target`` are the numbers of the ends' states."""

    variable: pulp.LpVariable
    figures: Vector
    source: int
    target: int


class Variables(Linear):
    """The variables of a ledger: x for each option of each unit, the pairs of each edge.

    Families (1) to (3) and (12) of ``integer``.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.model = ledger, ledger.model
        self._options()
        self._ties()
        self.pairs = [self._pairs(e) for e in range(len(ledger.edges))]
        self.moves = [self._moves(e) for e in range(len(ledger.edges))]

    def _options(self) -> None:
        self.x = [
            [pulp.LpVariable(f"x_{k}_{o}", cat="Binary") for o in range(len(unit.options))]
            for k, unit in enumerate(self.ledger.units)
        ]
        for row in self.x:
            self.equal(dict.fromkeys(row, 1.0), 1.0)

    def in_state(self, k: int, state: int) -> list[pulp.LpVariable]:
        """The options of a unit that have a state."""
        numbers = enumerate(self.ledger.units[k].state_of)
        return [self.x[k][n] for n, theirs in numbers if theirs == state]

    def _pairs(self, e: int) -> list[Pair]:
        """An edge's pairs of states: products of sums of x, by their marginals. Where one end has
        one state only, the other end's x are the pairs."""
        edge = self.ledger.edges[e]
        a, b = edge.source, edge.target
        sources, targets = edge.figures.shape[1:]
        if sources == 1:
            each = ((x, 0, t) for t in range(targets) for x in self.in_state(b, t))
        elif targets == 1:
            each = ((x, s, 0) for s in range(sources) for x in self.in_state(a, s))
        else:
            each = ((y, s, t) for (s, t), y in self._products(e, sources, targets).items())
        return [Pair(v, edge.figures[:, s, t], s, t) for v, s, t in each]

    def _moves(self, e: int) -> list[Pair]:
        """The pairs of an edge with what they cost in a plan: a pair of states whose tensors an
        earlier unit may have got alike has a variable of its own, which is 0 where one has."""
        if not self.model.same_tensors_before[e]:
            return self.pairs[e]
        found: dict[tuple[int, int], Pair] = {}
        same: dict[tuple[int, int], list[Pair]] = {}
        for pair in self.pairs[e]:
            same.setdefault((pair.source, pair.target), []).append(pair)
        for states, pairs in same.items():
            found[states] = pairs[0]
            if pairs[0].figures.any():
                found[states] = pairs[0]._replace(variable=self._charged(e, states, pairs))
        return list(found.values())

    def _charged(self, e: int, states: tuple[int, int], pairs: Sequence[Pair]) -> pulp.LpVariable:
        """At least 1 where an edge has these states and no earlier one has brought the same."""
        charged = self.new(f"c_{e}_{states[0]}_{states[1]}")
        row = dict.fromkeys((pair.variable for pair in pairs), 1.0) | {charged: -1.0}
        for other in self.model.same_tensors_before[e]:
            target = self.model.ends[other][1]
            for state in self.ledger.brings_alike(e, other, *states):
                row |= dict.fromkeys(self.in_state(target, state), -1.0)
        self.at_most(row, 0.0)
        return charged

    def _products(
        self, e: int, sources: int, targets: int
    ) -> dict[tuple[int, int], pulp.LpVariable]:
        edge = self.ledger.edges[e]
        y = {(s, t): self.new(f"y_{e}_{s}_{t}") for s in range(sources) for t in range(targets)}
        for s in range(sources):
            row = dict.fromkeys((y[s, t] for t in range(targets)), 1.0)
            self.equal(row | dict.fromkeys(self.in_state(edge.source, s), -1.0), 0.0)
        for t in range(targets):
            row = dict.fromkeys((y[s, t] for s in range(sources)), 1.0)
            self.equal(row | dict.fromkeys(self.in_state(edge.target, t), -1.0), 0.0)
        return y

    def _ties(self) -> None:
        for k, units in enumerate(self.model.ties):
            for other in units:
                if k < other:
                    self._tie(k, other)

    def _tie(self, a: int, b: int) -> None:
        """Units share a layout, and the cut of each parameter that both have."""
        keys = [self._cuts(a, b), self._cuts(b, a)]
        for key in dict.fromkeys((*keys[0], *keys[1])):
            left = dict.fromkeys(keys[0].get(key, ()), 1.0)
            self.equal(left | dict.fromkeys(keys[1].get(key, ()), -1.0), 0.0)

    def _cuts(self, k: int, other: int) -> dict[object, list[pulp.LpVariable]]:
        """The x of a unit by layout and by the dimension in which it cuts what both have."""
        unit, theirs = self.model.profile.units[k], self.model.profile.units[other]
        names = sorted({p.shared for p in unit.parameters} & {p.shared for p in theirs.parameters})
        found: dict[object, list[pulp.LpVariable]] = {}
        for x, option in zip(self.x[k], self.ledger.units[k].options, strict=True):
            split = unit.split(option.style) if option.layout.degree > 1 else None
            sharded = dict(split.sharded) if split else {}
            key = option.layout, tuple(sharded.get(name) for name in names)
            found.setdefault(key, []).append(x)
        return found

    def form(self, k: int, weights: Vector, figures: Matrix) -> Terms:
        """weights·f_k; ``figures`` [option, figure] are the unit's own. Bytes received are left out
        (see ``_received``)."""
        own = zip(self.x[k], figures @ weights, strict=True)
        into = [w for w in EDGE_FIGURES if w != RECEIVED]
        entry = weights[into]
        edges = [
            (pair.variable, float(pair.figures[: len(into)] @ entry))
            for e in self.model.edges_into[k]
            for pair in self.moves[e]
        ]
        return summed([*own, *(edges if entry.any() else ())])

    def scale_pairs(self, factor: float) -> None:
        """Edges' seconds in units of time; bytes stay."""
        scale = np.array([1.0 if f == RECEIVED else factor for f in EDGE_FIGURES])
        self.moves = [[p._replace(figures=p.figures * scale) for p in row] for row in self.moves]

    def chosen(self) -> list[int]:
        """The number of each unit's option in the solution found."""
        return [int(np.argmax([v.value() or 0.0 for v in row])) for row in self.x]

    def forbid(self, numbers: Sequence[int]) -> None:
        """Excludes one set of decisions."""
        chosen = {row[n]: 1.0 for row, n in zip(self.x, numbers, strict=True)}
        self.at_most(chosen, len(numbers) - 1.0)
