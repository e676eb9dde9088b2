"""Moves from one set of decisions to its neighbours, and going where they are better."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, islice, product

from ...schema.options import Option
from .space import Candidate, Point, Score, Space

HEAVY, PAIRS = 4, 1000
"""Units with most parameters, whose options are tried two at a time; moves of two units tried."""


def improve(point: Point, start: Candidate, most: int, deadline: float) -> Candidate:
    """Moves to better neighbours until nothing helps or the evaluations are at ``most``."""
    point.move_to(start.decisions)
    best = start.score
    helped = True
    while helped:
        helped = False
        for near in (moves(point.space), islice(pairs(point), PAIRS)):
            # Pairs are many and seldom help (2 of 105 random problems): only where no move does.
            if helped:
                break
            for changes in near:
                if point.evaluations >= most or time.perf_counter() > deadline:
                    return Candidate(best, point.taken())
                score = _try(point, changes, best)
                if score is not None:
                    best, helped = score, True
    return Candidate(best, point.taken())


def pairs(point: Point) -> Iterator[dict[int, Option]]:
    """A divided unit back to data parallel while another changes (what one leaves open in a bucket
    the other may fill); then the units with most parameters, two at a time."""
    space = point.space
    decisions = point.taken()
    for k, option in enumerate(decisions):
        back = space.tied(k, space.home) if option != space.home else None
        for changes in moves(space) if back else ():
            if back and not back.keys() & changes.keys():
                yield {**back, **changes}
    free = [k for k, o in enumerate(space.options) if len(o) > 1 and k == space.model.ties[k][0]]
    weight = [sum(p.bytes for p in owned) for owned in space.model.owned]
    heavy = sorted(free, key=lambda k: weight[k], reverse=True)[:HEAVY]
    for a, b in combinations(heavy, 2):
        for first, second in product(space.options[a], space.options[b]):
            one, other = space.tied(a, first), space.tied(b, second)
            if one and other:
                yield {**one, **other}


def moves(space: Space) -> Iterator[dict[int, Option]]:
    """Every option of every unit, tied ones with it; then column and row together, one way and the
    other, for neighbours: changed one by one, the first alone would only cost."""
    model = space.model
    for k, options in enumerate(space.options):
        if k == model.ties[k][0] and len(options) > 1:
            for option in options:
                changes = space.tied(k, option)
                if changes:
                    yield changes
    for a, b in model.ends:
        if len(model.ties[a]) > 1 or len(model.ties[b]) > 1:
            continue
        for layout in space.layouts:
            column, row = Option(layout, "column"), Option(layout, "row")
            for first, second in ((column, row), (row, column)):
                if first in space.options[a] and second in space.options[b]:
                    yield {a: first, b: second}


def _try(point: Point, changes: dict[int, Option], best: Score) -> Score | None:
    """Makes changes; keeps them and returns the score if that is better."""
    if all(point.decisions[k] == option for k, option in changes.items()):
        return None
    before = point.set(changes.items())
    score = point.score()
    if score.beats(best):
        return score
    point.set(before.items())
    return None
