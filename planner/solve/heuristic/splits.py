"""GHP's heuristic: groups, a split point, and what a look around improves.

For every layout of the lattice (every number of groups G, with m = W/G) and every split point, the
layers before the point are data parallel and those from it on model parallel inside groups, where
they can be divided. Styles alternate along a chain: column, then row, so that nothing moves between
the two; attention and feed-forward blocks are divided as pairs. Tied units follow their last user.
The best of these are improved unit by unit, and the best plans by formula are simulated.

Reconstruction: that workers form groups, early layers are data parallel and late ones model
parallel inside groups is GHP's (Joo & Youn, IEEE Access 9:52601, 2021, abstract). The alternation
of styles is Megatron-LM's (Shoeybi et al., arXiv 1909.08053); the improvement step is ours.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

from ...cost.cost import CostModel
from ...schema.cluster import Interference
from ...schema.layout import Layout, Style
from ...schema.options import Decisions, Option
from ..evaluate import Evaluation, Excess, evaluation, excess
from ..problem import Problem
from .checkpointing import fits_in_segments
from .least_memory import never_fits
from .space import Candidate, OptionSpace, Score, ScoredDecisions, improve, score_of

SPLIT_POINTS = 32
"""Split points tried for each layout; longer models are cut at as many even distances."""
STARTS = 3
"""How many split plans of each layout may be improved, the best of all layouts first."""
IMPROVED = 8
"""How many are, as long as there are evaluations left."""
EVALUATIONS = 3000
"""Scores that all improvements for one number of micro-batches may ask for."""
FEASIBILITY = 500
"""Scores that may be asked for where any plan that fits will do: the first of EVALUATIONS."""
SIMULATED = 4
"""How many plans are simulated for each number of micro-batches, plain data parallelism aside."""
POLISHED, POLISHES = 12, 4
"""How many neighbours of the best plan are simulated, those best by formula, and how often."""


class FoundPlan(NamedTuple):
    """The best plan found: the evaluation, and where memory is tightest under it."""

    evaluation: Evaluation
    tightest: Excess

    @property
    def score(self) -> Score:
        """Bytes over the limit, then simulated seconds."""
        done = self.evaluation
        over = max(self.tightest.over_bytes, 0)
        return score_of(done.model, done.decisions, over, done.prediction.step_s)


def search(
    problem: Problem, time_limit_s: float | None = None, evaluations: int = EVALUATIONS
) -> FoundPlan:
    """The best plan over all micro-batch counts: one that fits, if one was found, else the one
    that is the least over its limit. ``evaluations`` of plans are made at most for each count."""
    limit_s = float("inf") if time_limit_s is None else time_limit_s
    deadline = time.perf_counter() + limit_s
    counts = [m for m in sorted(set(problem.goal.micro_batches)) if problem.divides_into(m)]
    best: FoundPlan | None = None
    for i, micro_batches in enumerate(counts):
        problem.report(f"{micro_batches} micro-batches", i / len(counts))
        scored = _start(problem, micro_batches)
        candidates = _candidates(scored, deadline, evaluations)
        # Data parallelism comes first: of plans that are equally good the simplest is kept.
        for decisions in dict.fromkeys([scored.space.start, *(c.decisions for c in candidates)]):
            found = _simulated(scored.model, decisions, problem)
            if best is None or found.score.beats(best.score):
                best = found
        if time.perf_counter() > deadline:
            break
    assert best is not None
    # The formula is exact for the barrier without interference; else it knows neither interference
    # nor the size of slices. Of 210 searches of random problems (tests.problems, seeds 0 to 104) 28
    # gained by simulating neighbours too.
    exact = problem.schedule == "barrier" and problem.cluster.interference == Interference()
    return best if exact else polish(problem, best, deadline, evaluations)


def feasible(problem: Problem) -> bool:
    """Whether a plan fits that ``search`` would find, without looking for the quickest."""
    for micro_batches in problem.goal.micro_batches:
        if not problem.divides_into(micro_batches):
            continue
        scored = _start(problem, micro_batches)
        if not all(scored.space.options):
            continue  # pins and the limit on each unit leave one of them nothing
        if never_fits(problem, scored.model):
            continue
        for layout in scored.space.layouts:
            for decisions in split_plans(scored.space, layout):
                scored.move_to(decisions)
                if scored.score().over_bytes == 0:
                    return True
        if _candidates(scored, float("inf"), FEASIBILITY)[0].score.over_bytes == 0:
            return True
        if fits_in_segments(problem, scored.model):
            return True
    return False


def polish(
    problem: Problem, best: FoundPlan, deadline: float, evaluations: int = EVALUATIONS
) -> FoundPlan:
    """Moves from the best plan to better neighbours, judged by simulation; of each plan so many
    neighbours are looked at."""
    model = best.evaluation.model
    scored = ScoredDecisions(OptionSpace(model, problem.capability), problem.schedule)
    tried = {best.evaluation.decisions}
    for _ in range(POLISHES):
        start = best
        for decisions in _neighbours(scored, best.evaluation.decisions, deadline, evaluations):
            if decisions in tried or time.perf_counter() > deadline:
                continue
            tried.add(decisions)
            found = _simulated(model, decisions, problem)
            if found.score.beats(best.score):
                best = found
        if best is start:
            break
    return best


def _neighbours(
    scored: ScoredDecisions, decisions: Decisions, deadline: float, evaluations: int
) -> list[Decisions]:
    """The neighbours that are best by formula."""
    scored.move_to(decisions)
    found: list[Candidate] = []
    for changes in scored.space.moves:
        if time.perf_counter() > deadline or len(found) >= evaluations:
            break
        candidate = scored.tried(changes)
        if candidate is not None:
            found.append(candidate)
    return [c.decisions for c in sorted(found, key=lambda c: c.score)[:POLISHED]]


def _simulated(model: CostModel, decisions: Decisions, problem: Problem) -> FoundPlan:
    done = evaluation(model, decisions, schedule=problem.schedule)
    return FoundPlan(done, excess(model, done.memory))


def _start(problem: Problem, micro_batches: int) -> ScoredDecisions:
    """Plain data parallelism, to move on from."""
    space = OptionSpace(problem.cost_model(micro_batches), problem.capability)
    return ScoredDecisions(space, problem.schedule)


def _candidates(scored: ScoredDecisions, deadline: float, evaluations: int) -> list[Candidate]:
    """The best split plans and what improving them gave, best first."""
    found: list[Candidate] = []
    for layout in scored.space.layouts:
        tried: list[Candidate] = []
        for decisions in split_plans(scored.space, layout):
            scored.move_to(decisions)
            tried.append(Candidate(scored.score(), decisions))
        found += sorted(tried, key=lambda c: c.score)[:STARTS]
        if time.perf_counter() > deadline:
            break
    start = sorted({c.decisions: c for c in found}.values(), key=lambda c: c.score)
    improved: list[Candidate] = []
    most = scored.evaluations + evaluations
    for candidate in start[:IMPROVED]:
        if scored.evaluations < most and time.perf_counter() < deadline:
            improved.append(improve(scored, candidate, most, deadline))
    return sorted([*improved, *start], key=lambda c: c.score)[:SIMULATED]


def split_plans(space: OptionSpace, layout: Layout) -> Iterator[Decisions]:
    """The plans that are data parallel up to a unit and use ``layout`` from there on."""
    able = [
        k
        for k, row in enumerate(space.options)
        if any(o.layout == layout and o != space.plain for o in row)
    ]
    stride = max(len(able) / SPLIT_POINTS, 1.0)
    points = sorted({able[int(i * stride)] for i in range(int(len(able) / stride))})
    yield space.start
    # Backwards, as of plans with equal scores the first is kept: the one that divides fewest units.
    for start in reversed(points):
        yield _split_at(space, layout, start)


def _split_at(space: OptionSpace, layout: Layout, start: int) -> Decisions:
    model, chosen = space.model, list(space.start)
    done: set[int] = set()
    for k in range(len(chosen)):
        if k in done or max(model.ties[k]) < start:
            continue
        for style in _styles(model, chosen, layout, k):
            group = space.tied(k, Option(layout, style))
            if group:
                for other, theirs in group.items():
                    chosen[other] = theirs
                done |= group.keys()
                break
    return tuple(chosen)


def _styles(model: CostModel, chosen: list[Option], layout: Layout, k: int) -> tuple[Style, ...]:
    """The styles for unit ``k``, the one to try first first."""
    if layout.degree == 1:
        return ("none",)
    # After a column unit each member holds the slice of features that a row unit takes in.
    sources = [chosen[model.ends[e][0]] for e in model.edges_into[k]]
    if sources and all(o == Option(layout, "column") for o in sources):
        return ("row", "pair", "column")
    return ("pair", "column", "row")
