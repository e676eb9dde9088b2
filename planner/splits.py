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
from dataclasses import replace
from typing import NamedTuple

from .cost import CostModel, Decisions, Option
from .evaluate import (
    Evaluation,
    Excess,
    evaluation,
    excess,
)
from .layout import Layout, Style
from .memory import MemoryModel
from .placement import place
from .search import Point, Score, Space, score_of
from .solver import Problem

SPLIT_POINTS = 48
"""Split points tried for each layout; longer models are cut at as many even distances."""
IMPROVED = 3
"""How many of the best plans, each of another layout, are improved unit by unit."""
EVALUATIONS = 2500
"""Scores that one improvement may ask for."""
SIMULATED = 4
"""How many plans are simulated for each number of micro-batches, plain data parallelism aside."""


class Candidate(NamedTuple):
    """Decisions and their score by formula."""

    score: Score
    decisions: Decisions


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


def placed(problem: Problem) -> Problem:
    """The problem with a placement chosen, if it left that open."""
    if problem.placement is not None:
        return problem
    return replace(problem, placement=place(problem.cluster))


def search(problem: Problem, time_limit_s: float | None = None) -> Found:
    """The best plan over all micro-batch counts: one that fits, if one was found, else the one
    that is the least over its limit."""
    deadline = time.perf_counter() + (time_limit_s or float("inf"))
    counts = [m for m in sorted(set(problem.goal.micro_batches)) if _divides(problem, m)]
    best: Found | None = None
    for i, micro_batches in enumerate(counts):
        problem.report(f"{micro_batches} micro-batches", i / len(counts))
        for found in _simulated(problem, micro_batches, deadline):
            if best is None or found.score.beats(best.score):
                best = found
        if time.perf_counter() > deadline:
            break
    assert best is not None
    return best


def _divides(problem: Problem, micro_batches: int) -> bool:
    if micro_batches == 1:
        return True
    enough = problem.goal.batch >= micro_batches * problem.cluster.world_size
    return enough and problem.capability.micro_batches


def _simulated(problem: Problem, micro_batches: int, deadline: float) -> Iterator[Found]:
    """The best plans for one number of micro-batches, simplest first so that ties go to it."""
    model = CostModel(
        problem.profile,
        problem.cluster,
        problem.goal,
        micro_batches,
        problem.placement,
        problem.bucket_bytes,
        problem.schedule == "priority",
    )
    point = Point(
        Space(model, problem.capability),
        MemoryModel(model),
        problem.schedule,
    )
    chosen = _candidates(point, deadline)
    for decisions in dict.fromkeys([point.space.start, *(c.decisions for c in chosen)]):
        done = evaluation(model, decisions, schedule=problem.schedule)
        yield Found(done, excess(model, done.memory))


def _candidates(point: Point, deadline: float) -> list[Candidate]:
    """The best split plans and what improving them gave, best first."""
    best_of: dict[Layout, Candidate] = {}
    for layout in point.space.layouts:
        for decisions in split_plans(point.space, layout):
            point.move_to(decisions)
            score = point.score()
            if layout not in best_of or score.beats(best_of[layout].score):
                best_of[layout] = Candidate(score, decisions)
        if time.perf_counter() > deadline:
            break
    start = sorted(best_of.values(), key=lambda c: c.score)
    improved = [improve(point, c, deadline) for c in start[:IMPROVED]]
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


def improve(point: Point, start: Candidate, deadline: float) -> Candidate:
    """Changes one unit (with its tied ones) at a time for the better, until nothing helps or the
    evaluations are used up."""
    point.move_to(start.decisions)
    best, most = start.score, point.evaluations + EVALUATIONS
    helped = True
    while helped:
        helped = False
        for k, options in enumerate(point.space.options):
            if k != point.model.ties[k][0]:
                continue
            for option in options if len(options) > 1 else ():
                if point.evaluations >= most or time.perf_counter() > deadline:
                    return Candidate(best, point.taken())
                score = _try(point, k, option, best)
                if score is not None:
                    best, helped = score, True
    return Candidate(best, point.taken())


def _try(point: Point, k: int, option: Option, best: Score) -> Score | None:
    """Gives a unit an option; keeps it and returns the score if that is better."""
    if point.decisions[k] == option:
        return None
    changes = {k: option} if len(point.model.ties[k]) == 1 else point.space.tied(k, option)
    if changes is None:
        return None
    before = point.set(changes.items())
    score = point.score()
    if score.beats(best):
        return score
    point.set(before.items())
    return None
