"""Plans and proven bounds for many units on many ranks: dynamic programming under multipliers.

A step is the largest of many sums, so no unit can be decided alone. With a weight on each of these
sums (all weights together 1), and a price on memory, it is one sum, and the cheapest plan is found
by dynamic programming over the units (``dynamic``). Its price is a lower bound for every plan:

    T(x) ≥ min over x of ( Σ_r λ_r · row_r(x) + Σ_p μ_p · (bytes_p(x) - limit) )

for every plan x that fits. A small linear program over the plans found so far sets the weights
(``master``), which the bound guides back toward the best ones yet (smoothing after Wentges, 1997).
The mixture that the program ends with is rounded to one plan (``rounding``). What is between the
plan and the bound is reported as the gap.

With each number of micro-batches the search is made anew; one whose bound is above a plan already
found is left early. The objective is the step by formula, as that of the integer program is; the
plan carries the simulated prediction.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from .cost import CostModel, Decisions
from .dynamic import Order, minimise, order_of
from .evaluate import excess, limits_bytes, rank_memory
from .master import Master, Weights
from .memory import MemoryModel
from .rounding import Rounding, Standing
from .rows import AT, Rows, bucket_share, prices, rows
from .search import Space
from .sheet import EDGE_FIGURES, Numbers, Sheet
from .solver import Problem

GAP = 0.005
"""The search ends when plan and bound are this close."""
ITERATIONS = 200
SMOOTHING = 0.5
"""How far each guess of weights is drawn back to the best ones yet."""


class Priced(NamedTuple):
    """The cheapest plan for some weights, and the bound that it proves."""

    numbers: Numbers
    bound_s: float


class Outcome(NamedTuple):
    """What a search over one sheet found: the best plan (its bytes over the limit, its step by
    formula), the bound on every plan that fits, and how often the linear program was asked."""

    decisions: Decisions
    over_bytes: float
    step_s: float
    bound_s: float
    iterations: int


class Lagrangian:
    """The search for one number of micro-batches."""

    def __init__(self, sheet: Sheet, rows_: Rows, limit_bytes: float) -> None:
        self.sheet, self.rows, self.limit_bytes = sheet, rows_, limit_bytes
        sizes = [len(u.states) for u in sheet.units]
        self.order: Order = order_of(sizes, [(e.source, e.target) for e in sheet.edges])
        largest: dict[int, int] = {}
        for e, edge in enumerate(sheet.edges):
            best = largest.setdefault(edge.target, e)
            if edge.figures[-1].max() > sheet.edges[best].figures[-1].max():
                largest[edge.target] = e
        self._receiving = set(largest.values())
        self._flat = [e.figures.reshape(len(EDGE_FIGURES), -1) for e in sheet.edges]

    def cheapest(self, weights: Weights) -> Priced:
        """The cheapest plan for the weights. Of several edges into a unit only the one that can
        carry most is charged for the room that it takes, which keeps the bound a bound."""
        price = prices(self.rows, weights.tracks, weights.totals)
        units, best = [], []
        for table, per_figure in zip(self.sheet.units, price, strict=True):
            options = table.figures @ per_figure
            units.append(np.minimum.reduceat(options, table.begin))
            best.append(options)
        edges = []
        for e, edge in enumerate(self.sheet.edges):
            per_figure = price[edge.target, list(EDGE_FIGURES)]
            if e not in self._receiving:
                per_figure[-1] = 0.0
            seconds = (per_figure @ self._flat[e]).reshape(edge.figures.shape[1:])
            edges.append((edge.source, edge.target, seconds))
        answer = minimise(self.order, units, edges)
        numbers = [
            int(
                table.begin[s]
                + best[k][table.begin[s] : _end(table.begin, s, len(best[k]))].argmin()
            )
            for k, (table, s) in enumerate(zip(self.sheet.units, answer.states, strict=True))
        ]
        memory = weights.tracks[self.rows.timed :].sum() + weights.totals[1:].sum()
        return Priced(np.array(numbers), answer.price - float(memory) * self.limit_bytes)

    def start(self) -> list[Weights]:
        """Weights to begin with: everything one after another, every link full, little memory."""
        count = len(self.sheet.units)
        shape = len(self.rows.before), count
        found = [Weights(np.zeros(shape), np.array([1.0, 0.0]))]
        for track in range(self.rows.timed):
            weights = Weights(np.zeros(shape), np.zeros(2))
            weights.tracks[track] = 1.0 / count
            found.append(weights)
        lean = Weights(np.zeros(shape), np.array([1e-6, 0.0]))
        lean.tracks[self.rows.timed :] = 1.0 / count
        return [*found, lean]


def _end(begin: Numbers, state: int, options: int) -> int:
    return int(begin[state + 1]) if state + 1 < len(begin) else options


def search(
    lagrangian: Lagrangian,
    first: list[Numbers],
    deadline: float,
    cutoff_s: float = float("inf"),
    gap: float = GAP,
) -> Outcome:
    """The best plan and bound; ends early once the bound is above ``cutoff_s``. ``first`` are
    plans to begin with."""
    return _Search(lagrangian, deadline, gap).run(first, cutoff_s)


class _Search:
    """The loop of pricing, mixing and rounding, and the best of each so far."""

    def __init__(self, lagrangian: Lagrangian, deadline: float, gap: float) -> None:
        self.lagrangian, self.deadline, self.gap = lagrangian, deadline, gap
        self.rounding = Rounding(lagrangian.sheet, lagrangian.rows, lagrangian.limit_bytes)
        self.master = Master(lagrangian.rows.timed, lagrangian.limit_bytes)
        self.seen: list[Standing] = []
        self.best: Standing | None = None
        self.bound, self.centre = 0.0, None  # type: float, Weights | None
        self.iterations = 0

    def run(self, first: list[Numbers], cutoff_s: float) -> Outcome:
        """All of it."""
        for numbers in first:
            self._add(self.rounding.stand(numbers))
        for weights in self.lagrangian.start():
            self._price(weights)
        while not self._done(cutoff_s):
            self.iterations += 1
            mixture = self.master.solve()
            guess = mixture.weights
            if self.centre is not None:
                guess = self.centre.mixed(guess, SMOOTHING)
            fresh = self._price(guess)
            if not fresh and not self._price(mixture.weights):
                break
            if self.iterations % 5 == 0:
                self._round(mixture.shares)
        self._round(self.master.solve().shares)
        return self._outcome()

    def _outcome(self) -> Outcome:
        assert self.best is not None
        over, step = self.rounding.score(self.best.rows)
        decisions = self.lagrangian.sheet.choose(self.best.numbers)
        bound = min(self.bound, step) if not over else self.bound
        return Outcome(decisions, over, step, bound, self.iterations)

    def _done(self, cutoff_s: float) -> bool:
        assert self.best is not None
        over, step = self.rounding.score(self.best.rows)
        closed = not over and step - self.bound <= self.gap * step
        late = time.perf_counter() > self.deadline
        return closed or late or self.bound > cutoff_s or self.iterations >= ITERATIONS

    def _price(self, weights: Weights) -> bool:
        """Finds the cheapest plan for the weights; says whether it is new."""
        found = self.lagrangian.cheapest(weights)
        seconds = weights.tracks[: self.lagrangian.rows.timed].sum() + weights.totals[0]
        if abs(seconds - 1.0) < 1e-6 and (self.centre is None or found.bound_s > self.bound):
            self.bound, self.centre = max(found.bound_s, self.bound), weights
        return self._add(self.rounding.stand(found.numbers))

    def _add(self, plan: Standing) -> bool:
        if any(np.array_equal(plan.numbers, other.numbers) for other in self.seen):
            return False
        self.seen.append(plan)
        self.master.add(plan.rows)
        self._offer(plan)
        return True

    def _offer(self, plan: Standing) -> None:
        score = self.rounding.score
        if self.best is None or self.rounding.beats(score(plan.rows), score(self.best.rows)):
            self.best = plan

    def _round(self, shares: np.ndarray) -> None:  # type: ignore[type-arg]
        """Improves the best plan and the largest plans of the mixture by blocks of the others."""
        assert self.best is not None
        parts = [self.seen[i] for i in np.argsort(-shares)[: (shares > 1e-9).sum()]]
        for start in (self.best, *parts[:2]):
            plan = start
            for _ in range(3):
                before = plan
                for other in (*parts, self.best):
                    plan = self.rounding.improve(plan, other.numbers, self.deadline)
                if plan is before:
                    break
            self._offer(plan)
