"""Rows of bytes: the memory of a class of positions at every point of a step.

Families (6) to (8) of ``integer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pulp

from ...cost.step_time import Vector
from ...memory.rows import AT, Matrix, Rows
from ...schema.layout import Layout
from .variables import Terms, Variables, summed


class MemoryClass(NamedTuple):
    """A position, its memory, figures [option, figure] of each unit there, and for each unit's
    states whether it takes part."""

    position: int
    limit_bytes: float
    figures: tuple[Matrix, ...]
    takes_part: tuple[Vector, ...]


class Timeline:
    """Writes the rows of bytes of a program; with ``excess`` a limit may be passed by that share of
    it."""

    def __init__(self, program: Variables, rows: Rows, excess: pulp.LpVariable | None) -> None:
        self.program, self.rows, self.excess = program, rows, excess

    def add(self, i: int, each: MemoryClass) -> None:
        """Every row of bytes stays under the class's limit."""
        units = range(len(self.program.x))
        figures = [f / each.limit_bytes for f in each.figures]
        received = [self._received(i, k, each) for k in units]
        flight = self._buckets(i, figures, each)
        none: list[Terms] = [{} for _ in units]
        nothing: list[list[Terms]] = [[{}] for _ in units]
        families = [("forward", received, none), ("backward", received, flight)]
        if any(f[:, AT["update_temp"]].any() for f in figures):
            families.append(("update", nothing, none))  # else backward's rows hold it
        if any(f[:, [AT["exchange_temp"], AT["never_together"]]].any() for f in figures):
            families.append(("exchange", nothing, none))
        for point, coming, flying in families:
            track = self.rows.memory_track(point)
            family = (self.rows.before[track], self.rows.at[track], self.rows.after[track])
            parts = [tuple(self.program.form(k, w, figures[k]) for w in family) for k in units]
            table = self.program.track(f"m{i}_{track}", parts)  # type: ignore[arg-type]
            there = self._neighbours(track, figures)
            for row, into, buckets, others in zip(table, coming, flying, there, strict=True):
                for terms in into:
                    self._fits([*row.items(), *terms.items(), *buckets.items(), *others])
        update = (self.program.form(k, self.rows.totals[1], figures[k]).items() for k in units)
        self._fits([t for part in update for t in part])

    def _neighbours(
        self, track: int, figures: Sequence[Matrix]
    ) -> list[list[tuple[pulp.LpVariable, float]]]:
        """For each unit what others have at its point."""
        found: list[list[tuple[pulp.LpVariable, float]]] = [[] for _ in figures]
        for overlap in self.program.table.memory.overlaps:
            weight = self.rows.at[track][AT[overlap.point]]
            for at, of in zip(overlap.at, overlap.of, strict=True):
                values = figures[of][:, AT[overlap.field]] * weight
                if values.any():
                    found[at] += zip(self.program.x[of], values, strict=True)
        return found

    def _fits(self, parts: Iterable[tuple[pulp.LpVariable, float]]) -> None:
        """A row of bytes, in units of the limit, stays under it (or under 1 + v)."""
        over = {self.excess: -1.0} if self.excess is not None else {}
        self.program.at_most(summed(parts) | over, 1.0)

    def _received(self, i: int, k: int, each: MemoryClass) -> list[Terms]:
        """The bytes that a unit receives over each of its edges, of which the largest counts."""
        takes_part = each.takes_part[k]
        found = [
            summed((p.variable, p.figures[-1] / each.limit_bytes * takes_part[p.target])
                   for p in self.program.moves[e])
            for e in self.program.model.edges_into[k]
        ]  # fmt: skip
        if len(found) < 2:
            return found or [{}]
        most = self.program.new(f"r{i}_{k}")
        for terms in found:
            self.program.at_most(terms | {most: -1.0}, 0.0)
        return [{most: 1.0}]

    def _buckets(self, i: int, figures: Sequence[Matrix], each: MemoryClass) -> list[Terms]:
        """h_k: as unit k's backward comes, the smaller of what is still to be exchanged and of the
        open buckets, one for each layout in use but one that the unit closes; slices need none."""
        units = range(len(self.program.x))
        if self.program.model.sliced:
            return [{} for _ in units]
        sent = [f[:, AT["bucketed"]] for f in figures]
        to_come = [self.program.new(f"h{i}_come_{k}") for k in units]
        self.program.equal({to_come[0]: 1.0}, 0.0)
        for k in units[1:]:
            added = summed(zip(self.program.x[k - 1], sent[k - 1], strict=True))
            self.program.running(to_come[k], to_come[k - 1], added)
        bucket = self.program.model.message_bytes / each.limit_bytes
        most = sum(float(s.max()) for s in sent)
        closed = [self._closed(k, bucket) for k in units]
        if most <= bucket and not any(closed):
            return [{v: 1.0} for v in to_come]
        top: Terms = dict.fromkeys(self._kinds(i), bucket)
        return [self._smaller(f"h{i}_{k}", to_come[k], most, top, closed[k]) for k in units]

    def _closed(self, k: int, bucket: float) -> Terms:
        """What a unit takes off that by the options under which a gradient of its own has a bucket
        to itself."""
        options = zip(self.program.x[k], self.program.table.listed[k].options, strict=True)
        closes = self.program.model.closes_bucket
        return {x: -bucket for x, option in options if closes(k, option)}

    def _kinds(self, i: int) -> list[pulp.LpVariable]:
        """For each layout that exchanges gradients whether it is in use."""
        used: dict[Layout, pulp.LpVariable] = {}
        for row, unit in zip(self.program.x, self.program.table.listed, strict=True):
            options: dict[Layout, list[pulp.LpVariable]] = {}
            for x, option in zip(row, unit.options, strict=True):
                options.setdefault(option.layout, []).append(x)
            for layout, mine in options.items():
                if layout.groups > 1:
                    if layout not in used:
                        used[layout] = self.program.new(f"k{i}_{len(used)}")
                    self.program.at_most(dict.fromkeys(mine, 1.0) | {used[layout]: -1.0}, 0.0)
        return list(used.values())

    def _smaller(
        self, name: str, to_come: pulp.LpVariable, most: float, top: Terms, closed: Terms
    ) -> Terms:
        """h ≥ the smaller of to_come and top + closed; a binary says which."""
        height = self.program.new(name)
        full = pulp.LpVariable(f"{name}_full", cat="Binary")
        self.program.at_most({to_come: 1.0, height: -1.0, full: -most}, 0.0)
        highest = sum(top.values())
        self.program.at_most(top | closed | {height: -1.0, full: highest}, highest)
        return {height: 1.0}
