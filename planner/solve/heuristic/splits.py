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

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from ...cost.cost import CostModel
from ...schema.cluster import Interference
from ...schema.layout import Layout, Style
from ...schema.options import Decisions, Option
from ..evaluate import Evaluation, Excess, evaluation, excess, memory_of
from ..problem import Problem
from .fitting import fits_in_segments
from .least_memory import never_fits
from .neighbours import improve, moves
from .space import Candidate, Point, Score, Space, score_of

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
"""How many neighbours of the best plan are simulated, those best by formula, and how often: the
formula knows nothing of interference, nor of the size of slices."""


class Found(NamedTuple):
    """The best plan found: the evaluation, and where memory is tightest under it."""

    evaluation: Evaluation
    tightest: Excess

    @property
    def score(self) -> Score:
        """Bytes over the limit, then simulated seconds."""
        done = self.evaluation
        over = max(self.tightest.over_bytes, 0)
        return score_of(done.model, done.decisions, over, done.prediction.step_s)


def search(problem: Problem, time_limit_s: float | None = None) -> Found:
    """The best plan over all micro-batch counts: one that fits, if one was found, else the one
    that is the least over its limit."""
    deadline = time.perf_counter() + (time_limit_s or float("inf"))
    counts = [m for m in sorted(set(problem.goal.micro_batches)) if problem.divides_into(m)]
    best: Found | None = None
    for i, micro_batches in enumerate(counts):
        problem.report(f"{micro_batches} micro-batches", i / len(counts))
        for found in _simulated(_start(problem, micro_batches), problem, deadline):
            if best is None or found.score.beats(best.score):
                best = found
        if time.perf_counter() > deadline:
            break
    assert best is not None
    exact = problem.schedule == "barrier" and problem.cluster.interference == Interference()
    return best if exact else polish(problem, best, deadline)


def feasible(problem: Problem) -> bool:
    """Whether a plan fits that ``search`` would find, without looking for the quickest."""
    for micro_batches in problem.goal.micro_batches:
        if not problem.divides_into(micro_batches):
            continue
        point = _start(problem, micro_batches)
        if not all(point.space.options):
            continue  # pins and the limit on each unit leave one of them nothing
        if never_fits(problem, point.model):
            continue
        for layout in point.space.layouts:
            for decisions in split_plans(point.space, layout):
                point.move_to(decisions)
                if point.score().over_bytes == 0:
                    return True
        if _candidates(point, float("inf"), FEASIBILITY)[0].score.over_bytes == 0:
            return True
        if fits_in_segments(problem, point.model):
            return True
    return False


def polish(problem: Problem, best: Found, deadline: float) -> Found:
    """Moves from the best plan to better neighbours, judged by simulation."""
    model = best.evaluation.model
    point = Point(Space(model, problem.capability), memory_of(model), problem.schedule)
    tried = {best.evaluation.decisions}
    for _ in range(POLISHES):
        start = best
        for decisions in _neighbours(point, best.evaluation.decisions, deadline):
            if decisions in tried or time.perf_counter() > deadline:
                continue
            tried.add(decisions)
            found = _found(model, decisions, problem)
            if found.score.beats(best.score):
                best = found
        if best is start:
            break
    return best


def _neighbours(point: Point, decisions: Decisions, deadline: float) -> list[Decisions]:
    """The neighbours that are best by formula."""
    point.move_to(decisions)
    near: list[Candidate] = []
    for changes in moves(point.space):
        if time.perf_counter() > deadline or len(near) >= EVALUATIONS:
            break
        before = point.set(changes.items())
        if before:
            near.append(Candidate(point.score(), point.taken()))
            point.set(before.items())
    return [c.decisions for c in sorted(near, key=lambda c: c.score)[:POLISHED]]


def _found(model: CostModel, decisions: Decisions, problem: Problem) -> Found:
    done = evaluation(model, decisions, schedule=problem.schedule)
    return Found(done, excess(model, done.memory))


def _start(problem: Problem, micro_batches: int) -> Point:
    """Plain data parallelism, to move on from."""
    model = problem.cost_model(micro_batches)
    return Point(Space(model, problem.capability), memory_of(model), problem.schedule)


def _simulated(point: Point, problem: Problem, deadline: float) -> Iterator[Found]:
    """The best plans for one number of micro-batches, simplest first so that ties go to it."""
    model, chosen = point.model, _candidates(point, deadline, EVALUATIONS)
    for decisions in dict.fromkeys([point.space.start, *(c.decisions for c in chosen)]):
        yield _found(model, decisions, problem)


def _candidates(point: Point, deadline: float, evaluations: int) -> list[Candidate]:
    """The best split plans and what improving them gave, best first."""
    found: list[Candidate] = []
    for layout in point.space.layouts:
        tried: list[Candidate] = []
        for decisions in split_plans(point.space, layout):
            point.move_to(decisions)
            tried.append(Candidate(point.score(), decisions))
        found += sorted(tried, key=lambda c: c.score)[:STARTS]
        if time.perf_counter() > deadline:
            break
    start = sorted({c.decisions: c for c in found}.values(), key=lambda c: c.score)
    improved: list[Candidate] = []
    most = point.evaluations + evaluations
    for candidate in start[:IMPROVED]:
        if point.evaluations < most and time.perf_counter() < deadline:
            improved.append(improve(point, candidate, most, deadline))
    return sorted([*improved, *start], key=lambda c: c.score)[:SIMULATED]


def split_plans(space: Space, layout: Layout) -> Iterator[Decisions]:
    """The plans that are data parallel up to a unit and use ``layout`` from there on."""
    options = space.options
    able = [k for k in range(len(options)) if any(_at(o, layout, space) for o in options[k])]
    stride = max(len(able) / SPLIT_POINTS, 1.0)
    points = sorted({able[int(i * stride)] for i in range(int(len(able) / stride))})
    yield space.start
    for start in reversed(points):
        yield _split_at(space, layout, start)


def _at(option: Option, layout: Layout, space: Space) -> bool:
    return option.layout == layout and option != space.home


def _split_at(space: Space, layout: Layout, start: int) -> Decisions:
    model = space.model
    chosen = list(space.start)
    done: set[int] = set()
    for k in range(len(chosen)):
        if k in done or max(model.ties[k]) < start:
            continue
        for style in _styles(model, chosen, layout, k):
            option = Option(layout, style)
            group = space.tied(k, option) if option in space.options[k] else None
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
    sources = [chosen[model.ends[e][0]] for e in model.edges_into[k]]
    if sources and all(o == Option(layout, "column") for o in sources):
        return ("row", "pair", "column")
    return ("pair", "column", "row")
