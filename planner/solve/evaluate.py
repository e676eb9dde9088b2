"""What a set of decisions is predicted to cost, and the Plan made of them.

The prediction is the simulation of the schedule that the executor runs. For fixed decisions it
never rises with a bandwidth: compute does not depend on it, blocking communication and messages
only get shorter, and no message is sent earlier for being longer.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np

from ..cost.budget import gpu_seconds, idle_s, unit_s
from ..cost.compute import busiest_samples
from ..cost.cost import BUCKET_BYTES, CostModel
from ..cost.ownership import group_samples, position_classes
from ..cost.step_time import Chain, Vector, blocking_s, hosts_s
from ..memory.pinned import pinned_by_position
from ..memory.reserved import reserved_bytes
from ..memory.timeline import MemoryPoint, PositionMemory, moment_of, peak_bytes, timeline
from ..memory.unit_memory import memory_of
from ..schema.capability import PLAIN, Capability
from ..schema.cluster import Cluster
from ..schema.errors import InputError
from ..schema.goal import Goal
from ..schema.layout import Layout
from ..schema.options import Decisions, Option
from ..schema.plan import Moment, Plan, Prediction, Provenance, Status, UnitPlan
from ..schema.profile import ModelProfile
from ..schema.record import fingerprint
from ..simulate.events import Simulation
from ..simulate.rank_classes import simulate_decisions
from ..simulate.schedule import ScheduleName, Step, step_of
from ..simulate.spread import blocking_share, interval, slowest_of
from .host_memory import check_host_memory


class RankMemory(NamedTuple):
    """Positions that hold the same, their peak, the unit at work there, and what units hold."""

    positions: tuple[int, ...]
    peak_bytes: int
    unit: str
    memory: PositionMemory

    def fullest(self, names: Sequence[str]) -> Moment:
        """The point at which most is alive; ``names`` are the units'."""
        return moment_of(max(self.points, key=lambda point: point.total), names)

    @property
    def points(self) -> tuple[MemoryPoint, ...]:
        """The timeline, class by class."""
        return tuple(timeline(self.memory))


class Evaluation(NamedTuple):
    """All that is known of a set of decisions: the costs, the step run, its simulation, the memory
    of each class of positions, and the prediction drawn from them."""

    model: CostModel
    decisions: Decisions
    chain: Chain
    step: Step
    simulation: Simulation
    memory: tuple[RankMemory, ...]
    prediction: Prediction


class Excess(NamedTuple):
    """The position that is furthest over its limit, or closest to it (then negative). ``kind`` is
    the class of memory that takes most there, in words."""

    position: int
    unit: str
    needed_bytes: int
    available_bytes: int
    kind: str = ""

    @property
    def over_bytes(self) -> int:
        """How much is missing."""
        return self.needed_bytes - self.available_bytes


def evaluate(
    profile: ModelProfile,
    cluster: Cluster,
    goal: Goal,
    decisions: Sequence[Option] | None = None,
    micro_batches: int = 1,
    placement: Sequence[int] | None = None,
    *,
    schedule: ScheduleName = "barrier",
    message_bytes: int = BUCKET_BYTES,
) -> Prediction:
    """The prediction for ``decisions`` (one option for each unit; plain data parallelism if none).

    ``placement[p]`` is the rank at position p. ``message_bytes`` is the size of a bucket, or of a
    slice under the ``priority`` schedule.
    """
    model = CostModel(
        profile, cluster, goal, micro_batches=micro_batches,
        placement=tuple(placement) if placement else None, message_bytes=message_bytes,
        sliced=schedule == "priority",
    )  # fmt: skip
    chosen = model.baseline if decisions is None else tuple(decisions)
    return evaluation(model, chosen, schedule=schedule).prediction


def evaluation(
    model: CostModel, decisions: Decisions, *, schedule: ScheduleName = "barrier"
) -> Evaluation:
    """``evaluate`` with everything that led to the prediction."""
    units = model.profile.units
    if len(decisions) != len(units):
        raise InputError(f"{len(decisions)} decisions for {len(units)} units: give one for each")
    # What is waited for is the slowest rank.
    factor = slowest_of(model.world_size, model.profile.spread)
    chain, step, result = max(
        (_simulated(each, decisions, schedule, factor) for each in seen_by(model, decisions)),
        key=lambda found: found[-1].step_s,
    )
    memory = rank_memory(model, decisions)
    prediction = _prediction(model, decisions, step, result, factor, memory)
    return Evaluation(model, decisions, chain, step, result, memory, prediction)


def seen_by(model: CostModel, decisions: Decisions) -> Sequence[CostModel]:
    """The costs as those ranks see them of which each may be the slowest in a step."""
    if len(model.kinds) == 1:
        return (model,)
    # Where ranks wait for each other inside forward and backward, each unit takes as long as on its
    # slowest rank. Else only sums over units matter, and a rank that is slow in one may be quick in
    # another: see [Note: Shares of unequal devices] in local_batches.py.
    waits = any(option.layout.degree > 1 for option in decisions) or any(
        option.layout.size < model.world_size or option.early_release or option.gathers
        for option in decisions
    )
    chain = model.chain(decisions)
    if waits or blocking_s(chain):
        return (model,)
    return tuple(map(model.of_kind, model.kinds))


def _simulated(
    model: CostModel, decisions: Decisions, schedule: ScheduleName, factor: float
) -> tuple[Chain, Step, Simulation]:
    chain = model.chain(decisions)
    step = step_of(model, decisions, chain, schedule)
    found = simulate_decisions(model, decisions, step, slowest=factor)
    return chain, step, found.issued_in(issued_s(model, decisions, chain))


def issued_s(model: CostModel, decisions: Decisions, chain: Chain) -> float:
    """What the host of the busiest rank issues in a step."""
    return _on_busiest(model, decisions, hosts_s(chain))


def _copies_s(model: CostModel, decisions: Decisions) -> float:
    """What the busiest rank waits in a step for copies to its host's memory and back."""
    each = np.array([model.unit(k, option).copies_s for k, option in enumerate(decisions)])
    return model.micro_batches * _on_busiest(model, decisions, each)


def _on_busiest(model: CostModel, decisions: Decisions, each_s: Vector) -> float:
    """The most that a rank has of what each unit takes."""
    layouts = [option.layout for option in decisions]
    if not any(layout.first for layout in layouts):
        return float(each_s.sum())  # the rank at position 0 takes part in all units
    return max(
        sum(float(each_s[k]) for k, y in enumerate(layouts) if group.samples[y] is not None)
        for group in position_classes(model.counts, layouts)
    )


def rank_memory(model: CostModel, decisions: Decisions) -> tuple[RankMemory, ...]:
    """The memory timeline of each class of positions."""
    memory = memory_of(model)
    found = []
    for group in position_classes(model.counts, [o.layout for o in decisions]):
        position = memory.position(decisions, group.samples)
        peak, k = peak_bytes(position)
        name = model.profile.units[k].name
        found.append(RankMemory(group.positions, ceil(peak), name, position))
    return tuple(found)


def _prediction(
    model: CostModel,
    decisions: Decisions,
    step: Step,
    result: Simulation,
    factor: float,
    memory: Sequence[RankMemory],
) -> Prediction:
    peaks = {position: group.peak_bytes for group in memory for position in group.positions}
    per_link: dict[str, float] = {}
    for message in step.messages:
        per_link[message.link] = per_link.get(message.link, 0.0) + message.seconds
    names = [unit.name for unit in model.profile.units]
    # Measured is a median rank: it waits where the slowest computes.
    compute_s = (result.compute_s - result.host_s) / factor + result.host_s
    waiting_s = result.compute_s - compute_s
    blocked_s = waiting_s * blocking_share(step.work) if waiting_s else 0.0
    spread = model.cluster.spread
    origin = model.profile.origin
    expected = interval(result.step_s, result.compute_s, model.profile.spread, spread, origin)
    return Prediction(
        step_s=result.step_s,
        compute_s=compute_s,
        blocking_s=result.blocking_s + blocked_s,
        exposed_s=result.exposed_s + waiting_s - blocked_s,
        update_s=result.update_s / factor,
        exchange_s=max(per_link.values(), default=0.0),
        wire_bytes=round(_wire_bytes(model, decisions, step)),
        peak_bytes=tuple(peaks[position] for position in range(model.world_size)),
        gpu_seconds=_gpu_seconds(model, decisions, result),
        samples_per_s=model.goal.batch / result.step_s if result.step_s else 0.0,
        fullest=max(memory, key=lambda group: group.peak_bytes).fullest(names),
        waiting_s=waiting_s,
        host_s=result.host_s,
        copies_s=_copies_s(model, decisions),
        low_s=expected.low_s,
        high_s=expected.high_s,
    )


def _gpu_seconds(model: CostModel, decisions: Decisions, result: Simulation) -> float:
    if not any(option.layout.first for option in decisions):
        return gpu_seconds(model, decisions, result.step_s)
    # Branches side by side: all devices for the time in which the class that works longest does not
    # compute, and each unit's own for as long as it computes.
    whole = model.world_size * result.step_s
    own = sum(
        model.world_size * unit_s(model, k, o) - idle_s(model, k, o)
        for k, o in enumerate(decisions)
    )
    computing_s = result.compute_s - result.host_s
    return min(whole, whole - model.world_size * computing_s + own)


def _wire_bytes(model: CostModel, decisions: Decisions, step: Step) -> float:
    """What the busiest rank sends in a step."""
    # An upper estimate: the rank that is busiest in one collective may not be so in another.
    blocking = 0.0
    for k, option in enumerate(decisions):
        cost = model.unit(k, option)
        blocking += cost.inner_forward.sent_bytes + cost.inner_backward.sent_bytes
        blocking += cost.released.sent_bytes  # no message, as the rank waits for it in backward
    for e in range(len(model.ends)):
        edge = model.arrival(e, decisions)
        blocking += edge.forward.sent_bytes + edge.backward.sent_bytes
    return model.micro_batches * blocking + sum(m.sent_bytes for m in step.messages)


def limits_bytes(model: CostModel) -> tuple[int, ...]:
    """Memory available at each position: the goal's limit, else what of the device's own memory
    tensors can have."""
    if model.goal.memory_limit_bytes is not None:
        return (model.goal.memory_limit_bytes,) * model.world_size
    devices = model.cluster.devices  # once: it is put together anew whenever it is asked for
    return tuple(devices[rank].usable_bytes for rank in model.placement)


class BindingRank(NamedTuple):
    """The rank by whose memory a search judges all: its position, or None for one that is in the
    fullest group of every layout and has the least memory; and what it has."""

    position: int | None
    limit_bytes: int

    def samples(self, model: CostModel, layout: Layout) -> int:
        """Samples of its group."""
        own = None if self.position is None else group_samples(model.counts, layout)[self.position]
        return busiest_samples(model.counts, layout) if own is None else own


def binding_rank(model: CostModel) -> BindingRank:
    """The rank whose memory is short first."""
    limits = limits_bytes(model)
    # With even shares a search may take the fullest group and the least memory for one rank's. With
    # planned ones the rank of least memory has fewest samples for that.
    if not model.local_batch_sizes:
        return BindingRank(None, min(limits))
    position = excess(model, rank_memory(model, model.baseline)).position
    return BindingRank(position, limits[position])


def excess(model: CostModel, memory: Sequence[RankMemory]) -> Excess:
    """Where memory is tightest."""
    limits = limits_bytes(model)
    found = [
        (Excess(position, group.unit, group.peak_bytes, limits[position]), group)
        for group in memory
        for position in group.positions
    ]
    tight, group = max(found, key=lambda pair: pair[0].over_bytes)
    names = [unit.name for unit in model.profile.units]
    return tight._replace(kind=group.fullest(names).largest)


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    goal: Goal,
    decisions: Sequence[Option] | None = None,
    micro_batches: int = 1,
    placement: Sequence[int] | None = None,
    *,
    schedule: ScheduleName = "barrier",
    message_bytes: int = BUCKET_BYTES,
    local_batch_sizes: Sequence[int] = (),
    executor: Capability = PLAIN,
) -> Plan:
    """The Plan of those decisions with its prediction and that of plain data parallelism.

    ``local_batch_sizes`` are the samples of each position (none given: even shares). What
    ``executor`` cannot run is listed in the plan as hypothetical.
    """
    model = CostModel(
        profile, cluster, goal, micro_batches=micro_batches,
        placement=tuple(placement) if placement else None, message_bytes=message_bytes,
        sliced=schedule == "priority", local_batch_sizes=tuple(local_batch_sizes),
    )  # fmt: skip
    chosen = model.baseline if decisions is None else tuple(decisions)
    return plan_by(model, chosen, schedule, executor)


def plan_by(
    model: CostModel,
    decisions: Decisions,
    schedule: ScheduleName,
    executor: Capability,
    solver: str = "manual",
    status: Status = "manual",
    **proof: float | None,
) -> Plan:
    """``make_plan`` by the costs of a model; ``proof`` may name ``bound_s`` and ``gap``."""
    profile, cluster, goal = model.profile, model.cluster, model.goal
    check_host_memory(model, decisions)
    ours = evaluation(model, decisions, schedule=schedule)
    plain = _baseline(model, schedule)
    plan = Plan(
        target=profile.target,
        model=profile.model,
        precision=profile.precision,
        world_size=cluster.world_size,
        goal=goal,
        micro_batches=model.micro_batches,
        message_bytes=model.message_bytes,
        schedule=schedule,
        placement=model.placement,
        local_batch_sizes=model.local_batch_sizes,
        units=tuple(_unit_plan(ours, k) for k in range(len(decisions))),
        prediction=_with_allocators(ours),
        baseline=plain.prediction,
        baseline_fits=excess(plain.model, plain.memory).over_bytes <= 0,
        reserve_bytes=0 if goal.memory_limit_bytes is not None else _reserve_bytes(cluster),
        provenance=Provenance(
            solver=solver,
            status=status,
            profile=fingerprint(profile),
            cluster=fingerprint(cluster),
            software=profile.software,
            **{name: value for name, value in proof.items() if value is not None},
        ),
    )
    return msgspec.structs.replace(plan, hypothetical=executor.refusals(plan))


def _with_allocators(done: Evaluation) -> Prediction:
    """The prediction with what is pinned on the hosts, and on GPUs what the allocator reserves."""
    # Here and not in each evaluation: searches make many, and none decides by it.
    pinned = pinned_by_position(done.model, done.decisions)
    prediction = msgspec.structs.replace(done.prediction, pinned_bytes=pinned)
    if done.model.profile.device_type != "cuda":
        return prediction
    peaks = prediction.peak_bytes
    by_position = reserved_bytes(memory_of(done.model), done.decisions, peaks)
    return msgspec.structs.replace(prediction, reserved_bytes=by_position)


def _reserve_bytes(cluster: Cluster) -> int:
    return max(device.reserve_bytes for device in cluster.devices)


def _baseline(model: CostModel, schedule: ScheduleName) -> Evaluation:
    """Plain data parallelism as it would be run: ranks in the order of the hosts."""
    ways: list[tuple[ScheduleName, int]] = [(schedule, model.message_bytes)]
    # A plan is not to gain by slices that are bad for the baseline: there DDP's default counts.
    if schedule == "priority":
        ways.append(("barrier", BUCKET_BYTES))
    found = []
    for name, size in ways:
        plain = CostModel(
            model.profile, model.cluster, model.goal, micro_batches=model.micro_batches,
            message_bytes=size, sliced=name == "priority",
        )  # fmt: skip
        # With even shares, as DistributedDataParallel and its samplers have them.
        found.append(evaluation(plain, plain.baseline, schedule=name))
    return min(found, key=lambda done: done.prediction.step_s)


def _unit_plan(done: Evaluation, k: int) -> UnitPlan:
    unit, option, chain = done.model.profile.units[k], done.decisions[k], done.chain
    blocking = (
        chain.entry_forward_s[:, k]
        + chain.entry_backward_s[:, k]
        + chain.inner_forward_s[:, k]
        + chain.inner_backward_s[:, k]
    )
    return UnitPlan(
        name=unit.name,
        kind=unit.kind,
        modules=unit.modules,
        batched_inputs=unit.batched_inputs,
        batch_dims=unit.batch_dims,
        layout=option.layout,
        style=option.style,
        memory=option.memory,
        segment=option.segment,
        early_release=option.early_release,
        exchange=option.exchange,
        exchange_ratio=option.ratio,
        wire=option.wire,
        peers_per_host=option.peers_per_host,
        feedback=option.feedback,
        parameter_bytes=sum(p.bytes for p in done.model.owned[k]),
        forward_s=float(chain.forward_s[k]),
        backward_s=float(chain.backward_s[k]),
        blocking_s=float(blocking.sum()),
        exchange_s=float(chain.exchange_s[:, k].sum()),
    )


def decisions_of(plan: Plan) -> Decisions:
    """The options that a plan chose, as ``evaluate`` takes them."""
    return tuple(
        Option(
            layout=unit.layout,
            style=unit.style,
            memory=unit.memory,
            exchange=unit.exchange,
            ratio=unit.exchange_ratio,
            early_release=unit.early_release,
            feedback=unit.feedback,
            wire=unit.wire,
            peers_per_host=unit.peers_per_host,
            segment=unit.segment,
        )
        for unit in plan.units
    )
