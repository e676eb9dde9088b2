"""The interface behind which the ways of searching stand, and how one of them is asked.

A solver takes a ``Problem`` and returns a ``Result``: what it found, what it proved. ``OPTIMAL`` is
said only of what was proved. Solvers register under a name; ``auto`` takes the first of
``PREFERENCE`` that is registered, and the result says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ..schema.errors import InputError
from ..schema.pins import no_such_unit, spelled_out
from .heuristic.schedules import by_either, sharding_sparingly
from .problem import INTEGER_PAIRS, Problem, Result, state_pairs

PREFERENCE = ("integer", "multipliers", "heuristic")
"""The order in which ``auto`` looks for a solver: the first that is there and that is able."""
AUTO_S = 20.0
"""Seconds that ``auto`` gives the integer program where no limit was asked for."""


class Solver(Protocol):
    """A way of searching. ``name`` is what users call it."""

    @property
    def name(self) -> str:
        """What it is registered as."""

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """Searches, for no longer than ``time_limit_s`` where one is given."""


_solvers: dict[str, Callable[[], Solver]] = {}


def register(name: str, make: Callable[[], Solver]) -> None:
    """Makes a solver known under a name."""
    _solvers[name] = make


def solvers() -> tuple[str, ...]:
    """The names of the solvers that there are."""
    _load()
    return tuple(_solvers)


def solve(problem: Problem, solver: str = "auto", time_limit_s: float | None = None) -> Result:
    """Plans. ``solver`` is a registered name or ``auto``; see ``Result.checked`` for the plan."""
    _load()
    if problem.either:
        half_s = None if time_limit_s is None else time_limit_s / 2
        return by_either(problem, lambda one: solve(one, solver, half_s))
    if problem.sparing:
        plain = replace(problem, sparing=False)
        return sharding_sparingly(plain, lambda one: solve(one, solver, time_limit_s))
    name, reason = solver, "asked for"
    if solver == "auto":
        name, reason = _auto(problem)
        if name == "integer" and time_limit_s is None:
            time_limit_s = AUTO_S
    if name not in _solvers:
        known = ", ".join(["auto", *_solvers])
        raise InputError(f"there is no solver {solver!r}: choose from {known}")
    _check(problem)
    result = _solvers[name]().solve(problem, time_limit_s)
    result = result._replace(reason="; ".join(r for r in (reason, result.reason) if r))
    if problem.capability.branches:
        from .heuristic.branches import side_by_side

        result = side_by_side(problem, result)
    from .heuristic.segmented import quicker_in_segments

    return quicker_in_segments(problem, result, time_limit_s)


def settled(problem: Problem) -> Problem:
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
    if all(m > 1 and goal.batch < world * m for m in goal.micro_batches):
        most = max(goal.batch // world, 1)
        counts = " or ".join(map(str, goal.micro_batches))
        raise InputError(
            f"a batch of {goal.batch} on {world} ranks cannot be cut into {counts} micro-batches: "
            f"allow at most {most} (--micro-batches {most})"
        )
    names = [unit.name for unit in problem.profile.units]
    for pin in goal.pins:
        if pin.unit not in names:
            raise no_such_unit(pin, problem.profile)
    if problem.placement is not None and sorted(problem.placement) != list(range(world)):
        order = ", ".join(map(str, problem.placement))
        raise InputError(f"placement {order} is not an order of ranks 0 to {world - 1}")


def _load() -> None:
    """Registers the solvers that come with the planner (late: they load the libraries that they
    solve with)."""
    from .heuristic import heuristic
    from .ilp import solve as integer
    from .lagrangian import solver as multipliers

    register("heuristic", heuristic.Heuristic)
    register("integer", integer.Integer)
    register("multipliers", multipliers.Multipliers)
