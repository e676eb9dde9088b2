"""What is recomputed, and in which segments, where layouts and exchanges are decided: exactly.

Every point of the memory timeline is what the units before have saved, and something that depends
on the unit at work alone or, in a segment, on that segment. So a plan of memory is a path through
the units: a move takes one unit, kept or recomputed by itself, or several as one segment; it adds
to what is saved, and the most that it holds on top of what was saved before must keep the limit. Of
two paths to the same unit the one that saved no less in no less time is dropped; the others are
gone on with (labels, as in shortest paths with resources: Desrochers and Soumis, INFOR 26, 1988).
With labels left out (``MOST_STEPS``) what is found still keeps the limit.

Division, and other ways to save memory, are the solvers' to try. Whether data parallelism with
segments would do is answered here too (``fits_in_segments``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ...cost.cost import CostModel
from ...cost.step_time import Vector
from ...memory.checkpoint_segments import any_segment, possible_segments
from ...memory.timeline import Persistent, PositionMemory, Table, fullest_bytes
from ...memory.unit_memory import memory_of
from ...schema.capability import Capability
from ...schema.options import Decisions, Option
from ...schema.plan import MemoryPolicy, Plan
from ..choice import choice
from ..evaluate import binding_rank
from ..problem import Problem
from ..unit_options import may_have
from .space import OptionSpace

MOST_STEPS = 400_000
"""About how many times a path is gone on with by one move, in one search."""
MOST_SEGMENTS = 3000
"""Segments that are looked at; of more, those of some numbers of modules."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Indices = npt.NDArray[np.int64]
Costs = tuple[Vector, ...]
"""What paths cost, an element of each array for a path; less is better, in the order of arrays."""


class Move(NamedTuple):
    """Units from the one at which the move begins up to ``end``: their ``options``, the most
    ``bytes`` that are there while they work and nothing was saved before them, what they have
    ``saved``, the ``seconds`` of what is computed again, and how many have ``joined`` a segment."""

    end: int
    options: Decisions
    bytes: float
    saved: float
    seconds: float
    joined: int = 0


class Moves(NamedTuple):
    """Moves from one unit that have the same ``end``, an element for each: which of the unit's
    moves they are (``which``), and what ``Move`` tells of them."""

    end: int
    which: Indices
    bytes: Vector
    saved: Vector
    seconds: Vector
    joined: Vector


class Paths(NamedTuple):
    """Paths to one unit, an element for each: what has been ``saved`` on them, what they ``cost``,
    and their last step, which is a ``move`` from the unit ``start`` on, and before it the path
    ``before`` of those that were kept to that unit."""

    saved: Vector
    cost: Costs
    start: Indices
    before: Indices
    move: Indices

    @classmethod
    def of(cls, parts: Sequence[Paths]) -> Self:
        """All paths of several parts, in their order."""
        cost = tuple(map(np.concatenate, zip(*(part.cost for part in parts), strict=True)))
        saved, start, before, move = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("saved", "start", "before", "move")
        )
        return cls(saved, cost, start, before, move)

    def at(self, which: Indices | npt.NDArray[np.bool_]) -> Self:
        """Some of the paths."""
        cost = tuple(each[which] for each in self.cost)
        return self._replace(
            saved=self.saved[which], cost=cost, start=self.start[which], before=self.before[which],
            move=self.move[which],
        )  # fmt: skip


class Checkpointing:
    """The moves of one cost model under given decisions, on the position that holds most."""

    def __init__(
        self, model: CostModel, decisions: Sequence[Option], capability: Capability
    ) -> None:
        self.model, self.capability = model, capability
        self.memory = memory_of(model)
        self.decisions = tuple(
            option._replace(memory="keep" if unit.fixed else option.memory, segment=())
            for unit, option in zip(model.profile.units, decisions, strict=True)
        )
        binding = binding_rank(model)
        self._samples = {o.layout: binding.samples(model, o.layout) for o in self.decisions}
        self._moved = np.array([
            self.memory.moved(k, self.decisions, self._samples[o.layout])
            for k, o in enumerate(self.decisions)
        ]).T  # fmt: skip

    def quickest(self, limit_bytes: float) -> Decisions | None:
        """The decisions that compute least again within the limit, of these those with fewest units
        in segments; None where nothing keeps it."""

        def cost(saved: Vector, cost: Costs, moves: Moves) -> Costs:
            seconds, joined = cost
            return seconds + moves.seconds, joined + moves.joined

        return self._search((0.0, 0.0), cost, limit_bytes)

    def fitting(self, limit_bytes: float) -> Decisions | None:
        """Some decisions that keep the limit, or None where none do; much quicker than the best."""
        # Where all cost the same, one path to each unit is left: the one that has saved least.
        return self._search(
            (0.0,), lambda saved, cost, moves: (0.0 * (saved + moves.saved),), limit_bytes
        )

    def least(self) -> Decisions:
        """The decisions whose timeline has the lowest peak, of these those with fewest units in
        segments."""

        def cost(saved: Vector, cost: Costs, moves: Moves) -> Costs:
            peak, joined = cost
            return np.maximum(peak, saved + moves.bytes), joined + moves.joined

        found = self._search((self.update_bytes, 0.0), cost, inf)
        assert found is not None, "without a limit there is a path"
        return found

    def _search(
        self,
        first: tuple[float, ...],
        cost: Callable[[Vector, Costs, Moves], Costs],
        limit_bytes: float,
    ) -> Decisions | None:
        """The decisions of the path through all units that costs least and keeps the limit.
        ``cost(saved, cost, moves)`` tells what each path costs, [path, 1], with each move after it,
        [path, move]; ``first`` is the cost of no move."""
        if not self._may_fit(limit_bytes):
            return None
        count, nowhere = len(self.decisions), np.zeros(1, dtype=np.int64)
        most = max(MOST_STEPS // max(sum(map(len, self.moves)), 1), 16)
        begin = Paths(np.zeros(1), tuple(np.array([c]) for c in first), *[nowhere] * 3)
        arriving: list[list[Paths]] = [[begin], *([] for _ in range(count))]
        kept: dict[int, Paths] = {}
        for k in range(count):
            if not arriving[k]:
                continue
            here = kept[k] = _undominated(Paths.of(arriving[k]), most)
            for moves in self._moves_by_end[k]:
                steps = _after(here, k, moves, cost, limit_bytes)
                if len(steps.saved):
                    arriving[moves.end].append(steps)
            arriving[k] = []  # those that go on are in ``kept``
        if not arriving[count]:
            return None
        found = Paths.of(arriving[count])
        return self._decisions(kept, found, int(np.lexsort(found.cost[::-1])[0]))

    def _decisions(self, kept: Mapping[int, Paths], paths: Paths, path: int) -> Decisions:
        """The options of all units on one of the paths; ``kept`` are those to each unit."""
        taken: list[Move] = []
        start = len(self.decisions)
        while start:
            start, before, move = (
                int(each[path]) for each in (paths.start, paths.before, paths.move)
            )
            taken.append(self.moves[start][move])
            paths, path = kept[start], before
        return tuple(option for move in reversed(taken) for option in move.options)

    # -- moves -----------------------------------------------------------------------------------

    @cached_property
    def moves(self) -> list[list[Move]]:
        """The moves from each unit on."""
        found: list[list[Move]] = [[] for _ in self.decisions]
        for policy in (None, "keep", "recompute"):
            for k, move in enumerate(self._unit_moves(policy)):
                if move.options[0] not in [known.options[0] for known in found[k]]:
                    found[k].append(move)
        for k, move in self._segments():
            found[k].append(move)
        return found

    @cached_property
    def _moves_by_end(self) -> list[list[Moves]]:
        """``moves``, those together that begin and end alike."""
        return [list(_by_end(moves)) for moves in self.moves]

    def _may_fit(self, limit_bytes: float) -> bool:
        """Whether what policies about memory do not change leaves room for anything."""
        position = self._position_memory(self.decisions)
        always = sum(float(position.field(name).sum()) for name in Persistent._fields)
        return max(always, self.update_bytes) <= limit_bytes

    @cached_property
    def update_bytes(self) -> float:
        """The most that updates hold where feature maps have no part in it; policies about memory
        change nothing of it."""
        # By priority units are updated in the next forward, where feature maps are: see ``_most``.
        position = self._position_memory(self.decisions)
        return 0.0 if position.sliced else float(fullest_bytes(position)[1].max())

    def _unit_moves(self, policy: MemoryPolicy | None) -> Iterator[Move]:
        """Every unit by itself under a policy, where it may have that; else as it is decided."""
        # The bytes of moves are read from the timeline, so that there is no second formula.
        chosen = self._under(policy)
        position = self._position_memory(chosen)
        most, saved = self._most(position), position.field("saved")
        before = saved.cumsum() - saved
        for k, option in enumerate(chosen):
            bytes_ = float(most[k] - before[k])
            yield Move(k + 1, (option,), bytes_, float(saved[k]), self._again_s(k, option))

    def _under(self, policy: MemoryPolicy | None) -> Decisions:
        """The decisions with the policy wherever a unit may have it."""

        def of(k: int, own: Option) -> Option:
            # What is offloaded stays so: it has a part in what other units hold.
            if policy is None or own.memory in ("offload", policy):
                return own
            simplest = Option(own.layout, own.style, policy)  # whatever else has been decided
            may = may_have(self.model, k, simplest, self.capability)
            return own._replace(memory=policy) if may else own

        return tuple(of(k, own) for k, own in enumerate(self.decisions))

    def _segments(self) -> Iterator[tuple[int, Move]]:
        """Every segment that there may be: its first unit and the move, all other units kept."""
        if "recompute" not in self.capability.memory:
            return
        able = [self._may_join(k) for k in range(len(self.decisions))]
        known = [
            s for s in possible_segments(self.model.profile) if all(able[s.first : s.last + 1])
        ]
        if len(known) > MOST_SEGMENTS:
            known = [segment for segment in known if len(segment.modules) in LENGTHS]
        if not known:
            return
        kept = self._under("keep")
        # Costs and bytes ask only whether a unit is in a segment, so that one table does for all.
        joined = tuple(
            own._replace(memory="recompute", segment=("",)) if joins else own
            for own, joins in zip(self.decisions, able, strict=True)
        )
        kept_table, joined_table = self._table(kept), self._table(joined)
        again_s = np.array([self._again_s(k, option) for k, option in enumerate(joined)])
        for segment in known:
            here = slice(segment.first, segment.last + 1)
            options = tuple(o._replace(segment=segment.modules) for o in joined[here])
            table = kept_table.copy()
            table[:, here] = joined_table[:, here]
            position = self._position_memory(
                (*kept[: here.start], *options, *kept[here.stop :]), table
            )
            saved = position.field("saved")
            most = float(self._most(position)[here].max() - saved[: here.start].sum())
            kept_bytes, seconds = float(saved[here].sum()), float(again_s[here].sum())
            yield segment.first, Move(here.stop, options, most, kept_bytes, seconds, len(options))

    def _may_join(self, k: int) -> bool:
        """Whether a unit may be in a segment."""
        # Not one that leaves ranks idle, which run nothing again; nor one that is divided, whose
        # redistributions would run again as well; nor one whose parameters are whole only while
        # they are used, as a segment uses them once more.
        option, kind = self.decisions[k], self.model.profile.units[k].kind
        plain = option[:2] == self.model.baseline[k][:2] and not option.gathers
        return plain and option.memory != "offload" and kind not in ("input", "output")

    def _again_s(self, k: int, option: Option) -> float:
        """Seconds that a policy about memory adds to the unit's own."""

        def seconds(option: Option) -> float:
            cost = self.model.unit(k, option)
            inner = cost.inner_forward.seconds + cost.inner_backward.seconds
            return cost.forward_s + cost.backward_s + inner

        return seconds(option) - seconds(option._replace(memory="keep", segment=()))

    def _table(self, decisions: Sequence[Option]) -> Table:
        columns = [
            self.memory.unit(k, o, self._samples[o.layout]).column for k, o in enumerate(decisions)
        ]
        return np.array(columns, dtype=np.float64).T

    def _position_memory(
        self, decisions: Sequence[Option], table: Table | None = None
    ) -> PositionMemory:
        table = self._table(decisions) if table is None else table
        return self.memory.joined(table, self._moved, decisions)

    def _most(self, position: PositionMemory) -> Vector:
        """By unit the most that is there at its points that grow with what is saved."""
        working, updating = fullest_bytes(position)
        return np.maximum(working, updating) if position.sliced else working


def _by_end(moves: Sequence[Move]) -> Iterator[Moves]:
    for end in dict.fromkeys(move.end for move in moves):
        which = [i for i, move in enumerate(moves) if move.end == end]
        columns = np.array([
            (move.bytes, move.saved, move.seconds, move.joined)
            for move in (moves[i] for i in which)
        ], dtype=np.float64).T  # fmt: skip
        yield Moves(end, np.array(which, dtype=np.int64), *columns)


def _after(
    paths: Paths,
    unit: int,
    moves: Moves,
    cost: Callable[[Vector, Costs, Moves], Costs],
    limit_bytes: float,
) -> Paths:
    """The paths to ``unit`` gone on with by each of the moves, where that keeps the limit."""
    saved = paths.saved[:, None]
    before, move = np.nonzero(saved + moves.bytes <= limit_bytes)
    costs = cost(saved, tuple(each[:, None] for each in paths.cost), moves)
    return Paths(
        (saved + moves.saved)[before, move],
        tuple(each[before, move] for each in costs),
        np.full(len(before), unit),
        before,
        moves.which[move],
    )


def _undominated(paths: Paths, most: int) -> Paths:
    """The paths that are not beaten in both, by what they saved; of very many an even choice, the
    ends among them."""
    by_cost = np.lexsort(paths.cost[::-1])
    dearer = np.zeros(len(by_cost), dtype=bool)
    for each in paths.cost:
        dearer[1:] |= each[by_cost][1:] != each[by_cost][:-1]
    rank = np.empty(len(by_cost), dtype=np.int64)
    rank[by_cost] = dearer.cumsum()
    order = np.lexsort((rank, paths.saved))
    ranks = rank[order]
    beats = np.ones(len(order), dtype=bool)
    beats[1:] = ranks[1:] < np.minimum.accumulate(ranks)[:-1]
    kept = order[beats]
    if len(kept) > most:
        kept = kept[np.rint(np.arange(most) * (len(kept) - 1) / (most - 1)).astype(np.int64)]
    return paths.at(kept)


# -- segments under data parallelism -----------------------------------------------------------


def has_segments(problem: Problem) -> bool:
    """Whether units of the model can be recomputed together."""
    return "recompute" in problem.capability.memory and any_segment(problem.profile)


def limited_by_memory(plan: Plan) -> bool:
    """Whether a plan does something for the sake of memory, as far as it shows."""
    saves = any(
        unit.memory != "keep" or unit.early_release or unit.exchange == "fully_sharded"
        for unit in plan.units
    )
    return saves or not plan.baseline_fits


def fits_in_segments(problem: Problem, model: CostModel) -> bool:
    """Whether data parallelism under some policies keeps all limits with segments."""
    if not has_segments(problem):
        return False
    limit = binding_rank(model).limit_bytes
    for start in plain_starts(problem, model):
        found = Checkpointing(model, start, problem.capability).fitting(limit)
        if found is not None and choice(model, found, problem.schedule).feasible:
            return True
    return False


def plain_starts(problem: Problem, model: CostModel) -> Iterator[Decisions]:
    """Data parallelism as far as it may be had; the same with its exchange sharded, and with
    gradients released early."""

    def may(k: int, option: Option, asked: Option) -> Option:
        return asked if may_have(model, k, asked, problem.capability) else option

    plain = OptionSpace(model, problem.capability).start
    sharded = tuple(may(k, o, o._replace(exchange="sharded")) for k, o in enumerate(plain))
    released = tuple(may(k, o, o._replace(early_release=True)) for k, o in enumerate(plain))
    yield from dict.fromkeys((plain, sharded, released))
