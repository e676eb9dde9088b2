"""Rows of bytes: the memory of a class of positions at every point of a step.

Families (6) to (8) of ``integer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pulp

from ...cost.cost import CostModel
from ...cost.ownership import group_samples
from ...cost.step_time import Vector
from ...memory.rows import (
    AT,
    KEPT_INPUT,
    OWN_BACKWARD,
    OWN_BYTES,
    RECEIVED,
    RETURNING,
    Matrix,
    Rows,
)
from ...schema.layout import Layout
from ..evaluate import limits_bytes
from ..figures import EDGE_FIGURES
from ..option_table import OptionTable
from .variables import Terms, Variables, summed

_KEPT, _RETURNING, _RECEIVED = map(EDGE_FIGURES.index, (KEPT_INPUT, RETURNING, RECEIVED))


class MemoryClass(NamedTuple):
    """A position, its memory, figures [option, figure] of each unit there, and for each unit's
    states whether it takes part."""

    position: int
    limit_bytes: float
    figures: tuple[Matrix, ...]
    takes_part: tuple[Vector, ...]

    def covers(self, other: MemoryClass) -> bool:
        """Whether what fits here fits there."""
        parts = zip(self.takes_part, other.takes_part, strict=True)
        figures = zip(self.figures, other.figures, strict=True)
        return (
            self.limit_bytes <= other.limit_bytes
            and all((a >= b).all() for a, b in parts)
            and all((a[:, OWN_BYTES] >= b[:, OWN_BYTES]).all() for a, b in figures)
        )


def memory_classes(table: OptionTable, model: CostModel) -> list[MemoryClass]:
    """The positions whose memory may bind, in order; limits are those of the model's goal."""
    # Position 0 takes part in every layout, with the largest shards. But where the batch does not
    # divide, another position's group may have a sample more, and devices may differ in memory. A
    # position is left out where another has figures at least as large for every option, and no
    # more memory.
    limits = limits_bytes(model)
    layouts = sorted({layout for states in table.states for layout, _ in states})
    samples = {layout: group_samples(table.model.counts, layout) for layout in layouts}
    found: list[MemoryClass] = []
    seen: set[tuple[float, tuple[int | None, ...]]] = set()
    for position, limit in enumerate(limits):
        there = {layout: samples[layout][position] for layout in layouts}
        key = float(limit), tuple(there.values())
        if key in seen:
            continue
        seen.add(key)
        part = tuple(
            np.array([float(there[layout] is not None) for layout, _ in states])
            for states in table.states
        )
        figures = tuple(table.bytes_at(k, there) for k in range(len(table.options)))
        each = MemoryClass(position, float(max(limit, 1)), figures, part)
        if not any(other.covers(each) for other in found):
            found = [other for other in found if not each.covers(other)] + [each]
    return [each for each in found if not _always_fits(table, each)]


def _always_fits(table: OptionTable, each: MemoryClass) -> bool:
    """Whether even the largest of everything together stays under the limit."""
    most = sum(float(f[:, OWN_BYTES].max(axis=0).sum() + f[:, AT["gradients"]].max()
                     + f[:, AT["gradients_sent"]].max())
               for f in each.figures)  # fmt: skip
    moved = [e.figures[[_RETURNING, _RECEIVED]].max(initial=0.0) for e in table.edges]
    kept = sum(float(e.figures[_KEPT].max(initial=0.0)) for e in table.edges)
    return most + kept + max(moved, default=0.0) <= each.limit_bytes


class MemoryRows:
    """Writes a program's rows of bytes; with ``excess`` a limit may be passed by that share."""

    def __init__(self, program: Variables, rows: Rows, excess: pulp.LpVariable | None) -> None:
        self.program, self.rows, self.excess = program, rows, excess

    def add(self, i: int, each: MemoryClass) -> None:
        """Every row of bytes stays under the class's limit."""
        units = range(len(self.program.x))
        figures = [f / each.limit_bytes for f in each.figures]
        received = [self._received(i, k, each) for k in units]
        returned = [self._returned(i, k, figures[k], each) for k in units]
        flight = self._buckets(i, figures, each)
        kept = [part / each.limit_bytes for part in each.takes_part]
        none: list[Terms] = [{} for _ in units]
        families = [("forward", received, none), ("backward", returned, flight)]
        # Without temporaries of the update, or of an exchange, backward's rows hold these points.
        if any(f[:, AT["update_temp"]].any() for f in figures):
            families.append(("update", none, none))
        if any(f[:, [AT["exchange_temp"], AT["never_together"]]].any() for f in figures):
            families.append(("exchange", none, none))
        for point, *more in families:
            track = self.rows.memory_track(point)
            table = self.program.track(f"m{i}_{track}", self.rows, track, figures, kept)
            there = self._neighbours(track, figures)
            for row, into, buckets, others in zip(table, *more, there, strict=True):
                self._fits([*row.items(), *into.items(), *buckets.items(), *others])
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

    def _received(self, i: int, k: int, each: MemoryClass) -> Terms:
        """The bytes that a unit receives over its edges, of which the largest counts."""
        takes_part = each.takes_part[k] / each.limit_bytes
        found = [
            summed((p.variable, p.figures[_RECEIVED] * takes_part[p.target])
                   for p in self.program.moves[e])
            for e in self.program.model.edges_into[k]
        ]  # fmt: skip
        if len(found) < 2:
            return found[0] if found else {}
        return self._at_least(f"r{i}_{k}", found)

    def _returned(self, i: int, k: int, figures: Matrix, each: MemoryClass) -> Terms:
        """The bytes that stand side by side as the gradient of a unit's output comes back, beyond
        those of its own backward (``timeline.returned_bytes``)."""
        program, takes_part = self.program, each.takes_part[k] / each.limit_bytes
        own = figures @ OWN_BACKWARD
        least: dict[int, float] = {}
        for state, size in zip(program.table.listed[k].state_of, own, strict=True):
            least[state] = min(least.get(state, size), size)
        found = []
        for e in program.model.edges_from[k]:
            sizes = ((p, p.figures[_RETURNING] * takes_part[p.source]) for p in program.moves[e])
            # Most are smaller than whatever the unit's own backward has.
            more = summed((p.variable, size) for p, size in sizes if size > least[p.source])
            if more:
                ours = zip(program.x[k], -own, strict=True)
                found.append(summed([*more.items(), *ours]))
        return self._at_least(f"g{i}_{k}", found) if found else {}

    def _at_least(self, name: str, forms: Sequence[Terms]) -> Terms:
        """A variable of at least each of them: a point has one row, not one for each edge."""
        most = self.program.new(name)
        for terms in forms:
            self.program.at_most(terms | {most: -1.0}, 0.0)
        return {most: 1.0}

    def _buckets(self, i: int, figures: Sequence[Matrix], each: MemoryClass) -> list[Terms]:
        """h_k: as unit k's backward comes, the smaller of what is still to be exchanged and of the
        open buckets, one for each layout in use but one that the unit closes; slices need none, and
        none is open before the first gradient."""
        program, count = self.program, len(self.program.x)
        units = range(0 if program.model.sliced else program.model.last_trained + 1)
        unopened: list[Terms] = [{} for _ in range(len(units), count)]
        if not units:
            return unopened
        sent = [f[:, AT["bucketed"]] for f in figures]
        to_come = [program.new(f"h{i}_come_{k}") for k in units]
        program.equal({to_come[0]: 1.0}, 0.0)
        for k in units[1:]:
            added = summed(zip(program.x[k - 1], sent[k - 1], strict=True))
            program.running(to_come[k], to_come[k - 1], added)
        bucket = program.model.message_bytes / each.limit_bytes
        most = sum(float(s.max()) for s in sent)
        # An option under which a gradient of the unit's own has a bucket to itself takes one off.
        closed: list[Terms] = [
            {
                x: -bucket
                for x, o in zip(row, options, strict=True)
                if program.model.closes_bucket(k, o)
            }
            for k, (row, options) in enumerate(zip(program.x, program.table.options, strict=True))
        ]
        # What is still to be exchanged is the smaller where all of it fits into one bucket.
        if most <= bucket and not any(closed):
            return [*({v: 1.0} for v in to_come), *unopened]
        top: Terms = dict.fromkeys(self._kinds(i), bucket)
        highest, found = sum(top.values()), []
        for k in units:
            # At least the smaller of the two: a binary says which.
            height = program.new(f"h{i}_{k}")
            full = pulp.LpVariable(f"h{i}_{k}_full", cat="Binary")
            program.at_most({to_come[k]: 1.0, height: -1.0, full: -most}, 0.0)
            program.at_most(top | closed[k] | {height: -1.0, full: highest}, highest)
            found.append({height: 1.0})
        return found + unopened

    def _kinds(self, i: int) -> list[pulp.LpVariable]:
        """For each layout that exchanges gradients whether it is in use."""
        used: dict[Layout, pulp.LpVariable] = {}
        for row, options in zip(self.program.x, self.program.table.options, strict=True):
            chosen: dict[Layout, list[pulp.LpVariable]] = {}
            for x, option in zip(row, options, strict=True):
                if option.layout.groups > 1:
                    chosen.setdefault(option.layout, []).append(x)
            for layout, mine in chosen.items():
                if layout not in used:
                    used[layout] = self.program.new(f"k{i}_{len(used)}")
                self.program.at_most(dict.fromkeys(mine, 1.0) | {used[layout]: -1.0}, 0.0)
        return list(used.values())
