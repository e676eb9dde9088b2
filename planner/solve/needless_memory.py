"""Memory policies that a plan does not need: where a search ends within a gap of the best, it may
recompute or offload what has room to stay."""

from collections.abc import Sequence

from ..cost.cost import CostModel
from ..memory.unit_memory import memory_of
from ..schema.options import Decisions, Option
from .choice import Choice, Fullest, choice, fullest
from .problem import Problem
from .unit_options import may_have

MOST_TRIALS = 32
"""So many plans are tried: each takes as long as a judgement of the whole plan."""


def without_needless_memory(problem: Problem, found: Choice) -> Choice:
    """What was found, or where that keeps all limits and takes no longer the same with feature maps
    kept of units that it would recompute by themselves or offload."""
    freeing = [k for k, o in enumerate(found.decisions) if o.memory != "keep" and not o.segment]
    return _kept(problem, found, freeing) if freeing else found


def _kept(problem: Problem, first: Choice, units: Sequence[int]) -> Choice:
    """The choice with as many of ``units`` kept as may be: all of them, else their halves, and so
    on while trials are left."""
    best, groups, model = first, [units], first.model
    for _ in range(MOST_TRIALS):
        if not groups:
            break
        group = groups.pop(0)
        decisions = _keeping(problem, model, best.decisions, group)
        rank = fullest(model, decisions)
        if rank.over_bytes > 0:
            groups += _parts(group, _with_room(model, best.decisions, decisions, rank, group))
            continue
        trial = choice(model, decisions, problem.schedule)
        if trial.feasible and trial.objective_s <= best.objective_s:
            best = trial
        else:
            groups += _parts(group, group)
    return best


def _parts(tried: Sequence[int], left: Sequence[int]) -> list[Sequence[int]]:
    """What to try instead of units that cannot all be kept: those that are left, or the halves."""
    if len(left) < len(tried):
        return [left] if left else []
    middle = len(left) // 2
    return [left[:middle], left[middle:]] if middle else []


def _with_room(
    model: CostModel, before: Decisions, kept: Decisions, rank: Fullest, units: Sequence[int]
) -> list[int]:
    """Those of ``units`` that the rank may have room for, as it is over its limit with all kept."""
    # A unit that is not kept frees there at most what it saves. So what stays saved is at most all
    # of it without what is over the limit.
    memory = memory_of(model)

    def saved(k: int, option: Option) -> float:
        return memory.unit(k, option, rank.samples[option.layout]).phases.saved

    more = {k: saved(k, kept[k]) - saved(k, before[k]) for k in units if kept[k] != before[k]}
    room = sum(more.values()) - rank.over_bytes
    return [k for k, size in more.items() if size <= room]


def _keeping(
    problem: Problem, model: CostModel, decisions: Decisions, units: Sequence[int]
) -> Decisions:
    """The decisions with the feature maps of those units kept, where that may be."""
    changed = list(decisions)
    for k in units:
        option = decisions[k]._replace(memory="keep")
        if may_have(model, k, option, problem.capability):
            changed[k] = option
    return tuple(changed)
