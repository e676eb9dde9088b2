"""Which schedule a plan's gradients travel by: in buckets to a barrier, or in slices by priority.

The barrier is the simpler one and is planned first. Then it is planned by priority too, unless
computing alone takes nearly as long as the plan by barrier, or, where a search is long, unless no
decisions are known that would be quicker so.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from math import inf

import msgspec

from ...cost.cost import CostModel
from ...schema.capability import Capability
from ...schema.cluster import Interference
from ...schema.goal import Goal
from ...schema.options import Decisions, Option, segments_of
from ...schema.plan import SHARDING, ExchangePolicy, Plan, Prediction
from ..evaluate import evaluation
from ..problem import INTEGER_PAIRS, Problem, Result, state_pairs
from ..unit_options import may_gather, may_have, unit_options
from . import splits
from .branches import regions

SLICE_BYTES = (2**20, 2**22, 2**24)
"""Slices that a plan chooses from where the goal names none. Below 1 MiB the latency of gloo over
TCP (0.2 ms) is a twentieth of a slice's time on 1 Gbit/s."""
WORTHWHILE = 0.05
"""By so much priority, or sharded exchange, must be quicker to be taken: predictions are not much
nearer than that."""
LOOK_S, LOOK_SCORES = 2.0, 1000
"""Seconds for the heuristic's plan by priority where a whole search is long, and plans that it may
score for each number of micro-batches."""

Search = Callable[[Problem], Result]
"""How one problem is searched, of which schedule and allowances are given."""


def any_schedule(problem: Problem, search: Search) -> Result | None:
    """The better of the plans by barrier and by priority; the barrier's where they are near each
    other. None where neither has one."""
    by_barrier, by_priority = _with_schedules(problem)
    plain = search(by_barrier)
    if plain.plan is None:
        return shard_if_needed(by_priority, search) if _saves_memory(problem) else None
    # Simulating what was decided for the barrier, and data parallelism, is quicker than a search.
    # Neither of them sends gradients in part, which may gain more than they show.
    # Nor is it known what parameters in shards would take, which are an alternative to offload.
    promising = (
        problem.goal.allow_lossy
        or offloads(plain.plan)
        or any(
            clearly_better(problem, prediction, plain.plan)
            for decisions in (plain.decisions, None)
            for size in by_priority.slice_bytes
            for prediction in _by_priority(by_priority, plain.plan, decisions, size)
        )
    )
    if not promising and not _may_be_better(by_barrier, by_priority, plain.plan):
        return plain
    other = shard_if_needed(_within(by_priority, early_release=False), search)
    if other is None or other.plan is None:
        return plain
    if clearly_better(problem, other.plan.prediction, plain.plan):
        return _with_reason(other, "priority", plain)
    return _with_reason(plain, "barrier", other)


def _may_be_better(by_barrier: Problem, by_priority: Problem, plan: Plan) -> bool:
    """Whether other decisions may be clearly better by priority than a plan by barrier, which keeps
    away from exchanges that priority hides."""
    goal = by_barrier.goal
    # Where device time counts plans are asked for by the dozen, each of them searched for long.
    if goal.objective != "time" or goal.amplification_limit or by_barrier.capability.idle_positions:
        return False
    if _least_computing_s(by_barrier) >= plan.prediction.step_s * (1 - WORTHWHILE):
        return False
    # Where a search is short only its plan tells.
    if state_pairs(by_barrier) <= INTEGER_PAIRS:
        return True
    quiet = replace(without_shards(by_priority), progress=None)
    found = splits.search(_within(quiet, early_release=False), LOOK_S, LOOK_SCORES)
    # What it finds is mostly not the best.
    prediction = found.evaluation.prediction
    fits = found.tightest.over_bytes <= 0
    return fits and objective_s(goal, prediction) < objective_s(goal, plan.prediction)


def _least_computing_s(problem: Problem) -> float:
    """Seconds that forward and backward of all units take under any plan in which no rank is idle;
    0 where ranks compute at different speeds."""
    least = inf
    for model in problem.cost_models():
        if len(model.kinds) > 1:
            return 0.0
        least_s = 0.0
        for k in range(len(model.profile.units)):
            costs = (model.unit(k, o) for o in unit_options(model, k, problem.capability))
            least_s += min((cost.forward_s + cost.backward_s for cost in costs), default=0.0)
        least = min(least, model.micro_batches * least_s)
    return least


def shard_if_needed(problem: Problem, search: Search) -> Result | None:
    """A plan without sharded exchange; with it where nothing else fits, or where it is clearly
    quicker (each rank updates its part only). None where there is no plan."""
    # Parameters are sharded too only where nothing fits without that: it sends more and is never
    # quicker. Nothing is released early that fits without.
    for allowed in _releasing_last(problem):
        plain, sharded = without_shards(allowed), without_shards(allowed, SHARDING[1:])
        found = search(plain)
        if found.plan is not None and offloads(found.plan) and plain is not allowed:
            return _better_of(problem, found, _in_shards_instead(sharded, allowed, found, search))
        if found.plan is not None:
            if plain is allowed or not _quicker_in_shards(problem, found, found.plan):
                return found
            other = search(sharded)
            if other.plan is None or not clearly_better(problem, other.plan.prediction, found.plan):
                return found
            return _with_reason(
                other, "sharded exchange", found, "without and with sharded exchange"
            )
        more = [] if plain is allowed else [sharded]
        if sharded is not allowed:
            more.append(without_offload(allowed))
        other_plan = _first_plan(more, search)
        if other_plan is not None:
            return other_plan
    return None


def widest(problem: Problem) -> list[Problem]:
    """The searches that were made when no plan was found, without those that another of these
    contains; the last allows most."""
    if problem.any_schedule:
        by_barrier, by_priority = _with_schedules(problem)
        return (
            [by_barrier, *_with_gathering(by_priority)] if _saves_memory(problem) else [by_barrier]
        )
    given = replace(problem, shard_if_needed=False)
    return _with_gathering(given) if problem.shard_if_needed else [given]


def _with_gathering(problem: Problem) -> list[Problem]:
    """The problem, and the one that may shard parameters too where it may not itself."""
    fully = "fully_sharded" in problem.capability.exchange
    if fully and not may_gather(next(problem.cost_models()), problem.capability):
        return [problem, without_offload(problem)]
    return [problem]


def _with_schedules(problem: Problem) -> tuple[Problem, Problem]:
    """The problem by barrier and by priority."""
    plain = replace(problem, any_schedule=False)
    sizes = problem.goal.slice_bytes or SLICE_BYTES
    goal = msgspec.structs.replace(problem.goal, slice_bytes=sizes)
    return replace(plain, schedule="barrier"), replace(plain, goal=goal, schedule="priority")


def _releasing_last(problem: Problem) -> list[Problem]:
    """The problem without early release, then with it."""
    # It may be a little quicker too, but takes from the user what can be done between backward and
    # step.
    late = _within(problem, early_release=False)
    return [problem] if late is problem else [late, problem]


def _first_plan(problems: Iterable[Problem], search: Search) -> Result | None:
    results = (search(problem) for problem in problems)
    return next((result for result in results if result.plan is not None), None)


def _if_clearly_better(problem: Problem, found: Result) -> Problem:
    """The problem, of which a plan is wanted only where it may be clearly better than what was
    found: that much better by formula, less what predictions may differ from it by. The same
    problem where they differ by more, or where what follows a search makes plans better."""
    assert found.plan is not None
    assert found.objective_s is not None
    assert found.decisions is not None
    alike = problem.cluster.interference == Interference() and not found.plan.local_batch_sizes
    followed = segments_of(found.decisions) or (
        problem.capability.branches and regions(next(problem.cost_models()))
    )
    if followed or not alike:
        return problem
    return replace(problem, wanted_s=found.objective_s * (1 - WORTHWHILE / 2))


def without_offload(problem: Problem) -> Problem:
    """The problem where nothing is offloaded, the same one where that is not allowed anyway."""
    # A unit cannot be offloaded and have its parameters sharded: ``choices.may_gather``.
    kept = tuple(policy for policy in problem.capability.memory if policy != "offload")
    return _within(problem, memory=kept)


def offloads(plan: Plan) -> bool:
    """Whether some unit's feature maps wait on the host."""
    return any(unit.memory == "offload" for unit in plan.units)


def _in_shards_instead(
    sharded: Problem, allowed: Problem, offloaded: Result, search: Search
) -> Result:
    """What is found without offload, by ``allowed`` exchanges and if those do by ``sharded`` ones:
    a plan only where one may be clearly better than the one that offloads."""
    # What allows most is asked first: mostly it has no such plan, which is quick to prove.
    known = offloaded.plan
    assert known is not None

    def asked(problem: Problem) -> tuple[Result, bool]:
        found = search(_if_clearly_better(without_offload(problem), offloaded))
        plan = found.plan
        return found, plan is not None and clearly_better(problem, plan.prediction, known)

    found, is_better = asked(allowed)
    if sharded is allowed or not is_better:
        return found
    simpler, is_better = asked(sharded)
    return simpler if is_better else found


def _better_of(problem: Problem, offloaded: Result, other: Result) -> Result:
    """The plan that offloads, unless that which shards instead is clearly quicker."""
    # Copies are waited for: parameters that are gathered over a quick link take less.
    assert offloaded.plan is not None
    if other.plan is None:
        return offloaded
    planned = "with offload and with sharded exchange"
    if clearly_better(problem, other.plan.prediction, offloaded.plan):
        return _with_reason(other, "sharded exchange", offloaded, planned)
    return _with_reason(offloaded, "offload", other, planned)


def _within(problem: Problem, **allowed: object) -> Problem:
    """The problem with its capability restricted to that; the same object where it was already."""
    capability = msgspec.structs.replace(problem.capability, **allowed)
    return problem if capability == problem.capability else replace(problem, capability=capability)


def in_shards(model: CostModel, decisions: Decisions, capability: Capability) -> Decisions:
    """The decisions with every exchange sharded that may be."""

    def of(k: int, option: Option) -> Option:
        sharded = option._replace(exchange="sharded", early_release=False)
        plain = option.exchange == "dense" and not option.early_release
        return sharded if plain and may_have(model, k, sharded, capability) else option

    return tuple(of(k, option) for k, option in enumerate(decisions))


def by_host(model: CostModel, decisions: Decisions, capability: Capability) -> Decisions:
    """The decisions with every dense exchange made by host that may be and is quicker so."""

    def of(k: int, option: Option) -> Option:
        found = option._replace(peers_per_host=model.peers_per_host(option.layout))
        plain = option.exchange == "dense" and not option.early_release
        return found if plain and may_have(model, k, found, capability) else option

    return tuple(of(k, option) for k, option in enumerate(decisions))


def without_shards(problem: Problem, policies: Collection[ExchangePolicy] = SHARDING) -> Problem:
    """The problem with no exchange sharded (by those policies), the same one where that is not
    allowed anyway."""
    known = problem.capability.exchange
    return _within(problem, exchange=tuple(policy for policy in known if policy not in policies))


def _saves_memory(problem: Problem) -> bool:
    """Whether slices allow policies that hold less than what buckets do."""
    # By themselves slices hold as much as buckets or more.
    sharded = any(policy in problem.capability.exchange for policy in SHARDING)
    return sharded or problem.capability.early_release


def _quicker_in_shards(problem: Problem, found: Result, plan: Plan) -> bool:
    """Whether what was found is clearly quicker if its exchange is sharded."""
    # Not on devices whose streams the executor makes wait for the last gradient first: the cost
    # model overlaps that.
    if problem.profile.device_type != "cpu":
        return False
    tried = _by_priority(problem, plan, found.decisions, plan.message_bytes)
    return any(clearly_better(problem, one, plan) for one in tried)


def _by_priority(
    problem: Problem, plan: Plan, decisions: Decisions | None, slice_bytes: int
) -> Iterator[Prediction]:
    """Decisions (data parallelism where None) by priority; with their exchange by host where that
    may be; and sharded where that may be and updates take long enough for their parts to be clearly
    quicker."""
    problem = replace(problem, schedule="priority")
    model = problem.cost_model(plan.micro_batches, slice_bytes, plan.placement)
    chosen = model.baseline if decisions is None else decisions
    whole = evaluation(model, chosen, schedule="priority").prediction
    yield whole
    hosts = by_host(model, chosen, problem.capability)
    if hosts != chosen:
        yield evaluation(model, hosts, schedule="priority").prediction
    if whole.update_s > WORTHWHILE * whole.step_s:
        sharded = in_shards(model, chosen, problem.capability)
        if sharded != chosen:
            yield evaluation(model, sharded, schedule="priority").prediction


def clearly_better(problem: Problem, prediction: Prediction, plan: Plan) -> bool:
    """Whether the goal's objective is less than the plan's by more than predictions may be off."""
    goal = problem.goal
    return objective_s(goal, prediction) < objective_s(goal, plan.prediction) * (1 - WORTHWHILE)


def objective_s(goal: Goal, prediction: Prediction) -> float:
    """What the goal asks to be least, as it is predicted: seconds of a step, or device-seconds."""
    return prediction.step_s if goal.objective == "time" else prediction.gpu_seconds


def _with_reason(
    result: Result, taken: str, other: Result, planned: str = "by barrier and by priority"
) -> Result:
    assert result.plan is not None
    assert other.plan is not None
    words = (
        f"planned {planned}, took {taken} "
        f"({result.plan.prediction.step_s:.3g} s against {other.plan.prediction.step_s:.3g} s)"
    )
    return result._replace(reason=f"{result.reason}; {words}")
