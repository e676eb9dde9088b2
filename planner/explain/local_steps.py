"""Why a plan with local steps is as it is: what a host decides, and what the round adds.

What a host decides is explained as any plan (``why``). The round adds to its step waiting for
averages over hosts and applying them, and to its memory what hosts have agreed on.
"""

import msgspec

from ..cost.budget import gpu_seconds_limit, single_device_batch_s
from ..cost.cost import CostModel
from ..schema.capability import Capability
from ..schema.cluster import Cluster, LevelName
from ..schema.local_steps import MOST_INNER_STEPS
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..solve.local_steps import host_capability, kept_bytes, plan_of_host, round_of
from . import why
from .what_if import Gain, with_host_bandwidth, with_rates
from .why import DeviceTime, Explanation, Exposure, HostsWait, LimitUse, Part, StepBottleneck


def bottleneck(plan: Plan, profile: ModelProfile, cluster: Cluster) -> StepBottleneck:
    """What bounds the whole step of a plan with local steps: waiting for other hosts, or what
    bounds the step that a host makes by itself."""
    own, host = plan_of_host(plan, profile, cluster)
    wait = _wait(plan, own, profile, cluster)
    return _bottleneck(plan, own, why.bottleneck(own, profile, host), wait, profile, cluster)


def _bottleneck(
    plan: Plan,
    own: Plan,
    found: StepBottleneck,
    wait: HostsWait,
    profile: ModelProfile,
    cluster: Cluster,
) -> StepBottleneck:
    """The same, where it is known what bounds a host by itself and how long that waits."""
    whole = plan.prediction
    exposed_s = own.prediction.exposed_s
    parts: dict[Part, float] = {
        "compute": whole.compute_s,
        "copies": own.prediction.copies_s,
        "blocking": whole.blocking_s,
        "exchange": exposed_s,
        "communication": whole.blocking_s + exposed_s,
        "averages": wait.waited_s,
    }
    part: Part = "averages" if wait.waited_s > parts[found.part] else found.part
    faster_s = None
    if found.link is not None:
        faster_s = round_of(plan, profile, _twice(cluster, found.link)).step_s
    copies = found.copies
    if copies is not None:
        wider = with_host_bandwidth(cluster, 2.0)
        # A host has a limit of its own in any case: what hosts agree on is left out of its memory.
        limited = plan.goal.memory_limit_bytes is not None
        after_s = round_of(plan, profile, wider).step_s
        copies = copies._replace(faster_s=after_s, limited=limited)
    return found._replace(
        part=part, part_s=parts[part], step_s=whole.step_s, faster_s=faster_s, hosts=wait,
        copies=copies, blocking_s=whole.blocking_s,
    )  # fmt: skip


def _wait(plan: Plan, own: Plan, profile: ModelProfile, cluster: Cluster) -> HostsWait:
    """How long a host waits, and the step of twice as many inner steps and that with twice the
    bandwidth between hosts."""
    assert plan.local_steps is not None
    steps = plan.local_steps.inner_steps
    return HostsWait(
        waited_s=max(plan.prediction.exposed_s - own.prediction.exposed_s, 0.0),
        inner_steps=steps,
        longer_s=round_of(plan, profile, cluster, 2 * steps).step_s,
        faster_s=round_of(plan, profile, _twice(cluster, "inter")).step_s,
    )


def _twice(cluster: Cluster, level: LevelName) -> Cluster:
    return with_rates(cluster, level, lambda rate: 2 * rate)


def explain(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    capability: Capability,
    best: int,
    what_if: bool,
) -> Explanation:
    """As ``why.explain``: the units and their alternatives are those of a host by itself, the
    step, its parts, its limits and what would shorten it those of the whole plan."""
    own, host = plan_of_host(plan, profile, cluster)
    found = why.explain(own, profile, host, capability=host_capability(capability), best=best)
    kept, whole = kept_bytes(profile, cluster), plan.prediction
    wait = _wait(plan, own, profile, cluster)
    bound = _bottleneck(plan, own, why.bottleneck(own, profile, host), wait, profile, cluster)
    exposed = found.exposed
    if wait.waited_s > 0:
        names = tuple(unit.name for unit in plan.units)
        exposed = (*exposed, Exposure(names, "inter", wait.waited_s))
    return msgspec.structs.replace(
        found,
        step_s=whole.step_s,
        slowed_s=plan.slowed_s,
        baseline_s=plan.baseline.step_s,
        bound_by=bound.part,
        limits=tuple(_of_whole(use, plan, profile, cluster) for use in found.limits),
        tightest_rank=plan.placement[own.placement.index(found.tightest_rank)],
        needed_bytes=found.needed_bytes + kept,
        available_bytes=found.available_bytes + kept,
        exposed=exposed,
        device_time=_device_time(found.device_time, plan, profile, cluster),
        gains=_gains(plan, own, wait) if what_if else (),
        host_step_s=own.prediction.step_s,
    )


def _of_whole(use: LimitUse, plan: Plan, profile: ModelProfile, cluster: Cluster) -> LimitUse:
    """What the whole plan uses of a limit of which a host by itself uses so much."""
    used, available = use.used, use.available
    if use.limit == "memory_limit_bytes":
        kept = kept_bytes(profile, cluster)
        used, available = used + kept, available + kept
    elif use.limit == "time_limit_s":
        used = plan.slowed_s
    elif use.limit == "amplification_limit":
        used = plan.prediction.gpu_seconds
        available = gpu_seconds_limit(CostModel(profile, cluster, plan.goal))
    return LimitUse(limit=use.limit, used=used, available=available)


def _device_time(
    own: DeviceTime, plan: Plan, profile: ModelProfile, cluster: Cluster
) -> DeviceTime:
    """The device-seconds of all hosts, beside one device that computes the whole batch."""
    assert plan.local_steps is not None
    hosts, model = plan.local_steps.hosts, CostModel(profile, cluster, plan.goal)
    single_s, once_s = single_device_batch_s(model), why.update_once_s(model)
    # Of both sums one update on one device is counted as updating.
    computing_s = hosts * (own.shares_s + own.single_device_s - once_s)
    shares_s = computing_s - (single_s - once_s)
    updates_s = hosts * (own.updates_s + once_s) - once_s
    executor_s = hosts * own.executor_s
    slowed_s = round_of(plan, profile, cluster).slowed_s
    slowing_s = hosts * own.slowing_s + plan.world_size * slowed_s
    used_s, starved_s = plan.prediction.gpu_seconds, hosts * own.host_s
    copies_s = hosts * own.copies_s
    others_s = single_s + shares_s + updates_s + executor_s + slowing_s + starved_s + copies_s
    return DeviceTime(
        used_s=used_s,
        single_device_s=single_s,
        shares_s=shares_s,
        updates_s=updates_s,
        executor_s=executor_s,
        slowing_s=slowing_s,
        waiting_s=used_s - others_s,
        host_s=starved_s,
        copies_s=copies_s,
    )


def _gains(plan: Plan, own: Plan, wait: HostsWait) -> tuple[Gain, ...]:
    """What a longer round and faster links would buy. Other questions change what a host decides
    and the round with it, and are for planning again."""
    assert plan.local_steps is not None
    hosts, steps = plan.local_steps.hosts, wait.inner_steps
    each, of_devices = own.world_size, plan.goal.objective == "gpu_seconds"

    def objective_s(step_s: float) -> float:
        if not of_devices:
            return step_s
        return hosts * (own.prediction.gpu_seconds + each * (step_s - own.prediction.step_s))

    change = f"{2 * steps} inner steps for {steps}"
    if 2 * steps > MOST_INNER_STEPS:
        change += f" (published: up to {MOST_INNER_STEPS})"
    return tuple(
        Gain(
            change=words,
            before_s=objective_s(plan.prediction.step_s),
            after_s=objective_s(after_s),
            method="the round simulated again",
        )
        for words, after_s in (
            (change, wait.longer_s),
            ("twice the bandwidth between nodes", wait.faster_s),
        )
    )
