"""What the gradient of a unit's output takes as it comes back: where it can count, and its price.

At a unit's backward the larger of two counts: what its own backward has, and the gradient of its
output as a redistribution brings it back (``timeline.returned_bytes``). The first follows from the
unit's policies, the second from the states at both ends of an edge: what the second has beyond the
first can be priced at neither alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...memory.rows import OWN_BACKWARD, RETURNED, RETURNING, Matrix
from ..figures import EDGE_FIGURES, Numbers, Reals
from ..option_table import OptionTable, UnitTable

# Units that are charged at a time, those with the largest weights: the weights that prove most are
# on few rows, and the first guesses, which are on all, prove little. Of a thousand units on 1,024
# ranks (benchmarks/planner.py) all took four fifths of the search.
CHARGED = 64
_RETURNING = EDGE_FIGURES.index(RETURNING)
PolicyPrices = tuple[Reals, Reals]
"""The prices of a unit's memory policies and of its exchange policies, [state, policy]."""


class ReturningEdge(NamedTuple):
    """An edge over which a gradient that comes back may take more than its source's own backward
    has: its number, its ends, and the bytes [source's state, place]. Many states of the target need
    the tensor in the same place; ``place`` has that of each."""

    number: int
    source: int
    target: int
    bytes: Reals
    place: Numbers


class SourcePrice(NamedTuple):
    """[source's state, target's state] of an edge: the price of its source together with what comes
    back to it, and the number of the pair of policies (memory · exchange policies + exchange) that
    the source has for it."""

    edge: ReturningEdge
    price: Reals
    pair: Numbers


# [Note: Prices of returning gradients]
# Let a be an edge's source in state s with policies p, its target in state t, R(s, t) the bytes of
# the gradient on its way back, o(s, p) those of a's own backward, and c(s, p) the price of all else
# of a. With the weight μ on a's row of backward, unit a and this cost
#     min over p of  c(s, p) + μ · max(R(s, t) - o(s, p), 0)
# which depends on s and t alone: it joins the price of the edge, a itself is charged nothing, and
# the least over all plans stays exact. Of several edges out of a the largest R counts. One of them
# is charged here, whatever R it has, and of the units the CHARGED: the bound stays one.
class ReturnedGradients:
    """The prices of units together with what comes back to them."""

    def __init__(self, table: OptionTable) -> None:
        self.units = table.units
        largest: dict[int, ReturningEdge] = {}
        for one in _returning_edges(table):
            best = largest.setdefault(one.source, one)
            if one.bytes.max() > best.bytes.max():
                largest[one.source] = one
        self._edges = tuple(largest.values())
        self._sources = [one.source for one in self._edges]

    def priced(self, price: Matrix, policies: Sequence[PolicyPrices]) -> list[SourcePrice]:
        """For the units whose returning gradients have most weight at the prices [unit, figure]."""
        weights = price[self._sources, RETURNED]
        return [
            self._priced(self._edges[i], float(weights[i]), policies[self._sources[i]])
            for i in np.argsort(-weights, kind="stable")[:CHARGED]
            if weights[i] > 0
        ]

    def _priced(self, one: ReturningEdge, weight: float, policies: PolicyPrices) -> SourcePrice:
        unit = self.units[one.source]
        own = _pairs(unit.memory.figures @ OWN_BACKWARD, unit.exchange.figures @ OWN_BACKWARD)
        beyond = np.maximum(one.bytes[:, :, None] - own[:, None, :], 0.0)
        price = _pairs(*policies)[:, None, :] + weight * beyond
        best = price.argmin(axis=2)
        least = np.take_along_axis(price, best[:, :, None], axis=2)[:, :, 0]
        return SourcePrice(one, least[:, one.place], best[:, one.place])


def _pairs(memory: Reals, exchange: Reals) -> Reals:
    """[state, pair of policies]: sums of [state, memory policy] and [state, exchange policy]."""
    found: Reals = (memory[:, :, None] + exchange[:, None, :]).reshape(len(memory), -1)
    return found


def _returning_edges(table: OptionTable) -> list[ReturningEdge]:
    """The edges over which the gradient's return can count, in their order."""
    found, least = [], [_least_own_backward(unit) for unit in table.units]
    # Edges of one kind share a table.
    places: dict[int, tuple[Reals, Numbers]] = {}
    for e, edge in enumerate(table.edges):
        bytes_ = edge.figures[_RETURNING]
        if (bytes_ > least[edge.source][:, None]).any():
            if id(edge.figures) not in places:
                sizes, place = np.unique(bytes_, axis=1, return_inverse=True)
                places[id(edge.figures)] = sizes, place.ravel()
            found.append(ReturningEdge(e, edge.source, edge.target, *places[id(edge.figures)]))
    return found


def _least_own_backward(unit: UnitTable) -> Reals:
    """[state] the least that the unit's own backward has there under any policies."""
    memory, exchange = (
        np.where(block.allowed, block.figures @ OWN_BACKWARD, np.inf).min(axis=1)
        for block in (unit.memory, unit.exchange)
    )
    found: Reals = memory + exchange
    return found
