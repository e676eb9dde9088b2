"""What units of one segment hold and take while they are at work: they are recomputed together.

Only what enters the segment and the output of its last unit stay from forward to backward, and
outputs that units outside need. While a unit inside is at work in forward, the outputs of those
before it that it or later ones need are there besides. When backward reaches the last unit, all of
the segment runs again from its input: the feature maps of all its units are made, one after the
other, while the gradients wait that came to its output. Then backward goes down through it, and
what a unit made is gone when its own backward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schema.options import Option
from .step_time import Chain, Vector
from .structure import Structure
from .unit_bytes import FIELD


class Inside(NamedTuple):
    """By unit, in bytes: outputs of its segment that are there while it is at work in forward
    (``entering``), feature maps of those before it in its segment that are there again in its
    backward (``made``), and for the last unit of a segment the most that is there as all of it runs
    ``again``, beside what stays."""

    entering: Vector
    made: Vector
    again: Vector


def run_again_first(chain: Chain, decisions: Sequence[Option]) -> None:
    """Moves the second forwards of a segment's units in ``chain`` to where they are: before the
    backward of its last unit."""
    for first, last in segments_of(decisions):
        before = slice(first, last)
        chain.backward_s[last] += chain.forward_s[before].sum()
        left = chain.backward_s[before] - chain.forward_s[before]
        chain.backward_s[before] = np.maximum(left, 0.0)  # below zero by rounding only


def segments_of(decisions: Sequence[Option]) -> list[tuple[int, int]]:
    """The first and the last unit of each segment."""
    found, at = [], 0
    for segment, members in groupby(decisions, lambda option: option.segment):
        count = len(list(members))
        if segment:
            found.append((at, at + count - 1))
        at += count
    return found


def within_segments(
    structure: Structure, table: npt.NDArray[np.float64], decisions: Sequence[Option]
) -> tuple[npt.NDArray[np.float64], Inside]:
    """The ``table`` [field of ``UnitBytes``, unit] with what stays of segments, and what is there
    besides; the same table where there are none."""
    none = np.zeros(table.shape[1])
    inside = Inside(none, none, none)
    segments = segments_of(decisions)
    if not segments:
        return table, inside
    table, inside = table.copy(), Inside(*(none.copy() for _ in range(3)))
    for first, last in segments:
        _enter(structure, table, inside, first, last, _kept_by(structure, decisions, first))
    return table, inside


def _kept_by(structure: Structure, decisions: Sequence[Option], first: int) -> bool:
    """Whether the units that a segment's first one follows keep their outputs of themselves, as
    those do that may have to be run on from."""
    sources = (structure.ends[e][0] for e in structure.edges_into[first])
    return all(decisions[source].memory == "recompute" for source in sources)


def _enter(
    structure: Structure,
    table: npt.NDArray[np.float64],
    inside: Inside,
    first: int,
    last: int,
    kept: bool,
) -> None:
    """Writes one segment into the table and beside it."""
    saved, again, workspace = (table[FIELD[name]] for name in ("saved", "again", "workspace"))
    here = slice(first, last + 1)
    gone = np.array([0.0 if structure.last_use[k] > last else saved[k] for k in range(first, last)])
    gone = np.append(gone, 0.0)  # the last one's output is the segment's
    made = again[here] + gone
    inside.made[here] = made.cumsum() - made
    # What stayed of the first run has gone by the second, as all that needs it is behind.
    most = ((again[here] + saved[here]).cumsum() + workspace[here] - again[here]).max()
    stays = saved[here].sum() - gone.sum()
    inside.again[last] = most - stays + table[FIELD["arriving"], last]
    for k in range(first, last):
        inside.entering[k + 1 : min(structure.last_use[k], last) + 1] += gone[k - first]
    saved[here] -= gone
    workspace[here] += gone
    if not kept:
        saved[first] += table[FIELD["given"], first]
