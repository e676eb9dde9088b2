"""Parallel branches side by side: each on ranks of its own, at the same time, where that wins.

The solvers let all layouts start at position 0, so that branches run one after another and every
cost adds up. Between a unit where the graph forks and the one where all of its ways have met again,
branches that share no edge can be dealt out to parts of the ranks instead (DeepPool does so for
Inception). What a step then takes is the critical path: see ``rank_classes``. This search starts
from a solver's plan and keeps what is better; it proves nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ...cost.cost import CostModel
from ...schema.layout import Layout
from ...schema.options import Decisions, Option, allowed
from ..answer import plan_of
from ..choice import Choice, choice
from ..evaluate import evaluation
from ..problem import Problem, Result
from ..unit_options import may_have
from .space import BETTER

PARTS = (2, 4, 8)
"""Into how many equal parts the ranks are divided."""
REASON = "branches run side by side, found by trying, so that nothing is proved of the plan"


class BranchRegion(NamedTuple):
    """A fork, the unit where its ways meet again, and the branches between, as units' indices."""

    fork: int
    join: int
    branches: tuple[tuple[int, ...], ...]


def regions(model: CostModel) -> list[BranchRegion]:
    """Where branches are parallel, larger regions first."""
    import networkx as nx  # here: it takes a tenth of a second, and every command imports planners

    graph = nx.DiGraph(model.ends)
    graph.add_nodes_from(range(len(model.profile.units)))
    # The first unit that all ways from a fork to the last unit pass: its immediate dominator in the
    # graph turned round.
    last = len(model.profile.units) - 1
    meets = nx.immediate_dominators(graph.reverse(), last)
    found = []
    for fork in graph:
        join = meets.get(fork)
        if graph.out_degree(fork) < 2 or join is None or join == fork:
            continue
        between = nx.descendants(graph, fork) & nx.ancestors(graph, join)
        parts = nx.weakly_connected_components(graph.subgraph(between))
        branches = sorted(tuple(sorted(part)) for part in parts)
        if len(branches) > 1:
            found.append(BranchRegion(fork, join, tuple(branches)))
    return sorted(found, key=lambda r: -sum(map(len, r.branches)))


def side_by_side(problem: Problem, result: Result) -> Result:
    """The result, or that of a plan with branches side by side that is simulated to be quicker."""
    # Only where time is the objective and device-seconds are not limited: what a branch leaves free
    # another uses, which their formula does not know.
    goal = problem.goal
    limited = goal.amplification_limit is not None or goal.unit_amplification_limit is not None
    if result.plan is None or result.decisions is None or goal.objective != "time" or limited:
        return result
    plan = result.plan
    model = problem.cost_model(plan.micro_batches, plan.message_bytes, plan.placement)
    found = regions(model)
    if not found:
        return result
    best = start = _simulated(problem, model, result.decisions)
    for region in found:
        for decisions in _dealt(problem, model, best.decisions, region):
            trial = _simulated(problem, model, decisions)
            if trial.feasible and trial.step_s < best.step_s * BETTER:
                best = trial
    if best is start:
        return result
    return result._replace(
        status="heuristic",
        objective_s=best.step_s,
        bound_s=None,
        gap=None,
        plan=plan_of(problem, best, result.solver, "heuristic"),
        decisions=best.decisions,
        reason="; ".join(r for r in (result.reason, REASON) if r),
    )


def _simulated(problem: Problem, model: CostModel, decisions: Decisions) -> Choice:
    """The choice with its step as simulated."""
    # The formula adds up what branches do one after another.
    step_s = evaluation(model, decisions, schedule=problem.schedule).prediction.step_s
    made = choice(model, decisions, problem.schedule)
    return made._replace(step_s=step_s)


def _dealt(
    problem: Problem, model: CostModel, decisions: Decisions, region: BranchRegion
) -> Iterator[Decisions]:
    """The branches dealt out to equal parts of the ranks."""
    for parts in PARTS:
        if model.world_size % parts or parts > len(region.branches):
            continue
        width = model.world_size // parts
        moved = []
        for branch in region.branches:
            found = _moved(problem, model, decisions, branch, width)
            if found is not None:
                moved.append((_work(model, found), found))
        if len(moved) < len(region.branches):
            continue
        # The longest first, to the part that has least to do: list scheduling by longest processing
        # time (Graham, SIAM J. Appl. Math. 17, 1969), never over 4/3 of the shortest there is.
        load, chosen = [0.0] * parts, list(decisions)
        for work, branch_options in sorted(moved, key=lambda each: -each[0]):
            part = load.index(min(load))
            load[part] += work
            for k, option in branch_options.items():
                layout = option.layout
                there = Layout(groups=layout.groups, degree=layout.degree, first=part * width)
                chosen[k] = option._replace(layout=there)
        if all(_may(problem, model, k, chosen[k]) for b in region.branches for k in b):
            yield tuple(chosen)


def _moved(
    problem: Problem, model: CostModel, decisions: Decisions, branch: tuple[int, ...], width: int
) -> dict[int, Option] | None:
    """A branch's units on ``width`` ranks, divided as they were where that goes; None where one of
    them cannot move, or is tied to a unit elsewhere."""
    found = {}
    for k in branch:
        unit, option = model.profile.units[k], decisions[k]
        # Tied units have one layout: they move together or not at all.
        if unit.fixed or not set(model.ties[k]) <= set(branch):
            return None
        degree, style = option.layout.degree, option.style
        if degree > width or width % degree:
            degree, style = 1, "none"
        layout = Layout(groups=width // degree, degree=degree)
        # Peers that leave ranks idle have no exchange by host, and may lack other policies too.
        moved = option._replace(layout=layout, style=style, peers_per_host=1)
        if not _may_have(problem, model, k, moved):
            moved = Option(layout, style, option.memory, segment=option.segment)
        found[k] = moved
        if not _may(problem, model, k, moved):
            return None
    return found


def _work(model: CostModel, branch: dict[int, Option]) -> float:
    costs = (model.unit(k, option) for k, option in branch.items())
    return sum(cost.forward_s + cost.backward_s for cost in costs)


def _may(problem: Problem, model: CostModel, k: int, option: Option) -> bool:
    unit, world = model.profile.units[k], model.world_size
    fits = allowed(unit, option, problem.goal, problem.capability, world)
    return fits and _may_have(problem, model, k, option)


def _may_have(problem: Problem, model: CostModel, k: int, option: Option) -> bool:
    """Whether a unit may have the option's policies; a segment is recomputed as it is."""
    alone = option._replace(memory="keep", segment=()) if option.segment else option
    return may_have(model, k, alone, problem.capability)
