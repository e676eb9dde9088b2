"""Debug mode: every collective has a name, and ranks compare names before they issue it."""

# Each process group has a sequence of its own, for the library matches the n-th collective of a
# group on one rank with the n-th on another; how sequences of several groups interleave may differ
# between ranks (a gradient that one rank has no use for holds back buckets there). A name is
# appended to the store's entry for that place in the sequence, and what stands there is read back
# at once: of two ranks with different names at least one sees the other's, and does not issue.
# Where a collective has completed, all ranks' names for it are there, and are compared before its
# result is used.

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from torch._C._distributed_c10d import Store

from ...planner.schema.errors import InputError, RunError
from .groups import Group
from .heartbeat import REACH_S, Heartbeat, within

DEBUG_VARIABLE = "MESHWRIGHT_DEBUG"


def debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


@dataclass
class _Sequence:
    """The collectives of one group. ``open`` are places and names that not all ranks have reached;
    ``compared`` is how many this rank has seen equal on all; ``deleted`` how many are gone."""

    group: Group
    issued: int = 0
    compared: int = 0
    deleted: int = 0
    open: deque[tuple[int, str]] = field(default_factory=deque)


class CollectiveLog:
    """What this rank has issued, and what the others have. ``run`` tells runs apart."""

    def __init__(self, store: Store, heartbeat: Heartbeat, run: int) -> None:
        if not store.has_extended_api():  # type: ignore[attr-defined]
            raise InputError(
                f"{DEBUG_VARIABLE} compares collectives through a store that can append, which "
                f"{type(store).__name__} cannot: start with torchrun, or unset it"
            )
        self._store: Any = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._heartbeat, self._run = heartbeat, run
        self._sequences: dict[tuple[str, tuple[int, ...]], _Sequence] = {}
        self._reachable = True
        self._lock = threading.RLock()  # a sharded step waits in a thread of its own

    def note(self, group: Group, name: str) -> None:
        """This rank is about to issue a collective. Raises ``RunError`` where another rank has
        issued another in its place."""
        if group.handle is None:
            return
        with self._lock:
            sequence = self._of(group)
            place = sequence.issued
            sequence.issued += 1
            sequence.open.append((place, name))
            self._look(sequence, place, name, append=True)

    def compared(self, group: Group) -> bool:
        """Whether all ranks of the group have issued what this one has so far, or cannot be asked.
        Raises ``RunError`` where one issued something else."""
        with self._lock:
            sequence = self._of(group)
            while sequence.open and self._reachable:
                if not self._look(sequence, *sequence.open[0]):
                    return False
                place, _ = sequence.open.popleft()
                sequence.compared = place + 1
            return True

    def lagging(self, group: Group) -> str:
        """Who has issued nothing in place of the first collective that is not compared; "" where
        nobody lags."""
        with self._lock:
            sequence = self._of(group)
            if not sequence.open or not self._reachable:
                return ""
            place, name = sequence.open[0]
            there = self._read(sequence, place) or {}
        absent = [r for r in sorted(group.ranks) if r not in there]
        if not absent:
            return ""
        names = ", ".join(self._heartbeat.name(r) for r in absent)
        return (
            f" ({name}, its {_ordinal(place + 1)} collective in group {group.label!r}, where "
            f"{names} issues nothing any more)"
        )

    def _of(self, group: Group) -> _Sequence:
        return self._sequences.setdefault((group.label, group.ranks), _Sequence(group))

    def _look(self, sequence: _Sequence, place: int, name: str, *, append: bool = False) -> bool:
        """Whether all ranks' names stand at that place; raises where two differ."""
        there = self._read(sequence, place, name if append else None)
        if there is None:
            return False
        _compare(self._heartbeat, sequence.group, place, {r: n for r, (_, n) in there.items()})
        if len(there) < sequence.group.size:
            return False
        self._delete(sequence, min(compared for compared, _ in there.values()))
        return True

    def _read(
        self, sequence: _Sequence, place: int, mine: str | None = None
    ) -> dict[int, tuple[int, str]] | None:
        """By rank, how many places it had compared and its name; None where nobody answers."""
        if not self._reachable:
            return None  # each further try would take as long again
        key = self._key(sequence, place)

        def read() -> bytes:
            if mine is not None:
                line = f"{self._heartbeat.rank} {sequence.compared} {mine}".replace("\n", " ")
                self._store.append(key, f"{line}\n")
            found: bytes = self._store.get(key)
            return found

        found = within(read, REACH_S)
        if found is None:
            self._reachable = False  # whoever waits next says so
            return None
        lines = [line.split(" ", 2) for line in found.decode().splitlines()]
        return {int(rank): (int(compared), name) for rank, compared, name in lines}

    def _delete(self, sequence: _Sequence, compared: int) -> None:
        """Removes what every rank has compared."""
        if self._heartbeat.rank == min(sequence.group.ranks):  # one does it for all
            for place in range(sequence.deleted, compared):
                key = self._key(sequence, place)
                within(lambda key=key: self._store.delete_key(key), REACH_S)  # type: ignore[misc]
        sequence.deleted = max(compared, sequence.deleted)

    def _key(self, sequence: _Sequence, place: int) -> str:
        # With its ranks, as groups of layouts that leave ranks idle share a label; as a checksum,
        # as there may be thousands of them.
        group = sequence.group
        ranks = crc32(str(group.ranks).encode())
        return f"meshwright/debug/{self._run}/{group.label}/{ranks:x}/{place}"


def _compare(heartbeat: Heartbeat, group: Group, place: int, names: dict[int, str]) -> None:
    first, *others = sorted(names)
    for odd in others:
        if names[odd] != names[first]:
            sentence = (
                f"{heartbeat.name(first)} issues {names[first]} as its {_ordinal(place + 1)} "
                f"collective in group {group.label!r} while {heartbeat.name(odd)} issues "
                f"{names[odd]}: the model or the loop takes another path on one of them"
            )
            heartbeat.give_up(sentence)  # the others of the group may wait for this rank for long
            heartbeat.part(group.ranks)
            raise RunError(sentence)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"
