"""Why a plan is as it is: each unit's alternatives, what binds, where communication is exposed.

One unit at a time (with the units tied to it) is given every other option that it could have, the
formula ranks them, and the best are simulated. Nothing else changes with it: what the whole plan
would gain from more of anything is ``what_if``'s, which plans again.

Device-seconds are told beside what one device would take by itself; their ratio is DeepPool's
amplification (Park et al., arXiv 2112.10065).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ..cost.budget import (
    energy_budget,
    gpu_seconds,
    gpu_seconds_limit,
    lost_energy,
    profile_of_one,
    single_device_batch_s,
    unit_amplification,
    unit_s,
)
from ..cost.cost import CostModel
from ..cost.step_time import LINKS, binding_term
from ..schema.capability import PLAIN, Capability
from ..schema.cluster import Cluster, LevelName
from ..schema.errors import InputError
from ..schema.layout import Layout, Style
from ..schema.options import Decisions, Option
from ..schema.plan import (
    ExchangePolicy,
    FeedbackPolicy,
    MemoryPolicy,
    Plan,
    ScheduleName,
    WireFormat,
)
from ..schema.profile import ModelProfile
from ..schema.record import Bytes, Count, Index, Record, Seconds
from ..simulate.events import gaps
from ..simulate.schedule import COMPUTE
from ..solve.evaluate import Evaluation, decisions_of, evaluation, excess
from ..solve.heuristic.checkpointing import limited_by_memory
from ..solve.heuristic.space import OptionSpace, ScoredDecisions
from .what_if import Gain, with_bandwidth, with_host_bandwidth

# Limits may be overdrawn by this much: sums of floats differ by their order.
ROUNDING = 1 + 1e-9

# The share of memory above which there is no room for a larger batch.
FULL = 0.9
# Units, times the units that each simulation of one's alternatives goes through.
MOST_SIMULATED = 20_000

Part = Literal["compute", "copies", "blocking", "exchange", "communication", "averages"]
"""Parts of a step; ``copies`` are those to the host and back, a part of ``compute``, and
``communication`` is ``blocking`` and ``exchange`` together; ``averages`` are what hosts that train
apart wait for."""


class Exposure(NamedTuple):
    """Seconds of a step that a rank waits for one message of gradients: the units whose gradients
    it carries, and the link."""

    units: tuple[str, ...]
    link: str
    seconds: float


class LimitUse(Record, frozen=True, kw_only=True):
    """One limit (the goal's field, memory's also where it is the device's own): how much of it a
    plan uses, both in the limit's unit (bytes, device-seconds, seconds, times one device's time,
    share of the gradient's energy that is not sent)."""

    limit: str
    used: float
    available: float

    @property
    def kept(self) -> bool:
        return self.used <= self.available * ROUNDING + 1e-12


class BindingTerm(Record, frozen=True, kw_only=True):
    """The term that the step's formula is equal to: the gradients of all units up to ``unit`` on
    ``link``, sent while backward comes down to it (by priority: before forward comes up to it).
    Both are None where it is what the rank itself computes and waits for, or what ``hosts`` take to
    issue a step."""

    link: str | None = None
    unit: str | None = None
    hosts: bool = False


class Alternative(Record, frozen=True, kw_only=True):
    """Another option for a unit: the step that it would give, its device-seconds, the fullest
    rank's bytes, and the limits of the goal (pins among them) that it would break."""

    layout: Layout
    style: Style
    memory: MemoryPolicy = "keep"
    exchange: ExchangePolicy = "dense"
    exchange_ratio: float = 1.0
    early_release: bool = False
    feedback: FeedbackPolicy = "residual"
    wire: WireFormat = "exact"
    peers_per_host: Count = 1
    step_s: Seconds
    gpu_seconds: Seconds
    peak_bytes: Bytes
    breaks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it keeps the limit on memory."""
        return "memory_limit_bytes" not in self.breaks


class DeviceTime(Record, frozen=True, kw_only=True):
    """Device-seconds of a step. ``used_s`` is their sum; ``single_device_s`` is what one device
    would take to compute the whole batch and update once, and the others are what the division
    costs, or saves where they are negative:

    ``shares_s``    units at smaller shares of the batch (a kernel's fixed cost is paid on each
                    device), divided, or run again
    ``updates_s``   the update on every device that holds a parameter
    ``executor_s``  the executor's own work, as the probe measured it
    ``slowing_s``   computing beside communication, where each slows the other
    ``waiting_s``   redistribution, collectives inside units, exposed gradient exchange
    ``host_s``      GPUs that wait for their hosts to issue work
    ``copies_s``    copies to the hosts' memory and back
    """

    used_s: Seconds
    single_device_s: Seconds
    shares_s: float
    updates_s: float
    executor_s: Seconds
    slowing_s: float
    waiting_s: float
    host_s: float = 0.0
    copies_s: Seconds = 0.0

    @property
    def amplification(self) -> float:
        """Device-seconds as a multiple of what one device takes."""
        return self.used_s / self.single_device_s if self.single_device_s else 0.0


class UnitExplanation(Record, frozen=True, kw_only=True):
    """One unit's cost, part by part, for one micro-batch (exchange: for one step), and its best
    alternatives, the quickest first (none where other units take more, of more than 141 units).
    ``with_it`` are the units tied to it, ``stays_whole`` is the profile's."""

    name: str
    layout: Layout
    style: Style
    memory: MemoryPolicy = "keep"
    exchange: ExchangePolicy = "dense"
    exchange_ratio: float = 1.0
    early_release: bool = False
    feedback: FeedbackPolicy = "residual"
    wire: WireFormat = "exact"
    peers_per_host: Count = 1
    forward_s: Seconds
    backward_s: Seconds
    redistribute_s: Seconds
    inner_s: Seconds
    exchange_s: Seconds
    update_s: Seconds
    with_it: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    stays_whole: str = ""

    @property
    def seconds(self) -> float:
        """All of its cost."""
        waited = self.redistribute_s + self.inner_s + self.exchange_s
        return self.forward_s + self.backward_s + waited + self.update_s


class Explanation(Record, frozen=True, kw_only=True):
    """The largest part of the step (``bound_by``), the term of the formula that it is equal to, the
    limits and what is used of them, those that keep a quicker alternative of one unit out
    (``binding``; of fewer device-seconds where that is the objective), where memory is tightest,
    what is exposed, every unit, and what more of anything would buy where that was asked.
    ``slowed_s`` is what a step may take with the background job that the goal allows (``step_s``
    without one), ``device_time`` what its device-seconds are made of. Where hosts train apart
    ``host_step_s`` is the step that one makes by itself: the units, their alternatives and the term
    are of that, all else of the whole plan. ``waiting_s`` is the prediction's: for so long a median
    rank waits for the slowest, which is no part of ``exposed``. So is ``copies_s``: a rank waits so
    long for copies to its host's memory and back, which is a part of computing."""

    step_s: Seconds
    slowed_s: Seconds
    baseline_s: Seconds
    bound_by: Part
    term: BindingTerm | None
    limits: tuple[LimitUse, ...]
    binding: tuple[str, ...]
    tightest_rank: Index
    tightest_unit: str
    needed_bytes: Bytes
    available_bytes: Bytes
    exposed: tuple[Exposure, ...]
    units: tuple[UnitExplanation, ...]
    device_time: DeviceTime
    gains: tuple[Gain, ...] = ()
    host_step_s: Seconds | None = None
    waiting_s: Seconds = 0.0
    copies_s: Seconds = 0.0


def explain(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    capability: Capability = PLAIN,
    best: int = 3,
) -> Explanation:
    """``best`` is how many alternatives of each unit are told; of many units only those that take
    most have any (``units_told``)."""
    check_belongs(plan, profile, cluster)
    model, schedule = CostModel.of_plan(plan, profile, cluster), plan.schedule
    decisions = decisions_of(plan)
    done = evaluation(model, decisions, schedule=schedule)
    # What pins and unit limits forbid is an alternative too, one that breaks them. A limit on the
    # whole step is not: it is looked at after an alternative has been simulated.
    free = msgspec.structs.replace(plan.goal, pins=(), unit_amplification_limit=None)
    free_model = CostModel.of_plan(plan, profile, cluster, free)
    scored = ScoredDecisions(OptionSpace(free_model, capability), schedule)
    units = [_unit(done, k, ()) for k in range(len(decisions))]
    for k in sorted(range(len(units)), key=lambda k: -units[k].seconds)[: units_told(len(units))]:
        scored.move_to(decisions)
        found = [_alternative(model, k, d, schedule) for d in _nearest(scored, k, best)]
        told = tuple(sorted(found, key=lambda a: a.step_s))
        units[k] = msgspec.structs.replace(units[k], alternatives=told)
    tight = excess(model, done.memory)
    return Explanation(
        step_s=done.prediction.step_s,
        slowed_s=done.prediction.step_s * plan.goal.slowdown,
        baseline_s=plan.baseline.step_s,
        bound_by=largest_part(done)[0],
        term=term_of(done, schedule),
        limits=limit_uses(done),
        binding=tuple(_binding(done, units)),
        tightest_rank=plan.placement[tight.position],
        tightest_unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        exposed=tuple(exposures(done)),
        units=tuple(units),
        device_time=device_time(done),
        waiting_s=done.prediction.waiting_s,
        copies_s=done.prediction.copies_s,
    )


def units_told(units: int) -> int:
    """Of how many units of a model alternatives are simulated."""
    # Every alternative is a simulation of all units, so that all alternatives of all units take
    # time with the square of their number.
    return max(MOST_SIMULATED // units, 1)


def _binding(done: Evaluation, units: Sequence[UnitExplanation]) -> Iterator[str]:
    """The limits that alternatives break which would be better without them."""
    what = "gpu_seconds" if done.model.goal.objective == "gpu_seconds" else "step_s"
    ours = getattr(done.prediction, what) * (1 - 1e-9)
    every = (a for unit in units for a in unit.alternatives)
    yield from dict.fromkeys(b for a in every if getattr(a, what) < ours for b in a.breaks)


class HostsWait(NamedTuple):
    """How long a step of hosts that train apart waits for the averages over hosts, in rounds of
    ``inner_steps``; and the whole step in rounds of twice as many (``longer_s``), or with twice the
    bandwidth between hosts (``faster_s``)."""

    waited_s: float
    inner_steps: int
    longer_s: float
    faster_s: float


class HostCopies(NamedTuple):
    """How long a step waits for copies to the host's memory and back (a part of what it computes),
    the whole step with twice the bandwidth there (``faster_s``), and the policies that copy.
    ``limited``: a limit on memory was asked for."""

    copies_s: float
    faster_s: float
    policies: tuple[str, ...]
    limited: bool


class StepBottleneck(NamedTuple):
    """The largest part of a step of ``step_s``, and what would shorten it with the same decisions.
    ``link`` is where most of the communication that the rank waits for goes over, and ``faster_s``
    the step with twice its bandwidth; None where nothing is waited for. ``recompute_s`` is
    computing that is done again for lack of memory. ``may_round`` says that gradients could
    travel in fewer bytes and it was not allowed. ``hosts`` is of plans with local steps.
    ``on_slowest``: ``part_s`` is of the slowest rank, for which others mostly wait. ``copies`` is
    of plans that copy to the host's memory. ``full``: memory has no room for a larger batch.
    ``blocking_s`` is the blocking part of communication."""

    part: Part
    part_s: float
    step_s: float
    recompute_s: float
    link: LevelName | None = None
    faster_s: float | None = None
    may_round: bool = False
    hosts: HostsWait | None = None
    on_slowest: bool = False
    host_s: float = 0.0
    copies: HostCopies | None = None
    full: bool = False
    blocking_s: float = 0.0


def bottleneck(plan: Plan, profile: ModelProfile, cluster: Cluster) -> StepBottleneck:
    """What bounds ``plan``, made from ``profile`` and ``cluster``. Nothing is searched: the plan is
    simulated as it is, and once more with each faster link."""
    model, decisions = CostModel.of_plan(plan, profile, cluster), decisions_of(plan)
    done = evaluation(model, decisions, schedule=plan.schedule)
    part, part_s, on_slowest = largest_part(done)
    recomputed = (unit.forward_s for unit in plan.units if unit.memory == "recompute")
    found = StepBottleneck(
        part, part_s, done.prediction.step_s, sum(recomputed) * plan.micro_batches,
        may_round=not plan.goal.allow_lossy and model.wire_share("bf16") < 1,
        on_slowest=on_slowest, host_s=done.prediction.host_s,
        copies=_copies(plan, profile, cluster, done), full=_full(plan, done),
        blocking_s=done.prediction.blocking_s,
    )  # fmt: skip
    waited: dict[LevelName, float] = {}
    for link, seconds in _waited(done):
        waited[link] = waited.get(link, 0.0) + seconds
    level = cluster.level(max(waited, key=lambda name: waited[name])) if waited else None
    if level is None:
        return found
    faster = with_bandwidth(cluster, level.name, level.bytes_per_s)
    after = evaluation(CostModel.of_plan(plan, profile, faster), decisions, schedule=plan.schedule)
    return found._replace(link=level.name, faster_s=after.prediction.step_s)


def _full(plan: Plan, done: Evaluation) -> bool:
    """Whether feature maps of more samples would not fit as the plan keeps them."""
    tight = excess(done.model, done.memory)
    return limited_by_memory(plan) or tight.needed_bytes > FULL * tight.available_bytes


def _copies(
    plan: Plan, profile: ModelProfile, cluster: Cluster, done: Evaluation
) -> HostCopies | None:
    copies_s = done.prediction.copies_s
    if not copies_s:
        return None
    model = CostModel.of_plan(plan, profile, with_host_bandwidth(cluster, 2.0))
    faster_s = evaluation(model, done.decisions, schedule=plan.schedule).prediction.step_s
    used = {policy for unit in plan.units for policy in (unit.memory, unit.feedback)}
    policies = tuple(name for name in ("offload", "host_mirror") if name in used)
    return HostCopies(copies_s, faster_s, policies, plan.goal.memory_limit_bytes is not None)


def _waited(done: Evaluation) -> Iterator[tuple[LevelName, float]]:
    """Seconds for which the rank waits for each link: exposed messages, blocking communication."""
    for exposed in exposures(done):
        yield exposed.link, exposed.seconds  # type: ignore[misc]
    simulation = done.simulation
    for span in simulation.spans:
        waits = span.phase != "exchange" and span.resource != COMPUTE
        if waits and span.start_s >= simulation.start_s:
            seconds = (span.end_s - span.start_s) / simulation.steps
            yield span.resource, seconds  # type: ignore[misc]


def check_belongs(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raises where a plan is of another model or of another number of ranks."""
    planned, measured = ([u.name for u in each.units] for each in (plan, profile))
    if plan.model != profile.model or planned != measured:
        raise InputError(
            f"the plan is of {plan.target} ({plan.model}) and the profile of {profile.target} "
            f"({profile.model}): plan again from this profile"
        )
    if plan.world_size != cluster.world_size:
        raise InputError(
            f"the plan is for {plan.world_size} ranks and cluster {cluster.name!r} has "
            f"{cluster.world_size}: plan again for this cluster"
        )


def _nearest(scored: ScoredDecisions, k: int, best: int) -> list[Decisions]:
    """The decisions that differ from the plan's in unit ``k`` only, the best by formula."""
    found = []
    for option in scored.space.options[k]:
        changes = scored.space.tied(k, option)
        if option == scored.decisions[k] or changes is None:
            continue
        candidate = scored.tried(changes)
        if candidate is not None:
            found.append(candidate)
    fitting = sorted(found, key=lambda f: f[0])[:best]
    # The quickest too, even if a limit forbids it: that tells what the limit costs.
    quickest = sorted(found, key=lambda f: f[0].step_s)[:1]
    return list(dict.fromkeys(d for _, d in [*fitting, *quickest]))


def _alternative(
    model: CostModel, k: int, decisions: Decisions, schedule: ScheduleName
) -> Alternative:
    done = evaluation(model, decisions, schedule=schedule)
    return Alternative(
        **_fields(decisions[k]),
        step_s=done.prediction.step_s,
        gpu_seconds=done.prediction.gpu_seconds,
        peak_bytes=max(done.prediction.peak_bytes),
        breaks=_broken(done),
    )


def _fields(option: Option) -> dict[str, Any]:
    """What documents say of an option; segments are not changed unit by unit."""
    found = option._asdict()
    found["exchange_ratio"] = found.pop("ratio")
    del found["segment"]
    return found


def _unit(done: Evaluation, k: int, alternatives: tuple[Alternative, ...]) -> UnitExplanation:
    units, chain = done.model.profile.units, done.chain
    return UnitExplanation(
        name=units[k].name,
        **_fields(done.decisions[k]),
        forward_s=float(chain.forward_s[k]),
        backward_s=float(chain.backward_s[k]),
        redistribute_s=float((chain.entry_forward_s + chain.entry_backward_s)[:, k].sum()),
        inner_s=float((chain.inner_forward_s + chain.inner_backward_s)[:, k].sum()),
        exchange_s=float(chain.exchange_s[:, k].sum()),
        update_s=float(chain.update_s[k]),
        with_it=tuple(units[o].name for o in done.model.ties[k] if o != k),
        alternatives=alternatives,
        stays_whole=units[k].stays_whole,
    )


def term_of(done: Evaluation, schedule: ScheduleName) -> BindingTerm | None:
    """The term that binds a plan's step; None where there is no formula for it."""
    # Branches side by side overlap on different ranks: their step is a critical path.
    if any(option.layout.first for option in done.decisions):
        return None
    found = binding_term(done.chain, priority=schedule == "priority")
    hosts = done.prediction.host_s > 0
    if found is None or hosts:
        return BindingTerm(hosts=hosts)
    link, k = found
    return BindingTerm(link=LINKS[link], unit=done.model.profile.units[k].name)


def limit_uses(done: Evaluation) -> tuple[LimitUse, ...]:
    """The limits that there are, and what the plan uses of each as it is predicted (solvers keep
    them by the formula)."""
    model, decisions, goal = done.model, done.decisions, done.model.goal
    tight = excess(model, done.memory)
    step_s = done.prediction.step_s
    found: list[tuple[str, float, float]] = [
        ("memory_limit_bytes", tight.needed_bytes, tight.available_bytes)
    ]
    if goal.amplification_limit is not None:
        used = gpu_seconds(model, decisions, step_s)
        found.append(("amplification_limit", used, gpu_seconds_limit(model)))
    if goal.unit_amplification_limit is not None:
        most = max(unit_amplification(model, k, o) for k, o in enumerate(decisions))
        found.append(("unit_amplification_limit", most, goal.unit_amplification_limit))
    if goal.time_limit_s is not None:
        found.append(("time_limit_s", step_s * goal.slowdown, goal.time_limit_s))
    if goal.allow_lossy:
        lost = sum(lost_energy(model, k, o) for k, o in enumerate(decisions))
        found.append(("min_fidelity", lost, energy_budget(model)))
    return tuple(
        LimitUse(limit=limit, used=float(used), available=float(most))
        for limit, used, most in found
    )


def _broken(done: Evaluation) -> tuple[str, ...]:
    """The limits that a plan does not keep, pins among them."""
    over = tuple(use.limit for use in limit_uses(done) if not use.kept)
    units = zip(done.model.profile.units, done.decisions, strict=True)
    pinned = all(done.model.goal.permits(u.name, o.layout, o.style) for u, o in units)
    return over if pinned else (*over, "pins")


def largest_part(done: Evaluation) -> tuple[Part, float, bool]:
    """What a step takes longest for on the slowest rank, and how long that is predicted to take on
    a median rank; on the slowest one itself (True) where the median rank, which waits for it, does
    something else for longest. Computing is compared with all communication: the larger part of
    this is told where it alone takes more than computing, and of computing the copies to the host
    and back where they take most of it."""
    slowest, median = done.simulation, done.prediction
    parts: dict[Part, tuple[float, float]] = {
        "compute": (slowest.compute_s, median.compute_s),
        "blocking": (slowest.blocking_s, median.blocking_s),
        "exchange": (slowest.exposed_s, median.exposed_s),
    }
    both = slowest.blocking_s + slowest.exposed_s, median.blocking_s + median.exposed_s
    part = max(parts, key=lambda name: parts[name][0])
    if part == "compute":
        if both[0] > slowest.compute_s:
            return "communication", both[1], False
        parts["communication"] = both
    waited_for = parts[part][1] < max(usual for _, usual in parts.values())
    part_s = parts[part][0 if waited_for else 1]
    if part == "compute" and 2 * median.copies_s > part_s:
        return "copies", median.copies_s, False
    return part, part_s, waited_for


def exposures(done: Evaluation) -> Iterator[Exposure]:
    """Each message's part in the stalls of the step, those without one left out."""
    units, simulation = done.model.profile.units, done.simulation
    spans, start_s = simulation.spans, simulation.start_s
    # What devices wait for their hosts is no part of what was simulated.
    end_s = start_s + simulation.steps * (simulation.step_s - simulation.host_s)
    # A stall is when the rank neither computes nor communicates for itself. One may be the last of
    # a step: where no parameter is trained there is no update, and nothing follows the exchange.
    busy = [(s.start_s, s.end_s) for s in spans if s.phase != "exchange"]
    stalls = list(gaps(busy, start_s, end_s))
    # A message is exposed for as long as it is under way while the rank does nothing. Messages on
    # two links at once share a stall, so these seconds may add up to more than the step's.
    for index, message in enumerate(done.step.messages):
        seconds = sum(
            max(min(span.end_s, end) - max(span.start_s, start), 0.0)
            for span in spans
            if span.message == index
            for start, end in stalls
        )
        if seconds > 0:
            named = tuple(units[k].name for k in message.units)
            yield Exposure(named, message.link, seconds / simulation.steps)


def device_time(done: Evaluation) -> DeviceTime:
    """The parts of what an evaluated plan uses. A step keeps all devices for its time, less those
    that a burst leaves idle while its units compute."""
    model, decisions = done.model, done.decisions
    units = range(len(decisions))
    sizes = [option.layout.size for option in decisions]
    seconds = [unit_s(model, k, decisions[k]) for k in units]
    computing_s = sum(sizes[k] * seconds[k] for k in units)
    sent = [model.unit(k, o).trained_bytes if o.layout.groups > 1 else 0
            for k, o in enumerate(decisions)]  # fmt: skip
    own_s = [model.overhead_s(k, sent[k]) for k in units]
    for k, option in enumerate(decisions):
        if option.memory == "recompute" and not option.segment:
            own_s[k] += model.rerun_s(k)
    executor_s = sum(sizes[k] * model.micro_batches * own_s[k] for k in units)
    copied = (sizes[k] * model.unit(k, option).copies_s for k, option in enumerate(decisions))
    copies_s = model.micro_batches * sum(copied)
    updates_s = sum(sizes[k] * model.unit(k, decisions[k]).update_s for k in units)
    # One device has no executor and nothing to wait for.
    single_device_s = single_device_batch_s(model)
    once_s = update_once_s(model)
    # With branches side by side the step is a critical path, on which the units of a rank do not
    # add up: what is slowed by communication is then counted as waiting.
    branches = any(option.layout.first for option in decisions)
    slowed_s = 0.0
    if not branches:
        slowed_s = done.prediction.compute_s - done.prediction.host_s - sum(seconds)
    slowing_s = model.world_size * max(slowed_s, 0.0)
    starved_s = model.world_size * done.prediction.host_s
    return DeviceTime(
        used_s=done.prediction.gpu_seconds,
        single_device_s=single_device_s,
        shares_s=computing_s - executor_s - copies_s - updates_s - (single_device_s - once_s),
        updates_s=updates_s - once_s,
        executor_s=executor_s,
        slowing_s=slowing_s,
        waiting_s=done.prediction.gpu_seconds - computing_s - slowing_s - starved_s,
        host_s=starved_s,
        copies_s=copies_s,
    )


def update_once_s(model: CostModel) -> float:
    """Seconds in which one device updates all parameters that are trained."""
    trained = sum(p.bytes for owned in model.owned for p in owned if p.trainable)
    return trained * profile_of_one(model).update_seconds_per_byte(model.goal.optimizer)
