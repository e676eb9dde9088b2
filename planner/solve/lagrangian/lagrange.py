"""The cheapest plan for given weights, and the search for the weights that prove most.

A step is the largest of many sums, so no unit can be decided alone. With a weight on each of these
sums, and on each limit, it is one sum, and the cheapest plan is found by dynamic programming over
the units (``dynamic``). Its price less what the weights charge for the limits is a lower bound for
every plan x that keeps them:

    T(x) ≥ min over x of ( Σ_r λ_r · row_r(x) + Σ_p μ_p · bytes_p(x) + … ) - Σ_p μ_p · limit - …

for weights λ on seconds that add up to 1. A small linear program over the plans found so far sets
the weights (``master``); each guess is drawn back toward the weights that proved most so far
(smoothing, Wentges 1997). The mixture that the program ends with is rounded (``rounding``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...cost.step_time import Vector
from ...memory.rows import ALWAYS, AT, ENTRY, LOST_FIGURE, RECEIVED, Matrix, Rows, prices
from .dynamic import Order, minimise, order_of
from .finish import Finish
from .limits import Limits
from .master import Master, Mixture, Weights
from .moves import Charges
from .option_table import OptionTable
from .rounding import Rounding, Standing
from .tables import Block, Numbers, Reals, UnitTable

ITERATIONS = 400
SMOOTHING = 0.5
"""How far each guess of weights is drawn back to the best ones yet."""
ROUND_EVERY = 6
"""Iterations between roundings."""
LARGEST = 4
"""Plans of the mixture, those with the largest shares, that the last step of rounding takes states
and policies from."""
FINISH_S = 1.0
FINISH_UNIT_S = 0.004
"""Seconds that it may take, each time, and more for each unit."""
EDGE_FIGURES = [*ENTRY, RECEIVED]
IDLE = AT["idle"]


class Priced(NamedTuple):
    """The cheapest plan for some weights, and the bound that it proves."""

    numbers: Numbers
    bound: float


class Outcome(NamedTuple):
    """What a search found: the best plan and what it is, the bound on the objective of every plan
    that keeps the limits (infinite where none does), and how often weights were tried."""

    best: Standing
    bound: float
    iterations: int
    weights: Weights | None


class Lagrangian:
    """The units' and edges' tables as prices."""

    def __init__(self, sheet: OptionTable, rows: Rows, limits: Limits) -> None:
        self.sheet, self.rows, self.limits = sheet, rows, limits
        sizes = [len(u.states) for u in sheet.units]
        ends = [(e.source, e.target) for e in sheet.edges]
        ends += [(t.source, t.target) for t in sheet.ties]
        self.order: Order = order_of(sizes, ends)
        self._ties = [(t.source, t.target, np.where(t.agree, 0.0, np.inf)) for t in sheet.ties]
        # Of several edges into a unit only the one that can carry most is charged for the room
        # that it takes: the largest of them is what counts, so that the bound stays a bound.
        largest: dict[int, int] = {}
        for e, edge in enumerate(sheet.edges):
            best = largest.setdefault(edge.target, e)
            if edge.figures[-1].max() > sheet.edges[best].figures[-1].max():
                largest[edge.target] = e
        self._receiving = set(largest.values())
        self._charges = Charges(sheet.moves, sheet.edges)

    def cheapest(self, weights: Weights) -> Priced:
        """The cheapest plan for the weights."""
        price = self.prices(weights)
        choices = [_choices(u, p) for u, p in zip(self.sheet.units, price, strict=True)]
        edges = []
        for e, edge in enumerate(self.sheet.edges):
            received = price[edge.target, RECEIVED] if e in self._receiving else 0.0
            charged = self._charges.of(e, price, EDGE_FIGURES, received)
            edges.append((edge.source, edge.target, charged))
        answer = minimise(self.order, [c.least for c in choices], [*edges, *self._ties])
        numbers = [
            u.number(int(s), int(c.memory[s]), int(c.exchange[s]))
            for u, c, s in zip(self.sheet.units, choices, answer.states, strict=True)
        ]
        charge = weights.charge(self.limits, self.rows.timed)
        return Priced(np.array(numbers), answer.price - charge)

    def prices(self, weights: Weights) -> Matrix:
        """What one of each figure of each unit costs, [unit, figure]."""
        price = prices(self.rows, weights.tracks, weights.totals)
        for overlap in self.sheet.memory.overlaps:
            price[:, AT[overlap.field]] += overlap.priced(price[:, AT[overlap.point]])
        price[:, IDLE] -= weights.gpu + (1.0 if self.limits.economical else 0.0)
        return price

    def start(self) -> list[Weights]:
        """Weights to begin with: everything one after another, every link full, little memory."""
        count = len(self.sheet.units)
        shape = len(self.rows.before), count
        one = float(self.limits.devices) if self.limits.economical else 1.0
        found = []
        for track in range(self.rows.timed):
            weights = Weights(np.zeros(shape), np.zeros(3))
            weights.tracks[track] = one / count
            found.append(weights)
        serial = np.zeros(3)
        serial[ALWAYS] = one
        lean = Weights(np.zeros(shape), serial.copy())
        scale = max(self.limits.memory_bytes, 1.0)
        lean.tracks[self.rows.timed :] = one / count / scale
        return [Weights(np.zeros(shape), serial), *found, lean]


class _Choice(NamedTuple):
    """The least price of each state of a unit, and the policies that have it."""

    least: Reals
    memory: Numbers
    exchange: Numbers


def _choices(unit: UnitTable, price: Vector) -> _Choice:
    memory, exchange = _priced(unit.memory, price), _priced(unit.exchange, price)
    return _Choice(memory.min(axis=1) + exchange.min(axis=1), memory.argmin(1), exchange.argmin(1))


def _priced(block: Block, price: Vector) -> Reals:
    found: Reals = block.figures @ price + block.lost * price[LOST_FIGURE]
    return found if block.free else np.where(block.allowed, found, np.inf)


class Search:
    """The loop of pricing, mixing and rounding, and the best of each so far. A plan whose objective
    is at most ``target`` is good enough."""

    def __init__(
        self, lagrangian: Lagrangian, deadline: float, gap: float, target: float = -1.0
    ) -> None:
        self.lagrangian, self.deadline, self.gap = lagrangian, deadline, gap
        self.target = target
        sheet, rows, limits = lagrangian.sheet, lagrangian.rows, lagrangian.limits
        self.rounding = Rounding(sheet, rows, limits)
        self.master = Master(rows.timed, limits)
        self.seen: list[Standing] = []
        self._known: set[bytes] = set()
        self.best: Standing | None = None
        self.bound = 0.0
        self.centre: Weights | None = None
        self.iterations = 0
        self._finished: Standing | None = None

    def run(self, first: Sequence[Numbers], cutoff: float = float("inf")) -> Outcome:
        """All of it, from the plans ``first`` on; ends early once no plan can be better than an
        objective of ``cutoff``."""
        for numbers in first:
            self._add(self.rounding.stand(numbers))
        for weights in self.lagrangian.start():
            self._price(weights)
        mixture = self.master.solve()
        while not self._done(cutoff):
            self.iterations += 1
            guess = mixture.weights
            if self.centre is not None:
                guess = self.centre.mixed(guess, SMOOTHING)
            if not self._price(guess) and not self._price(mixture.weights):
                break
            mixture = self.master.solve()
            if self.iterations % ROUND_EVERY == 0 and self._promising(mixture):
                self._round(mixture)
                self._finish(mixture)
        if not self._done(cutoff):
            self._round(mixture)
            self._finish(mixture)
        if not self._done(cutoff) and self.best is not None:
            self._offer(self.rounding.polish(self.best, self.deadline))
        return self._outcome()

    def _outcome(self) -> Outcome:
        assert self.best is not None
        score = self.best.score
        bound = min(self.bound, score.objective) if not score.over else self.bound
        return Outcome(self.best, bound, self.iterations, self.centre)

    def _done(self, cutoff: float) -> bool:
        assert self.best is not None
        over, value = self.best.score
        closed = not over and value <= max(self.target, self.bound + self.gap * value)
        late = time.perf_counter() > self.deadline
        return closed or late or self.bound > cutoff or self.iterations >= ITERATIONS

    def _promising(self, mixture: Mixture) -> bool:
        """Whether a plan as good as the mixture would end the search."""
        idle = sum(float(w) * p.idle_s for w, p in zip(mixture.shares, self.seen, strict=True))
        value = self.lagrangian.limits.objective(mixture.step_s, idle)
        return value <= self.enough

    @property
    def enough(self) -> float:
        """The objective that is close enough to the bound."""
        return self.bound / (1.0 - self.gap)

    def _price(self, weights: Weights) -> bool:
        """Finds the cheapest plan for the weights; says whether it is new."""
        found = self.lagrangian.cheapest(weights)
        if self.centre is None or found.bound > self.bound:
            self.bound, self.centre = max(found.bound, self.bound), weights
        return self._add(self.rounding.stand(found.numbers))

    def _finish(self, mixture: Mixture) -> None:
        """Decides states and policies of all units together."""
        assert self.best is not None
        left = self.deadline - time.perf_counter()
        if not self._done(float("inf")) and self.best is not self._finished:
            largest = [self.seen[i] for i in np.argsort(-mixture.shares)[:LARGEST]]
            prices = None if self.centre is None else self.lagrangian.prices(self.centre)
            program = Finish(self.rounding, self.best, largest, prices)
            most = FINISH_S + FINISH_UNIT_S * len(self.best.numbers)
            self._offer(program.run(max(min(left / 4, most), 0.01), self.enough))
            self._finished = self.best

    def _add(self, plan: Standing) -> bool:
        key = plan.numbers.tobytes()
        if key in self._known:
            return False
        self._known.add(key)
        self.seen.append(plan)
        self.master.add(plan.rows, plan.idle_s)
        self._offer(plan)
        return True

    def _offer(self, plan: Standing) -> None:
        if self.best is None or plan.score.beats(self.best.score):
            self.best = plan

    def _round(self, mixture: Mixture) -> None:
        """Improves the best plan and the largest plans of the mixture by blocks of the others."""
        assert self.best is not None
        shares = mixture.shares
        parts = [self.seen[i] for i in np.argsort(-shares)[: int((shares > 1e-9).sum())]]
        for start in (self.best, *parts[:2]):
            if self._done(float("inf")):
                return
            plan, before = start, None
            for _ in range(3):
                if plan is before:
                    break
                before = plan
                for other in (*parts, self.best):
                    plan = self.rounding.improve(plan, other.numbers, self.deadline, self.enough)
            self._offer(plan)
