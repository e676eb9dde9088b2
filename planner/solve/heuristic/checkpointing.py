"""What is recomputed, and in which segments, where layouts and exchanges are decided: exactly.

Every point of the memory timeline is what the units before have saved, and something that depends
on the unit at work alone or, in a segment, on that segment. So a plan of memory is a path through
the units: a move takes one unit, kept or recomputed by itself, or several as one segment; it adds
to what is saved, and the most that it holds on top of what was saved before must keep the limit. Of
two paths to the same unit the one that saved no less in no less time is dropped; the others are
gone on with (labels, as in shortest paths with resources: Desrochers and Soumis, INFOR 26, 1988).
With labels left out (``MOST_STEPS``) what is found still keeps the limit.

The bytes of moves are read from the timeline itself, so that there is no second formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...cost.compute import busiest_samples
from ...cost.cost import CostModel
from ...cost.step_time import Vector
from ...memory.checkpoint_segments import Window, windows
from ...memory.timeline import Persistent, PositionMemory, Table, fullest_bytes
from ...schema.capability import Capability
from ...schema.layout import data_parallel
from ...schema.options import Decisions, Option
from ...schema.plan import MemoryPolicy
from ..choices import may_have
from ..evaluate import memory_of

MOST_STEPS = 400_000
"""About how many times a path is gone on with by one move, in one search."""
MOST_WINDOWS = 3000
"""Segments that are looked at; of more, those of some numbers of modules."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Move(NamedTuple):
    """Units from the one at which the move begins up to ``end``: their ``options``, the most
    ``bytes`` that are there while they work and nothing was saved before them, what they have
    ``saved``, the ``seconds`` of what is computed again, and how many are in a segment."""

    end: int
    options: Decisions
    bytes: float
    saved: float
    seconds: float
    inside: int = 0


class Path(NamedTuple):
    """What has been saved, what it costs (less is better, in order), and how it came about."""

    saved: float
    cost: tuple[float, ...]
    before: Path | None = None
    move: Move | None = None

    @property
    def decisions(self) -> Decisions:
        """The options of all units on the path."""
        moves: list[Move] = []
        path: Path | None = self
        while path is not None and path.move is not None:
            moves.append(path.move)
            path = path.before
        return tuple(option for move in reversed(moves) for option in move.options)


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
        self.home = data_parallel(model.world_size)
        self._samples = {o.layout: busiest_samples(model.counts, o.layout) for o in self.decisions}
        self._received = np.array([
            self.memory.received(k, self.decisions, self._samples[o.layout])
            for k, o in enumerate(self.decisions)
        ])  # fmt: skip

    def quickest(self, limit_bytes: float) -> Decisions | None:
        """The decisions that compute least again within the limit, of these those with fewest units
        in segments; None where nothing keeps it."""
        if not self._may_fit(limit_bytes):
            return None

        def cost(path: Path, move: Move) -> tuple[float, ...] | None:
            if path.saved + move.bytes > limit_bytes:
                return None
            seconds, inside = path.cost
            return seconds + move.seconds, inside + move.inside

        found = self._search((0.0, 0.0), cost)
        return min(found, key=lambda path: path.cost).decisions if found else None

    def fitting(self, limit_bytes: float) -> Decisions | None:
        """Some decisions that keep the limit, or None where none do; much quicker than the best."""
        if not self._may_fit(limit_bytes):
            return None
        within = (0.0,)
        found = self._search(
            within, lambda path, move: None if path.saved + move.bytes > limit_bytes else within
        )
        return found[0].decisions if found else None

    def least(self) -> Decisions:
        """The decisions whose timeline has the lowest peak, of these those with fewest units in
        segments."""

        def cost(path: Path, move: Move) -> tuple[float, ...]:
            peak, inside = path.cost
            return max(peak, path.saved + move.bytes), inside + move.inside

        return min(self._search((self.update_bytes, 0.0), cost), key=lambda p: p.cost).decisions

    def _search(
        self,
        start: tuple[float, ...],
        cost: Callable[[Path, Move], tuple[float, ...] | None],
    ) -> list[Path]:
        count = len(self.decisions)
        most = max(MOST_STEPS // max(sum(map(len, self.moves)), 1), 16)
        paths: list[list[Path]] = [[] for _ in range(count + 1)]
        paths[0] = [Path(0.0, start)]
        for k in range(count):
            for path in _worthwhile(paths[k], most):
                for move in self.moves[k]:
                    costs = cost(path, move)
                    if costs is not None:
                        saved = path.saved + move.saved
                        paths[move.end].append(Path(saved, costs, path, move))
            paths[k] = []
        return paths[count]

    # -- moves -----------------------------------------------------------------------------------

    @cached_property
    def moves(self) -> list[list[Move]]:
        """The moves from each unit on."""
        found: list[list[Move]] = [[] for _ in self.decisions]
        for policy in (None, "keep", "recompute"):
            for k, move in self._alone(policy):
                if move.options[0] not in [known.options[0] for known in found[k]]:
                    found[k].append(move)
        for window in self._windows():
            found[window.first].append(self._together(window))
        return found

    def _may_fit(self, limit_bytes: float) -> bool:
        """Whether what policies about memory do not change leaves room for anything."""
        held = self._held(self._table(self.decisions), self.decisions)
        always = sum(float(held.field(name).sum()) for name in Persistent._fields)
        return max(always, self.update_bytes) <= limit_bytes

    @cached_property
    def update_bytes(self) -> float:
        """The most that updates hold where feature maps have no part in it; policies about memory
        change nothing of it."""
        held = self._held(self._table(self.decisions), self.decisions)
        return 0.0 if held.sliced else float(fullest_bytes(held)[1].max())

    def _alone(self, policy: MemoryPolicy | None) -> Iterator[tuple[int, Move]]:
        """Every unit by itself under a policy, where it may have that; else as it is decided. What
        is offloaded stays so: it has a part in what others hold."""
        chosen = tuple(self._under(k, policy) for k in range(len(self.decisions)))
        held = self._held(self._table(chosen), chosen)
        most, saved = self._most(held), held.field("saved")
        before = saved.cumsum() - saved
        for k, option in enumerate(chosen):
            bytes_ = float(most[k] - before[k])
            yield k, Move(k + 1, (option,), bytes_, float(saved[k]), self._again_s(k, option))

    def _under(self, k: int, policy: MemoryPolicy | None) -> Option:
        own = self.decisions[k]
        if policy is None or own.memory in ("offload", policy):
            return own
        alone = Option(own.layout, own.style, policy)  # whatever else has been decided
        may = may_have(self.model, k, alone, self.capability)
        return own._replace(memory=policy) if may else own

    def _together(self, window: Window) -> Move:
        """The units of a window as one segment, all others kept."""
        here = slice(window.first, window.last + 1)
        options = tuple(o._replace(segment=window.modules) for o in self._parts[here])
        kept, table = self._kept
        chosen = (*kept[: here.start], *options, *kept[here.stop :])
        table = table.copy()
        table[:, here] = self._parts_table[:, here]
        held = self._held(table, chosen)
        saved = held.field("saved")
        return Move(
            here.stop,
            options,
            float(self._most(held)[here].max() - saved[: here.start].sum()),
            float(saved[here].sum()),
            float(self._parts_s[here].sum()),
            len(options),
        )

    @cached_property
    def _kept(self) -> tuple[Decisions, Table]:
        chosen = tuple(self._under(k, "keep") for k in range(len(self.decisions)))
        return chosen, self._table(chosen)

    @cached_property
    def _parts(self) -> Decisions:
        """The units that may be in a segment as parts of some, the others as they are."""
        return tuple(
            own._replace(memory="recompute", segment=("",)) if able else own
            for own, able in zip(self.decisions, self._able, strict=True)
        )

    @cached_property
    def _parts_table(self) -> Table:
        return self._table(self._parts)

    @cached_property
    def _parts_s(self) -> Vector:
        return np.array([self._again_s(k, option) for k, option in enumerate(self._parts)])

    @cached_property
    def _able(self) -> list[bool]:
        return [self._may(k) for k in range(len(self.decisions))]

    def _may(self, k: int) -> bool:
        """Whether a unit may be in a segment. Not one that leaves ranks idle, which run nothing
        again; nor one that is divided, whose redistributions would run again as well; nor one whose
        parameters are whole only while they are used, as a segment uses them once more."""
        option, kind = self.decisions[k], self.model.profile.units[k].kind
        plain = option.layout == self.home and option.style == "none" and not option.gathers
        return plain and option.memory != "offload" and kind not in ("input", "output")

    def _windows(self) -> list[Window]:
        if "recompute" not in self.capability.memory:
            return []
        known = [
            window
            for window in windows(self.model.profile)
            if all(self._able[window.first : window.last + 1])
        ]
        if len(known) > MOST_WINDOWS:
            known = [window for window in known if len(window.modules) in LENGTHS]
        return known

    def _again_s(self, k: int, option: Option) -> float:
        """Seconds that a policy about memory adds to the unit's own."""
        kept = option._replace(memory="keep", segment=())
        return _seconds(self.model, k, option) - _seconds(self.model, k, kept)

    def _table(self, decisions: Sequence[Option]) -> Table:
        columns = [
            self.memory.unit(k, o, self._samples[o.layout]).column for k, o in enumerate(decisions)
        ]
        return np.array(columns, dtype=np.float64).T

    def _held(self, table: Table, decisions: Sequence[Option]) -> PositionMemory:
        return self.memory.joined(table, self._received, decisions)

    def _most(self, held: PositionMemory) -> Vector:
        """By unit the most that is there at its points that grow with what is saved."""
        working, updating = fullest_bytes(held)
        return np.maximum(working, updating) if held.sliced else working


def _seconds(model: CostModel, k: int, option: Option) -> float:
    cost = model.unit(k, option)
    inner = cost.inner_forward.seconds + cost.inner_backward.seconds
    return cost.forward_s + cost.backward_s + inner


def _worthwhile(paths: list[Path], most: int) -> list[Path]:
    """The paths that are not beaten in both, by what they saved; of very many an even choice, the
    ends among them."""
    kept: list[Path] = []
    for path in sorted(paths, key=lambda path: path[:2]):
        if not kept or path.cost < kept[-1].cost:
            kept.append(path)
    if len(kept) <= most:
        return kept
    return [kept[round(i * (len(kept) - 1) / (most - 1))] for i in range(most)]
