"""From what a user has and wants to a problem for a solver: what ``plan`` and its tables ask."""

import warnings
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from ..schema import cache
from ..schema.capability import EVERYTHING, Capability
from ..schema.cluster import Cluster
from ..schema.errors import InputError
from ..schema.goal import Goal
from ..schema.pins import EARLY_RELEASE, checked_policies, without
from ..schema.plan import Plan
from ..schema.precision import is_scaled
from ..schema.profile import ModelProfile
from ..schema.record import check_is, fingerprint
from .heuristic.schedules import SLICE_BYTES
from .problem import Problem, Progress

Schedules = Literal["auto", "barrier", "priority"]
"""How gradients may travel: ``auto`` takes priority where that is predicted to be clearly
quicker (``schedules.WORTHWHILE``) or nothing else fits."""


def problem_for(
    profile: ModelProfile,
    cluster: Cluster,
    goal: Goal,
    executor: Capability,
    *,
    bursts: bool = False,
    hypothetical: bool = False,
    forbidden: Sequence[str] = (),
    schedule: Schedules = "auto",
    progress: Callable[[int, int, str], None] | None = None,
) -> Problem:
    """What is to be planned: within what the ``executor`` can run (units on a part of the ranks
    only with ``bursts``), or with ``hypothetical`` all that can be decided (gradients by priority,
    unless told). ``forbidden`` are policies that no unit shall have, besides the goal's."""
    check_schedule(schedule)
    ruled_out = checked_policies((*goal.forbidden, *forbidden))
    goal = msgspec.structs.replace(goal, forbidden=ruled_out)
    if goal.allows_parts and not any(unit.fidelity for unit in profile.units):
        if profile.origin == "measured":
            cause = (
                "time ran out before it was measured, or gradients were not finite: measure fewer "
                "batches (meshwright profile --batches 4,8, batches=[4, 8] of mw.profile) and plan "
                "from that profile"
            )
        else:
            cause = (
                "estimates do not know it: measure the model on this machine (meshwright profile "
                "without --device, mw.profile without device)"
            )
        raise InputError(
            f"the profile of {profile.target} says of no unit how much of its gradient a lossy "
            f"exchange keeps (fidelity), as {cause}, or leave --min-fidelity (min_fidelity) out, "
            "which allows gradients rounded to bfloat16"
        )
    if goal.allows_parts and is_scaled(profile.precision):
        raise InputError(
            f"precision {profile.precision} scales gradients by a factor that changes, and what is "
            "kept of one that is sent in part would have an old one: leave --min-fidelity "
            "(min_fidelity) out, which allows gradients rounded to bfloat16, or use bf16-mixed"
        )
    runs = executor if bursts else searched(executor)
    # A scaled gradient may have to be thrown away whole, so none is used before all are there.
    early = (EARLY_RELEASE,) if is_scaled(profile.precision) else ()
    capability = without(EVERYTHING if hypothetical else runs, (*ruled_out, *early))
    asked = "priority" if hypothetical and schedule == "auto" else schedule
    if asked == "priority" and not goal.slice_bytes:
        goal = msgspec.structs.replace(goal, slice_bytes=SLICE_BYTES)
    return Problem(
        profile,
        cluster,
        goal,
        capability,
        executor=executor,
        schedule="priority" if asked == "priority" else "barrier",
        any_schedule=asked == "auto",
        shard_if_needed=asked == "priority" and not hypothetical,
        progress=shown(progress),
    )


def check_schedule(schedule: str) -> None:
    """Raises ``InputError`` for what is no schedule."""
    if schedule not in get_args(Schedules):
        known = ", ".join(get_args(Schedules))
        raise InputError(f"there is no schedule {schedule!r}: choose from {known}")


def searched(executor: Capability) -> Capability:
    """What plans are made within unless more is asked for."""
    # Units that leave ranks idle are run, but what is predicted of them has not been held against
    # measured steps widely.
    return msgspec.structs.replace(executor, idle_positions=False, branches=False)


def shown(progress: Callable[[int, int, str], None] | None) -> Progress | None:
    """A solver's progress as a bar's."""
    if progress is None:
        return None
    return lambda doing, share: progress(round(1000 * share), 1000, doing)


def problem_of(
    plan: Plan, profile: ModelProfile, cluster: Cluster, executor: Capability
) -> Problem:
    """The problem that a plan answers, as far as the plan tells."""
    return Problem(
        profile,
        cluster,
        plan.goal,
        capability_of(plan, executor),
        executor=executor,
        schedule=plan.schedule,
        message_bytes=plan.message_bytes,
        placement=plan.placement,
    )


def capability_of(plan: Plan, executor: Capability) -> Capability:
    """Within what a plan was made: what is searched by default, unless it goes beyond that."""
    if plan.hypothetical:
        return without(EVERYTHING, plan.goal.forbidden)
    found = executor if plan.leaves_idle else searched(executor)
    early = (EARLY_RELEASE,) if is_scaled(plan.precision) else ()
    return without(found, (*plan.goal.forbidden, *early))


def made_from(
    plan: Plan, profile: ModelProfile | None, cluster: Cluster | None
) -> tuple[ModelProfile, Cluster]:
    """What a plan was made from, by fingerprint where it is not given; raises ``InputError``, and
    warns of one that is given and is another."""
    check_is(plan, Plan)
    for value, kind in ((profile, ModelProfile), (cluster, Cluster)):
        if value is not None:
            check_is(value, kind)
    what = "what is computed anew is of the plan's decisions"
    if profile is not None and fingerprint(profile) != plan.provenance.profile:
        words = f"this profile of {profile.target} is not the one that the plan was made from"
        warnings.warn(f"{words}: {what} by its times", stacklevel=1)
    if cluster is not None and fingerprint(cluster) != plan.provenance.cluster:
        words = f"this cluster ({cluster.name}) is not the one that the plan was made for"
        warnings.warn(f"{words}: {what} on it", stacklevel=1)
    return (
        profile or cache.get_named(ModelProfile, plan.provenance.profile, "--profile (profile)"),
        cluster or cache.get_named(Cluster, plan.provenance.cluster, "--cluster (cluster)"),
    )


def check_time_limit(time_limit_s: float | None) -> None:
    """Refuses a limit that leaves no time."""
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"a time limit of {time_limit_s:g} s leaves no search: give more than 0")
