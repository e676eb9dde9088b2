"""Plans that stand in for a run's own: for those of its hosts that are left, or within the memory
that is free, for the same goal, from what its plan was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ...planner.schema import cache
from ...planner.schema.cluster import Cluster
from ...planner.schema.errors import InfeasibleError, InputError, NoRoomError
from ...planner.schema.goal import Goal
from ...planner.schema.pins import EARLY_RELEASE, without
from ...planner.schema.plan import Plan, UnitPlan
from ...planner.schema.profile import ModelProfile
from ...planner.schema.text import ranks, seconds, size
from ...planner.solve.heuristic.resize import cluster_of_nodes
from ...planner.solve.request import made_from, problem_for
from ...planner.solve.solver import expand_pins, solve
from ..capability import CAPABILITY
from .restarts import Restarts

# Ranks wait for the new plan, so the search has less time than one that was asked for.
SEARCH_S = 20.0
# What is free changes, so a plan that was made for it may not fit either; so often one is made.
TRIES = 2
# So many units are named in the sentence on what changed.
_NAMED = 2


@dataclass(frozen=True)
class Replanner:
    """Makes plans for all or some of the hosts that ``plan`` was made for, which take no more than
    ``limit_bytes`` on a rank where that is given."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    limit_bytes: int | None = None
    _made: dict[tuple[int, ...], Plan] = field(default_factory=dict)

    @classmethod
    def for_run(cls, plan: Plan, per_host: Sequence[int], restarts: Restarts) -> Replanner:
        """What the plan was made from, found or given. Raises ``InputError`` where it is not here,
        and where its cluster has other hosts than the run, with ``per_host`` ranks on each."""
        found = cls.for_plan(plan, restarts)
        nodes = [len(node.devices) for node in found.cluster.nodes]
        if nodes != list(per_host):
            raise InputError(
                f"the plan is for nodes of {_listed(nodes)} devices and the hosts have "
                f"{_listed(per_host)} ranks, so it is not known which of its devices go with a "
                "host: plan for a cluster of these hosts, or leave --min-nodes (min_nodes) out"
            )
        return found

    @classmethod
    def for_plan(cls, plan: Plan, restarts: Restarts) -> Replanner:
        """What the plan was made from, found or given. Raises ``InputError`` where it is not
        here."""
        return cls(plan, *made_from(plan, restarts.profile, restarts.cluster))

    def within(self, limit_bytes: int) -> Replanner:
        """One whose plans take less."""
        return Replanner(self.plan, self.profile, self.cluster, limit_bytes)

    def plan_for(self, numbers: Sequence[int]) -> Plan:
        """A plan for the hosts of those numbers, the same whenever it is asked for; the run's own
        for all of them where no limit asks for another. Raises ``InfeasibleError`` where none
        fits."""
        if len(numbers) == len(self.cluster.nodes) and self.limit_bytes is None:
            return self.plan
        key = tuple(numbers)
        if key not in self._made:
            self._made[key] = self._solved(key)
        return self._made[key]

    def _solved(self, numbers: tuple[int, ...]) -> Plan:
        there = self.cluster
        goal = self.plan.goal
        if len(numbers) < len(there.nodes):
            there, goal = cluster_of_nodes(there, numbers), _goal_of_fewer(goal)
        if self.limit_bytes is not None:
            goal = goal.within(self.limit_bytes)
        if self.plan.local_steps is None:
            goal = _goal_together(goal)
        # Not every loop bears a plan whose parameters are updated in backward, so a run that had
        # none is not given it.
        early = any(unit.early_release for unit in self.plan.units)
        problem = problem_for(
            self.profile, there, goal, CAPABILITY,
            bursts=self.plan.leaves_idle, schedule=self.plan.schedule,
        )  # fmt: skip
        if not early:
            problem = replace(problem, capability=without(problem.capability, (EARLY_RELEASE,)))
        try:
            problem = expand_pins(problem)
        except InputError:  # a style that no unit can have on so few
            free = msgspec.structs.replace(problem.goal, pins=())
            problem = replace(problem, goal=free)
        found = solve(problem, "auto", SEARCH_S)
        if found.plan is None:
            why = found.infeasible.sentence if found.infeasible else found.reason
            raise InfeasibleError(why)
        # ``explain`` finds it by the fingerprint that the plan has.
        cache.put(there)
        cache.put(self.profile)
        return found.plan


def _goal_of_fewer(goal: Goal) -> Goal:
    """The goal without the layouts of its pins, which are of as many ranks as there were; the
    styles that they ask for stay."""
    pins = (msgspec.structs.replace(pin, only=(), never=()) for pin in goal.pins)
    kept = tuple(pin for pin in pins if pin.styles or pin.never_styles)
    return msgspec.structs.replace(goal, pins=kept)


def _goal_together(goal: Goal) -> Goal:
    """The goal without local steps: a run whose hosts have trained together may keep checkpoints,
    or have a loop, that cannot be with hosts that train apart."""
    return msgspec.structs.replace(goal, allow_local_steps=False, inner_steps=None, fragments=None)


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


class RoomForPlan:
    """The ``plan`` of a run, and others in its place where that needs more memory than is free."""

    def __init__(
        self, plan: Plan, replanner: Callable[[], Replanner], say: Callable[[str], None]
    ) -> None:
        self.plan, self._replanner, self._say = plan, replanner, say
        self._tries = TRIES

    def plan_after(self, error: NoRoomError, hosts: Sequence[int] = ()) -> Replanner:
        """Makes another plan after one was refused, for those ``hosts`` of its cluster (none named:
        all), and says so; what has made it. Raises the error, with why, where there is none."""
        if not self._tries:
            raise error
        self._tries -= 1
        try:
            replanner = self._replanner().within(error.limit_bytes)
            found = replanner.plan_for(hosts or range(len(replanner.cluster.nodes)))
        except (InputError, InfeasibleError) as why:
            more = f"{error.sentence}, and none was made that needs less ({why})"
            raise NoRoomError(more, error.remedy, error.limit_bytes) from None
        self._say(f"{error.sentence}: {planned_within(error.limit_bytes, self.plan, found)}")
        self.plan = found
        return replanner


def planned_within(limit_bytes: int, before: Plan, after: Plan) -> str:
    """That another plan takes the place of one that did not fit."""
    # More than the sentence before it calls free: a plan counts what the rank holds already, too.
    within = f"within {size(limit_bytes)} on a rank, what it holds already among them,"
    return f"planned again {within} {what_changed(before, after)}"


def what_changed(before: Plan, after: Plan) -> str:
    """What another plan for the same goal has otherwise, in the words after "planned again"."""
    step = f"{seconds(after.prediction.step_s)} a step"
    was = f"{seconds(before.prediction.step_s)} on {ranks(before.world_size)}"
    old = {unit.name: unit for unit in before.units}
    changed = [
        f"{unit.name} {_decided(unit)} instead of {_decided(old[unit.name])}"
        for unit in after.units
        if unit.name in old and _decided(unit) != _decided(old[unit.name])
    ]
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    units = f"{', '.join(changed[:_NAMED])}{more}" if changed else "all units decided as before"
    shares = ""
    if after.local_batch_sizes:
        sizes = (after.local_batch_size(rank) for rank in range(after.world_size))
        shares = f"; ranks get {_listed(sizes)} of the {after.goal.batch} samples"
    elif before.local_batch_sizes:
        shares = "; ranks get even shares of the batch"
    parts = ""
    if after.micro_batches != before.micro_batches:
        pieces = "micro-batch" if after.micro_batches == 1 else "micro-batches"
        parts = f"; {after.micro_batches} {pieces} instead of {before.micro_batches}"
    there = ranks(after.world_size)
    return f"for {there}, predicted {step} (before {was}){parts}; {units}{shares}"


def _decided(unit: UnitPlan) -> str:
    """A unit's decision in a few words: how many divide it, not how many groups do so."""
    words = f"{unit.style} over {unit.layout.degree}" if unit.layout.degree > 1 else "undivided"
    extras = [
        word
        for word, plain in ((unit.memory, "keep"), (unit.exchange, "dense"), (unit.wire, "exact"))
        if word != plain
    ]
    return " ".join([words, *extras])
