"""Why nothing fits, and the smallest changes that help: one report, whichever solver was asked.

A solver tells two things (``Evidence``): the plan that comes closest to a limit, and whether
another problem has a plan. The report asks in this order, until one deadline: which limit cannot be
kept, and the least of it that would do; then, for memory, more micro-batches and a smaller batch;
then more nodes. Every change that it names has been tried; it is called "at least" where it is
proved that nothing less would do, else "enough".
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from math import ceil, inf
from typing import NamedTuple, Protocol

import msgspec

from ...cost.budget import single_device_batch_s, unit_amplification
from ...cost.cost import CostModel
from ...schema.layout import Layout
from ...schema.options import Option
from ..choice import Choice, choice
from ..evaluate import excess, rank_memory
from ..problem import (
    UNMEASURED,
    Enlargement,
    Infeasibility,
    Problem,
    Relaxation,
    state_pairs,
)
from ..unit_options import all_options, unit_options
from .checkpointing import Checkpointing, has_segments, plain_starts
from .least_memory import few_options, least_memory, memory_models
from .resize import resized_problem
from .splits import feasible

EXPLAIN_S = 10.0
"""Seconds after which a report asks no further question."""
NODES_S = 1.0
"""Of these, after which it asks no further one about nodes."""
NODES_PAIRS = 2000
"""State pairs up to which a program is asked of nodes: built and solved in less than a second."""
LIMITS = ("memory_limit_bytes", "amplification_limit", "time_limit_s")
"""Limits of which a closest plan can be told, in the order in which they are blamed."""
DEVICE_LIMITS = ("unit_amplification_limit", "amplification_limit", "time_limit_s")
MOST_RANKS = 1024
"""Larger clusters are not tried."""
DIGITS = 4
"""Of a value that is named; it is rounded up."""
LIFTED = {"amplification_limit": "gpu_seconds", "time_limit_s": "time"}
"""The objective that shows the least that would do of a limit."""
UNIT_LIMITS = 20
"""Values of a limit on each unit that are tried."""


class Closest(NamedTuple):
    """The plan that needs the least of one limit, of those that keep all others: its choice, a
    value of the limit that would do (None where none was found), and whether it is proved that no
    smaller value would."""

    choice: Choice
    limit: float | None
    proved: bool = False


class Evidence(Protocol):
    """What a solver can tell about problems for which it has found no plan."""

    @property
    def proves(self) -> bool:
        """Whether there is no plan where ``fits`` finds none."""

    def closest(self, problems: Sequence[Problem], what: str, deadline: float) -> Closest | None:
        """The plan, for any of the problems, that needs the least of the limit ``what`` and keeps
        all others; None where there is none, or ``what`` is not to blame."""

    def fits(self, problem: Problem, deadline: float) -> bool:
        """Whether the solver finds a plan that keeps all limits."""


def explain(
    problems: Sequence[Problem], evidence: Evidence, deadline: float | None = None
) -> Infeasibility:
    """Why none of the problems has a plan. They differ in schedule and in what is allowed only, and
    what would help is asked of the last, which allows most."""
    deadline = time.perf_counter() + EXPLAIN_S if deadline is None else deadline
    pinned = _pinned(problems[-1])
    if pinned is not None:
        return _several_limits(problems[-1])._replace(unit=pinned, limit="pins")
    for what in LIMITS:
        if what == "memory_limit_bytes" or getattr(problems[-1].goal, what) is not None:
            if what == "amplification_limit" and _takes_nothing(problems[-1]):
                return _several_limits(problems[-1])._replace(limit=UNMEASURED)
            closest = evidence.closest(problems, what, deadline)
            if closest is not None and what == "memory_limit_bytes":
                return _memory_report(problems, closest, evidence, deadline)
            if closest is not None:
                return _limit_report(problems, closest, what, evidence, deadline)
    why = _several_limits(problems[-1])
    if problems[-1].goal.unit_amplification_limit is None:
        return why
    unit_limit = higher_unit_limit(problems, evidence, deadline)
    if unit_limit is None:
        return why
    return why._replace(limit="unit_amplification_limit", relaxations=(unit_limit,))


def _memory_report(
    problems: Sequence[Problem], closest: Closest, evidence: Evidence, deadline: float
) -> Infeasibility:
    closest = _in_segments(problems, closest, deadline)
    found = [_more_micro_batches(problems[-1], evidence, deadline)]
    found.append(_smaller_batch(problems[-1], evidence, deadline))
    if closest.limit is not None:
        own = problems[-1].goal.memory_limit_bytes is None
        found.append(more_memory(int(closest.limit), proved=closest.proved, own=own))
    return _tightest(closest.choice)._replace(
        relaxations=tuple(change for change in found if change is not None),
        enlargement=more_nodes(problems[-1], evidence, deadline),
    )


def _limit_report(
    problems: Sequence[Problem], closest: Closest, what: str, evidence: Evidence, deadline: float
) -> Infeasibility:
    """Where memory is not what is missing."""
    least = closest.limit
    found = () if least is None else (higher(what, least, proved=closest.proved),)
    # More ranks may shorten a step; they never save device-seconds.
    larger = more_nodes(problems[-1], evidence, deadline) if what == "time_limit_s" else None
    return _tightest(closest.choice)._replace(
        kind="", limit=what, relaxations=found, enlargement=larger
    )


def _tightest(chosen: Choice) -> Infeasibility:
    """The tightest rank and unit of a choice."""
    model = chosen.model
    tight = excess(model, rank_memory(model, chosen.decisions))
    return Infeasibility(
        rank=model.placement[tight.position],
        unit=tight.unit,
        needed_bytes=tight.needed_bytes,
        available_bytes=tight.available_bytes,
        kind=tight.kind,
    )


def _several_limits(problem: Problem) -> Infeasibility:
    """No single limit is to blame: several exclude each other, or which it is was not found out."""
    model = next(problem.cost_models())
    plain = choice(model, model.baseline, problem.schedule)
    why, over = _tightest(plain)._replace(kind=""), plain.over_bytes > 0
    asked = [what for what in DEVICE_LIMITS if getattr(problem.goal, what) is not None]
    if over and not asked:
        return why
    return why._replace(limit=asked[0] if len(asked) == 1 and not over else "several limits")


def _pinned(problem: Problem) -> str | None:
    """A unit that could be something but for its pins, whatever else is limited."""
    unlimited = _with_goal(problem, unit_amplification_limit=None)
    pinned, free = (next(p.cost_models()) for p in (unlimited, _with_goal(unlimited, pins=())))
    for k, unit in enumerate(problem.profile.units if problem.goal.pins else ()):
        if not unit_options(pinned, k, problem.capability):
            return unit.name if unit_options(free, k, problem.capability) else None
    return None


def _takes_nothing(problem: Problem) -> bool:
    """Whether one device takes no time for the batch, so that no limit is a multiple of it."""
    return all(single_device_batch_s(model) == 0 for model in problem.cost_models())


# -- memory --------------------------------------------------------------------------------------


def is_least(problems: Sequence[Problem], chosen: Choice) -> bool:
    """Whether the bound from below proves that no plan is less over its memory limits; False where
    it is too much work."""
    every = [(p, model) for p in problems for model in memory_models(p)]
    if any(few_options(p, model) is None for p, model in every):
        return False
    bounds = [least_memory(p, model) for p, model in every]
    known = [least.over_bytes_in_segments for least in bounds if least is not None]
    return bool(known) and chosen.over_bytes <= min(known)


def _in_segments(problems: Sequence[Problem], closest: Closest, deadline: float) -> Closest:
    """The closest plan, or one of which units recomputed in segments need less."""
    if not has_segments(problems[-1]) or is_least(problems, closest.choice):
        return closest
    for problem in problems:
        for model in memory_models(problem):
            for start in plain_starts(problem, model):
                if time.perf_counter() > deadline:
                    return closest
                decisions = Checkpointing(model, start, problem.capability).least()
                new = choice(model, decisions, problem.schedule)
                if new.over_bytes < closest.choice.over_bytes:
                    peak = max(m.peak_bytes for m in rank_memory(model, decisions))
                    closest = Closest(new, float(peak))
    return closest


def _fits(problem: Problem, evidence: Evidence, deadline: float, **changes: object) -> bool:
    """Whether there is a plan when fields of the goal are changed."""
    return evidence.fits(replace(_with_goal(problem, **changes), progress=None), deadline)


def _more_micro_batches(problem: Problem, evidence: Evidence, deadline: float) -> Relaxation | None:
    """The fewest micro-batches, by doubling, with which a plan fits."""
    count = 2 * max(problem.goal.micro_batches)
    most = problem.goal.batch // problem.cluster.world_size
    while problem.capability.micro_batches and count <= most and time.perf_counter() < deadline:
        if _fits(problem, evidence, deadline, micro_batches=(count,)):
            option = f"--micro-batches {count}, micro_batches=({count},)"
            sentence = f"allow {count} micro-batches ({option})"
            return Relaxation("micro_batches", count, sentence)
        count *= 2
    return None


def _smaller_batch(problem: Problem, evidence: Evidence, deadline: float) -> Relaxation | None:
    """The largest multiple of the ranks below the batch with which a plan fits."""
    # By halving: where a batch fits, smaller ones are taken to fit, too.
    world = problem.cluster.world_size
    low, high = 0, (problem.goal.batch - 1) // world
    while low < high:
        if time.perf_counter() > deadline:
            return None
        middle = (low + high + 1) // 2
        good = _fits(problem, evidence, deadline, batch=middle * world)
        low, high = (middle, high) if good else (low, middle - 1)
    if not low:
        return None
    size = low * world
    option = f"--batch {size}, Goal.batch or global_batch_size"
    return Relaxation("batch", size, f"lower the global batch to {size} ({option})")


# -- nodes ---------------------------------------------------------------------------------------


def more_nodes(problem: Problem, evidence: Evidence, deadline: float) -> Enlargement | None:
    """The fewest whole nodes like the first with which a plan keeps all limits, while with one node
    fewer there is none; what is enough where the time or the size of a program leaves that open.
    None where nothing was found, or the cluster says nothing of links between nodes."""
    # By doubling up to a number that is enough, then by halving what lies between.
    cluster, deadline = problem.cluster, min(deadline, time.perf_counter() + NODES_S)
    if cluster.level("inter") is None:
        return None
    node = cluster.nodes[0]
    each = len(node.devices)
    low = max(cluster.world_size // each, 1)
    most = min(MOST_RANKS, problem.goal.batch) // each
    high, known = None, True
    while (high is None or high - low > 1) and time.perf_counter() < deadline:
        asked = 2 * low if high is None else (low + high) // 2
        if asked > most:
            return None
        enough = _enough(_on_nodes(problem, asked), evidence, deadline)
        known = known and enough is not None
        low, high = (low, asked) if enough else (asked, high)
    if high is None:
        return None
    words = "" if known and high - low == 1 else ", which is enough"
    sentence = f"use {high * each} ranks ({high} nodes like {node.name!r}){words}"
    return Enlargement(high * each, high, sentence)


def _on_nodes(problem: Problem, nodes: int) -> Problem:
    ranks = nodes * len(problem.cluster.nodes[0].devices)
    return replace(resized_problem(problem, ranks), progress=None).placed()


def _enough(larger: Problem, evidence: Evidence, deadline: float) -> bool | None:
    """Whether a larger cluster has a plan; None where that was not found out."""
    # A program is built and has its least time however little is left: not asked then. Where it is
    # asked, it knows sooner than the search does.
    few = state_pairs(larger) <= NODES_PAIRS
    if evidence.proves and few and time.perf_counter() <= deadline - NODES_S / 2:
        return evidence.fits(larger, deadline)
    if feasible(larger):
        return True
    return None if evidence.proves else False


# -- sentences -----------------------------------------------------------------------------------


def rounded_up(value: float) -> float:
    """The value with ``DIGITS`` digits, never less than it was."""
    # From the digits that name the float: its exact value may be a little more than these.
    rounding = Context(prec=DIGITS, rounding=ROUND_CEILING)
    return float(rounding.create_decimal(str(float(value))))


def more_memory(needed_bytes: int, *, proved: bool, own: bool) -> Relaxation:
    """That many bytes on each rank. Where devices' ``own`` memory is the limit, no option gives
    them more: there it plans for other devices."""
    limit = f"{ceil(needed_bytes / 2**20 * 10) / 10:.1f}MiB"
    option = f"--memory-limit {limit}, memory_limit_bytes={needed_bytes}"
    count = f"{needed_bytes:,} bytes per rank"
    words = f"at least {count}" if proved else f"{count}, which is enough"
    sentence = f"allow {words} ({option})"
    if own:
        sentence = f"take devices that have {words} (to plan for such: {option})"
    return Relaxation("memory_limit_bytes", needed_bytes, sentence, proved)


def higher(what: str, least: float, *, proved: bool) -> Relaxation:
    """A limit of the goal that is not memory's, ``least`` or a little more."""
    value = rounded_up(least)
    told = f"{value:.{DIGITS}g}" if value < 10**DIGITS else f"{value:.0f}"
    thing, option = {
        "amplification_limit": ("an amplification limit of", f"--amplification-limit {told}"),
        "unit_amplification_limit": (
            "a unit's amplification of", f"--unit-amplification-limit {told}",
        ),
        "time_limit_s": ("a step of", f"--step-limit {told}s"),
    }[what]  # fmt: skip
    unit = " s" if what == "time_limit_s" else ""
    words = f"at least {told}{unit}" if proved else f"{told}{unit}, which is enough"
    sentence = f"allow {thing} {words} ({option})"
    return Relaxation(what, value, sentence, proved)  # type: ignore[arg-type]


def lifted(problem: Problem, what: str) -> Problem:
    """The problem without a limit, what it bounds being made small."""
    return _with_goal(problem, **{what: None, "objective": LIFTED[what]})


def needed(what: str, chosen: Choice) -> float:
    """How much of a limit that is not memory's a plan takes."""
    if what == "time_limit_s":
        return chosen.step_s * chosen.model.goal.slowdown
    # Of no time at all there is no multiple, and ``explain`` names none; searches still compare it.
    return chosen.gpu_seconds / max(single_device_batch_s(chosen.model), 1e-300)


def with_limit(problem: Problem, what: str, value: float | None) -> Problem:
    """The problem under another limit, searched in silence."""
    return replace(_with_goal(problem, **{what: value}), progress=None)


def _with_goal(problem: Problem, **changes: object) -> Problem:
    """The problem with fields of its goal changed."""
    return replace(problem, goal=msgspec.structs.replace(problem.goal, **changes))


def higher_unit_limit(
    problems: Sequence[Problem], evidence: Evidence, deadline: float
) -> Relaxation | None:
    """The least limit on every unit's device-seconds under which there is a plan for one of the
    problems; None if there never is, or not before ``deadline`` (of ``time.perf_counter``)."""
    what = "unit_amplification_limit"
    least, every = _unit_values([with_limit(problem, what, None) for problem in problems])
    values = list(dict.fromkeys(rounded_up(v * (1 + 1e-9)) for v in every if v >= least))
    low, high, best = 0, len(values) - 1, None
    # Less than the first value leaves some unit no option, and often that is all that is missing:
    # so the first is tried first, and halving begins after it.
    middle = 0
    for _ in range(UNIT_LIMITS):
        if low > high or time.perf_counter() > deadline:
            break
        limited = (with_limit(problem, what, values[middle]) for problem in problems)
        if any(evidence.fits(problem, deadline) for problem in limited):
            best, high = middle, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    if best is None:
        return None
    # Less than the first value leaves a unit nothing that it can be. Else it takes a solver that
    # knows, and that has looked at everything below.
    bare = best == 0 and least > 0
    return higher(what, values[best], proved=bare or (evidence.proves and low > high))


def _unit_values(problems: Sequence[Problem]) -> tuple[float, list[float]]:
    """The least limit that leaves every unit an option, and all that make a difference, rising."""

    def limit_for(model: CostModel, k: int, option: Option) -> float:
        # On one device a unit keeps any limit: see ``budget.within_unit_limit``.
        return 0.0 if option.layout == Layout(groups=1) else unit_amplification(model, k, option)

    least, every = inf, set()
    for problem, model in ((p, m) for p in problems for m in p.cost_models()):
        every_option = all_options(model, problem.capability)
        each = [{limit_for(model, k, o) for o in row} for k, row in enumerate(every_option)]
        if all(each):
            least = min(least, max(min(values) for values in each))
            every |= {v for values in each for v in values if 0 < v < inf}
    return least, sorted(every)
