"""Which units can form a segment: those that modules called one after another run, and no others.

A profile's ``pieces`` are linked where one is called with just what another returns. A chain of
them is a stretch of the forward that can run again as one; the units of which all lies in it are
the segment's. Several chains may run the same units (a block, or what it is made of): the one of
fewest modules stands for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..schema.profile import ModelProfile, PieceProfile

MOST_PIECES = 64
"""Longer chains are not looked at."""


class Window(NamedTuple):
    """Units ``first`` to ``last`` by number, and the modules that name them as one segment."""

    first: int
    last: int
    modules: tuple[str, ...]


def windows(profile: ModelProfile) -> tuple[Window, ...]:
    """Every segment of at least two units with modules that the executor can recompute."""
    found: dict[tuple[int, int], Window] = {}
    for window in _chains(profile):
        known = found.get(window[:2])
        if known is None or len(window.modules) < len(known.modules):
            found[window[:2]] = window
    return tuple(window for _, window in sorted(found.items()))


def any_window(profile: ModelProfile) -> bool:
    """Whether there is one."""
    return next(_chains(profile), None) is not None


def _chains(profile: ModelProfile) -> Iterator[Window]:
    """The windows of all chains."""
    number = {unit.name: k for k, unit in enumerate(profile.units)}
    after: dict[str, list[PieceProfile]] = {}
    for piece in profile.pieces:
        for name in piece.follows:
            after.setdefault(name, []).append(piece)
    for piece in profile.pieces:
        if piece.first and piece.opens:
            for window in _from(piece, after, number):
                if _is_several(profile, window):
                    yield window


def _from(
    start: PieceProfile, after: dict[str, list[PieceProfile]], number: dict[str, int]
) -> Iterator[Window]:
    """The chains that begin with a piece, those of fewer pieces first. Of chains that end in the
    same piece the first, which has fewest, goes on."""
    first = number[start.first]
    ends = {start.modules[0]: start.modules}
    border = [start]
    for _ in range(MOST_PIECES):
        for piece in border:
            if piece.last:
                yield Window(first, number[piece.last], ends[piece.modules[0]])
        ahead = []
        for piece in border:
            for more in after.get(piece.modules[0], ()):
                if more.modules[0] not in ends:
                    ends[more.modules[0]] = (*ends[piece.modules[0]], *more.modules)
                    ahead.append(more)
        border = ahead


def _is_several(profile: ModelProfile, window: Window) -> bool:
    units = profile.units[window.first : window.last + 1]
    return sum(bool(unit.modules) for unit in units) > 1
