"""Which schedule a plan's gradients travel by: in buckets to a barrier, or in slices by priority.

The barrier is the simpler one and is planned first. Only if its decisions, or plain data
parallelism, would be clearly quicker by priority is it planned for that too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import msgspec

from ...cost.cost import CostModel
from ...schema.capability import Capability
from ...schema.options import Decisions, Option
from ...schema.plan import SHARDING, ExchangePolicy, Plan, Prediction
from ..choices import may_have
from ..evaluate import evaluation
from ..problem import Infeasibility, Problem, Relaxation, Result
from .relaxations import unproved

SLICE_BYTES = (2**20, 2**22, 2**24)
"""Slices that a plan chooses from where the goal names none. Below 1 MiB the latency of gloo over
TCP (0.2 ms) is a twentieth of a slice's time on 1 Gbit/s."""


WORTHWHILE = 0.05
"""By so much priority, or sharded exchange, must be quicker to be taken: predictions are not much
nearer than that."""


def by_either(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    """The better of ``search``'s answers by barrier and by priority; the barrier's where they are
    near each other."""
    saving = _saves_memory(problem)
    asked = problem.brief or saving  # then what follows has the last word
    plain = search(replace(problem, schedule="barrier", either=False, brief=asked))
    sizes = problem.goal.slice_bytes or SLICE_BYTES
    goal = msgspec.structs.replace(problem.goal, slice_bytes=sizes)
    sliced = replace(problem, goal=goal, schedule="priority", either=False)
    if plain.plan is None:
        other = releasing_last(sliced, search) if saving else plain
        return other if other.plan is not None else nearer(plain, other)
    if not (problem.goal.allow_lossy or _promising(sliced, plain, plain.plan)):
        return plain
    other = sharding_sparingly(_without_release(sliced), search)
    if other.plan is None:
        return plain
    better = _worth(problem, other.plan.prediction) < _enough(problem, plain.plan)
    return _said(other, "priority", plain) if better else _said(plain, "barrier", other)


def sharding_sparingly(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    """``search``'s answer without sharded exchange; with it where nothing else fits, or where it is
    clearly quicker (each rank updates its part only). Else the simpler one. Parameters are sharded
    too only where nothing fits without that: it sends more and is never quicker. Nothing is
    released early that fits without."""
    return releasing_last(problem, lambda one: _sharding_sparingly(one, search))


def releasing_last(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    """``search``'s answer without early release; with it where nothing else fits. It may be a
    little quicker too, but takes from the user what can be done between backward and step."""
    late = _without_release(problem)
    if late is problem:
        return search(problem)
    found = search(replace(late, brief=True))
    if found.plan is not None:
        return found
    other = search(problem)
    return other if other.plan is not None else nearer(found, other)


def nearer(one: Result, other: Result) -> Result:
    """Of two answers without a plan the second, which was allowed more and has all remedies; what
    falls short is the first's (a ``brief`` one) where that asks for less of the same limit. A value
    is proved to be the least only where both have proved theirs."""
    if one.infeasible is None or other.infeasible is None:
        return other
    why = other.infeasible
    mine, theirs = (_of_limit(each.infeasible) for each in (one, other))
    proved = False
    if mine is not None and theirs is not None and mine.what == theirs.what:
        proved = mine.proved and theirs.proved
        if mine.value < theirs.value:
            remedies = tuple(mine if r is theirs else r for r in why.relaxations)
            why = one.infeasible._replace(relaxations=remedies, enlargement=why.enlargement)
    if not proved:
        why = why._replace(relaxations=tuple(map(unproved, why.relaxations)))
    return other._replace(infeasible=why)


def _of_limit(why: Infeasibility | None) -> Relaxation | None:
    """The change of the limit that is to blame."""
    found = () if why is None else why.relaxations
    return next((change for change in found if why and change.what == why.limit), None)


def _without_release(problem: Problem) -> Problem:
    return _within(problem, early_release=False)


def _within(problem: Problem, **allowed: object) -> Problem:
    """The problem where no more than that is allowed, the same one where no more was."""
    capability = msgspec.structs.replace(problem.capability, **allowed)
    same = capability == problem.capability
    return problem if same else replace(problem, capability=capability)


def _sharding_sparingly(problem: Problem, search: Callable[[Problem], Result]) -> Result:
    plain, first = without_shards(problem), without_shards(problem, SHARDING[1:])
    if plain is problem:
        return search(problem)
    found = search(replace(plain, brief=True))
    if found.plan is None:
        is_last = first is problem
        other = search(first if is_last else replace(first, brief=True))
        if other.plan is not None or is_last:
            return other if other.plan is not None else nearer(found, other)
        # A unit cannot have both: ``may_gather``.
        kept = tuple(policy for policy in problem.capability.memory if policy != "offload")
        last = search(_within(problem, memory=kept))
        return last if last.plan is not None else nearer(nearer(found, other), last)
    if not _quicker_in_shards(problem, found, found.plan):
        return found
    other = search(first)
    if other.plan is None or _worth(problem, other.plan.prediction) >= _enough(problem, found.plan):
        return found
    return _said(other, "sharded exchange", found, "without and with sharded exchange")


def in_shards(model: CostModel, decisions: Decisions, capability: Capability) -> Decisions:
    """The decisions with every exchange sharded that may be."""

    def of(k: int, option: Option) -> Option:
        sharded = option._replace(exchange="sharded", early_release=False)
        plain = option.exchange == "dense" and not option.early_release
        return sharded if plain and may_have(model, k, sharded, capability) else option

    return tuple(of(k, option) for k, option in enumerate(decisions))


def without_shards(problem: Problem, policies: Collection[ExchangePolicy] = SHARDING) -> Problem:
    """The problem with no exchange sharded (by those policies), the same one where that is not
    allowed anyway."""
    known = problem.capability.exchange
    return _within(problem, exchange=tuple(policy for policy in known if policy not in policies))


def _saves_memory(problem: Problem) -> bool:
    """Whether slices allow policies that hold less; by themselves they hold as much or more."""
    sharded = any(policy in problem.capability.exchange for policy in SHARDING)
    return sharded or problem.capability.early_release


def _promising(problem: Problem, plain: Result, plan: Plan) -> bool:
    """Whether what was decided for the barrier, or data parallelism, is quicker by priority, as it
    is or with its exchange sharded."""
    tried = (plain.decisions, None)
    return any(
        _worth(problem, prediction) < _enough(problem, plan)
        for decisions in tried
        for size in problem.slice_bytes
        for prediction in _by_priority(problem, plan, decisions, size)
    )


def _quicker_in_shards(problem: Problem, found: Result, plan: Plan) -> bool:
    """Whether what was found is clearly quicker if its exchange is sharded. Not on devices whose
    streams the executor makes wait for the last gradient first: the cost model overlaps that."""
    if problem.profile.device_type != "cpu":
        return False
    tried = _by_priority(problem, plan, found.decisions, plan.bucket_bytes)
    return any(_worth(problem, one) < _enough(problem, plan) for one in tried)


def _by_priority(
    problem: Problem, plan: Plan, decisions: Decisions | None, slice_bytes: int
) -> Iterator[Prediction]:
    """Decisions (data parallelism where None) by priority; and with their exchange sharded where
    the problem allows that, and updates take long enough for their parts to be clearly quicker."""
    problem = replace(problem, schedule="priority")
    model = problem.cost_model(plan.micro_batches, slice_bytes, plan.placement)
    chosen = model.baseline if decisions is None else decisions
    whole = evaluation(model, chosen, schedule="priority").prediction
    yield whole
    if whole.update_s > WORTHWHILE * whole.step_s:
        sharded = in_shards(model, chosen, problem.capability)
        if sharded != chosen:
            yield evaluation(model, sharded, schedule="priority").prediction


def _worth(problem: Problem, prediction: Prediction) -> float:
    by_time = problem.goal.objective == "time"
    return prediction.step_s if by_time else prediction.gpu_seconds


def _enough(problem: Problem, plan: Plan) -> float:
    """Below this a plan is better than the barrier's."""
    return _worth(problem, plan.prediction) * (1 - WORTHWHILE)


def _said(
    result: Result, taken: str, other: Result, planned: str = "by barrier and by priority"
) -> Result:
    assert result.plan is not None
    assert other.plan is not None
    words = (
        f"planned {planned}, took {taken} "
        f"({result.plan.prediction.step_s:.3g} s against {other.plan.prediction.step_s:.3g} s)"
    )
    both = result.seconds + other.seconds
    return result._replace(reason=f"{result.reason}; {words}", seconds=both)
