"""What may be decided, decisions with their score, and the way from one plan to a better one.

The score is (bytes over the limit, seconds of a step by formula): feasibility first, then time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, islice, product
from typing import NamedTuple

import numpy as np

from ...cost.budget import gpu_seconds, overdrawn
from ...cost.cost import CostModel
from ...cost.step_time import (
    Chain,
    Vector,
    barrier_step,
    blocking_s,
    compute_s,
    priority_step,
)
from ...memory.timeline import peak_bytes
from ...memory.unit_memory import memory_of
from ...schema.capability import Capability
from ...schema.layout import Layout, Style
from ...schema.options import Decisions, Option, ties_agree
from ...simulate.schedule import ScheduleName, bucketed_s
from ..evaluate import binding_rank, limits_bytes
from ..unit_options import all_options, layouts_of

ROUNDING = 1e-9
BETTER = 1 - 1e-6
"""A change must save a millionth of the step: rounding is no reason to change a layout."""
ENTRIES = ("entry_forward_s", "entry_backward_s", "entry_host_s")
"""The figures of a chain that are not a unit's own."""
HEAVY, PAIRS = 4, 1000
"""Units with most parameters, whose options are tried two at a time; moves of two units tried."""


class Score(NamedTuple):
    """Bytes over the limit (0 where all limits are kept), then seconds of the objective."""

    over_bytes: float
    step_s: float

    def beats(self, other: Score) -> bool:
        """Whether this is better by more than rounding."""
        if self.over_bytes != other.over_bytes:
            return self.over_bytes < other.over_bytes
        return self.step_s < other.step_s * BETTER


class Candidate(NamedTuple):
    """Decisions and their score by formula."""

    score: Score
    decisions: Decisions


def score_of(
    model: CostModel, decisions: Sequence[Option], over_bytes: float, step_s: float
) -> Score:
    """The score of a plan."""
    # Whatever limit is broken, a plan that keeps all of them comes first. So the share by which
    # another limit is overdrawn counts as that share of the memory.
    over = overdrawn(model, decisions, step_s)
    if over > ROUNDING:
        over_bytes += over * min(limits_bytes(model))
    return Score(over_bytes, objective_s(model, decisions, step_s))


def objective_s(model: CostModel, decisions: Sequence[Option], step_s: float) -> float:
    """What the goal wants least, of a step of ``step_s`` seconds."""
    if model.goal.objective == "gpu_seconds":
        return gpu_seconds(model, decisions, step_s)
    return step_s


class OptionSpace:
    """What may be chosen for each unit of a cost model."""

    def __init__(self, model: CostModel, capability: Capability) -> None:
        self.model, self.capability = model, capability
        self.layouts = layouts_of(model, capability)
        self.plain = model.baseline[0]

    @cached_property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        """The options of each unit by itself."""
        return all_options(self.model, self.capability)

    @cached_property
    def _have(self) -> tuple[frozenset[Option], ...]:
        return tuple(frozenset(row) for row in self.options)

    @cached_property
    def start(self) -> Decisions:
        """Plain data parallelism, as far as every unit may have it; else its first option, and for
        tied units the first that all of them may have."""
        chosen = list(self.model.baseline)
        for k, options in enumerate(self.options):
            ties = self.model.ties[k]
            if k != ties[0] or all(chosen[u] in self.options[u] for u in ties):
                continue
            fitting = (found for o in options if (found := self.tied(k, o)) is not None)
            for u, option in next(fitting, {}).items():
                chosen[u] = option
        return tuple(chosen)

    @cached_property
    def moves(self) -> tuple[dict[int, Option], ...]:
        """The changes that are tried one by one."""
        return tuple(moves(self))

    @cached_property
    def seen_by(self) -> tuple[tuple[int, ...], ...]:
        """For each unit those on whose layouts and styles it depends what moves at its ends."""
        model, found = self.model, []
        for k in range(len(model.profile.units)):
            edges = {*model.edges_into[k], *model.edges_from[k]}
            edges |= {other for e in edges for other in model.same_tensors_before[e]}
            found.append(tuple(sorted({k, *(unit for e in edges for unit in model.ends[e])})))
        return tuple(found)

    @cached_property
    def ends_of(self) -> tuple[frozenset[int], ...]:
        """``seen_by`` the other way: for each unit those at whose ends it changes what moves."""
        units = range(len(self.seen_by))
        return tuple(frozenset(j for j in units if k in self.seen_by[j]) for k in units)

    def tied(self, k: int, option: Option) -> dict[int, Option] | None:
        """The options of all units tied to ``k`` if it takes ``option``; None if they cannot."""
        if option not in self._have[k]:
            return None
        profiles, chosen = self.model.profile.units, {k: option}
        for other in self.model.ties[k]:
            if other == k:
                continue
            fitting = (
                o
                for o in self.options[other]
                if o.layout == option.layout
                and ties_agree((profiles[k], profiles[other]), (option, o))
            )
            found = next(fitting, None)
            if found is None:
                return None
            chosen[other] = found
        # Each of them agrees with ``k``; two others may still cut a parameter of theirs unlike.
        agree = len(chosen) == 1 or ties_agree([profiles[u] for u in chosen], [*chosen.values()])
        return chosen if agree else None


class ScoredDecisions:
    """Decisions that can be changed unit by unit, and their score."""

    # A change touches the unit's own figures and, where its layout changes, what moves at its ends.
    # All figures stand in one table, of which what the formulas take are views, and what has been
    # worked out is written there again from memory: thousands of changes are tried in a second.

    def __init__(self, space: OptionSpace, schedule: ScheduleName) -> None:
        self.space, self.model, self.schedule = space, space.model, schedule
        self.memory = memory_of(self.model)
        self.binding = binding_rank(self.model)
        self.limit_bytes = self.binding.limit_bytes
        self.decisions: list[Option] = list(space.start)
        self._samples: dict[Layout, int] = {}
        self._numbers: dict[tuple[Layout, Style], int] = {}
        self._states = [self._number(option) for option in self.decisions]
        self._own_columns: dict[tuple[int, Option], Vector] = {}
        self._end_columns: dict[tuple[int, ...], Vector] = {}
        self._tabulate()
        self.evaluations = 0

    def _tabulate(self) -> None:
        """Makes the table of all figures: ``chain``, ``table`` and ``moved`` are parts of it."""
        units = range(len(self.decisions))
        chain = self.model.chain(self.decisions)._asdict()
        own = {name: v for name, v in chain.items() if v is not None and name not in ENTRIES}
        own["table"] = np.array([self._memory(k) for k in units], dtype=np.float64).T
        ends = {name: chain[name] for name in ENTRIES}
        ends["moved"] = np.array([self._moved(k) for k in units]).T
        rows = {name: np.atleast_2d(value) for name, value in (own | ends).items()}
        self._figures = np.concatenate([*rows.values()])
        self._own = sum(len(rows[name]) for name in own)
        views = np.split(self._figures, np.cumsum([*map(len, rows.values())])[:-1])
        for (name, value), view in zip((own | ends).items(), views, strict=True):
            chain[name] = view if value.ndim > 1 else view[0]
        self.table, self.moved = chain.pop("table"), chain.pop("moved")
        self.chain = Chain(**chain)

    def samples(self, layout: Layout) -> int:
        """Samples of the group by whose memory is judged."""
        # One rank stands for all: one that is in the fullest group of every layout. Where every
        # layout has all ranks, the rank at position 0 is one; else it bounds every rank from above.
        # Where shares of the batch are planned it is the rank that is short of memory first.
        if layout not in self._samples:
            self._samples[layout] = self.binding.samples(self.model, layout)
        return self._samples[layout]

    def _memory(self, k: int) -> tuple[float, ...]:
        option = self.decisions[k]
        return self.memory.unit(k, option, self.samples(option.layout)).column

    def _moved(self, k: int) -> tuple[float, float, float]:
        return self.memory.moved(k, self.decisions, self.samples(self.decisions[k].layout))

    def _number(self, option: Option) -> int:
        """The number of an option's layout and style: quicker to look up than these."""
        return self._numbers.setdefault((option.layout, option.style), len(self._numbers))

    def set(self, changes: Iterable[tuple[int, Option]]) -> dict[int, Option]:
        """Makes changes; returns what was there before, by which they are undone."""
        before: dict[int, Option] = {}
        ends: set[int] = set()
        for k, option in changes:
            if self.decisions[k] == option:
                continue
            before[k] = self.decisions[k]
            self.decisions[k] = option
            self._write_own(k)
            number = self._number(option)
            if number != self._states[k]:
                self._states[k] = number
                ends |= self.space.ends_of[k]
        for k in ends:
            self._write_ends(k)
        return before

    def _write_own(self, k: int) -> None:
        """Writes what unit ``k`` costs by itself."""
        key = k, self.decisions[k]
        if key in self._own_columns:
            self._figures[: self._own, k] = self._own_columns[key]
            return
        self.model.write_unit(self.chain, k, self.decisions[k])
        self.table[:, k] = self._memory(k)
        self._own_columns[key] = self._figures[: self._own, k].copy()

    def _write_ends(self, k: int) -> None:
        """Writes what moves at the ends of unit ``k``, which layouts and styles alone decide."""
        key = k, *(self._states[other] for other in self.space.seen_by[k])
        if key in self._end_columns:
            self._figures[self._own :, k] = self._end_columns[key]
            return
        self.model.write_entry(self.chain, k, self.decisions)
        self.moved[:, k] = self._moved(k)
        self._end_columns[key] = self._figures[self._own :, k].copy()

    def move_to(self, decisions: Sequence[Option]) -> None:
        """Takes all of the decisions."""
        self.set(enumerate(decisions))

    def tried(self, changes: dict[int, Option]) -> Candidate | None:
        """The decisions with changes made, and undone again; None where they change nothing."""
        # Moved and moved back: a copy would work out all other units once more.
        before = self.set(changes.items())
        if not before:
            return None
        found = Candidate(self.score(), self.taken())
        self.set(before.items())
        return found

    def score(self) -> Score:
        """The score of the decisions as they stand."""
        self.evaluations += 1
        return score_of(self.model, self.decisions, self._over_bytes(), self.step_s())

    def better_than(self, best: Score) -> Score | None:
        """``score`` where it beats ``best``; None where not, which is often seen from a part."""
        self.evaluations += 1
        if best.over_bytes > 0:
            # The other limits only add to what is over.
            over_bytes = self._over_bytes()
            if over_bytes > best.over_bytes:
                return None
            step_s = self.step_s()
        else:
            if not self._may_take_less(best.step_s):
                return None
            step_s = self.step_s()
            if objective_s(self.model, self.decisions, step_s) >= best.step_s * BETTER:
                return None
            over_bytes = self._over_bytes()
        score = score_of(self.model, self.decisions, over_bytes, step_s)
        return score if score.beats(best) else None

    def _may_take_less(self, most_s: float) -> bool:
        """Whether a bound from below on the step leaves room for less than ``most_s``."""
        if self.model.goal.objective != "time":
            return True
        # Whatever the schedule, a rank computes and waits, and updates once.
        once_s = compute_s(self.chain) + blocking_s(self.chain)
        least_s = self.model.micro_batches * once_s + float(self.chain.update_s.sum())
        return least_s * (1 - ROUNDING) < most_s

    def step_s(self) -> float:
        """The step by formula: of the buckets as they leave, or of priority."""
        if self.schedule == "priority":
            return priority_step(self.chain, self.model.micro_batches)
        chain = self.chain._replace(exchange_s=bucketed_s(self.model, self.decisions))
        return barrier_step(chain, self.model.micro_batches)

    def peak(self) -> float:
        """Peak bytes of the rank judged."""
        return peak_bytes(self.memory.joined(self.table, self.moved, self.decisions))[0]

    def _over_bytes(self) -> float:
        return max(self.peak() - self.limit_bytes, 0.0)

    def taken(self) -> Decisions:
        """The decisions as they stand."""
        return tuple(self.decisions)


def improve(scored: ScoredDecisions, start: Candidate, most: int, deadline: float) -> Candidate:
    """Moves to better neighbours until nothing helps or the evaluations are at ``most``."""
    scored.move_to(start.decisions)
    best = start.score
    helped = True
    while helped:
        helped = False
        for tried in (scored.space.moves, islice(pairs(scored), PAIRS)):
            # Pairs are many and seldom help (2 of 105 random problems): only where no move does.
            if helped:
                break
            for changes in tried:
                if scored.evaluations >= most or time.perf_counter() > deadline:
                    return Candidate(best, scored.taken())
                if all(scored.decisions[k] == option for k, option in changes.items()):
                    continue
                before = scored.set(changes.items())
                score = scored.better_than(best)
                if score is not None:
                    best, helped = score, True
                else:
                    scored.set(before.items())
    return Candidate(best, scored.taken())


def pairs(scored: ScoredDecisions) -> Iterator[dict[int, Option]]:
    """Changes of two units: a divided unit back to data parallelism while another changes; then the
    units with most parameters, two at a time."""
    space, decisions = scored.space, scored.taken()
    for k, option in enumerate(decisions):
        back = space.tied(k, space.plain) if option != space.plain else None
        # By itself that may not help: what the unit leaves open in a bucket another may fill.
        for changes in space.moves if back else ():
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


def moves(space: OptionSpace) -> Iterator[dict[int, Option]]:
    """Every option of every unit, tied ones with it; then neighbours divided by column and row, one
    way and the other."""
    model = space.model
    for k, options in enumerate(space.options):
        if k == model.ties[k][0] and len(options) > 1:
            yield from (changes for option in options if (changes := space.tied(k, option)))
    # Column and row change together: one by one, the first alone would only cost.
    for a, b in model.ends:
        if len(model.ties[a]) > 1 or len(model.ties[b]) > 1:
            continue
        for layout in space.layouts:
            column, row = Option(layout, "column"), Option(layout, "row")
            for first, second in ((column, row), (row, column)):
                if first in space.options[a] and second in space.options[b]:
                    yield {a: first, b: second}
