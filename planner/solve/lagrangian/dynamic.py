"""The cheapest assignment of states where units and edges have prices: dynamic programming.

Units are eliminated one after another: all prices that a unit appears in are added up for every
combination of its states and its remaining neighbours', and the least over its own states is what
is left. On a chain that is the shortest path; on other graphs tables are as wide as what a cut
through the graph holds (units with one state count nothing). The order is chosen greedily, the
smallest table first. Nonserial dynamic programming after Bertelè and Brioschi, 1972.

Where a table would be too large, edges are *relaxed*: such an edge costs each state of its source
what it costs to the best state of its target. What is found is then still a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

LARGEST_TABLE = 4_000_000
"""Entries of a table that may be made; more are relaxed away."""


class Bag(NamedTuple):
    """One elimination: the unit, and those that its table still depends on."""

    unit: int
    scope: tuple[int, ...]


class Order(NamedTuple):
    """An order of elimination, and the edges (by number) that it keeps."""

    bags: tuple[Bag, ...]
    kept: frozenset[int]


class Answer(NamedTuple):
    """The least price and an assignment that has it: one state for each unit."""

    price: float
    states: Numbers


def order_of(sizes: Sequence[int], ends: Sequence[tuple[int, int]]) -> Order:
    """The order for units with ``sizes`` states and edges between ``ends``."""
    kept = set(range(len(ends)))
    while True:
        bags = _greedy(sizes, [ends[e] for e in sorted(kept)])
        worst = max(bags, key=lambda bag: _entries(sizes, bag), default=None)
        if worst is None or _entries(sizes, worst) <= LARGEST_TABLE:
            return Order(tuple(bags), frozenset(kept))
        kept.remove(_longest(ends, kept, worst, sizes))


def _entries(sizes: Sequence[int], bag: Bag) -> int:
    entries = sizes[bag.unit]
    for k in bag.scope:
        entries *= sizes[k]
    return entries


def _longest(
    ends: Sequence[tuple[int, int]], kept: set[int], bag: Bag, sizes: Sequence[int]
) -> int:
    """The edge to relax: of those at the units of a bag the one that spans most."""
    inside = {bag.unit, *bag.scope}
    free = [e for e in kept if sizes[ends[e][0]] > 1 and sizes[ends[e][1]] > 1]
    near = [e for e in free if inside & set(ends[e])]
    return max(near, key=lambda e: (ends[e][1] - ends[e][0], e))


def _greedy(sizes: Sequence[int], ends: Sequence[tuple[int, int]]) -> list[Bag]:
    """Eliminates the unit with the smallest table, the first in forward order among equals."""
    near: list[set[int]] = [set() for _ in sizes]
    for a, b in ends:
        if sizes[a] > 1 and sizes[b] > 1:
            near[a].add(b)
            near[b].add(a)
    bags: list[Bag] = []
    queue = [(_entries(sizes, Bag(k, tuple(near[k]))), k) for k in range(len(sizes))]
    heapify(queue)
    gone: set[int] = set()
    while queue:
        cost, k = heappop(queue)
        if k in gone or cost != _entries(sizes, Bag(k, tuple(near[k]))):
            continue  # an entry from before its neighbours changed
        gone.add(k)
        scope = tuple(sorted(near[k]))
        bags.append(Bag(k, scope))
        for a in scope:
            near[a] |= set(scope)
            near[a] -= {a, k}
            heappush(queue, (_entries(sizes, Bag(a, tuple(near[a]))), a))
    return bags


def minimise(
    order: Order, units: Sequence[Reals], edges: Sequence[tuple[int, int, Reals]]
) -> Answer:
    """The least Σ units[k][s_k] + Σ edges[s_a, s_b] over the kept edges, relaxed ones at their
    least."""
    factors: list[list[tuple[tuple[int, ...], Reals]]] = [[((k,), u)] for k, u in enumerate(units)]
    rank = {bag.unit: i for i, bag in enumerate(order.bags)}
    for e, (a, b, price) in enumerate(edges):
        if len(units[a]) == 1 or len(units[b]) == 1 or e not in order.kept:
            k = a if len(units[b]) == 1 or e not in order.kept else b
            factors[k].append(((k,), price.min(axis=1 if k == a else 0)))
        else:
            scope, table = ((a, b), price) if a < b else ((b, a), price.T)
            factors[min(scope, key=rank.__getitem__)].append((scope, table))
    least_price = 0.0
    choices: list[Numbers] = []
    for bag in order.bags:
        table = _joined(bag, factors[bag.unit])
        choice = table.argmin(axis=0)
        choices.append(choice)
        least = np.take_along_axis(table, choice[None], axis=0)[0]
        if bag.scope:
            factors[min(bag.scope, key=rank.__getitem__)].append((bag.scope, least))
        else:
            least_price += float(least)
    return Answer(least_price, _read_back(order, choices, len(units)))


def _joined(bag: Bag, factors: Sequence[tuple[tuple[int, ...], Reals]]) -> Reals:
    """The sum of the factors over (the unit, its scope)."""
    axes = (bag.unit, *bag.scope)
    total: Reals | None = None
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


def _read_back(order: Order, choices: Sequence[Numbers], count: int) -> Numbers:
    states = np.zeros(count, dtype=np.int64)
    for bag, choice in zip(reversed(order.bags), reversed(choices), strict=True):
        states[bag.unit] = choice[tuple(states[list(bag.scope)])]
    return states
