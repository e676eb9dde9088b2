"""Checkpoint segments: several units that are recomputed together, from one input.

Which units can form a segment (``possible_segments``): a profile's ``pieces`` are linked where one
is called with just what another returns. A chain of them is a stretch of the forward that can run
again as one. The units of which all lies in it are the segment's. Several chains may run the same
units (a block, or what it is made of): the one of fewest modules stands for them.

What units of a segment hold (``write_segments``): only what enters the segment and the output of
its last unit stay from forward to backward, and outputs that units outside need. While a unit
inside works in forward, the outputs of those before it that it or later ones need are there too,
and what enters the segment, wherever it waits meanwhile.
When backward reaches the last unit, all of the segment runs again from its input: the feature maps
of all its units are made, one after the other, while the gradients of its output wait. Then
backward goes down through it, and what a unit made is gone when its own backward is over.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..cost.structure import Structure
from ..schema.options import Option, segments_of
from ..schema.profile import ModelProfile, PieceProfile
from .timeline import FIELD, Table

MOST_PIECES = 64  # longer chains are not looked at


class PossibleSegment(NamedTuple):
    """Units ``first`` to ``last`` by number, and the modules that name them as one segment."""

    first: int
    last: int
    modules: tuple[str, ...]


def possible_segments(profile: ModelProfile) -> tuple[PossibleSegment, ...]:
    """Every segment of at least two units with modules that the executor can recompute."""
    found: dict[tuple[int, int], PossibleSegment] = {}
    for segment in _chains(profile):
        known = found.get(segment[:2])
        if known is None or len(segment.modules) < len(known.modules):
            found[segment[:2]] = segment
    return tuple(segment for _, segment in sorted(found.items()))


def any_segment(profile: ModelProfile) -> bool:
    """Whether there is one."""
    return next(_chains(profile), None) is not None


def _chains(profile: ModelProfile) -> Iterator[PossibleSegment]:
    number = {unit.name: k for k, unit in enumerate(profile.units)}
    after: dict[str, list[PieceProfile]] = {}
    for piece in profile.pieces:
        for name in piece.follows:
            after.setdefault(name, []).append(piece)
    for piece in profile.pieces:
        if piece.first and piece.opens:
            for segment in _from(piece, after, number):
                units = profile.units[segment.first : segment.last + 1]
                if sum(bool(unit.modules) for unit in units) > 1:
                    yield segment


def _from(
    start: PieceProfile, after: dict[str, list[PieceProfile]], number: dict[str, int]
) -> Iterator[PossibleSegment]:
    """The chains that begin with a piece, those of fewer pieces first. Of chains that end in the
    same piece the first, which has fewest, goes on."""
    first = number[start.first]
    ends = {start.modules[0]: start.modules}
    border = [start]
    for _ in range(MOST_PIECES):
        for piece in border:
            if piece.last:
                yield PossibleSegment(first, number[piece.last], ends[piece.modules[0]])
        ahead = []
        for piece in border:
            for more in after.get(piece.modules[0], ()):
                if more.modules[0] not in ends:
                    ends[more.modules[0]] = (*ends[piece.modules[0]], *more.modules)
                    ahead.append(more)
        border = ahead


def write_segments(structure: Structure, table: Table, decisions: Sequence[Option]) -> None:
    """Writes into a ``table`` [field, unit] what stays of segments, and what they hold besides. Its
    fields of segments are zero before."""
    # Searches ask for thousands of plans that have none.
    if not any(option.segment for option in decisions):
        return
    for first, last in segments_of(decisions):
        _write_segment(structure, table, first, last)
        for source in structure.sources_of((first,)):
            _write_offloaded_input(structure, table, source, last)


def _write_segment(structure: Structure, table: Table, first: int, last: int) -> None:
    saved, recomputed, workspace = (
        table[FIELD[name]] for name in ("saved", "recomputed", "workspace")
    )
    here = slice(first, last + 1)
    gone = np.array([0.0 if structure.last_use[k] > last else saved[k] for k in range(first, last)])
    gone = np.append(gone, 0.0)  # the last one's output is the segment's
    remade = recomputed[here] + gone
    table[FIELD["segment_remade"], here] = remade.cumsum() - remade
    # What stayed of the first run has gone by the second, as all that needs it is behind.
    running = (recomputed[here] + saved[here]).cumsum() + workspace[here] - recomputed[here]
    table[FIELD["segment_rerun"], last] = running.max() - (saved[here].sum() - gone.sum())
    for k in range(first, last):
        until = min(structure.last_use[k], last)
        table[FIELD["segment_outputs"], k + 1 : until + 1] += gone[k - first]
    table[FIELD["output_gradients"], first:last] = 0.0  # they wait at the segment's end only
    saved[here] -= gone
    workspace[here] += gone
    saved[first] += table[FIELD["segment_input"], first]


def _write_offloaded_input(structure: Structure, table: Table, source: int, last: int) -> None:
    """What enters a segment from a unit that may be offloaded is there until the segment's forward
    is over, and from its second forward on, until the first unit's backward has read it."""
    output, beyond = table[FIELD["offloaded_output"], source], structure.last_use[source]
    if beyond >= last:
        return  # counted there for the unit that it enters last (``prefetch_overlap``)
    table[FIELD["segment_outputs"], beyond + 1 : last + 1] += output
    table[FIELD["segment_remade"], beyond + 1 : last + 1] += output
    table[FIELD["segment_rerun"], last] += output
