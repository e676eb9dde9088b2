"""From what a user has and wants to a problem for a solver: what ``plan`` and its tables ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from .planner.evaluation.problem import Problem, Progress
from .planner.nouns.capability import EVERYTHING, Capability
from .planner.nouns.cluster import Cluster
from .planner.nouns.errors import InputError
from .planner.nouns.goal import Goal
from .planner.nouns.pins import without
from .planner.nouns.plan import Plan
from .planner.nouns.profile import ModelProfile
from .planner.search.schedules import SLICE_BYTES
from .remember import recall
from .screen import Step

if TYPE_CHECKING:
    from .units.workload import Workload

Schedules = Literal["auto", "barrier", "priority"]
"""How gradients may travel: ``auto`` takes priority where that is predicted to be clearly
quicker (``schedules.WORTHWHILE``) or nothing else fits."""


def problem_for(
    what: str | Workload | ModelProfile,
    cluster: Cluster,
    goal: Goal,
    *,
    bursts: bool = False,
    hypothetical: bool = False,
    forbidden: Sequence[str] = (),
    schedule: Schedules = "auto",
    progress: Step | None = None,
) -> Problem:
    """What is to be planned: within what the executor can run (units on a part of the ranks only
    with ``bursts``), or with ``hypothetical`` all that can be decided (gradients by priority,
    unless told). ``forbidden`` are policies that no unit shall have."""
    check_schedule(schedule)
    made = profile_for(what, cluster, goal, progress)
    if goal.allow_lossy and not any(unit.fidelity for unit in made.units):
        raise InputError(
            f"the profile of {made.target} says of no unit how much of its gradient a lossy "
            "exchange keeps (fidelity): measure that, or leave --allow-lossy (allow_lossy) out"
        )
    from .executor.capability import CAPABILITY, SEARCHED

    runs = CAPABILITY if bursts else SEARCHED
    capability = without(EVERYTHING if hypothetical else runs, forbidden)
    asked = "priority" if hypothetical and schedule == "auto" else schedule
    if asked == "priority" and not goal.slice_bytes:
        goal = msgspec.structs.replace(goal, slice_bytes=SLICE_BYTES)
    return Problem(
        made,
        cluster,
        goal,
        capability,
        executor=CAPABILITY,
        schedule="priority" if asked == "priority" else "barrier",
        either=asked == "auto",
        sparing=asked == "priority" and not hypothetical,
        progress=shown(progress),
    )


def check_schedule(schedule: str) -> None:
    """Raises ``InputError`` for what is no schedule."""
    if schedule not in get_args(Schedules):
        known = ", ".join(get_args(Schedules))
        raise InputError(f"there is no schedule {schedule!r}: choose from {known}")


def shown(progress: Step | None) -> Progress | None:
    """A solver's progress as a bar's."""
    if progress is None:
        return None
    return lambda doing, share: progress(round(1000 * share), 1000, doing)


def problem_of(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Problem:
    """The problem that a plan answers, as far as the plan tells (policies that were forbidden for
    all units it does not)."""
    from .executor.capability import CAPABILITY

    return Problem(
        profile,
        cluster,
        plan.goal,
        capability_of(plan),
        executor=CAPABILITY,
        schedule=plan.schedule,
        bucket_bytes=plan.bucket_bytes,
        placement=plan.placement,
    )


def capability_of(plan: Plan) -> Capability:
    """Within what a plan was made: what is searched by default, unless it goes beyond that."""
    from .executor.capability import CAPABILITY, SEARCHED

    if plan.hypothetical:
        return EVERYTHING
    return CAPABILITY if leaves_idle(plan) else SEARCHED


def leaves_idle(plan: Plan) -> bool:
    """Whether some unit takes a part of the ranks only."""
    return any(unit.layout.size < plan.world_size for unit in plan.units)


def made_from(
    plan: Plan, profile: ModelProfile | None, cluster: Cluster | None
) -> tuple[ModelProfile, Cluster]:
    """What a plan was made from, by fingerprint where it is not given; raises ``InputError``."""
    return (
        profile or recall(ModelProfile, plan.provenance.profile, "--profile"),
        cluster or recall(Cluster, plan.provenance.cluster, "--cluster"),
    )


def check_time_limit(time_limit_s: float | None) -> None:
    """Refuses a limit that leaves no time."""
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"a time limit of {time_limit_s:g} s leaves no search: give more than 0")


def profile_for(
    what: str | Workload | ModelProfile, cluster: Cluster, goal: Goal, progress: Step | None
) -> ModelProfile:
    """``what`` itself if it is a profile, else measured here or estimated for the cluster."""
    if isinstance(what, ModelProfile):
        return what
    from . import local

    return local.profile_for(what, cluster, goal, progress)
