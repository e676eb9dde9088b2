"""The interface behind which the ways of searching stand, and how one of them is asked.

A solver takes a ``Problem`` and returns a ``Result``: what it found, what it proved. ``optimal`` is
said only of what was proved. Solvers register under a name; ``auto`` takes the first of
``PREFERENCE`` that is able (a problem may be too large), and the result says which.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from ..schema.errors import InputError
from ..schema.pins import no_such_unit, spelled_out
from .heuristic.branches import side_by_side
from .heuristic.least_memory import nothing_fits
from .heuristic.schedules import any_schedule, offloads, shard_if_needed, widest, without_offload
from .heuristic.segmented import quicker_in_segments
from .local_steps import apart_if_quicker
from .problem import INTEGER_PAIRS, Infeasibility, Problem, Result, state_pairs
from .quicker_shares import with_quicker_shares

PREFERENCE = ("integer", "lagrangian", "heuristic")
"""The order in which ``auto`` looks for a solver: the first that is there and that is able."""
AUTO_S = 20.0
"""Seconds that ``auto`` gives the integer programs of all searches together where no limit was
asked for."""
LEAST_S = 10.0
"""What each of these searches gets of them, however late it is."""
NEAR = 0.01
"""A gap up to which no second search is made for something better."""


class Solver(Protocol):
    """A way of searching. ``name`` is what users call it."""

    @property
    def name(self) -> str:
        """What it is registered as."""

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """Searches, for no longer than ``time_limit_s`` where one is given. Where it finds no plan,
        it says why if the problem ``explains``."""

    def explain(self, problems: Sequence[Problem]) -> Infeasibility:
        """Why none of the problems has a plan. They differ in schedule and in what is allowed only,
        and the last allows most."""


_solvers: dict[str, Callable[[], Solver]] = {}


def register(name: str, make: Callable[[], Solver]) -> None:
    """Makes a solver known under a name."""
    _solvers[name] = make


def solvers() -> tuple[str, ...]:
    """The names of the solvers that there are."""
    _load()
    return tuple(_solvers)


def check_solver(solver: str) -> None:
    """Raises ``InputError`` for what is no solver's name, nor ``auto``."""
    known = ("auto", *solvers())
    if solver not in known:
        raise InputError(f"there is no solver {solver!r}: choose from {', '.join(known)}")


# [Note: Order of searches]
# A policy that takes something from the user or that is only predicted to pay is tried last. So a
# problem that leaves the schedule or sharding open becomes several problems, each allowed more than
# the one before, and the first that has a plan decides:
#
#   any_schedule      by barrier; nothing fits: by priority, as in ``shard_if_needed``.
#                     Else the search by priority is made too, and its plan taken where that is
#                     clearly quicker (``schedules.WORTHWHILE``). It is left out where computing
#                     alone takes nearly as long as the plan by barrier; and where device time
#                     counts, or a problem is too large for the integer program, unless that plan's
#                     decisions, or plain data parallelism, are clearly quicker by priority, as they
#                     are, by host or sharded, or (of large problems) the heuristic finds any that
#                     are quicker.
#   shard_if_needed   without sharded exchange; nothing fits: with it, then with sharded parameters
#                     (without offloading), then all of these with gradients released early. A plan
#                     without is kept unless it is clearly quicker with its exchange sharded. One
#                     that offloads is kept unless shards instead are, which are looked for only
#                     so far as they may be that much better (``Problem.wanted_s``).
#
# Each of these is one search by one solver, and what follows it can only make its plan better: what
# it would recompute or offload though there is room is kept (``needless_memory``), branches side by
# side, then segments, then even shares of the batch where devices are unequal and units are divided
# ([Note: Shares of unequal devices]). If memory rules out every plan (``least_memory``), no search
# is made. If none of them has a plan, one report covers them all (``heuristic.infeasible``).
#
# [Note: What is proved]
# The integer program proves its objective, and the Lagrangian a bound on it, over all options of
# the problem that they were given: one schedule, the allowances of that search, layouts that begin
# at position 0, units that are recomputed one by one, and the shares of the batch that its cost
# model has. Choosing between the searches above is a
# prediction, not a proof. A plan that branches or segments made better, or one with local steps,
# has status ``heuristic``.
# A report that nothing fits is a proof where it says "at least"; "enough" was tried only.


def solve(problem: Problem, solver: str = "auto", time_limit_s: float | None = None) -> Result:
    """Plans. ``solver`` is a registered name or ``auto``; see ``Result.checked`` for the plan.

    In this order (see [Note: Order of searches]):

    1. The solver is chosen: by name, or the first of ``PREFERENCE`` that is able.
    2. Schedules and allowances that the problem leaves open are searched one after another, the
       simplest first, each for its part of ``time_limit_s``.
    3. Each search that finds a plan is followed by those for branches side by side and segments.
    4. Where none finds a plan, the solver explains why, once for all of them.
    5. Where the goal allows local steps, a plan with them is made too (``local_steps``).

    The seconds that are told are those of all of it.
    """
    start = time.perf_counter()
    found = _solve_together(problem, solver, time_limit_s)
    if problem.goal.allow_local_steps:
        found = apart_if_quicker(
            problem, found, lambda one: _solve_together(one, solver, time_limit_s)
        )
    return found.took(time.perf_counter() - start)


def _solve_together(problem: Problem, solver: str, time_limit_s: float | None) -> Result:
    """``solve`` without local steps."""
    start = time.perf_counter()
    check_solver(solver)
    name, reason = _auto(problem) if solver == "auto" else (solver, "asked for")
    _check(problem)
    problem = problem.placed()
    if time_limit_s is not None and problem.any_schedule:
        time_limit_s /= 2  # for barrier and priority each
    by_itself = time_limit_s is None and solver == "auto" and name == "integer"
    if by_itself:
        # Nobody has asked for a proof to the last digit, nor for how long to look for one.
        problem = replace(problem, good_enough=problem.tie_tolerance)
        time_limit_s = AUTO_S
    chosen = _solvers[name]()

    def left_s() -> float | None:
        if not by_itself:
            return time_limit_s
        return max(start + AUTO_S - time.perf_counter(), LEAST_S)

    def search(one: Problem) -> Result:
        nothing = nothing_fits(one)
        return Result.without_plan(name, None, reason) if nothing else searched(one)

    def searched(one: Problem) -> Result:
        found = _without_needless_offload(one, chosen, left_s)
        if one.capability.branches:
            found = side_by_side(one, found)
        found = with_quicker_shares(one, quicker_in_segments(one, found, time_limit_s))
        return found._replace(reason="; ".join(r for r in (reason, found.reason) if r))

    result, every = None, widest(problem)
    if all(map(nothing_fits, every)):
        pass  # nothing to search
    elif problem.any_schedule:
        result = any_schedule(replace(problem, explains=False), search)
    elif problem.shard_if_needed:
        result = shard_if_needed(replace(problem, shard_if_needed=False, explains=False), search)
    else:
        result = searched(problem)  # which is the only one of ``every``
    if result is not None and (result.plan is not None or result.infeasible is not None):
        return result
    why = chosen.explain(every) if problem.explains else None
    return Result.without_plan(name, why, reason)


def _without_needless_offload(
    problem: Problem, solver: Solver, left_s: Callable[[], float | None]
) -> Result:
    """What the solver finds; where that offloads and may be far from the best, the better of it and
    of what is found without."""
    found = solver.solve(problem, left_s())
    near = found.gap is not None and found.gap <= NEAR
    if found.plan is None or near or not offloads(found.plan):
        return found
    # It may have gone for a policy that frees much and takes long.
    other = solver.solve(without_offload(problem), left_s())
    assert found.objective_s is not None
    if other.objective_s is None or found.objective_s <= other.objective_s:
        return found
    # A bound over all options is one for what was found among fewer.
    gap = None if found.bound_s is None else 1 - found.bound_s / other.objective_s
    assert other.plan is not None
    provenance = msgspec.structs.replace(
        other.plan.provenance, bound_s=found.bound_s, gap=gap, status=found.status
    )
    plan = msgspec.structs.replace(other.plan, provenance=provenance)
    return other._replace(plan=plan, bound_s=found.bound_s, gap=gap, status=found.status)


def expand_pins(problem: Problem) -> Problem:
    """The problem with patterns in its pins spelled out; see ``pins.spelled_out``."""
    world = problem.cluster.world_size
    goal = spelled_out(problem.goal, problem.profile, problem.capability, world)
    return replace(problem, goal=goal)


def _auto(problem: Problem) -> tuple[str, str]:
    """The solver to take, and why."""
    pairs = state_pairs(problem)
    able = [n for n in PREFERENCE if n in _solvers and (n != "integer" or pairs <= INTEGER_PAIRS)]
    size = f"{pairs:,} pairs of states along edges"
    if able[0] == "integer":
        return able[0], f"auto took integer: it proves its answer, and {size} are few"
    return able[0], f"auto took {able[0]}: {size} are too many for the integer program"


def _check(problem: Problem) -> None:
    goal, world = problem.goal, problem.cluster.world_size
    if problem.uncut:
        raise InputError(problem.uncut)
    names = [unit.name for unit in problem.profile.units]
    for pin in goal.pins:
        if pin.unit not in names:
            raise no_such_unit(pin, problem.profile.units)
    if problem.placement is not None and sorted(problem.placement) != list(range(world)):
        order = ", ".join(map(str, problem.placement))
        raise InputError(f"placement {order} is not an order of ranks 0 to {world - 1}")


def _load() -> None:
    """Registers the solvers that come with the planner."""
    for name, make in (
        ("heuristic", _heuristic), ("integer", _integer), ("lagrangian", _lagrangian),
    ):  # fmt: skip
        register(name, make)


# Imported when one of them is asked: they load the libraries that they solve with.


def _heuristic() -> Solver:
    from .heuristic.heuristic import Heuristic

    return Heuristic()


def _integer() -> Solver:
    from .ilp.solver import IntegerSolver

    return IntegerSolver()


def _lagrangian() -> Solver:
    from .lagrangian.solver import LagrangianSolver

    return LagrangianSolver()
