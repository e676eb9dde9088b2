"""The integer program: one plan for one number of micro-batches and one slice size, proved best.

Notation: unit k takes option o (x_ko = 1), whose *state* σ is its layout and style; f_k is what
unit k's choice amounts to (``rows.FIGURES``: seconds by kind, bytes by class), linear in x and y;
b, a, c are the coefficients of ``rows`` before, at and after a unit. Each family of constraints,
with the function that adds it:

    one option           Σ_o x_ko = 1                                             ``_options``
    pairs along an edge  Σ_τ y_eστ = Σ_{o in σ} x_source,o ;
                         Σ_σ y_eστ = Σ_{o in τ} x_target,o ;  y ≥ 0               ``_pairs``
    ties                 equal layouts and cuts: for each, equal sums of x        ``_ties``
    step time (P3)       T ≥ Σ_{k<j} b·f_k + a·f_j + Σ_{k>j} c·f_k + d_j
                         for every unit j and link, and T ≥ Σ_k always·f_k        ``_step``
    slices               d_j ≥ slice_k for k > j, where unit j exchanges          ``_slices``
    memory timeline      limit ≥ the rows of bytes, at every unit in forward and
                         backward (there + h_k) and at the update, for every
                         class of positions; limit·(1 + v) where v is to be least ``_memory``
    open buckets         h_k ≥ min(Σ_{i<k} sent_i, layouts in use · bucket)       ``_buckets``
    device-seconds       W·T - Σ_k idle_k ≤ limit (DeepPool's amplification)      ``_budgets``
    fidelity             Σ_k lost_k ≤ 1 - the floor                               ``_budgets``
    step time limit      T ≤ limit                                                ``_budgets``

The objective is T, or W·T - Σ_k idle_k. Of the y, which are not integer, none needs to be: once x
is, each edge has one pair left. Sums over k < j and k > j are running sums, so that a row has few
terms. Times are in units of ``time_unit_s``, bytes in units of the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pulp

from ..budget import energy_budget, gpu_seconds_limit, lost_energy
from ..layout import Layout
from ..options import Option
from ..rows import AT, RECEIVED, Matrix, rows
from ..schedule import ScheduleName
from ..step import LINKS, Vector
from .classes import MemoryClass
from .ledger import EDGE_FIGURES, Ledger

Terms = dict[pulp.LpVariable, float]
"""A linear form without a constant."""


class Pair(NamedTuple):
    """One variable of an edge and what it adds to the target: seconds of ``EDGE_FIGURES``, bytes
    received last; ``source`` and ``target`` are the numbers of the ends' states."""

    variable: pulp.LpVariable
    figures: Vector
    source: int
    target: int


def summed(parts: Iterable[tuple[pulp.LpVariable, float]]) -> Terms:
    """The sum of products, each variable once."""
    total: Terms = {}
    for variable, value in parts:
        if value:
            total[variable] = total.get(variable, 0.0) + float(value)
    return total


class Program:
    """The program of one ledger. ``classes`` are the positions whose memory may bind."""

    def __init__(
        self,
        ledger: Ledger,
        classes: Sequence[MemoryClass],
        schedule: ScheduleName,
        time_unit_s: float,
        *,
        excess: bool = False,
    ) -> None:
        self.ledger, self.model = ledger, ledger.model
        self.unit_s = time_unit_s
        self.rows = rows(self.model.micro_batches, schedule, 0.0)
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self.step = self._new("T")
        self._options()
        self._ties()
        self.pairs = [self._pairs(e) for e in range(len(ledger.edges))]
        self._step(schedule)
        self.excess = self._new("v") if excess else None
        for i, each in enumerate(classes):
            self._memory(i, each)
        self._budgets()

    # -- variables -----------------------------------------------------------------------------

    def _new(self, name: str) -> pulp.LpVariable:
        return pulp.LpVariable(name, lowBound=0)

    def _at_most(self, terms: Terms, most: float) -> None:
        """Σ terms ≤ most."""
        form = pulp.LpAffineExpression(terms)
        self.problem += pulp.LpConstraint(form, pulp.LpConstraintLE, rhs=most)

    def _equal(self, terms: Terms, value: float) -> None:
        form = pulp.LpAffineExpression(terms)
        self.problem += pulp.LpConstraint(form, pulp.LpConstraintEQ, rhs=value)

    def _options(self) -> None:
        self.x = [
            [pulp.LpVariable(f"x_{k}_{o}", cat="Binary") for o in range(len(unit.options))]
            for k, unit in enumerate(self.ledger.units)
        ]
        for row in self.x:
            self._equal(dict.fromkeys(row, 1.0), 1.0)

    def _in_state(self, k: int, state: int) -> list[pulp.LpVariable]:
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
            each = ((x, 0, t) for t in range(targets) for x in self._in_state(b, t))
        elif targets == 1:
            each = ((x, s, 0) for s in range(sources) for x in self._in_state(a, s))
        else:
            each = ((y, s, t) for (s, t), y in self._products(e, sources, targets).items())
        return [Pair(v, edge.figures[:, s, t], s, t) for v, s, t in each]

    def _products(
        self, e: int, sources: int, targets: int
    ) -> dict[tuple[int, int], pulp.LpVariable]:
        edge = self.ledger.edges[e]
        y = {(s, t): self._new(f"y_{e}_{s}_{t}") for s in range(sources) for t in range(targets)}
        for s in range(sources):
            row = dict.fromkeys((y[s, t] for t in range(targets)), 1.0)
            self._equal(row | dict.fromkeys(self._in_state(edge.source, s), -1.0), 0.0)
        for t in range(targets):
            row = dict.fromkeys((y[s, t] for s in range(sources)), 1.0)
            self._equal(row | dict.fromkeys(self._in_state(edge.target, t), -1.0), 0.0)
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
            self._equal(left | dict.fromkeys(keys[1].get(key, ()), -1.0), 0.0)

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

    # -- rows ----------------------------------------------------------------------------------

    def _form(self, k: int, weights: Vector, figures: Matrix) -> Terms:
        """weights·f_k; ``figures`` [option, figure] are the unit's own. Bytes received are left out
        (see ``_received``)."""
        own = zip(self.x[k], figures @ weights, strict=True)
        into = [w for w in EDGE_FIGURES if w != RECEIVED]
        entry = weights[into]
        edges = [
            (pair.variable, float(pair.figures[: len(into)] @ entry))
            for e in self.model.edges_into[k]
            for pair in self.pairs[e]
        ]
        return summed([*own, *(edges if entry.any() else ())])

    def _track(self, name: str, parts: Sequence[tuple[Terms, Terms, Terms]]) -> list[Terms]:
        """The rows of a track from each unit's (before, at, after)."""
        count = len(parts)
        ahead = [self._new(f"{name}_ahead_{j}") for j in range(count)]
        behind = [self._new(f"{name}_behind_{j}") for j in range(count)]
        for j in range(1, count):
            self._running(ahead[j], ahead[j - 1], parts[j - 1][0])
            self._running(behind[j - 1], behind[j], parts[j][2])
        found = []
        for j in range(count):
            row = dict(parts[j][1])
            if j:
                row[ahead[j]] = 1.0
            if j + 1 < count:
                row[behind[j]] = 1.0
            found.append(row)
        self._equal({ahead[0]: 1.0}, 0.0)
        self._equal({behind[-1]: 1.0}, 0.0)
        return found

    def _running(self, now: pulp.LpVariable, last: pulp.LpVariable, added: Terms) -> None:
        self._equal({now: 1.0, last: -1.0} | {v: -c for v, c in added.items()}, 0.0)

    def _step(self, schedule: ScheduleName) -> None:
        """T in units of ``unit_s`` is at least every row of seconds."""
        units = range(len(self.x))
        figures = [u.figures / self.unit_s for u in self.ledger.units]
        self._scale_pairs(1 / self.unit_s)
        always = summed(
            item for k in units for item in self._form(k, self.rows.totals[0], figures[k]).items()
        )
        self._bound(always)
        for link in range(self.rows.timed):
            sends = [self._sends(k, link) for k in units]
            if not any(s.any() for s in sends):
                continue
            family = (self.rows.before[link], self.rows.at[link], self.rows.after[link])
            parts = [tuple(self._form(k, w, figures[k]) for w in family) for k in units]
            delay = self._slices(link, sends) if schedule == "priority" else {}
            for j, row in enumerate(self._track(f"t{link}", parts)):  # type: ignore[arg-type]
                if sends[j].any():
                    self._bound(row | ({delay[j]: 1.0} if j in delay else {}))

    def _scale_pairs(self, factor: float) -> None:
        """Edges' seconds in units of time; bytes stay."""
        scale = np.array([1.0 if f == RECEIVED else factor for f in EDGE_FIGURES])
        self.pairs = [[p._replace(figures=p.figures * scale) for p in row] for row in self.pairs]

    def _bound(self, row: Terms) -> None:
        self._at_most(row | {self.step: row.get(self.step, 0.0) - 1.0}, 0.0)

    def _sends(self, k: int, link: int) -> Vector:
        """For each option the seconds of exchange on a link."""
        seconds: Vector = self.ledger.units[k].figures[:, AT[f"exchange.{LINKS[link]}"]]
        return seconds

    def _slices(self, link: int, sends: Sequence[Vector]) -> dict[int, pulp.LpVariable]:
        """For each unit j the longest slice that may be on the wire before its own go."""
        count, found = len(sends), {}
        slices = [self._slice_s(k, link) for k in range(count)]
        longest = 0.0
        following: pulp.LpVariable | None = None  # the longest slice of the units after j
        for j in reversed(range(count - 1)):
            if slices[j + 1].any():
                wait = self._new(f"w{link}_{j}")
                own = summed(zip(self.x[j + 1], slices[j + 1], strict=True))
                self._at_most(own | {wait: -1.0}, 0.0)
                if following is not None:
                    self._at_most({following: 1.0, wait: -1.0}, 0.0)
                longest, following = max(longest, slices[j + 1].max()), wait
            if following is not None and sends[j].any():
                delay = found[j] = self._new(f"d{link}_{j}")
                idle = [x for x, s in zip(self.x[j], sends[j], strict=True) if not s]
                self._at_most(
                    {following: 1.0, delay: -1.0} | dict.fromkeys(idle, -float(longest)), 0.0
                )
        return found

    def _slice_s(self, k: int, link: int) -> Vector:
        slices: Vector = self.ledger.units[k].slice_s[link] / self.unit_s
        return slices

    # -- limits --------------------------------------------------------------------------------

    def _memory(self, i: int, each: MemoryClass) -> None:
        """Every row of bytes stays under the class's limit."""
        units, timed = range(len(self.x)), self.rows.timed
        figures = [f / each.limit_bytes for f in each.figures]
        received = [self._received(i, k, each) for k in units]
        flight = self._buckets(i, figures, each)
        for track, flying in ((timed, [{}] * len(units)), (timed + 1, flight)):
            family = (self.rows.before[track], self.rows.at[track], self.rows.after[track])
            parts = [tuple(self._form(k, w, figures[k]) for w in family) for k in units]
            table = self._track(f"m{i}_{track}", parts)  # type: ignore[arg-type]
            for row, into, buckets in zip(table, received, flying, strict=True):
                for terms in into:
                    self._fits([*row.items(), *terms.items(), *buckets.items()])
        update = (self._form(k, self.rows.totals[1], figures[k]).items() for k in units)
        self._fits([t for part in update for t in part])

    def _fits(self, parts: Iterable[tuple[pulp.LpVariable, float]]) -> None:
        """A row of bytes, in units of the limit, stays under it (or under 1 + v)."""
        over = {self.excess: -1.0} if self.excess is not None else {}
        self._at_most(summed(parts) | over, 1.0)

    def _received(self, i: int, k: int, each: MemoryClass) -> list[Terms]:
        """The bytes that a unit receives over each of its edges, of which the largest counts."""
        takes_part = each.takes_part[k]
        found = [
            summed((p.variable, p.figures[-1] / each.limit_bytes * takes_part[p.target])
                   for p in self.pairs[e])
            for e in self.model.edges_into[k]
        ]  # fmt: skip
        if len(found) < 2:
            return found or [{}]
        most = self._new(f"r{i}_{k}")
        for terms in found:
            self._at_most(terms | {most: -1.0}, 0.0)
        return [{most: 1.0}]

    def _buckets(self, i: int, figures: Sequence[Matrix], each: MemoryClass) -> list[Terms]:
        """h_k: as unit k's backward comes, the smaller of what is still to be exchanged and of the
        open buckets, one for each layout in use; slices need no buckets."""
        units = range(len(self.x))
        if self.model.sliced:
            return [{} for _ in units]
        sent = [f[:, AT["exchanged"]] for f in figures]
        to_come = [self._new(f"h{i}_come_{k}") for k in units]
        self._equal({to_come[0]: 1.0}, 0.0)
        for k in units[1:]:
            added = summed(zip(self.x[k - 1], sent[k - 1], strict=True))
            self._running(to_come[k], to_come[k - 1], added)
        bucket = self.model.bucket_bytes / each.limit_bytes
        most = sum(float(s.max()) for s in sent)
        if most <= bucket:
            return [{v: 1.0} for v in to_come]
        kinds = self._kinds(i)
        return [self._smaller(f"h{i}_{k}", to_come[k], most, kinds, bucket) for k in units]

    def _kinds(self, i: int) -> list[pulp.LpVariable]:
        """For each layout that exchanges gradients whether it is in use."""
        used: dict[Layout, pulp.LpVariable] = {}
        for row, unit in zip(self.x, self.ledger.units, strict=True):
            options: dict[Layout, list[pulp.LpVariable]] = {}
            for x, option in zip(row, unit.options, strict=True):
                options.setdefault(option.layout, []).append(x)
            for layout, mine in options.items():
                if layout.groups > 1:
                    if layout not in used:
                        used[layout] = self._new(f"k{i}_{len(used)}")
                    self._at_most(dict.fromkeys(mine, 1.0) | {used[layout]: -1.0}, 0.0)
        return list(used.values())

    def _smaller(
        self,
        name: str,
        to_come: pulp.LpVariable,
        most: float,
        kinds: Sequence[pulp.LpVariable],
        bucket: float,
    ) -> Terms:
        """h ≥ the smaller of to_come and Σ kinds · bucket; a binary says which."""
        height = self._new(name)
        full = pulp.LpVariable(f"{name}_full", cat="Binary")
        self._at_most({to_come: 1.0, height: -1.0, full: -most}, 0.0)
        top = bucket * len(kinds)
        buckets = dict.fromkeys(kinds, bucket)
        self._at_most(buckets | {height: -1.0, full: top}, top)
        return {height: 1.0}

    def _budgets(self) -> None:
        """Device-seconds, fidelity, and the time that a step may take."""
        goal, limit = self.model.goal, gpu_seconds_limit(self.model)
        if limit < float("inf"):
            self._at_most(self.device_seconds(), limit / self.unit_s)
        if goal.time_limit_s is not None:
            self._at_most({self.step: 1.0}, goal.time_limit_s / self.unit_s)
        lost = self.lost()
        if lost:
            self._at_most(lost, energy_budget(self.model))

    def lost(self) -> Terms:
        """The share of the gradient's energy that is left for later."""
        return summed(
            (x, lost_energy(self.model, k, option))
            for k, row in enumerate(self.x)
            for x, option in zip(row, self.ledger.units[k].options, strict=True)
        )

    def device_seconds(self) -> Terms:
        """W·T less what is idle."""
        idle = summed(
            (x, -figure / self.unit_s)
            for row, unit in zip(self.x, self.ledger.units, strict=True)
            for x, figure in zip(row, unit.figures[:, AT["idle"]], strict=True)
        )
        return idle | {self.step: float(self.model.world_size)}

    # -- answers -------------------------------------------------------------------------------

    @property
    def presses(self) -> bool:
        """Whether a larger T is worse, so that it equals the largest row in the best solution."""
        return bool(self.problem.objective.get(self.step, 0.0))

    @property
    def objective(self) -> Terms:
        """What is to be least, in units of ``unit_s``."""
        if self.model.goal.objective == "time":
            return {self.step: 1.0}
        return self.device_seconds()

    def within(self, most_s: float) -> None:
        """Only what is at most that good counts from now on."""
        if self.model.goal.objective == "time":
            self.step.upBound = most_s / self.unit_s
        else:
            self._at_most(self.device_seconds(), most_s / self.unit_s)

    def minimise(self, what: str) -> None:
        """Makes what a limit of the goal bounds the objective."""
        if what == "memory_limit_bytes":
            terms: Terms = {self.excess: 1000.0} if self.excess is not None else {}
        elif what == "amplification_limit":
            terms = self.device_seconds()
        else:
            terms = {self.step: 1.0}
        self.problem.setObjective(pulp.LpAffineExpression(terms))

    def simplest(self) -> None:
        """Makes the fewest changes of layout the objective, and then the least loss; a policy
        counts a little, so that none is chosen for nothing."""
        parts: list[tuple[pulp.LpVariable, float]] = [(v, 0.5 * c) for v, c in self.lost().items()]
        for edge, pairs in zip(self.ledger.edges, self.pairs, strict=True):
            source, target = (self.ledger.units[k].states for k in (edge.source, edge.target))
            parts += [(p.variable, 1.0) for p in pairs if source[p.source] != target[p.target]]
        policies = sum(len(row) for row in self.x)
        for row, unit in zip(self.x, self.ledger.units, strict=True):
            for x, option in zip(row, unit.options, strict=True):
                parts.append((x, 0.4 / policies * (option[2:] != Option(option.layout)[2:])))
        self.problem.setObjective(pulp.LpAffineExpression(summed(parts)))

    def forbid(self, numbers: Sequence[int]) -> None:
        """Excludes one set of decisions."""
        chosen = {row[n]: 1.0 for row, n in zip(self.x, numbers, strict=True)}
        self._at_most(chosen, len(numbers) - 1.0)

    def chosen(self) -> list[int]:
        """The number of each unit's option in the solution found."""
        return [int(np.argmax([v.value() or 0.0 for v in row])) for row in self.x]
