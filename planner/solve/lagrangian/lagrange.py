"""The cheapest plan for given weights, and the search for the weights that prove most.

A step is the largest of many sums, so no unit can be decided alone. With a weight on each of these
sums, and on each limit, it is one sum, and the cheapest plan is found by dynamic programming over
the units (``dynamic``). A small linear program over the plans found so far sets the weights
(``Master``); each guess is drawn back toward the weights that proved most so far (smoothing,
Wentges 1997). A restricted integer program decides among the states and policies of the plans of
that mixture (``restricted_program``), these plans take over blocks of units from each other
(``judging``), and what single units can still improve is tried one by one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from ...cost.step_time import Vector
from ...memory.rows import (
    ALWAYS,
    AT,
    LOST,
    UPDATE,
    Matrix,
    Rows,
    Values,
    prices,
    seconds_of,
)
from ..figures import EDGE_FIGURES, Numbers, Reals
from ..highs import ArrayProgram
from ..option_table import OptionTable
from .dynamic import minimise, order_of
from .judging import IDLE, INFINITE, JudgedPlan, Limits, PlanJudge
from .restricted_program import RestrictedProgram
from .returned_gradients import ReturnedGradients

# Price of going over a limit by all of it, in steps.
PENALTY = 50.0
# Of the master program: rounds of taking in rows, and by what share one may be violated.
ROUNDS = 12
TOLERANCE = 1e-7
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
RESTRICTED_UNIT_S = 0.02


class Weights(NamedTuple):
    """Weights on the rows, shaped as ``rows.Values``; ``gpu`` on the limit of device-seconds and
    ``step`` on that of seconds."""

    tracks: Matrix
    totals: Vector
    gpu: float = 0.0
    step: float = 0.0

    def mixed(self, other: Weights, share: float) -> Weights:
        """``share`` of these and the rest of the others."""
        rest = 1.0 - share
        return Weights(
            share * self.tracks + rest * other.tracks,
            share * self.totals + rest * other.totals,
            share * self.gpu + rest * other.gpu,
            share * self.step + rest * other.step,
        )

    def charge(self, limits: Limits, timed: int) -> float:
        """What keeping to the limits is worth: each weight times its limit."""
        memory = float(self.tracks[timed:].sum() + self.totals[UPDATE])
        charged = memory * limits.memory_bytes + float(self.totals[LOST]) * limits.lost
        for weight, limit in ((self.gpu, limits.gpu_s), (self.step, limits.step_s)):
            charged += weight * limit if weight else 0.0  # 0 · ∞ where there is no limit
        return charged


class Mixture(NamedTuple):
    """The best mixture: the share of each plan, its seconds, the share that it is over its limits,
    and the weights that prove that no mixture of these plans is better."""

    shares: Vector
    step_s: float
    over: float
    weights: Weights


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
# a unit is charged for the room that it takes, one edge out of it for the gradient that comes back
# (``returned_gradients``), open buckets are left out, and edges that dynamic programming cannot
# afford cost their least (``dynamic``). docs/planner.md has the whole proof, with limits on
# device-seconds and on time.
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
        self._returned = ReturnedGradients(table)

    def cheapest(self, weights: Weights) -> tuple[Numbers, float]:
        """The cheapest plan for the weights, and the bound that it proves."""
        price, units = self.prices(weights), self.table.units
        # Memory and exchange add up, so that each is chosen by itself in each state.
        priced = [
            (u.memory.priced(p), u.exchange.priced(p)) for u, p in zip(units, price, strict=True)
        ]
        edges = [self._edge_prices.of(e, price) for e in range(len(self.table.edges))]
        least = [memory.min(axis=1) + exchange.min(axis=1) for memory, exchange in priced]
        returned = self._returned.priced(price, priced)
        for one in returned:
            # The unit's own price is in that of its edge.
            edges[one.edge.number] = edges[one.edge.number] + one.price
            least[one.edge.source] = np.zeros_like(least[one.edge.source])
        ends = ((edge.source, edge.target) for edge in self.table.edges)
        between = [(*pair, found) for pair, found in zip(ends, edges, strict=True)]
        answer = minimise(self.order, least, [*between, *self._ties])
        numbers = [
            u.number(int(s), int(memory[s].argmin()), int(exchange[s].argmin()))
            for u, (memory, exchange), s in zip(units, priced, answer.states, strict=True)
        ]
        for one in returned:
            k, state, other = one.edge.source, *answer.states[[one.edge.source, one.edge.target]]
            policies = divmod(int(one.pair[state, other]), len(units[k].exchange.policies))
            numbers[k] = units[k].number(int(state), *policies)
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

        def none() -> Weights:
            return Weights(np.zeros(shape), np.zeros(len(self.rows.totals)))

        links = [none() for _ in range(self.rows.timed)]
        for track, weights in enumerate(links):
            weights.tracks[track] = one / count
        serial = [none() for _ in seconds_of(self.rows.totals)]
        for total, weights in zip(seconds_of(self.rows.totals), serial, strict=True):
            weights.totals[total] = one
        small = none()
        small.totals[ALWAYS] = one
        small.tracks[self.rows.timed :] = one / count / max(self.limits.memory_bytes, 1.0)
        return [*serial, *links, small]


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


# [Note: The master program]
#     minimise    T + penalty · v, or in place of T the device-seconds W·T - Σ w_i · idle(i)
#     over        w_i ≥ 0 with Σ w_i = 1 (a mixture of the plans i), v ≥ 0
#     such that   Σ w_i · row_r(i) ≤ T                     for every row r of seconds
#                 Σ w_i · row_r(i) ≤ limit_r · (1 + v)     for every row r of bytes, and energy
#                 W·T - Σ w_i · idle(i) ≤ budget · (1 + v) device-seconds, where they are limited
#                 T ≤ limit · (1 + v)                      seconds, where they are limited
#
# Its optimal duals are weights on the rows. For any such weights the cheapest plan at their prices
# is a lower bound (Lagrange), and, if it is new, a plan that the next mixture can use: column
# generation after Dantzig and Wolfe, 1960.
class Master:
    """The small linear program that sets the weights: which mixture of plans found so far is best.
    It holds the plans, and the rows that have mattered."""

    def __init__(self, rows: Rows, units: int, limits: Limits) -> None:
        self.limits = limits
        self.plans: list[Vector] = []
        self.idle: list[float] = []
        # Of the thousands of rows few ever bind: rows enter when a mixture violates them.
        self.active: list[int] = []
        self.scale = 1.0
        self.shape = len(rows.before), units
        self.end = len(rows.before) * units
        tracks = [slice(a, a + units) for a in range(0, self.end, units)]
        size = self.end + len(rows.totals)
        self.families = [*tracks, *(slice(i, i + 1) for i in range(self.end, size))]
        self.seconds = np.zeros(size, dtype=bool)
        self.seconds[: rows.timed * units] = True
        self.seconds[[self.end + total for total in seconds_of(rows.totals)]] = True

    def add(self, plan: Values, idle_s: float) -> None:
        """Adds a plan and the rows in which it is largest."""
        flat = np.concatenate([plan.tracks.ravel(), plan.totals])
        if not self.plans:
            self.scale = max(float(flat[self.seconds].max()), 1e-12)
        self.plans.append(flat / self._unit())
        self.idle.append(idle_s / (self.limits.devices * self.scale))
        self._activate(self.plans[-1])

    def _unit(self) -> Vector:
        """What each row is counted in: the first plan's step, or the row's limit."""
        unit = np.where(self.seconds, self.scale, max(self.limits.memory_bytes, 1.0))
        unit[self.end + LOST] = max(self.limits.lost, 1e-12)
        return unit

    def _activate(self, flat: Vector) -> bool:
        """Takes in the largest row of each family; says whether one of them is new."""
        known = set(self.active)
        largest = (family.start + int(flat[family].argmax()) for family in self.families)
        self.active += [row for row in largest if row not in known]
        return len(self.active) > len(known)

    def solve(self) -> Mixture:
        table = np.array(self.plans)
        for _ in range(ROUNDS):
            shares, step, over, duals = self._program(table[:, self.active])
            rows = shares @ table
            beyond = np.where(self.seconds, rows - step, rows - 1 - over)
            if beyond.max() <= TOLERANCE or not self._activate(beyond):
                break
        return Mixture(shares, step * self.scale, over, self._weights(duals))

    def _program(self, table: Matrix) -> tuple[Vector, float, float, Vector]:
        """(shares, T, v, duals: of the active rows, of device-seconds, of seconds)."""
        (plans, count), seconds = table.shape, self.seconds[self.active]
        idle, limits = np.array(self.idle), self.limits
        rows = np.zeros((count + 3, plans + 2))
        rows[:count, :plans] = table.T
        rows[:count, plans] = np.where(seconds, -1.0, 0.0)
        rows[:count, plans + 1] = np.where(seconds, 0.0, -1.0)
        rows[count + 2, :plans] = 1.0
        right = np.append(np.where(seconds, 0.0, 1.0), [0.0, 0.0, 1.0])
        limited = ((-idle, limits.gpu_s / limits.devices), (0 * idle, limits.step_s))
        for row, (own, limit_s) in enumerate(limited, count):
            # The row of a limit that there is not stays empty: duals keep their places.
            if limit_s < INFINITE:
                right[row] = limit_s / self.scale
                rows[row] = [*own, 1.0, -right[row]]
        cost = np.append(-idle if limits.economical else 0 * idle, [1.0, PENALTY])
        lower = np.append(np.full(count + 2, -np.inf), 1.0)
        top = np.full(plans + 2, np.inf)
        program = ArrayProgram(cost, csr_array(rows), lower, right, top, whole=0)
        found, prices = program.relaxed()
        # HiGHS's duals of rows with an upper side are at most 0, but for rounding.
        shares, duals = np.maximum(found[:plans], 0.0), np.maximum(-prices[:-1], 0.0)
        return shares / shares.sum(), float(found[plans]), float(found[plans + 1]), duals

    def _weights(self, duals: Vector) -> Weights:
        """Duals in the units of the objective for each unit of a row."""
        per = float(self.limits.devices) if self.limits.economical else 1.0
        flat = np.zeros(len(self.seconds))
        flat[self.active] = duals[:-2]
        gpu, step = (float(d) for d in duals[-2:])
        # Rounding in the duals must not leave weights that prove nothing: those of seconds have to
        # add up to what one second is worth.
        flat[self.seconds] *= (1.0 + gpu + step) / flat[self.seconds].sum()
        flat *= per * self.scale / self._unit()
        tracks = flat[: self.end].reshape(self.shape)
        return Weights(tracks, flat[self.end :], gpu * per / self.limits.devices, step * per)


class SearchOutcome(NamedTuple):
    """What a search found: the best plan, and the bound on the objective of every plan that keeps
    the limits (infinite where none does)."""

    best: JudgedPlan
    bound: float


class LagrangianSearch:
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

    def run(self, first: Sequence[Numbers], cutoff: float = INFINITE) -> SearchOutcome:
        """All of it, from the plans ``first`` on; ends early once no plan can be better than an
        objective of ``cutoff``."""
        for numbers in first:
            self._add(self.judge.judged(numbers))
        for weights in self.lagrangian.start():
            self._price(weights)
        mixture = self.master.solve()
        while not self._done(cutoff):
            self.iterations += 1
            assert self.centre is not None
            guess = self.centre.mixed(mixture.weights, SMOOTHING)
            # A guess that was drawn back may find nothing new where the mixture's own weights do.
            if not self._price(guess) and not self._price(mixture.weights):
                break
            mixture = self.master.solve()
            if self.iterations % RESTRICTED_EVERY == 0 and self._promising(mixture):
                self._solve_restricted(mixture)
                self._combine(mixture)
        if not self._done(cutoff):
            self._solve_restricted(mixture)
            self._combine(mixture)
        assert self.best is not None
        if not self._done(cutoff):
            self._offer(self.judge.polish(self.best, self.deadline))
        score = self.best.score
        return SearchOutcome(
            self.best, self.bound if score.over else min(self.bound, score.objective)
        )

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
        assert self.centre is not None
        # From the same plan much the same program would follow.
        if self._done() or self.best is self._last_restricted:
            return
        largest = [self.seen[i] for i in np.argsort(-mixture.shares)[:LARGEST]]
        prices = self.lagrangian.prices(self.centre)
        program = RestrictedProgram(self.judge, self.best, largest, prices, self.centre.tracks)
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
        # It pays where the restricted program has left out what is needed: 24 units on 64 ranks end
        # with a step 0.9% shorter (tests/unit/planner/test_post_searches.py). It comes second, for
        # it takes a judgement for each block: 1.5 s for 400 units on 256 ranks.
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
