"""Edges whose tensors an earlier unit may have got alike (``shared_redistribution``), between
states of units.

A plan is charged for the first of them only. That depends on more than the states at an edge's two
ends, so the bound by prices, which looks at these, divides: where n units of a load could need it
in one form, each is charged an n-th of the redistribution, at the least price that any of the
load's units has. Those g ≤ n of them that do need it so then pay g/n of it at most, and never more
than the first of them by itself: the bound stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ...cost.cost import CostModel
from ...cost.ownership import TensorPlacement, input_placement, output_placement
from ...cost.redistribution import SharedRedistribution, edge_redistribution, edge_tensors
from .tables import EdgeTable, Reals, State


class Moves:
    """The edges of a cost model; unit k has the states ``states[k]``."""

    def __init__(self, model: CostModel, states: Sequence[Sequence[State]]) -> None:
        self.model, self.states = model, states

    def shared_redistribution(self, e: int, source: int, target: int) -> SharedRedistribution:
        """What edge ``e`` brings where its ends are in those states."""
        a, b = self.model.ends[e]
        held, wanted = (
            output_placement(*self.states[a][source]),
            input_placement(*self.states[b][target]),
        )
        return edge_redistribution(self.model.profile.edges[e], held, wanted)

    def brought(self, e: int, state: Callable[[int], int]) -> bool:
        """Whether an earlier unit has got what edge ``e`` brings; units are in ``state(unit)``."""
        earlier = self.model.same_tensors_before[e]
        if not earlier:
            return False

        def of(edge: int) -> SharedRedistribution:
            a, b = self.model.ends[edge]
            return self.shared_redistribution(edge, state(a), state(b))

        mine = of(e)
        return any(of(other) == mine for other in earlier)

    @cached_property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """For each edge those with its load, itself among them."""
        same: dict[object, list[int]] = {}
        for e, edge in enumerate(self.model.profile.edges):
            same.setdefault(edge_tensors(edge), []).append(e)
        return tuple(tuple(same[edge_tensors(edge)]) for edge in self.model.profile.edges)

    def sharers(self, e: int) -> Reals | None:
        """[source's state, target's state] how many edges could bring what edge ``e`` does there;
        None where no other edge ever could."""
        if len(self.together[e]) < 2:
            return None
        edges, wanted = self.model.profile.edges, self._wanted(e)
        left = [
            output_placement(*state).form == "feature_shard"
            for state in self.states[self.model.ends[e][0]]
        ]
        sliced = np.array(left)[:, None] | np.array([h.form == "feature_shard" for h in wanted])
        count = np.ones(sliced.shape)
        for other in self.together[e]:
            if other != e:
                theirs = set(self._wanted(other))
                alike = np.array([held in theirs for held in wanted])
                count += alike & (~sliced | (edges[e].features == edges[other].features))
        return count if count.max() > 1 else None

    def _wanted(self, e: int) -> list[TensorPlacement]:
        """What the target of edge ``e`` needs in each of its states."""
        return [input_placement(*state) for state in self.states[self.model.ends[e][1]]]


class Charges:
    """What edges with those ``tables`` are charged at prices."""

    def __init__(self, moves: Moves, tables: Sequence[EdgeTable]) -> None:
        self.moves, self.tables = moves, tables
        self.sharers = [moves.sharers(e) for e in range(len(tables))]

    def of(self, e: int, price: Reals, figures: Sequence[int], received: float) -> Reals:
        """[source's state, target's state] of edge ``e``, for prices [unit, figure]; ``received``
        is that of a byte received, the last of the table's figures."""
        table = self.tables[e]
        own = price[table.target, figures].copy()
        own[-1] = received
        alone = np.tensordot(own, table.figures, axes=1)
        count = self.sharers[e]
        if count is None:
            return alone
        targets = [self.tables[other].target for other in self.moves.together[e]]
        least = price[np.ix_(targets, figures)].min(axis=0)
        least[-1] = 0.0
        shared = np.tensordot(least, table.figures, axes=1) / count
        found: Reals = np.where(count > 1, shared, alone)
        return found
