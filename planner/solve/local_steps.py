"""Plans whose hosts train apart: the part of a host planned by itself, and the shortest round that
hides the links between hosts.

What changes the training as much as this is planned last, where the user has allowed it by name,
and taken only where it is predicted to be clearly quicker than the best plan without.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor

import msgspec

from ..cost.budget import gpu_seconds_limit
from ..cost.collectives import Fabric
from ..cost.cost import CostModel
from ..cost.device_kinds import slowest_node
from ..cost.fragments import (
    FRAGMENTS,
    OUTER_UPDATES,
    FragmentCost,
    first_units,
    fragment_bytes,
    fragment_cost,
)
from ..schema.capability import Capability
from ..schema.cluster import Cluster
from ..schema.errors import InputError
from ..schema.goal import Goal, Pin
from ..schema.layout import Layout
from ..schema.local_steps import MIXING, MOST_INNER_STEPS, LocalSteps
from ..schema.plan import SHARDING, Moment, Plan, Prediction, UnitPlan
from ..schema.precision import is_scaled
from ..schema.profile import ModelProfile
from ..schema.record import fingerprint
from ..schema.text import option
from ..simulate.local_round import Round, simulate_round
from .evaluate import decisions_of, limits_bytes, make_plan
from .heuristic.resize import resized
from .heuristic.schedules import Search, clearly_better, objective_s
from .problem import Problem, Result

HIDDEN = 0.01
"""A link is hidden where steps wait for it no longer than this share of a step."""
ROOM = 1.15
"""A link is to be hidden though its messages take so many times as long as predicted. Hosts are
never equally quick: without room every other message is waited for by the host that is ahead, and a
step or two more of a delay cost little."""
MOST_DELAY = 0.5
"""The largest part of a round that an average may come late: what a host has learnt since it sent
its part, the average knows nothing of, and half of it is given up (``MIXING``)."""


def apart_if_quicker(problem: Problem, together: Result, search: Search) -> Result:
    """What was found ``together``, or a plan with local steps where that is clearly quicker."""
    why = cannot(problem)
    if why is not None:
        return _told(together, f"no local steps: {why}")
    inner = search(_of_host(problem))
    if inner.plan is None:
        return _told(together, "no local steps: nothing fits in the memory of a host's ranks then")
    plan = _whole(problem, inner.plan, together.plan)
    # A host's own limit is of a part of the batch, and knows nothing of what hosts exchange.
    allowed_s = gpu_seconds_limit(CostModel(problem.profile, problem.cluster, problem.goal))
    if plan.prediction.gpu_seconds > allowed_s * (1 + 1e-9):
        used = f"{plan.prediction.gpu_seconds:.3g} device-seconds, and {allowed_s:.3g} are allowed"
        return _told(together, f"no local steps: they would use {used}")
    limit_s = problem.goal.undisturbed_limit_s
    late = limit_s is not None and plan.prediction.step_s > limit_s
    if late or (
        together.plan is not None and not clearly_better(problem, plan.prediction, together.plan)
    ):
        words = f"with local steps {plan.prediction.step_s:.3g} s, which is not clearly quicker"
        return _told(together, words)
    return Result(
        inner.solver,
        "heuristic",
        objective_s=objective_s(problem.goal, plan.prediction),
        plan=plan,
        reason=f"{inner.reason}; hosts train apart",
    )


def cannot(problem: Problem) -> str | None:
    """Why a problem has no plan with local steps, or None."""
    hosts = problem.cluster.nodes
    if not problem.capability.local_steps:
        return "they cannot be run"
    if len(hosts) < 2:
        return "there is one host only"
    if len({len(host.devices) for host in hosts}) > 1:
        return "hosts have different numbers of devices"
    if problem.goal.batch < problem.cluster.world_size:
        return f"a batch of {problem.goal.batch} leaves ranks without samples"
    if is_scaled(problem.profile.precision):
        return f"under precision {problem.profile.precision} hosts leave out different steps"
    if problem.goal.batch_statistics == "global":
        return "batch statistics of the whole batch are not shared by hosts"
    return None


def _told(result: Result, words: str) -> Result:
    return result._replace(reason="; ".join(filter(None, (result.reason, words))))


# -- the part of a host ----------------------------------------------------------------------------


def host_cluster(profile: ModelProfile, cluster: Cluster) -> Cluster:
    """One host of a cluster by itself: of unequal ones the slowest, as all have equal shares of the
    batch and wait for it where they average."""
    node = cluster.nodes[slowest_node(profile, cluster)]
    # Under its own name, by which the profile has its times.
    return msgspec.structs.replace(resized(cluster, len(node.devices)), nodes=(node,))


def _of_host(problem: Problem) -> Problem:
    """What the ranks of one host are to train by: gradients stay inside it, whole and exact."""
    return replace(
        problem,
        cluster=host_cluster(problem.profile, problem.cluster),
        goal=_host_goal(problem.profile, problem.cluster, problem.goal),
        capability=host_capability(problem.capability),
        placement=None,
        explains=False,
        even=True,
        progress=None,
    )


def host_capability(known: Capability) -> Capability:
    """What of a ``known`` capability the ranks of one host may do."""
    return msgspec.structs.replace(
        known,
        exchange=tuple(e for e in known.exchange if e not in SHARDING),
        idle_positions=False,
        branches=False,
        by_host=False,
    )


def _host_goal(profile: ModelProfile, cluster: Cluster, goal: Goal) -> Goal:
    """What is asked of one host: its part of the batch, in the memory that is left to it."""
    hosts, apart_bytes = len(cluster.nodes), kept_bytes(profile, cluster)
    limits = limits_bytes(CostModel(profile, cluster, goal))
    return msgspec.structs.replace(
        goal,
        batch=ceil(goal.batch / hosts),
        # What cannot be kept is found out by the search, which is told of at least one byte.
        memory_limit_bytes=max(min(limits) - apart_bytes, 1),
        allow_lossy=False,
        min_fidelity=1.0,
        pins=tuple(_inside(pin, hosts) for pin in goal.pins),
        allow_local_steps=False,
        inner_steps=None,
        fragments=None,
    )


def _inside(pin: Pin, hosts: int) -> Pin:
    """A pin whose layouts are of all hosts, for one of them."""

    def of_host(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        return tuple(
            msgspec.structs.replace(layout, groups=layout.groups // hosts)
            for layout in layouts
            if layout.groups % hosts == 0
        )

    only = of_host(pin.only)
    # Of layouts that all go beyond a host none is left, which must not read as any: one that no
    # host has keeps the search from a plan.
    if pin.only and not only:
        only = pin.only
    return msgspec.structs.replace(pin, only=only, never=of_host(pin.never))


def kept_bytes(profile: ModelProfile, cluster: Cluster) -> int:
    """What a rank keeps besides for local steps: its part of the agreed copy, of the outer momentum
    and of messages on their way."""
    return ceil(3 * sum(_trained_bytes(profile)) / len(cluster.nodes[0].devices))


def _trained_bytes(profile: ModelProfile) -> list[int]:
    """The bytes of each unit's own parameters that are trained, as hosts keep and send them: those
    of 16 bits in 32."""
    seen: set[str] = set()
    sizes = []
    for unit in profile.units:
        own = [p for p in unit.parameters if p.trainable and p.shared not in seen]
        seen |= {p.shared for p in own}
        sizes.append(sum(2 * p.bytes if p.is_half else p.bytes for p in own))
    return sizes


# -- the round -------------------------------------------------------------------------------------


class _Rounds:
    """The rounds of which one is to be chosen, for hosts whose step by itself takes so long."""

    def __init__(
        self, profile: ModelProfile, cluster: Cluster, goal: Goal, inner_step_s: float
    ) -> None:
        self._cluster, self._goal, self._step_s = cluster, goal, inner_step_s
        self._sizes, self._hosts = _trained_bytes(profile), len(cluster.nodes)
        self._fabric = Fabric(cluster, tuple(range(cluster.world_size)))
        # Statistics of each rank's own samples.
        changed = (unit.state_bytes for unit in profile.units if unit.batch_statistics)
        self._buffers_bytes = sum(changed)
        self._rate = OUTER_UPDATES * profile.update_seconds_per_byte("momentum")
        self._cut: dict[int, tuple[tuple[int, ...], list[FragmentCost]]] = {}

    def fragments(self, count: int) -> tuple[tuple[int, ...], list[FragmentCost]]:
        """The first units of at most ``count`` fragments, and what these take."""
        if count not in self._cut:
            first = first_units(self._sizes, count)
            sizes = fragment_bytes(self._sizes, first)
            also = [0] * (len(sizes) - 1) + [self._buffers_bytes]
            costs = [
                fragment_cost(self._fabric, self._hosts, size, self._rate, buffers)
                for size, buffers in zip(sizes, also, strict=True)
            ]
            self._cut[count] = first, costs
        return self._cut[count]

    def of(self, length: int) -> tuple[LocalSteps, Round, list[FragmentCost]]:
        """The round of so many inner steps, what it is predicted to take, and its exchanges."""
        first, costs = self.fragments(min(self._goal.fragments or FRAGMENTS, length))
        links = self._cluster.interference
        longest_s = ROOM * links.communication_slowdown * max(cost.message_s for cost in costs)
        needed = ceil(longest_s / self._step_s) if self._step_s else 0
        delay = min(needed, floor(MOST_DELAY * length))
        local = LocalSteps(
            hosts=self._hosts, inner_steps=length, fragments=first, delay=delay,
            outer_lr=self._goal.outer_lr, outer_momentum=self._goal.outer_momentum,
            mixing=MIXING if delay else 1.0,
        )  # fmt: skip
        return local, simulate_round(local, self._step_s, costs, links), costs

    def _exposed_s(self, length: int) -> float:
        """What a step of such a round waits for links that are slower than predicted."""
        local, _, costs = self.of(length)
        slower = [cost._replace(message_s=ROOM * cost.message_s) for cost in costs]
        return simulate_round(local, self._step_s, slower, self._cluster.interference).exposed_s

    def shortest(self) -> tuple[LocalSteps, Round, list[FragmentCost]]:
        """The shortest round that hides the links, or the longest where none does."""
        least, most = 1, MOST_INNER_STEPS
        while least < most:
            middle = (least + most) // 2
            if self._exposed_s(middle) <= HIDDEN * self._step_s:
                most = middle
            else:
                least = middle + 1
        return self.of(most)


def _whole(problem: Problem, inner: Plan, together: Plan | None) -> Plan:
    """The plan of all hosts, of the plan of one."""
    profile, cluster, goal = problem.profile, problem.cluster, problem.goal
    rounds = _Rounds(profile, cluster, goal, inner.prediction.step_s)
    asked = goal.inner_steps
    local, found, costs = rounds.shortest() if asked is None else rounds.of(asked)
    each, hosts = inner.world_size, local.hosts
    if together is None:
        together = make_plan(profile, cluster, goal)
    placement = tuple(h * each + place for h in range(hosts) for place in inner.placement)
    plan = msgspec.structs.replace(
        inner,
        world_size=cluster.world_size,
        goal=goal,
        placement=placement,
        units=tuple(_on_all_hosts(unit, hosts) for unit in inner.units),
        local_steps=local,
        prediction=_prediction(problem, inner, local, found, costs),
        baseline=together.baseline,
        baseline_fits=together.baseline_fits,
        provenance=msgspec.structs.replace(
            inner.provenance,
            status="heuristic",
            bound_s=None,
            gap=None,
            cluster=fingerprint(cluster),
        ),
    )
    executor = problem.executor or problem.capability
    return msgspec.structs.replace(plan, hypothetical=executor.refusals(plan))


def _on_all_hosts(unit: UnitPlan, hosts: int) -> UnitPlan:
    layout = msgspec.structs.replace(unit.layout, groups=unit.layout.groups * hosts)
    return msgspec.structs.replace(unit, layout=layout)


def _prediction(
    problem: Problem, inner: Plan, local: LocalSteps, found: Round, costs: Sequence[FragmentCost]
) -> Prediction:
    """The mean step of a round, of the step that a host makes by itself."""
    own, length = inner.prediction, local.inner_steps
    more_s = found.step_s - own.step_s
    wider = found.step_s / own.step_s if own.step_s else 1.0
    kept = kept_bytes(problem.profile, problem.cluster)
    return msgspec.structs.replace(
        own,
        step_s=found.step_s,
        compute_s=own.compute_s + found.slowed_s,
        blocking_s=own.blocking_s + found.applied_s,
        exposed_s=own.exposed_s + found.exposed_s,
        exchange_s=max(own.exchange_s, sum(cost.message_s for cost in costs) / length),
        wire_bytes=own.wire_bytes + round(sum(cost.sent_bytes for cost in costs) / length),
        peak_bytes=tuple(peak + kept for peak in own.peak_bytes) * local.hosts,
        gpu_seconds=local.hosts * (own.gpu_seconds + inner.world_size * more_s),
        samples_per_s=problem.goal.batch / found.step_s if found.step_s else 0.0,
        fullest=_with_kept(own.fullest, kept),
        low_s=None if own.low_s is None else own.low_s * wider,
        high_s=None if own.high_s is None else own.high_s * wider,
    )


def _with_kept(moment: Moment | None, kept_bytes: int) -> Moment | None:
    """The moment with what is kept for local steps: two thirds as state, the rest on its way."""
    if moment is None:
        return None
    on_its_way = kept_bytes // 3
    return msgspec.structs.replace(
        moment,
        optimizer=moment.optimizer + kept_bytes - on_its_way,
        buffers=moment.buffers + on_its_way,
    )


def refuse_local_steps(plan: Plan, done: str) -> None:
    """Raises ``InputError`` for a plan whose hosts train apart, which cannot be ``done``."""
    if plan.local_steps is not None:
        raise InputError(
            f"a plan with local steps cannot be {done}: take one that was planned without "
            "--allow-local-steps (allow_local_steps)"
        )


def plan_of_host(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Plan, Cluster]:
    """A plan with local steps as the ranks of one host train by it, with the prediction of that
    host by itself, and this host; another plan and its cluster as they are. Its goal's limit on
    memory is what hosts' agreed copies and messages leave (``kept_bytes``)."""
    if plan.local_steps is None:
        return plan, cluster
    inner, host = plan.inside_host, host_cluster(profile, cluster)
    if inner.world_size != host.world_size:
        raise InputError(
            f"the plan is for hosts of {inner.world_size} ranks that train apart, and the cluster "
            f"has nodes of {host.world_size} devices: give the cluster that it was made for "
            f"({option('cluster')})"
        )
    goal = _host_goal(profile, cluster, plan.goal)
    made = make_plan(
        profile, host, goal, decisions_of(inner), plan.micro_batches, inner.placement,
        schedule=plan.schedule, message_bytes=plan.message_bytes,
    )  # fmt: skip
    return msgspec.structs.replace(made, hypothetical=plan.hypothetical), host


def round_of(
    plan: Plan, profile: ModelProfile, cluster: Cluster, inner_steps: int | None = None
) -> Round:
    """The round of a plan with local steps, simulated anew on ``cluster`` or with another number of
    ``inner_steps``; averages are applied as late as is best then."""
    assert plan.local_steps is not None
    own, _ = plan_of_host(plan, profile, cluster)
    rounds = _Rounds(profile, cluster, plan.goal, own.prediction.step_s)
    return rounds.of(inner_steps or plan.local_steps.inner_steps)[1]
