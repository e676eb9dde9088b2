"""The cheapest plan for given weights, and the search for the weights that prove most.

A step is the largest of many sums, so no unit can be decided alone. With a weight on each of these
sums, and on each limit, it is one sum, and the cheapest plan is found by dynamic programming over
the units (``dynamic``). A small linear program over the plans found so far sets the weights
(``master``); each guess is drawn back toward the weights that proved most so far (smoothing,
Wentges 1997). The plans of that mixture take over blocks of units from each other (``judging``),
a restricted integer program decides among their states and policies (``restricted_program``), and
what single units can still improve is tried one by one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...memory.rows import ALWAYS, AT, Matrix, Rows, prices
from ..edge_table import EDGE_FIGURES
from ..option_table import OptionTable
from ..unit_figures import Numbers, Reals
from .dynamic import minimise, order_of
from .judging import IDLE, INFINITE, JudgedPlan, Limits, PlanJudge
from .master import Master, Mixture, Weights
from .restricted_program import RestrictedProgram

ITERATIONS = 400
# How far each guess of weights is drawn back to the best ones yet.
SMOOTHING = 0.5
# Iterations between restricted programs.
RESTRICTED_EVERY = 6
# Plans of the mixture, those with the largest shares, that the restricted program takes states and
# policies from.
LARGEST = 4
# Seconds that it may take, each time, and more for each unit.
RESTRICTED_S = 1.0
RESTRICTED_UNIT_S = 0.004


class Outcome(NamedTuple):
    """What a search found: the best plan, and the bound on the objective of every plan that keeps
    the limits (infinite where none does)."""

    best: JudgedPlan
    bound: float


# [Note: The bound that the Lagrangian proves]
# Let x be a plan that keeps all limits, and T(x) its step, the largest row of seconds. For weights
# λ ≥ 0 on the rows of seconds that add up to 1, Σ λ_r·row_r(x) is a mean of numbers none of which
# is above T(x). For weights μ ≥ 0 on the limits, μ_p·(row_p(x) - limit_p) is at most 0. So
#     T(x) ≥ Σ λ_r·row_r(x) + Σ μ_p·row_p(x) - Σ μ_p·limit_p
# and the right side is no less than its least over all plans, whether they keep the limits or not.
# ``Lagrangian.cheapest`` finds this least; ``Weights.charge`` is the last sum. The bound holds for
# every choice of weights: a search that ends early has a bound that is low but never wrong.
# For the same reason all that is not exact here errs to the low side: waits for slices are left out
# of the priced rows, an edge that may be shared is charged an n-th (``EdgePrices``), one edge into
# a unit is charged for the room that it takes, open buckets are a chord below the true curve
# (``rows.bucket_share``), and edges that dynamic programming cannot afford cost their least
# (``dynamic``). docs/planner.md has the whole proof, with limits on device-seconds and on time.
class Lagrangian:
    """The prices of an option table's units and edges for weights on rows and limits."""

    def __init__(self, table: OptionTable, rows: Rows, limits: Limits) -> None:
        self.table, self.rows, self.limits = table, rows, limits
        sizes = [len(u.states) for u in table.units]
        ends = [(e.source, e.target) for e in table.edges]
        ends += [(t.source, t.target) for t in table.ties]
        self.order = order_of(sizes, ends)
        self._ties = [(t.source, t.target, np.where(t.agree, 0.0, np.inf)) for t in table.ties]
        self._edge_prices = EdgePrices(table)

    def cheapest(self, weights: Weights) -> tuple[Numbers, float]:
        """The cheapest plan for the weights, and the bound that it proves."""
        price, units = self.prices(weights), self.table.units
        # Memory and exchange add up, so that each is chosen by itself in each state.
        priced = [
            (u.memory.priced(p), u.exchange.priced(p)) for u, p in zip(units, price, strict=True)
        ]
        edges = [
            (edge.source, edge.target, self._edge_prices.of(e, price))
            for e, edge in enumerate(self.table.edges)
        ]
        least = [memory.min(axis=1) + exchange.min(axis=1) for memory, exchange in priced]
        answer = minimise(self.order, least, [*edges, *self._ties])
        numbers = [
            u.number(int(s), int(memory[s].argmin()), int(exchange[s].argmin()))
            for u, (memory, exchange), s in zip(units, priced, answer.states, strict=True)
        ]
        charge = weights.charge(self.limits, self.rows.timed)
        return np.array(numbers), answer.price - charge

    def prices(self, weights: Weights) -> Matrix:
        """What one of each figure of each unit costs, [unit, figure]."""
        price = prices(self.rows, weights.tracks, weights.totals)
        for overlap in self.table.memory.overlaps:
            price[:, AT[overlap.field]] += overlap.priced(price[:, AT[overlap.point]])
        price[:, IDLE] -= weights.gpu + (1.0 if self.limits.economical else 0.0)
        return price

    def start(self) -> list[Weights]:
        """Weights to begin with: everything one after another, every link full, little memory."""
        count = len(self.table.units)
        shape = len(self.rows.before), count
        one = float(self.limits.devices) if self.limits.economical else 1.0
        links = [Weights(np.zeros(shape), np.zeros(3)) for _ in range(self.rows.timed)]
        for track, weights in enumerate(links):
            weights.tracks[track] = one / count
        serial, small = (Weights(np.zeros(shape), np.zeros(3)) for _ in range(2))
        serial.totals[ALWAYS] = small.totals[ALWAYS] = one
        small.tracks[self.rows.timed :] = one / count / max(self.limits.memory_bytes, 1.0)
        return [serial, *links, small]


# [Note: Prices of shared redistributions]
# A plan is charged for the first only of several edges that move the same. Which one that is
# depends on more than the states at an edge's two ends, so the charge is divided: where n units
# could need a tensor in one form, each is charged an n-th of the redistribution, at the least price
# that any of them has. Those g ≤ n that do need it so then pay g/n of it at most, and never more
# than the first of them by itself: the bound stays one.
class EdgePrices:
    """What edges cost at prices of figures."""

    def __init__(self, table: OptionTable) -> None:
        self.edges, self.shared = table.edges, table.shared
        self.sharers = [self.shared.sharers(e) for e in range(len(self.edges))]
        # Of several edges into a unit only the one that can carry most is charged for the room
        # that it takes: the largest of them is what counts, so that the bound stays a bound.
        largest: dict[int, int] = {}
        for e, edge in enumerate(self.edges):
            best = largest.setdefault(edge.target, e)
            if edge.figures[-1].max() > self.edges[best].figures[-1].max():
                largest[edge.target] = e
        self._receiving = set(largest.values())

    def of(self, e: int, price: Matrix) -> Reals:
        """[source's state, target's state] of edge ``e``, for prices [unit, figure]."""
        edge = self.edges[e]
        own = price[edge.target, EDGE_FIGURES]
        if e not in self._receiving:
            own[-1] = 0.0
        unshared: Reals = np.tensordot(own, edge.figures, axes=1)
        count = self.sharers[e]
        if count is None:
            return unshared
        targets = [self.edges[other].target for other in self.shared.same_tensors[e]]
        least = price[np.ix_(targets, EDGE_FIGURES)].min(axis=0)
        least[-1] = 0.0
        shared = np.tensordot(least, edge.figures, axes=1) / count
        found: Reals = np.where(count > 1, shared, unshared)
        return found


class Search:
    """The loop of pricing and mixing, and the best of each so far. A plan whose objective
    is at most ``target`` is good enough."""

    def __init__(
        self, lagrangian: Lagrangian, deadline: float, gap: float, target: float = -1.0
    ) -> None:
        self.lagrangian, self.deadline, self.gap = lagrangian, deadline, gap
        self.target = target
        table, rows, limits = lagrangian.table, lagrangian.rows, lagrangian.limits
        self.judge = PlanJudge(table, rows, limits)
        self.master = Master(rows, len(table.units), limits)
        self.seen: list[JudgedPlan] = []
        self._known: set[bytes] = set()
        self.best: JudgedPlan | None = None
        self.bound = 0.0
        self.centre: Weights | None = None
        self.iterations = 0
        self._last_restricted: JudgedPlan | None = None

    def run(self, first: Sequence[Numbers], cutoff: float = INFINITE) -> Outcome:
        """All of it, from the plans ``first`` on; ends early once no plan can be better than an
        objective of ``cutoff``."""
        for numbers in first:
            self._add(self.judge.judged(numbers))
        for weights in self.lagrangian.start():
            self._price(weights)
        mixture = self.master.solve()
        while not self._done(cutoff):
            self.iterations += 1
            guess = mixture.weights
            if self.centre is not None:
                guess = self.centre.mixed(guess, SMOOTHING)
            # A guess that was drawn back may find nothing new where the mixture's own weights do.
            if not self._price(guess) and not self._price(mixture.weights):
                break
            mixture = self.master.solve()
            if self.iterations % RESTRICTED_EVERY == 0 and self._promising(mixture):
                self._combine(mixture)
                self._solve_restricted(mixture)
        if not self._done(cutoff):
            self._combine(mixture)
            self._solve_restricted(mixture)
        assert self.best is not None
        if not self._done(cutoff):
            self._offer(self.judge.polish(self.best, self.deadline))
        score = self.best.score
        return Outcome(self.best, self.bound if score.over else min(self.bound, score.objective))

    def _done(self, cutoff: float = INFINITE) -> bool:
        assert self.best is not None
        over, value = self.best.score
        closed = not over and value <= max(self.target, self.bound + self.gap * value)
        late = time.perf_counter() > self.deadline
        return closed or late or self.bound > cutoff or self.iterations >= ITERATIONS

    def _promising(self, mixture: Mixture) -> bool:
        """Whether a plan as good as the mixture would end the search."""
        idle = sum(float(w) * p.idle_s for w, p in zip(mixture.shares, self.seen, strict=True))
        return self.lagrangian.limits.objective(mixture.step_s, idle) <= self.enough

    @property
    def enough(self) -> float:
        """The objective that is close enough to the bound."""
        return self.bound / (1.0 - self.gap)

    def _price(self, weights: Weights) -> bool:
        """Finds the cheapest plan for the weights; says whether it is new."""
        numbers, bound = self.lagrangian.cheapest(weights)
        if self.centre is None or bound > self.bound:
            self.bound, self.centre = max(bound, self.bound), weights
        return self._add(self.judge.judged(numbers))

    def _solve_restricted(self, mixture: Mixture) -> None:
        """Decides states and policies of all units together."""
        assert self.best is not None
        # From the same plan the same program would follow.
        if self._done() or self.best is self._last_restricted:
            return
        largest = [self.seen[i] for i in np.argsort(-mixture.shares)[:LARGEST]]
        prices = None if self.centre is None else self.lagrangian.prices(self.centre)
        program = RestrictedProgram(self.judge, self.best, largest, prices)
        most_s = RESTRICTED_S + RESTRICTED_UNIT_S * len(self.best.numbers)
        left_s = self.deadline - time.perf_counter()
        self._offer(program.run(max(min(left_s / 4, most_s), 0.01), self.enough))
        self._last_restricted = self.best

    def _add(self, plan: JudgedPlan) -> bool:
        key = plan.numbers.tobytes()
        if key in self._known:
            return False
        self._known.add(key)
        self.seen.append(plan)
        self.master.add(plan.rows, plan.idle_s)
        self._offer(plan)
        return True

    def _offer(self, plan: JudgedPlan) -> None:
        if self.best is None or plan.score.beats(self.best.score):
            self.best = plan

    def _combine(self, mixture: Mixture) -> None:
        """Improves the best plan and the largest plans of the mixture by blocks of the others."""
        # It pays for large problems: 1,000 units on 1,024 ranks of benchmarks/planner.py end with a
        # gap of 6.6% without, of 0.7% with it. No small problem was seen to need it.
        assert self.best is not None
        shares = mixture.shares
        parts = [self.seen[i] for i in np.argsort(-shares)[: int((shares > 1e-9).sum())]]
        for start in (self.best, *parts[:2]):
            if self._done():
                return
            plan, before = start, None
            for _ in range(3):
                if plan is before:
                    break
                before = plan
                for other in (*parts, self.best):
                    plan = self.judge.take_over(plan, other.numbers, self.deadline, self.enough)
            self._offer(plan)
