"""Variables and rows of a linear program, with running sums so that rows stay sparse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pulp

Terms = dict[pulp.LpVariable, float]
"""A linear form without a constant."""


def summed(parts: Iterable[tuple[pulp.LpVariable, float]]) -> Terms:
    """The sum of products, each variable once."""
    total: Terms = {}
    for variable, value in parts:
        if value:
            total[variable] = total.get(variable, 0.0) + float(value)
    return total


class Linear:
    """A program that rows are added to."""

    def __init__(self) -> None:
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)

    def new(self, name: str) -> pulp.LpVariable:
        return pulp.LpVariable(name, lowBound=0)

    def at_most(self, terms: Terms, most: float) -> None:
        """Σ terms ≤ most."""
        form = pulp.LpAffineExpression(terms)
        self.problem += pulp.LpConstraint(form, pulp.LpConstraintLE, rhs=most)

    def equal(self, terms: Terms, value: float) -> None:
        form = pulp.LpAffineExpression(terms)
        self.problem += pulp.LpConstraint(form, pulp.LpConstraintEQ, rhs=value)

    def track(self, name: str, parts: Sequence[tuple[Terms, Terms, Terms]]) -> list[Terms]:
        """The rows of a track from each unit's (before, at, after)."""
        count = len(parts)
        ahead = [self.new(f"{name}_ahead_{j}") for j in range(count)]
        behind = [self.new(f"{name}_behind_{j}") for j in range(count)]
        for j in range(1, count):
            self.running(ahead[j], ahead[j - 1], parts[j - 1][0])
            self.running(behind[j - 1], behind[j], parts[j][2])
        found = []
        for j in range(count):
            row = dict(parts[j][1])
            if j:
                row[ahead[j]] = 1.0
            if j + 1 < count:
                row[behind[j]] = 1.0
            found.append(row)
        self.equal({ahead[0]: 1.0}, 0.0)
        self.equal({behind[-1]: 1.0}, 0.0)
        return found

    def running(self, now: pulp.LpVariable, last: pulp.LpVariable, added: Terms) -> None:
        self.equal({now: 1.0, last: -1.0} | {v: -c for v, c in added.items()}, 0.0)
