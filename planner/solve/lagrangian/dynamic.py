"""The cheapest assignment of states where units and edges have prices: dynamic programming.

Units are eliminated one after another: all prices that a unit appears in are added up for every
combination of its states and its remaining neighbours', and the least over its own states is what
is left. On a chain that is the shortest path; on other graphs tables are as wide as what a cut
through the graph holds (units with one state count nothing). The order is chosen greedily, the
smallest table first. Nonserial dynamic programming after Bertelè and Brioschi, 1972.

Where a table would be too large, edges are *relaxed*: such an edge costs each state of its source
what it costs to the best state of its target.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

# Entries of a table that may be made (32 MB of floats); more are relaxed away.
LARGEST_TABLE = 4_000_000


class Elimination(NamedTuple):
    """One elimination: the unit, and those that its table still depends on."""

    unit: int
    scope: tuple[int, ...]


class EliminationOrder(NamedTuple):
    """An order of elimination, and the edges (by number) that it keeps."""

    eliminations: tuple[Elimination, ...]
    kept: frozenset[int]


class Assignment(NamedTuple):
    """The least price and an assignment that has it: one state for each unit."""

    price: float
    states: Numbers


def order_of(sizes: Sequence[int], ends: Sequence[tuple[int, int]]) -> EliminationOrder:
    """The order for units with ``sizes`` states and edges between ``ends``."""
    kept = set(range(len(ends)))
    while True:
        eliminations = _greedy(sizes, [ends[e] for e in sorted(kept)])
        worst = max(eliminations, key=lambda one: _entries(sizes, one), default=None)
        if worst is None or _entries(sizes, worst) <= LARGEST_TABLE:
            return EliminationOrder(tuple(eliminations), frozenset(kept))
        # Of the edges at these units the one that spans most is relaxed: it is in the scopes of all
        # that lies between its ends.
        inside = {worst.unit, *worst.scope}
        free = [e for e in kept if sizes[ends[e][0]] > 1 and sizes[ends[e][1]] > 1]
        touching = [e for e in free if inside & set(ends[e])]
        kept.remove(max(touching, key=lambda e: (ends[e][1] - ends[e][0], e)))


def _entries(sizes: Sequence[int], one: Elimination) -> int:
    entries = sizes[one.unit]
    for k in one.scope:
        entries *= sizes[k]
    return entries


def _greedy(sizes: Sequence[int], ends: Sequence[tuple[int, int]]) -> list[Elimination]:
    """Eliminates the unit with the smallest table, the first in forward order among equals."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for a, b in ends:
        if sizes[a] > 1 and sizes[b] > 1:
            neighbours[a].add(b)
            neighbours[b].add(a)
    eliminations: list[Elimination] = []
    queue = [(_entries(sizes, Elimination(k, tuple(neighbours[k]))), k) for k in range(len(sizes))]
    heapify(queue)
    gone: set[int] = set()
    while queue:
        cost, k = heappop(queue)
        if k in gone or cost != _entries(sizes, Elimination(k, tuple(neighbours[k]))):
            continue  # an entry from before its neighbours changed
        gone.add(k)
        scope = tuple(sorted(neighbours[k]))
        eliminations.append(Elimination(k, scope))
        for a in scope:
            neighbours[a] |= set(scope)
            neighbours[a] -= {a, k}
            heappush(queue, (_entries(sizes, Elimination(a, tuple(neighbours[a]))), a))
    return eliminations


def minimise(
    order: EliminationOrder, units: Sequence[Reals], edges: Sequence[tuple[int, int, Reals]]
) -> Assignment:
    """The least Σ units[k][s_k] + Σ edges[s_a, s_b] over the kept edges, relaxed ones at their
    least."""
    factors: list[list[tuple[tuple[int, ...], Reals]]] = [[((k,), u)] for k, u in enumerate(units)]
    rank = {one.unit: i for i, one in enumerate(order.eliminations)}
    for e, (a, b, price) in enumerate(edges):
        # A relaxed edge costs no more here than in any assignment: what is found is still a lower
        # bound. A unit with one state leaves nothing to relax.
        if len(units[a]) == 1 or len(units[b]) == 1 or e not in order.kept:
            k = a if len(units[b]) == 1 or e not in order.kept else b
            factors[k].append(((k,), price.min(axis=1 if k == a else 0)))
        else:
            scope, table = ((a, b), price) if a < b else ((b, a), price.T)
            factors[min(scope, key=rank.__getitem__)].append((scope, table))
    least_price = 0.0
    choices: list[Numbers] = []
    for one in order.eliminations:
        table = _joined(one, factors[one.unit])
        choice = table.argmin(axis=0)
        choices.append(choice)
        least = np.take_along_axis(table, choice[None], axis=0)[0]
        if one.scope:
            factors[min(one.scope, key=rank.__getitem__)].append((one.scope, least))
        else:
            least_price += float(least)
    # A unit's best state is known for every combination of the states of those that its table
    # depends on. They were eliminated after it, so the states are read off from the last one back.
    states = np.zeros(len(units), dtype=np.int64)
    for one, choice in zip(reversed(order.eliminations), reversed(choices), strict=True):
        states[one.unit] = choice[tuple(states[list(one.scope)])]
    return Assignment(least_price, states)


def _joined(one: Elimination, factors: Sequence[tuple[tuple[int, ...], Reals]]) -> Reals:
    """The sum of the factors over (the unit, its scope)."""
    axes = (one.unit, *one.scope)
    total: Reals | None = None
    # Small tables first: what is added up stays small until a large one comes.
    for scope, table in sorted(factors, key=lambda f: len(f[0])):
        if scope != axes:
            here = sorted(range(len(scope)), key=lambda i: axes.index(scope[i]))
            present = set(scope)
            shape = iter(table.transpose(here).shape)
            table = table.transpose(here).reshape(
                [next(shape) if a in present else 1 for a in axes]
            )
        total = table if total is None else total + table
    assert total is not None
    return total
